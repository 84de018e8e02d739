"""Reward functions by slime's names, with slime's values: pure, synchronous and free of torch. The services wrap them with deadlines.

docs/rewards.md says what each of them wants; tests/unit/rewards holds the values.
"""
