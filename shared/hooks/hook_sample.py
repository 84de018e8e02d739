"""A sample as hooks see it: plain lists and slime's field and method names."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Self

from shared.hooks import engine_meta, sample_counters


@dataclass
class HookSample:
    """One trajectory.

    group_index: index of the group. index: of the rollout among all of the run's. rollout_id: samples that share it count as one rollout.
    prompt: what was rendered by the chat template, where it is applied. tokens: ids of the rendered prompt, then of the response;
    response: the text of its last ``response_length`` tokens. loss_mask: one entry a response token, 1 where it is trained; None: all of
    them. rollout_log_probs: one a response token, the engine's; 0.0 where the mask is 0; None: they have not been kept.
    weight_versions: see `shared.hooks.sample_conversion`. reward: one number, or named ones. remove_sample: leave it out of the loss.
    rollout_top_p_token_ids, rollout_top_p_token_offsets: the nucleus of each response token, ragged. rollout_routed_experts: int32
    [T - 1, layers, experts a token]. generate_function_path, custom_rm_path: this sample's own functions. train_metadata: for functions in
    the trainer. non_generation_time: seconds. A reward function finds in ``turns``, a list, the texts of what the model itself sampled:
    all of the response where nothing else is in it. Attributes besides these may be set and reach the reward function if MessagePack
    carries them.
    """

    class Status(Enum):
        """The state of its generation."""

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    SpecInfo = sample_counters.SpecInfo
    PrefixCacheInfo = sample_counters.PrefixCacheInfo

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[Any] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: "Status" = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: sample_counters.SpecInfo = field(default_factory=sample_counters.SpecInfo)
    prefix_cache_info: sample_counters.PrefixCacheInfo = field(default_factory=sample_counters.PrefixCacheInfo)

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

    def to_dict(self) -> dict[str, Any]:
        """Returns all attributes, its own and others, with status and counters as plain values."""
        plain = {"status": Status(self.status).value, "spec_info": self.spec_info.to_dict()}
        return {**vars(self), **plain, "prefix_cache_info": self.prefix_cache_info.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Returns the sample of `to_dict`; what is no field becomes an attribute all the same."""
        known = {one.name for one in fields(cls)}
        sample = cls(**{name: value for name, value in data.items() if name in known})
        sample.status = Status(data["status"])
        sample.spec_info = sample_counters.SpecInfo.from_dict(data.get("spec_info", {}))
        sample.prefix_cache_info = sample_counters.PrefixCacheInfo.from_dict(data.get("prefix_cache_info", {}))
        for name in data.keys() - known:
            setattr(sample, name, data[name])
        return sample

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Any = None,
        log_probs: Any = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Appends to the response and keeps all that belongs to its tokens in step. The sample's lists are extended in place.

        Args:
            tokens, log_probs: lists, arrays or tensors; one log-prob a token, where they are ``trainable``. Without them the sample has
                none at all, and the trainer computes its own, if the objective can do with these. Tokens of tools and environments have
                none and are not trained.
            meta_info: the engine's, of the answer with these tokens: it sets ``status``, counters and, where the engine tells them,
                versions.
            update_terminal_info: False for a part of an answer: status and counters stay as they are.

        Raises ValueError.
        """
        ids, meta, before = [int(token) for token in engine_meta.listed(tokens)], meta_info or {}, self.response_length
        given = self._checked_log_probs(len(ids), log_probs, trainable)
        versions = self.weight_versions if len(self.weight_versions) == before else [None] * before
        self.response += text or ""
        if ids:
            self.tokens = _extended(self.tokens, ids)
            self.response_length += len(ids)
            self.loss_mask = _extended([1] * before if self.loss_mask is None else self.loss_mask, [int(trainable)] * len(ids))
            if given is not None:
                self.rollout_log_probs = _extended([0.0] * before if self.rollout_log_probs is None else self.rollout_log_probs, given)
            self.weight_versions = _extended(versions, engine_meta.versions(meta, len(ids)))
            engine_meta.add_nucleus(self, meta, len(ids), trainable)
        elif self.rollout_log_probs is None and log_probs is not None and not self._trained_before():
            self.rollout_log_probs = [0.0] * before
        engine_meta.set_routed_experts(self, args, meta)
        if update_terminal_info and "finish_reason" in meta:
            self._end(args, meta)
        self._check_lengths()

    def _checked_log_probs(self, count: int, log_probs: Any, trainable: bool) -> list[float] | None:
        """Returns the log-probs of ``count`` tokens to append; None where the sample keeps none. Raises ValueError."""
        if log_probs is None:
            return self._without_log_probs(count, trainable)
        given = [float(value) for value in engine_meta.listed(log_probs)]
        if not trainable and count:
            raise ValueError("tokens that are not trainable have no log_probs")
        if len(given) != count:
            raise ValueError(f"{len(given)} log_probs for {count} tokens")
        if count and self.response_length and self.rollout_log_probs is None and self._trained_before():
            raise ValueError(f"the {self.response_length} response tokens before these have no rollout_log_probs")
        return given

    def _without_log_probs(self, count: int, trainable: bool) -> list[float] | None:
        if not count or not trainable:
            return None if self.rollout_log_probs is None and self._trained_before() else [0.0] * count
        if self.rollout_log_probs is not None and self._trained_before():
            raise ValueError(f"{count} trainable tokens without log_probs, after {self.response_length} response tokens with them")
        self.rollout_log_probs = None
        return None

    def _trained_before(self) -> bool:
        return self.response_length > 0 and (self.loss_mask is None or any(self.loss_mask))

    def _end(self, args: Any, meta: Mapping[str, Any]) -> None:
        """Takes over what the engine says of a whole answer."""
        if getattr(args, "sglang_speculative_algorithm", None):
            self.spec_info.add(meta)
        self.prefix_cache_info.add(meta)
        if meta["finish_reason"]:
            self.status = FINISHED.get(meta["finish_reason"]["type"], self.status)

    def _check_lengths(self) -> None:
        for name in ("loss_mask", "rollout_log_probs"):
            values = getattr(self, name)
            if values is not None and len(values) != self.response_length:
                raise ValueError(f"{name} has {len(values)} entries for a response_length of {self.response_length}")
        engine_meta.check_nucleus(self)


Status = HookSample.Status

FINISHED = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
"""The status by the engine's ``finish_reason``."""


def status_of(given: object) -> Status | None:
    """Returns the status that a user's function set, by whichever enum or by its word; None for anything else."""
    try:
        return Status(getattr(given, "value", given))
    except ValueError:
        return None


def _extended(values: Any, more: list[Any]) -> Any:
    """Returns ``values``, extended in place where it is a list: who holds the same list sees it grow."""
    if not isinstance(values, list):
        values = engine_meta.listed(values)
    values += more
    return values
