"""Makes the samples of a rollout of the sessions that an agent has ended. It is pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from services.rollout.agents.agent_program import Rewards
from shared.data.tokenizer import Tokenizer
from shared.runtime.errors import BadMessage
from shared.schema.message import MAX_SAMPLES
from shared.schema.messages import Task
from shared.schema.sample import Sample, turns_of
from shared.sessions.session import Trajectory

ROUND_NUMBER = "round_number"
"""The metadata's key with the number of turns, which the trainer makes a metric of."""


@dataclass(frozen=True)
class Conversation:
    """One conversation of a session. ``role``: whose session it is, "" without roles."""

    trajectory: Trajectory
    session: str
    role: str
    reward: Rewards | None


def samples_of_sessions(task: Task, rollout: int, played: Sequence[Conversation], tokenizer: Tokenizer) -> list[Sample]:
    """Returns one sample for each conversation, checked; they share the rollout, and those of a role its reward.

    Their ``index`` is their place here; the group numbers them anew. Raises BadMessage where there is none, where there are more
    than a group has room for, and for a sample that is not valid.
    """
    if not played:
        raise BadMessage("it made no model call")
    if len(played) > (most := MAX_SAMPLES // task.n):
        raise BadMessage(f"it made {len(played)} conversations; a rollout has room for {most}")
    samples = [_sample(task, rollout, index, conversation, tokenizer) for index, conversation in enumerate(played)]
    for sample in samples:
        sample.check()
    return samples


def _sample(task: Task, rollout: int, index: int, conversation: Conversation, tokenizer: Tokenizer) -> Sample:
    trajectory, role = conversation.trajectory, conversation.role
    plain = task.sampling.skip_special_tokens is not False
    decode = partial(tokenizer.decode, skip_special_tokens=plain)
    return Sample(
        group=task.group,
        index=index,
        prompt=trajectory.prompt,
        response=trajectory.response,
        log_probs=trajectory.log_probs,
        mask=trajectory.mask,
        segments=trajectory.segments,
        finish="length" if trajectory.finish == "length" else "stop",
        text=decode(trajectory.response),
        prompt_text=task.prompt,
        label=task.label,
        label_json=task.label_json,
        metadata={ROUND_NUMBER: len(trajectory.turns), **task.metadata},
        rollout=rollout,
        given_reward=conversation.reward,
        role=role,
        attributes={"session_id": conversation.session} | ({"role": role} if role else {}),
        turns=turns_of(trajectory.sampled, trajectory.response, decode),
    )
