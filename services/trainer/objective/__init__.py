"""The trainer's objective: rewards to advantages, log-probs to a loss. Pure functions; no Megatron, no bus.

`advantage` makes advantages of a batch's rewards, `reduce` one weight for each sample; after packing, `loss` reads both, with the
importance weights of `correction`. `advantage.needs` names the inputs that a run's objective has beside these, `custom_objective`
calls the user's own functions.
"""
