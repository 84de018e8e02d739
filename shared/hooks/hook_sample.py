"""A sample as hooks see it: plain lists and slime's field names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


@dataclass
class HookSample:
    """One trajectory.

    group_index: index of the group. index: of the sample in its group. rollout_id: which of the group's n rollouts it comes from.
    prompt: as it stands in the file. tokens: ids of the rendered prompt, then of the response; response: the text of its last
    ``response_length`` tokens. loss_mask: one entry a response token, 1 where it is trained; None: all of them.
    rollout_log_probs: one a response token, the engine's; 0.0 where the mask is 0.
    weight_versions: see `shared.hooks.sample_conversion`. reward: one number, or named ones. remove_sample: leave it out of the loss.
    """

    class Status(Enum):
        """The state of its generation."""

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    session_id: str | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    weight_versions: list[Any] = field(default_factory=list)
    remove_sample: bool = False
    status: "Status" = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def effective_response_length(self) -> int:
        """Returns the number of trained tokens."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def get_reward_value(self, args: Any) -> float:
        """Returns the reward that counts: of named ones that of ``args.reward_key`` or ``reward``. Raises ValueError without one."""
        if isinstance(self.reward, Mapping):
            key = args.reward_key or "reward"
            if key not in self.reward:
                raise ValueError(f"no reward is named {key}; there are {', '.join(map(str, self.reward)) or 'none'} (reward.reward_key)")
            return self.reward[key]
        if self.reward is None:
            raise ValueError("the sample has no reward yet")
        return self.reward

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Sequence[int],
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str = "",
    ) -> None:
        """Appends to the response and keeps all that belongs to its tokens in step.

        Args:
            log_probs: one a token; needed where they are ``trainable``. Tokens of tools and environments have none and are not trained.
            meta_info: the engine's, of the answer with these tokens: it sets ``status`` and, where the engine tells them, versions.

        Raises ValueError.
        """
        count, before = len(tokens), self.response_length
        given = _checked_log_probs(count, log_probs) if trainable else [0.0] * count
        mask = [1] * before if self.loss_mask is None else self.loss_mask
        if self.rollout_log_probs is None and any(mask):
            raise ValueError(f"the {before} response tokens before these have no rollout_log_probs")
        versions = self.weight_versions if len(self.weight_versions) == before else [None] * before
        self.loss_mask = [*mask, *[int(trainable)] * count]
        self.rollout_log_probs = [*(self.rollout_log_probs or [0.0] * before), *given]
        self.weight_versions = [*versions, *_versions(meta_info or {}, count)]
        self.tokens = [*self.tokens, *(int(token) for token in tokens)]
        self.response += text
        self.response_length = before + count
        if meta_info is not None:
            self.status = FINISHED[meta_info["finish_reason"]["type"]]


Status = HookSample.Status

FINISHED = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
"""The status by the engine's ``finish_reason``."""


def _checked_log_probs(count: int, log_probs: Sequence[float] | None) -> Sequence[float]:
    if log_probs is None and count:
        raise ValueError(f"{count} trainable tokens without log_probs")
    if log_probs is not None and len(log_probs) != count:
        raise ValueError(f"{len(log_probs)} log_probs for {count} tokens")
    return log_probs or ()


def _versions(meta_info: Mapping[str, Any], count: int) -> list[int | None]:
    """Returns the version of each of ``count`` tokens, None where the engine does not name it (its version at the end says nothing)."""
    versions: list[int | None] = [None] * count
    for span in meta_info.get("weight_versions") or ():
        for at in range(span["start"], min(span["end"], count)):
            versions[at] = int(span["version"])
    return versions
