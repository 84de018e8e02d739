"""The SDK's requests as commands: what is asked, checked field by field. Pure.

A request that is wrong takes its number all the same, since the client counts it: its command is refused, and the next ones follow.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shared.runtime.errors import MyxoError
from shared.runtime.safe_files import is_plain_name
from shared.schema import codec
from shared.schema.client_commands import TENANT
from shared.schema.message import LARGEST

PREFIX = "tinker://"
CLIENT = re.compile(rf"{TENANT}-[0-9a-f]{{16}}(:(train|sample):[0-9]{{1,9}})?\Z")
KINDS = ("weights", "sampler_weights")
DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
MOST_SAMPLES = 1024
# loss → its inputs beside target_tokens, and its settings with their defaults
CLIPPED = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES: dict[str, tuple[tuple[str, ...], dict[str, float]]] = {
    "cross_entropy": (("weights",), {}),
    "importance_sampling": (("logprobs", "advantages"), {}),
    "ppo": (("logprobs", "advantages"), CLIPPED),
    "cispo": (("logprobs", "advantages"), {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": (("logprobs", "advantages"), {"beta": 0.05}),
}


class WrongRequest(MyxoError):
    """A request that is wrong for what it asks."""


def wrong(name: str, given: object, expected: str) -> WrongRequest:
    """Returns the refusal of a field."""
    return WrongRequest(f"{name}: {str(given)[:200]}; expected {expected}")


@dataclass(frozen=True)
class ServedModel:
    """What this server serves. ``names``: of the model. ``rank``: of adapters; None: the whole model trains. ``seeded``: whether engines
    sample by seeds."""

    names: tuple[str, ...]
    rank: int | None
    vocabulary: int
    context: int
    seeded: bool


@dataclass(frozen=True)
class Asked:
    """A checked request: a command's arguments, the payload's content, and the tokens that it counts for quotas."""

    arguments: dict[str, Any] = field(default_factory=dict)
    content: Any = None
    tokens: int = 0

    def encoded(self) -> tuple[str, bytes | None]:
        """Returns arguments and payload as the log and the store hold them."""
        return json.dumps(self.arguments, sort_keys=True), None if self.content is None else codec.pack(self.content)


def digest(verb: str, body: bytes) -> str:
    """Returns the digest by which a repeated request is known."""
    return hashlib.blake2b(verb.encode() + b"\0" + body, digest_size=16).hexdigest()


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)
    type: str = ""


class _Lora(_Body):
    rank: int = Field(ge=1)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class _Optimizer(_Body):
    type: Literal["adamw"] = "adamw"


Token = Annotated[int, Field(ge=0, le=LARGEST)]
Metadata = dict[str, Any] | None


class CreateModel(_Body):
    session_id: str
    model_seq_id: int = Field(ge=0, lt=10**9)
    base_model: str
    user_metadata: Metadata = None
    lora_config: _Lora | None = None
    optimizer_config: _Optimizer = _Optimizer()

    def asked(self, served: ServedModel, client: str) -> Asked:
        if self.base_model not in served.names:
            raise wrong("base_model", self.base_model, served.names[0])
        lora = self.lora_config or _Lora(rank=served.rank or 1)
        if served.rank is not None and lora.rank > served.rank:
            raise wrong("lora_config.rank", lora.rank, f"at most {served.rank}, this server's trainer.lora_rank")
        parts = [name for name, trains in (("attn", lora.train_attn), ("mlp", lora.train_mlp)) if trains]
        if served.rank is not None and not parts:
            raise wrong("lora_config", "neither train_attn nor train_mlp", "one of them: this server has no adapter on the output layer")
        if served.rank is None and len(parts) < 2:
            raise wrong("lora_config", "train_attn or train_mlp false", "both: this server trains the whole model (no trainer.lora_rank)")
        seed = int.from_bytes(hashlib.blake2b(client.encode(), digest_size=4).digest()) if lora.seed is None else lora.seed
        return Asked({"seed": seed, "rank": min(lora.rank, served.rank or lora.rank), "parts": parts})


class LoadWeights(_Body):
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: Metadata = None
    path: str
    optimizer: bool
    optimizer_config: _Optimizer | None = None
    weights_access_token: None = None

    def asked(self, served: ServedModel, client: str) -> Asked:
        if self.base_model is not None and self.base_model not in served.names:
            raise wrong("base_model", self.base_model, served.names[0])
        return Asked({"path": checked_path(self.path, client, "weights"), "optimizer": self.optimizer})


class _Adam(_Body):
    learning_rate: float = Field(default=1e-4, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip_norm: float = 0.0


class OptimStep(_Body):
    model_id: str
    seq_id: int
    adam_params: _Adam

    def asked(self, served: ServedModel, client: str) -> Asked:
        adam = self.adam_params
        betas, clip = (adam.beta1, adam.beta2), max(0.0, adam.grad_clip_norm)
        return Asked({"lr": adam.learning_rate, "betas": betas, "eps": adam.eps, "weight_decay": adam.weight_decay, "clip_grad": clip})


class SaveWeights(_Body):
    model_id: str
    seq_id: int
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Metadata = None
    sampling_session_seq_id: int | None = Field(default=None, ge=0, lt=10**9)
    kind: Literal["snapshot"] = "snapshot"

    def asked(self, served: ServedModel, client: str, kind: str) -> Asked:
        name = self.path if self.path is not None else f"step-{self.seq_id}"
        if not is_plain_name(name) or name.startswith("."):
            raise wrong("path", repr(name), "a name without / that begins with no dot")
        return Asked({"path": f"{PREFIX}{client}/{kind}/{name}", "overwrite": self.overwrite})


class CreateSamplingSession(_Body):
    session_id: str
    sampling_session_seq_id: int = Field(ge=0, lt=10**9)
    base_model: str | None = None
    model_path: str | None = None

    def asked(self, served: ServedModel, client: str) -> Asked:
        if self.model_path is None and self.base_model not in served.names:
            raise wrong("base_model", self.base_model, f"{served.names[0]}, or a model_path")
        return Asked({"path": None if self.model_path is None else checked_path(self.model_path, client, "sampler_weights")})


class _TextChunk(_Body):
    tokens: list[Token]
    type: Literal["encoded_text"] = "encoded_text"


class _Prompt(_Body):
    chunks: list[_TextChunk]


class _SamplingParams(_Body):
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    stop: str | list[Token] | list[str] | None = None
    temperature: float = Field(default=1.0, ge=0, le=1000)
    top_k: int = Field(default=-1, ge=-1)
    top_p: float = Field(default=1.0, gt=0, le=1)

    def checked(self, served: ServedModel, room: int) -> dict[str, Any]:
        """Returns the engine's sampling parameters; ``room``: the most tokens that the context leaves."""
        if self.stop == []:
            raise wrong("sampling_params.stop", "[]", "None, or stop sequences: this server always ends at the model's end token")
        if self.seed is not None and not served.seeded:
            raise wrong("sampling_params.seed", self.seed, "None: rollout.sglang.enable-deterministic-inference is off")
        if self.top_k == 0:
            raise wrong("sampling_params.top_k", 0, "-1, or at least 1")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        ids = [stop for stop in stops if isinstance(stop, int)]
        if ids:
            checked_tokens("sampling_params.stop", np.array(ids, np.int64), served)
        texts = [stop for stop in stops if isinstance(stop, str)]
        limits = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {**limits, "max_new_tokens": min(room, self.max_tokens or room), "stop": texts, "stop_token_ids": ids}


class SampleBody(_Body):
    num_samples: int = Field(default=1, ge=1, le=MOST_SAMPLES)
    prompt: _Prompt
    sampling_params: _SamplingParams
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str
    seq_id: int = Field(ge=0)
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Literal[0] = 0
    topk_sample_logprobs: Literal[0] = 0
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: Literal[0] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    record_stability_info: Literal[False] | None = None

    def asked(self, served: ServedModel, client: str) -> Asked:
        tokens = [token for chunk in self.prompt.chunks for token in chunk.tokens]
        prompt, last = checked_tokens("prompt", np.array(tokens, np.int64), served), self.prompt_logprobs_last_n
        if last is not None and not (self.prompt_logprobs and last < len(prompt)):
            raise wrong("prompt_logprobs_last_n", last, "less than the prompt's tokens, beside prompt_logprobs")
        if (room := served.context - len(prompt) - 1) < 1:
            raise wrong("prompt", f"{len(prompt)} tokens", f"less than the context, {served.context}")
        sampling = self.sampling_params.checked(served, room)
        scored = (last or len(prompt)) if self.prompt_logprobs else 0
        arguments = {"n": self.num_samples, "sampling": sampling, "seed": self.sampling_params.seed, "prompt_log_probs": scored}
        return Asked(arguments, {"tokens": prompt}, len(prompt) + self.num_samples * sampling["max_new_tokens"])


def read_json(model: type[Any], body: Any) -> Any:
    """Returns a request's fields. Raises WrongRequest, which names the first that is wrong."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = ".".join(map(str, first["loc"]))
        given = first["input"] if not isinstance(first["input"], dict | list) else type(first["input"]).__name__
        raise wrong(name, given, f"otherwise: {first['msg']}") from None


def checked_tokens(name: str, tokens: NDArray[Any], served: ServedModel) -> NDArray[np.int32]:
    """Returns token ids as int32. Raises WrongRequest where there is none, or one is not in the vocabulary."""
    if not len(tokens):
        raise wrong(name, "no tokens", "at least one")
    if len(outside := tokens[(tokens < 0) | (tokens >= served.vocabulary)]):
        raise wrong(name, int(outside[0]), f"token ids from 0 to {served.vocabulary - 1}")
    return tokens.astype(np.int32)


def checked_path(path: str, client: str, kind: str) -> str:
    """Returns a path of saved weights. Raises WrongRequest where it is none, or another tenant's: as one that is not there."""
    parts = path.removeprefix(PREFIX).split("/")
    if not path.startswith(PREFIX) or len(parts) != 3 or parts[1] not in KINDS or not is_plain_name(parts[2]) or parts[2].startswith("."):
        raise wrong("path", path, f"{PREFIX}MODEL/{kind}/NAME")
    if parts[1] != kind:
        raise wrong("path", path, f"{kind}: {'save_state' if kind == 'weights' else 'save_weights_for_sampler'} makes them")
    if parts[0].partition("-")[0] != client.partition("-")[0]:
        raise WrongRequest(f"path: {path}: there are no such weights")
    return path


def forward_backward(message: Mapping[str, Any], served: ServedModel) -> Asked:
    """Returns the request of a decoded ``ForwardBackwardRequest``. Raises WrongRequest."""
    loss, data = message.get("loss_fn", ""), message["data"]
    if loss not in LOSSES:
        raise wrong("loss_fn", loss, f"one of {', '.join(LOSSES)}; others run as forward_backward_custom on the client")
    needed, settings = LOSSES[loss]
    config = settings | {each["key"]: each.get("value", 0.0) for each in message["loss_fn_config"] if "key" in each}
    for each in message["loss_fn_config_v2"]:
        value = each.get("value", {})
        if "text" in value:
            raise wrong(f"loss_fn_config.{each.get('key')}", value["text"], "a number")
        config[each.get("key", "")] = value.get("number", 0.0)
    if unknown := sorted(config.keys() - settings.keys()):
        raise wrong(f"loss_fn_config.{unknown[0]}", config[unknown[0]], f"{' and '.join(settings) or 'nothing'} with {loss}")
    if not all(map(math.isfinite, config.values())):
        raise wrong("loss_fn_config", config, "finite numbers")
    if not data:
        raise wrong("data", "no datums", "at least one")
    datums = [_datum(index, datum, needed, served) for index, datum in enumerate(data)]
    return Asked({"loss_fn": loss, "loss_fn_config": config}, datums, sum(len(datum["tokens"]) for datum in datums))


def _datum(index: int, datum: Mapping[str, Any], needed: tuple[str, ...], served: ServedModel) -> dict[str, NDArray[Any]]:
    name = f"data.{index}"
    chunks = []
    for chunk in datum["model_input"]:
        if "encoded_text" not in chunk:
            raise wrong(f"{name}.model_input", next(iter(chunk), "an empty chunk"), "chunks of tokens; this server trains text alone")
        tokens = chunk["encoded_text"].get("tokens", b"")
        if len(tokens) % 4:
            raise wrong(f"{name}.model_input", f"{len(tokens)} bytes", "int32 token ids")
        chunks.append(np.frombuffer(tokens, "<i4"))
    tokens = checked_tokens(f"{name}.model_input", np.concatenate([*chunks, np.empty(0, np.int32)]), served)
    if len(tokens) > served.context:
        raise wrong(f"{name}.model_input", f"{len(tokens)} tokens", f"at most the context, {served.context}")
    inputs = {each.get("key", ""): each.get("value", {}) for each in datum["loss_fn_inputs"]}
    wanted = ("target_tokens", *needed)
    if unknown := sorted(inputs.keys() - {*wanted}):
        raise wrong(f"{name}.loss_fn_inputs.{unknown[0]}", "given", f"{', '.join(wanted)} alone")
    found: dict[str, NDArray[Any]] = {"tokens": tokens}
    for key in wanted:
        if key not in inputs and key != "weights":
            raise wrong(f"{name}.loss_fn_inputs.{key}", "absent", f"a tensor of {len(tokens)}, one for each token of model_input")
        values = _tensor(f"{name}.loss_fn_inputs.{key}", inputs[key], len(tokens)) if key in inputs else np.ones(len(tokens), np.float32)
        found[key] = checked_tokens(f"{name}.loss_fn_inputs.{key}", values, served) if key == "target_tokens" else values
    return found


def _tensor(name: str, given: Mapping[str, Any], length: int) -> NDArray[Any]:
    if "sparse_csr" in given:
        raise wrong(name, "sparse", "a dense tensor")
    dtype, data = DTYPES.get(given.get("dtype", 0)), given.get("dense", b"")
    if dtype is None or len(data) % dtype.itemsize:
        raise wrong(name, f"dtype {given.get('dtype', 0)}, {len(data)} bytes", "float32, int64 or int32")
    if len(given["shape"]) > 1 or len(data) // dtype.itemsize != length:
        raise wrong(
            name, f"shape {given['shape'] or [len(data) // dtype.itemsize]}", f"[{length}], one value for each token of model_input"
        )
    values = np.frombuffer(data, dtype)
    if name.endswith(".target_tokens"):
        if dtype.kind != "i":
            raise wrong(name, "float32", "integers")
        return values
    if not np.isfinite(values).all():
        raise wrong(name, values[~np.isfinite(values)][0], "finite numbers")
    return values.astype(np.float32)


def seed_of(given: int | None, client: str, number: int, index: int) -> int:
    """Returns the seed of one of a command's sequences: by the client's own seed, else by its key, so that a repetition gives the same."""
    words = f"{given}:{index}" if given is not None else f"{client}:{number}:{index}"
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=4).digest()) & LARGEST
