"""A sample as hooks see it: plain lists and slime's field and method names. What the engine says of its tokens (``meta_info``) is read into
it. It is also ``slime.utils.types``.

``meta_info`` has versions, nuclei and routed experts as lists, arrays, tensors, or base64 of 32-bit integers.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass, field, fields
from enum import Enum
from itertools import zip_longest
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from shared.schema.versions import TOKEN_VERSIONS


@dataclass
class EngineCounters:
    """Counts that an engine reports with each of its answers, added up over those of a sample."""

    of_engine: ClassVar[Mapping[str, str]] = {}  # Field → what the engine's ``meta_info`` calls it

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Adds what the engine counted for one answer."""
        for name, key in self.of_engine.items():
            setattr(self, name, getattr(self, name) + (meta_info.get(key) or 0))

    def to_dict(self) -> dict[str, int]:
        """Returns the counts by name."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Returns the counters of `to_dict`."""
        return cls(**{one.name: data.get(one.name, 0) for one in fields(cls)})


@dataclass
class SpeculationCounters(EngineCounters):
    """Speculative decoding: tokens drafted and accepted, verifications, and tokens in all."""

    of_engine = {
        "spec_accept_token_num": "spec_accept_token_num",
        "spec_draft_token_num": "spec_draft_token_num",
        "spec_verify_ct": "spec_verify_ct",
        "completion_token_num": "completion_tokens",
    }

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def spec_accept_rate(self) -> float:
        """Returns the share of drafted tokens that were accepted."""
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num > 0 else 0.0

    @property
    def spec_accept_length(self) -> float:
        """Returns the mean number of tokens a verification."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct > 0 else 0.0


@dataclass
class PrefixCacheCounters(EngineCounters):
    """The prefix cache: input tokens, and those of them that were cached."""

    of_engine = {"cached_tokens": "cached_tokens", "total_prompt_tokens": "prompt_tokens"}

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Returns the share of input tokens that were cached."""
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens > 0 else 0.0


_NUCLEUS = ("top_p_token_ids", "top_p_kept_token_ids"), ("top_p_token_offsets", "top_p_kept_token_offsets")
"""The engine's names, newer and older, of a nucleus's ids and of their offsets."""


def listed(values: Any) -> list[Any]:
    """Returns the entries of a list, an array or a tensor of any shape; none for None."""
    if values is None:
        return []
    if hasattr(values, "tolist"):
        flat = values.reshape(-1).tolist()
        return list(flat)
    return list(values)


def token_versions(meta: Mapping[str, Any], count: int) -> list[int | None]:
    """Returns the version of each of ``count`` tokens, None where the engine does not name it (its version at the end says nothing)."""
    reported = meta.get(TOKEN_VERSIONS) or []  # of a part of an answer, those of its new tokens
    found: list[int | None] = [*[None] * (count - len(reported)), *reported[:count]]
    for span in meta.get("weight_versions") or ():
        for at in range(span["start"], min(span["end"], count)):
            found[at] = int(str(span["version"]).partition("@")[0])  # an external engine's has a mark
    return found


NO_TIMES = (0.0,) * 8
ENGINE_TIMES = "engine_times"  # the attribute of a sample with the sum of its answers' `engine_times`


def engine_times(meta: Mapping[str, Any]) -> list[float]:
    """Returns an answer's seconds in the engine, in its queue and in decoding, and the tokens that were decoded in these; where drafts were
    verified its tokens, verifications, drafted and accepted tokens; zeros where the engine does not measure them. SGLang's own
    ``decode_throughput`` counts from the first part that it sends: of an answer that comes as a whole it says nothing."""
    begun, ended = (meta.get(name) or 0.0 for name in ("prefill_finished_time", "request_finished_ts"))
    decoding = [ended - begun, float(int(meta.get("completion_tokens") or 0) - 1)] if 0.0 < begun < ended else [0.0, 0.0]
    speculation = [float(meta.get(name) or 0) for name in ("spec_verify_ct", "spec_num_proposed_drafts", "spec_num_correct_drafts")]
    verified = float(meta.get("completion_tokens") or 0) if speculation[0] else 0.0
    return [float(meta.get("e2e_latency") or 0.0), float(meta.get("queue_time") or 0.0), *decoding, verified, *speculation]


def add_times(before: Sequence[float], further: Sequence[float]) -> list[float]:
    """Returns the sum of what several answers took."""
    return [a + b for a, b in zip_longest(before, further, fillvalue=0.0)]  # a sample of an older release has fewer


def add_nucleus(sample: Any, meta: Mapping[str, Any], count: int, trainable: bool) -> None:
    """Appends the nuclei of ``count`` new tokens, empty ones where they are not trainable and nuclei are kept. Raises ValueError."""
    ids, offsets = (_integers(meta, names) for names in _NUCLEUS)
    if (ids is None) != (offsets is None):
        raise ValueError("meta_info has only one of a nucleus's token ids and offsets")
    had = sample.rollout_top_p_token_offsets is not None
    if ids is None or offsets is None:
        if trainable or not had:
            return
        ids, offsets = np.empty(0, np.int32), np.zeros(count + 1, np.int32)
    if len(offsets) != count + 1 or offsets[0] != 0 or offsets[-1] != len(ids):
        raise ValueError(f"a nucleus with {len(offsets)} offsets, the last {offsets[-1:]}, for {count} tokens and {len(ids)} ids")
    if had:
        old = np.asarray(listed(sample.rollout_top_p_token_offsets), np.int32)
        ids = np.concatenate([np.asarray(listed(sample.rollout_top_p_token_ids), np.int32), ids])
        offsets = np.concatenate([old, offsets[1:] + old[-1]])
    sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets = ids, offsets


def set_routed_experts(sample: Any, args: Any, meta: Mapping[str, Any]) -> None:
    """Takes over the experts that each token went through, int32 [T - 1, layers, experts a token]. Raises ValueError."""
    given = _integers(meta, ("routed_experts",))
    if given is None:
        return
    if args is None:
        raise ValueError("args is needed to read routed experts")
    start = int(meta.get("routed_experts_start_len") or 0)
    rows, layers, experts = max(0, len(sample.tokens) - 1 - start), args.num_layers, args.moe_router_topk
    if start < 0 or given.size != rows * layers * experts:
        raise ValueError(f"{given.size} routed experts for {rows} tokens from {start} on, {layers} layers and {experts} experts each")
    routed = given.reshape(rows, layers, experts)
    if start:
        before = sample.rollout_routed_experts
        if before is None or len(before) < start:
            raise ValueError(f"routed experts from token {start} on, without those before it")
        routed = np.concatenate([np.asarray(before, np.int32)[:start], routed])
    sample.rollout_routed_experts = routed


def _integers(meta: Mapping[str, Any], names: tuple[str, ...]) -> NDArray[np.int32] | None:
    """Returns the integers under the first of the names that is there, flat."""
    value = next((meta[name] for name in names if name in meta), None)
    if value is None:
        return None
    if isinstance(value, str):
        value = base64.b64decode(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return np.frombuffer(value, np.int32)
    return np.asarray(listed(value), np.int32).reshape(-1)


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

    SpecInfo = SpeculationCounters
    PrefixCacheInfo = PrefixCacheCounters

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
    spec_info: SpeculationCounters = field(default_factory=SpeculationCounters)
    prefix_cache_info: PrefixCacheCounters = field(default_factory=PrefixCacheCounters)
    engine_times: InitVar[list[float] | None] = None  # no field of slime's; functions copy samples by ``Sample(**vars(sample))``

    def __post_init__(self, engine_times: list[float] | None) -> None:
        if engine_times is not None:
            setattr(self, ENGINE_TIMES, engine_times)

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
        sample.spec_info = SpeculationCounters.from_dict(data.get("spec_info", {}))
        sample.prefix_cache_info = PrefixCacheCounters.from_dict(data.get("prefix_cache_info", {}))
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
        ids, meta, before = [int(token) for token in listed(tokens)], meta_info or {}, self.response_length
        given = self._checked_log_probs(len(ids), log_probs, trainable)
        versions = self.weight_versions if len(self.weight_versions) == before else [None] * before
        self.response += text or ""
        if ids:
            self.tokens = _extended(self.tokens, ids)
            self.response_length += len(ids)
            self.loss_mask = _extended([1] * before if self.loss_mask is None else self.loss_mask, [int(trainable)] * len(ids))
            if given is not None:
                self.rollout_log_probs = _extended([0.0] * before if self.rollout_log_probs is None else self.rollout_log_probs, given)
            self.weight_versions = _extended(versions, token_versions(meta, len(ids)))
            add_nucleus(self, meta, len(ids), trainable)
        elif self.rollout_log_probs is None and log_probs is not None and not self._trained_before():
            self.rollout_log_probs = [0.0] * before
        set_routed_experts(self, args, meta)
        if update_terminal_info and "finish_reason" in meta:
            self._end(meta)
        self._check_lengths()

    def _checked_log_probs(self, count: int, log_probs: Any, trainable: bool) -> list[float] | None:
        """Returns the log-probs of ``count`` tokens to append; None where the sample keeps none. Raises ValueError."""
        if log_probs is None:
            return self._without_log_probs(count, trainable)
        given = [float(value) for value in listed(log_probs)]
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

    def _end(self, meta: Mapping[str, Any]) -> None:
        """Takes over what the engine says of a whole answer."""
        if meta.get("spec_verify_ct"):
            self.spec_info.add(meta)
        self.prefix_cache_info.add(meta)
        if any(times := engine_times(meta)):
            setattr(self, ENGINE_TIMES, add_times(getattr(self, ENGINE_TIMES) or NO_TIMES, times))
        if meta["finish_reason"]:
            self.status = FINISHED.get(meta["finish_reason"]["type"], self.status)

    def _check_lengths(self) -> None:
        for name in ("loss_mask", "rollout_log_probs"):
            values = getattr(self, name)
            if values is not None and len(values) != self.response_length:
                raise ValueError(f"{name} has {len(values)} entries for a response_length of {self.response_length}")
        ids, offsets = self.rollout_top_p_token_ids, self.rollout_top_p_token_offsets
        if ids is None and offsets is None:
            return
        if ids is None or offsets is None:
            raise ValueError("rollout_top_p_token_ids and rollout_top_p_token_offsets go together")
        if len(offsets) != self.response_length + 1 or int(offsets[-1]) != len(ids):
            raise ValueError(f"rollout_top_p_token_offsets: {len(offsets)} for {self.response_length} response tokens and {len(ids)} ids")


Status = HookSample.Status

Sample = HookSample  # slime's name for it, which functions that were written for slime use

RolloutBatch = dict[str, Any]  # slime's type of a rank's batch

FINISHED = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}  # The status by the engine's ``finish_reason``


def status_of(given: object) -> Status | None:
    """Returns the status that a user's function set, by whichever enum or by its word; None for anything else."""
    try:
        return Status(getattr(given, "value", given))
    except ValueError:
        return None


def _extended(values: Any, more: list[Any]) -> Any:
    """Returns ``values``, extended in place where it is a list: who holds the same list sees it grow."""
    if not isinstance(values, list):
        values = listed(values)
    values += more
    return values
