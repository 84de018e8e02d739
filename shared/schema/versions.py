"""Weight versions and steps: one rule for trainer, buffer and rollout.

Version v is the policy after v·u training steps, u = ``update_weights_interval``; the policy after the last step is a version too.
Versions are counted from the run's beginning, so a trainer that resumes from a checkpoint makes the same numbers again for the same
weights, and they never fall.
"""

# The field of an engine's answer with each output token's version, None where it is unknown, if SGLang itself reports none
TOKEN_VERSIONS = "token_versions"


def version_after(steps: int, interval: int, total: int) -> int:
    """Returns the version that ``steps`` finished steps amount to, of ``total``."""
    last = -(-total // interval)
    return last if steps >= total else steps // interval


def is_pushed(steps: int, interval: int, total: int) -> bool:
    """Returns whether a new version is pushed once ``steps`` steps are finished."""
    return steps >= total or steps % interval == 0


def newest_due(steps: int, interval: int, per_epoch: int | None = None) -> int:
    """Returns the newest of the first ``steps`` steps after which something is due that happens every ``interval`` steps, and at the end of
    each epoch (``per_epoch`` steps); 0 if none is."""
    return max(steps // each * each for each in (interval, per_epoch or interval))


def crossed(previous: int, current: int, interval: int, per_epoch: int | None = None) -> bool:
    """Returns whether such a step lies after ``previous`` and not after ``current``: however far a count jumps, nothing due is lost, and
    what was done once is not done again."""
    return newest_due(current, interval, per_epoch) > previous


def is_periodic(steps: int, interval: int, per_epoch: int | None = None) -> bool:
    """Returns whether such a step is ``steps`` itself."""
    return crossed(steps - 1, steps, interval, per_epoch)


def admissible_steps(live: int, max_staleness: int, interval: int, total: int) -> int:
    """Returns for how many steps groups may be admitted while ``live`` is served.

    Step k trains on version ⌊k/u⌋, so groups begun now stay within the bound for every k with ⌊k/u⌋ ≤ live + max_staleness.
    """
    return min(total, (live + max_staleness + 1) * interval)


def newest_possible(live: int, max_staleness: int) -> int:
    """Returns the newest version that a replica can serve while ``live`` is the newest one that was announced (-1: none).

    A version is served a moment before it is announced, and the announcement may be lost with the trainer. But each step needs its groups,
    and none is admitted beyond `admissible_steps`, after which the version is live + max_staleness + 1.
    """
    return live + max_staleness + 1


def is_too_stale(oldest: int, live: int, max_staleness: int, policy: str) -> bool:
    """Returns whether nothing will be trained of a group whose oldest token is of version ``oldest``, however soon it ends.

    No batch that is still to be formed trains on a version before the live one; ``drop`` and ``requeue`` train no group that is over a
    batch's bound, the other policies mask its stale tokens.
    """
    return policy in ("drop", "requeue") and oldest < live - max_staleness


def last_live(oldest: int, newest: int, max_staleness: int, policy: str) -> int:
    """Returns the newest live version under which something will be trained of a group with tokens of these versions."""
    return max_staleness + (oldest if policy in ("drop", "requeue") else newest)
