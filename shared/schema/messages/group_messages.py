"""The flow of a group: task → generated → scored, and what these are made of."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from shared.schema.messages.message import Message, Part, Tokens


class Sampling(Part):
    """How the engine samples. ``max_new_tokens``: tokens. ``stop`` holds strings, ``stop_token_ids`` ids."""

    temperature: float = Field(ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = -1
    max_new_tokens: int = Field(gt=0)
    stop: list[str] = []
    stop_token_ids: list[int] = []


class Payload(Part):
    """Where a group's samples lie in the store: one or more blobs, ``bytes`` is their total size.

    ``tokens``: of each sample, prompt and response together, so that a batch can be dealt out to ranks before anybody reads it.
    """

    keys: list[str] = Field(min_length=1)
    bytes: int = Field(ge=0)
    tokens: tuple[int, ...] = ()


# neither of the next two is a `Part`: there is one for every sample; in slots they take a tenth of the memory, and less time
@dataclass(slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class SampleMeta:
    """What decisions need of one sample without reading its payload.

    ``tokens``: length of the response. ``oldest``/``newest``: weight versions of its oldest and newest trained token.
    """

    tokens: int = Field(ge=0)
    oldest: int = Field(ge=0)
    newest: int = Field(ge=0)
    finish: Literal["stop", "length", "abort"]


@dataclass(slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Score:
    """The reward of one sample, finite; ``parts`` holds named rewards where the environment gives several.

    ``removed``: a sample filter took the sample out of the loss; its reward still counts in the group.
    """

    reward: float = Field(allow_inf_nan=False)
    parts: dict[str, float] = Field(default_factory=dict)
    removed: bool = False


class Task(Message):
    """A group to generate: ``n`` samples of one prompt. Subject ``<run>.task.<class>``.

    ``min_version``: a replica on an older version hands the task back. ``attempt`` grows when a group is generated anew.
    ``partial``: samples of an earlier attempt to go on from; of those that had ended, the ones whose newest token is older than version
    ``renew_below`` are generated anew.
    """

    group: str
    attempt: int = Field(default=0, ge=0)
    n: int = Field(gt=0)
    prompt: str | list[dict[str, Any]]
    prompt_tokens: Tokens
    label: str | None = None
    metadata: dict[str, Any] = {}
    environment: str
    sampling: Sampling
    min_version: int = Field(ge=0)
    partial: Payload | None = None
    renew_below: int = Field(default=0, ge=0)


class Generated(Message):
    """Samples of a group, finished and in the store, to be scored. Subject ``<run>.generated.<environment>``.

    ``started``/``ended``: seconds since the epoch, of the generation. ``rollouts``: of each sample, which of the task's n rollouts it comes
    from; empty where each gave one sample.
    """

    group: str
    attempt: int
    payload: Payload
    samples: list[SampleMeta]
    rollouts: tuple[int, ...] = ()
    replica: str
    started: float
    ended: float


class Outcome(Message):
    """Base of what comes back to the buffer about one attempt at a group. Subject ``<run>.scored``."""

    group: str
    attempt: int


class Scored(Outcome):
    """Rewards of a group. ``scores`` has one entry a sample, in order; ``rollouts`` as in `Generated`.

    ``filtered``: why the dynamic sampling filter does not keep the group; None: it is kept.
    """

    payload: Payload
    samples: list[SampleMeta]
    scores: list[Score]
    rollouts: tuple[int, ...] = ()
    filtered: str | None = None
    replica: str
    environment: str
    started: float
    ended: float


class Failed(Outcome):
    """Generation or scoring (``by``) gave the group up; the buffer makes it ``dead`` and frees its payload, where it has one."""

    reason: str
    by: str
    payload: Payload | None = None


class Interrupted(Outcome):
    """A replica stopped generating the group before its end; ``payload`` holds what its samples have so far, if they have anything.

    ``stale``: their oldest tokens have fallen behind the bound. Otherwise the replica leaves, or had to make room.
    """

    stale: bool
    replica: str
    payload: Payload | None = None


def outcome_id(message: Generated | Outcome) -> str:
    """Under which an outcome is published: repeated it counts once, while what another made of the same attempt is an outcome of its own,
    whose payload the buffer hears of and frees."""
    payload: Payload | None = getattr(message, "payload", None)
    return payload.keys[0] if payload is not None and payload.keys else f"{message.group}.{message.attempt}"
