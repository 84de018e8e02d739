"""Where training resumes after a stop or a death: the newest checkpoint that every rank holds, with its files as they were written.

Ranks on other machines may have disks of their own. The buffer sends the batches after it again, which stay in the store for that long.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

import structlog

from services.trainer.commands import CommandBroadcast, Resume
from services.trainer.control_client import ControlClient
from services.trainer.parallel import runtime
from services.trainer.parallel.checkpoint import CheckpointDamaged, checkpoints, damage, set_aside


def resume_step(root: Path, broadcast: CommandBroadcast, control: ControlClient | None, *, decides: bool) -> int | None:
    """Returns the step to go back to, None to begin anew: rank 0 takes the newest that every rank has, and sends it to the others.

    Args:
        root: of the checkpoints. control: rank 0's connection to the bus. decides: this is rank 0.
    """
    held = _sound_steps(root, broadcast, control)
    if not decides:
        command = broadcast.receive()
        assert isinstance(command, Resume)  # the first command
        return command.step
    step = newest_of_all(held)
    if lacking := [rank for rank, steps in enumerate(held) if max(steps, default=None) != step]:
        newest = {rank: max(held[rank], default=None) for rank in lacking}
        reason = "ranks do not have the same steps on their disks"
        structlog.get_logger().warning("checkpoints_differ", resumes=step, ranks=newest, reason=reason)
    broadcast.send(Resume(step))
    return step


def _sound_steps(root: Path, broadcast: CommandBroadcast, control: ControlClient | None) -> list[list[int]]:
    """Returns the steps that each rank holds, once the newest that all hold has its files as they were written.

    One that has not is set aside on every disk. Raises CheckpointDamaged where that is the last one.
    """
    while True:
        held = broadcast.gather(sorted(found := checkpoints(root)))
        if (step := newest_of_all(held)) is None:
            return held
        reasons = broadcast.gather(damage(found[step], runtime.rank(), len(held)))
        if not any(reasons):
            return held
        rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason)
        if newest_of_all([[other for other in steps if other != step] for steps in held]) is None:  # it stays: no start would see it
            raise CheckpointDamaged(f"step {step} in {root} is damaged (rank {rank}: {reason}), and no older one is left")
        if control is not None:
            control.set_state(f"passing over the damaged checkpoint of step {step}")
            detail = f"the checkpoint of step {step} is damaged (rank {rank}: {reason}); the next older one is tried"
            structlog.get_logger().error("checkpoint_damaged", step=step, rank=rank, reason=reason)
            control.publish_event("checkpoint_damaged", detail)
        with runtime.together(f"setting the damaged checkpoint of step {step} aside"):
            set_aside(found[step])


def newest_of_all(held: Sequence[Sequence[int]]) -> int | None:
    """Returns the newest step that everyone holds; None where there is none."""
    return max(set.intersection(*map(set, held)), default=None)


def kept_from(checkpoints: Collection[int], keep: int, last: int, *, room_needed: bool = False) -> int:
    """Returns the steps below which no checkpoint that is kept needs its batches: those of the oldest kept, so each can be resumed.

    Where the store is full, and at the run's end, they are the newest one's.

    Args:
        checkpoints: steps of those on disk. keep: how many of the newest stay. last: the run's steps. room_needed: the store is full.
    """
    newest = max(checkpoints, default=0)
    if room_needed or newest >= last:
        return newest
    return min(sorted(checkpoints)[-keep:], default=0)
