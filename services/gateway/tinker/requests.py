"""The SDK's requests as commands, checked field by field, and its protocol buffers: the fields that are read and written. Pure.

A request that is wrong takes its number all the same, since the client counts it: its command is refused, and the next ones follow.
"""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.gateway.tinker.command_book import PREFIX, CommandBook, WrongRequest, wrong
from shared.formats.request import TurnRefused
from shared.runtime.safe_files import is_plain_name
from shared.schema.message import LARGEST
from shared.schema.messages import TENANT, Verb

# message → its fields: number, name, kind (* where it repeats). Maps are lists of entries, which is the same on the wire.
_MESSAGES = {
    "Unread": "",  # only whether it is there
    "Text": "1 tokens bytes",
    "Chunk": "1 encoded_text Text, 2 image Unread, 3 dmel Unread",
    "Tensor": "1 dense bytes, 2 sparse_csr Unread, 3 dtype int32, 4 shape int64*",
    "Input": "1 key string, 2 value Tensor",
    "Datum": "1 model_input Chunk*, 2 loss_fn_inputs Input*",
    "Number": "1 key string, 2 value double",
    "Setting": "1 number double, 2 text string",
    "NamedSetting": "1 key string, 2 value Setting",
    "ForwardBackwardRequest": "1 model_id string, 2 seq_id int32, 3 data Datum*, 4 loss_fn string, 5 loss_fn_config Number*, "
    "6 forward_only bool, 7 loss_fn_config_v2 NamedSetting*",
    "BatchedTensor": "1 data bytes, 2 offsets bytes, 3 dtype int32",
    "Output": "1 key string, 2 value BatchedTensor",
    "ArrayRecord": "2 fields Output*, 3 num_datums int64",
    "ForwardBackwardOutput": "1 loss_fn_output_type string, 2 loss_fn_outputs ArrayRecord*, 3 metrics Number*",
    "SampledSequence": "1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes",
    "SampleResponse": "1 sequences SampledSequence*, 2 prompt_logprobs bytes, 4 prompt_cache_hit_tokens int32",
}
DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}


def _classes() -> dict[str, Any]:
    file = FileDescriptorProto(name="tinker.proto", package="tinker", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, key, kind in (each.split() for each in fields.split(", ") if each):
            one, repeats = kind.rstrip("*"), kind.endswith("*")
            added = message.field.add(name=key, number=int(number), label=3 if repeats else 1)
            if one in _MESSAGES:
                added.type, added.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".tinker.{one}"
            else:
                added.type = FieldDescriptorProto.Type.Value(f"TYPE_{one.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    found = message_factory.GetMessageClassesForFiles([file.name], pool)
    return {name.removeprefix("tinker."): kind for name, kind in found.items()}


MESSAGES = _classes()


def forward_backward_output(log_probs: Sequence[NDArray[np.float32]], metrics: Mapping[str, float]) -> bytes:
    """Returns an encoded ``ForwardBackwardOutput`` with the log-probs of each datum's targets."""
    offsets = np.cumsum([0, *(values.nbytes for values in log_probs)]).astype("<i8").tobytes()
    tensor = {"data": b"".join(values.astype("<f4").tobytes() for values in log_probs), "offsets": offsets, "dtype": 1}
    record = {"fields": [{"key": "logprobs", "value": tensor}], "num_datums": len(log_probs)}
    named = [{"key": name, "value": value} for name, value in metrics.items()]
    answer = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics=named)
    return bytes(answer.SerializeToString())


def sample_response(found: Mapping[str, Any]) -> bytes:
    """Returns an encoded ``SampleResponse``.

    ``found``: ``sequences``, each with its ``tokens``, their ``log_probs`` and whether it ``stopped`` by itself; ``prompt``, the log-probs
    of the prompt, NaN where there is none, or None; ``cached``, tokens of the prompt whose keys and values were there already.
    """
    prompt = None if found["prompt"] is None else found["prompt"].astype("<f4").tobytes()
    answer = MESSAGES["SampleResponse"](prompt_logprobs=prompt, prompt_cache_hit_tokens=found["cached"])
    for one in found["sequences"]:
        tokens, log_probs = one["tokens"].astype("<i4").tobytes(), one["log_probs"].astype("<f4").tobytes()
        answer.sequences.add(stop_reason=int(not one["stopped"]), tokens=tokens, logprobs=log_probs)
    return bytes(answer.SerializeToString())


CLIENT = re.compile(rf"{TENANT}-[0-9a-f]{{16}}(:(train|sample):[0-9]{{1,9}})?\Z")
SURROGATE = re.compile("[\ud800-\udfff]")
MOST_SAMPLES, MOST_DATUMS, MOST_NAME = 1024, 1024, 128
UNNAMED_SECONDS = 7 * 24 * 3600  # the time that weights for sampling stay that were saved without a name
MOST_NUMBER = 1 << 62  # of a sample
MOST_AHEAD = 10_000  # a client's commands that may wait, and numbers by which one may come before another that was sent earlier
ROUNDING = 1e-2  # by which a log-prob may be more than 0
CLIPPED = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
# loss → its inputs beside target_tokens, and its settings with their defaults
LOSSES: dict[str, tuple[tuple[str, ...], dict[str, float]]] = {
    "cross_entropy": (("weights",), {}),
    "importance_sampling": (("logprobs", "advantages"), {}),
    "ppo": (("logprobs", "advantages"), CLIPPED),
    "cispo": (("logprobs", "advantages"), {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": (("logprobs", "advantages"), {"beta": 0.05}),
}


@dataclass(frozen=True)
class ServedModel:
    """What this server serves. ``names``: of the model. ``rank``: of adapters; None: the whole model trains. ``seeded``: whether engines
    sample by seeds."""

    names: tuple[str, ...]
    rank: int | None
    vocabulary: int
    context: int
    seeded: bool

    def check_name(self, given: str | None) -> None:
        if given not in self.names:
            raise wrong("base_model", given, self.names[0])


@dataclass(frozen=True)
class Asked:
    """A checked request: a command's arguments, the payload's content, and the tokens that it counts for quotas."""

    arguments: dict[str, Any] = field(default_factory=dict)
    content: Any = None
    tokens: int = 0


def not_there(name: str, given: object) -> WrongRequest:
    """Returns the refusal of a name of nothing, or of another tenant's: the two are not told apart."""
    return WrongRequest(f"{name}: {str(given)[:200]}: there is no such thing, or no more", 404)


def owned(tenant: str, body: Mapping[str, Any], name: str, kind: str = "") -> str:
    """Returns the id in a field of a request. ``kind``: train or sample; empty: a session. Raises WrongRequest."""
    client = str(body.get(name))
    if not (match := CLIENT.match(client)) or client.partition("-")[0] != tenant or (match[2] or "") != kind:
        raise not_there(name, client)
    return client


def number_of(body: Mapping[str, Any], name: str, least: int, most: int = 10**9) -> int:
    """Returns a whole number in a field of a request. Raises WrongRequest."""
    number = body.get(name)
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number < most:
        raise wrong(name, repr(number), f"a number from {least} to {most - 1}")
    return number


def key_of(tenant: str, verb: Verb, body: Mapping[str, Any], book: CommandBook) -> tuple[str, int]:
    """Returns client and number of a request's command. Raises WrongRequest; TurnRefused where too many wait: the SDK asks again."""
    if verb == "create_sampling_session":
        return f"{owned(tenant, body, 'session_id')}:sample:{number_of(body, 'sampling_session_seq_id', 0)}", 0
    if verb == "create_model" or (verb == "load_weights" and body.get("session_id") is not None):
        return f"{owned(tenant, body, 'session_id')}:train:{number_of(body, 'model_seq_id', 0)}", 0
    name, kind, first = ("sampling_session_id", "sample", 0) if verb == "sample" else ("model_id", "train", 1)
    client = owned(tenant, body, name, kind)
    # a copy of the SDK's sampling client numbers its requests from far away; they have no order
    most = MOST_NUMBER if verb == "sample" else book.newest[client] + 1 + MOST_AHEAD
    number = number_of(body, "seq_id", first, most) + 1 - first
    if client not in book.models and client not in book.samplers and (client, number) not in book.commands:
        raise not_there(name, client)
    new = (client, number) not in book.commands if verb == "sample" else number > book.newest[client]  # others wait for less
    if new and book.waiting[client] >= MOST_AHEAD:
        raise TurnRefused(429, f"{client}: {MOST_AHEAD} of its requests wait; expected fewer before another one")
    return client, number


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)


class _Body(_Fields):
    """A request: whose it is, as `key_of` has checked, and notes of the client's own, which nothing reads."""

    type: str = ""
    session_id: str | None = None
    model_id: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    model_seq_id: int | None = None
    user_metadata: dict[str, Any] | None = None


SessionNumber = Annotated[int, Field(ge=0, lt=10**9)]


class _Lora(_Fields):
    rank: int = Field(ge=1)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


Optimizer = dict[Literal["type"], Literal["adamw"]]
Token = Annotated[int, Field(ge=0, le=LARGEST)]


class CreateModel(_Body):
    base_model: str | None = None
    lora_config: _Lora | None = None
    optimizer_config: Optimizer = {}

    def asked(self, served: ServedModel, book: CommandBook, client: str) -> Asked:
        served.check_name(self.base_model)
        lora = self.lora_config or _Lora(rank=served.rank or 1)
        parts = [name for name, trains in (("attn", lora.train_attn), ("mlp", lora.train_mlp)) if trains]
        if served.rank is None and len(parts) < 2:
            raise wrong("lora_config", "train_attn or train_mlp false", "both: this server trains the whole model (no trainer.lora_rank)")
        if served.rank is not None and lora.rank > served.rank:
            raise wrong("lora_config.rank", lora.rank, f"at most {served.rank}, this server's trainer.lora_rank")
        if not parts:
            raise wrong("lora_config", "neither train_attn nor train_mlp", "one of them: this server has no adapter on the output layer")
        seed = int.from_bytes(hashlib.blake2b(client.encode(), digest_size=4).digest()) if lora.seed is None else lora.seed
        return Asked({"seed": seed, "rank": lora.rank, "parts": parts})


class LoadWeights(_Body):
    base_model: str | None = None
    path: str
    optimizer: bool
    optimizer_config: Optimizer | None = None
    weights_access_token: None = None

    def asked(self, served: ServedModel, book: CommandBook, client: str) -> Asked:
        served.check_name(self.base_model or served.names[0])
        return Asked({"path": book.saved(self.path, client, "weights", coming=True), "optimizer": self.optimizer})


class _Adam(_Fields):
    # beyond these bounds float32 overflows, or divides by zero where a gradient is 0
    learning_rate: float = Field(default=1e-4, ge=0, le=1e6)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, ge=1e-30, le=1e6)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip_norm: float = Field(default=0.0, ge=0)


class OptimStep(_Body):
    adam_params: _Adam

    def asked(self, served: ServedModel, book: CommandBook, client: str) -> Asked:
        adam = self.adam_params
        if adam.weight_decay * adam.learning_rate > 1:
            raise wrong("adam_params.weight_decay", adam.weight_decay, "at most 1 / learning_rate: more turns the weights' signs round")
        if 0 < adam.grad_clip_norm < 1e-9:  # Adam's squares of much smaller gradients are 0
            raise wrong("adam_params.grad_clip_norm", adam.grad_clip_norm, "0, which clips nothing, or at least 1e-9")
        found = {"lr": adam.learning_rate, "betas": (adam.beta1, adam.beta2), "eps": adam.eps, "weight_decay": adam.weight_decay}
        return Asked({**found, "clip_grad": adam.grad_clip_norm})


class SaveWeights(_Body):
    path: str | None = None
    ttl_seconds: Annotated[int, Field(ge=1, le=10**9)] | None = None
    overwrite: bool = False

    _of = "weights"

    def asked(self, served: ServedModel, book: CommandBook, client: str) -> Asked:
        name = self.path if self.path is not None else f"step-{self.seq_id}"
        if not is_plain_name(name) or name.startswith(".") or len(name.encode()) > MOST_NAME:
            raise wrong("path", repr(name), f"a name without / that begins with no dot, of at most {MOST_NAME} bytes")
        path, replaces = f"{PREFIX}{client}/{self._of}/{name}", self._of == "weights"
        if book.is_taken(path) and not (replaces and self.overwrite):
            raise wrong("path", path, "a name that is not taken" + ", or overwrite" * replaces)
        return Asked({"path": path, "ttl": self.ttl_seconds})


class SaveWeightsForSampler(SaveWeights):
    overwrite: Literal[False] = False
    kind: Literal["snapshot"] = "snapshot"
    sampling_session_seq_id: SessionNumber | None = None

    _of = "sampler_weights"

    def asked(self, served: ServedModel, book: CommandBook, client: str) -> Asked:
        arguments = super().asked(served, book, client).arguments
        arguments["ttl"] = self.ttl_seconds or (None if self.path is not None else UNNAMED_SECONDS)
        if self.sampling_session_seq_id is not None:
            arguments["sampler"] = sampler = f"{client.partition(':')[0]}:sample:{self.sampling_session_seq_id}"
            book.check_free(sampler)
        return Asked(arguments)


class CreateSamplingSession(_Body):
    sampling_session_seq_id: SessionNumber
    base_model: str | None = None
    model_path: str | None = None

    def asked(self, served: ServedModel, book: CommandBook, client: str) -> Asked:
        book.check_free(client)
        if self.model_path is None or self.base_model is not None:
            served.check_name(self.base_model)
        if self.model_path is None:
            return Asked({"path": None})
        return Asked({"path": book.saved(self.model_path, client, "sampler_weights")})


class _TextChunk(_Fields):
    tokens: list[Token]
    type: Literal["encoded_text"] = "encoded_text"


class _Prompt(_Fields):
    chunks: list[_TextChunk]


class _SamplingParams(_Fields):
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    stop: str | list[Token] | list[str] | None = None
    temperature: float = Field(default=1.0, ge=0, le=1000)
    top_k: int = Field(default=-1, ge=-1)
    top_p: float = Field(default=1.0, gt=0, le=1)

    def checked(self, served: ServedModel, room: int) -> dict[str, Any]:
        """Returns the engine's sampling parameters; ``room``: the most tokens that the context leaves."""
        if self.seed is not None and not served.seeded:
            raise wrong("sampling_params.seed", self.seed, "None: rollout.sglang.enable-deterministic-inference is off")
        if self.top_k == 0:
            raise wrong("sampling_params.top_k", 0, "-1, or at least 1")
        limits = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k if self.top_k < served.vocabulary else -1}
        return {**limits, "max_new_tokens": min(room, self.max_tokens or room), **self._stops(served)}

    def _stops(self, served: ServedModel) -> dict[str, Any]:
        if self.stop == []:
            raise wrong("sampling_params.stop", "[]", "None, or stop sequences: this server always ends at the model's end token")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if ids := [stop for stop in stops if isinstance(stop, int)]:
            checked_tokens("sampling_params.stop", np.array(ids, np.int64), served)
        texts = [stop for stop in stops if isinstance(stop, str)]
        if bad := [text for text in texts if not text or SURROGATE.search(text)]:
            raise wrong("sampling_params.stop", repr(bad[0]), "sequences of at least one character, without halves of surrogate pairs")
        return {"stop": texts, "stop_token_ids": ids}


class SampleBody(_Body):
    base_model: None = None
    num_samples: int = Field(default=1, ge=1, le=MOST_SAMPLES)
    prompt: _Prompt
    sampling_params: _SamplingParams
    model_path: None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Literal[0] = 0
    topk_sample_logprobs: Literal[0] = 0
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: Literal[0] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    record_stability_info: Literal[False] | None = None

    def asked(self, served: ServedModel, book: CommandBook, client: str) -> Asked:
        book.check_sampler(client)
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


FORMS: dict[Verb, type[Any]] = {
    "create_model": CreateModel,
    "load_weights": LoadWeights,
    "optim_step": OptimStep,
    "save_weights": SaveWeights,
    "save_weights_for_sampler": SaveWeightsForSampler,
    "create_sampling_session": CreateSamplingSession,
    "sample": SampleBody,
}


def read_json(verb: Verb, body: Mapping[str, Any], served: ServedModel, book: CommandBook, client: str) -> Asked:
    """Returns a JSON request. Raises WrongRequest with the first wrong field."""
    try:
        asked: Asked = FORMS[verb].model_validate(body, strict=True).asked(served, book, client)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        given = first["input"] if not isinstance(first["input"], dict | list) else type(first["input"]).__name__
        raise wrong(".".join(map(str, first["loc"])), given, f"otherwise: {first['msg']}") from None
    return asked


def checked_tokens(name: str, tokens: NDArray[Any], served: ServedModel) -> NDArray[np.int32]:
    """Returns token ids as int32. Raises WrongRequest where there is none, or one is not in the vocabulary."""
    if not len(tokens):
        raise wrong(name, "no tokens", "at least one")
    if len(outside := tokens[(tokens < 0) | (tokens >= served.vocabulary)]):
        raise wrong(name, int(outside[0]), f"token ids from 0 to {served.vocabulary - 1}")
    return tokens.astype(np.int32)


def forward_backward(message: Any, served: ServedModel) -> Asked:
    """Returns the request of a decoded ``ForwardBackwardRequest``. Raises WrongRequest."""
    if message.loss_fn not in LOSSES:
        raise wrong("loss_fn", message.loss_fn, f"one of {', '.join(LOSSES)}; others run as forward_backward_custom on the client")
    needed, settings = LOSSES[message.loss_fn]
    given = {each.key: each.value for each in message.loss_fn_config}
    for each in message.loss_fn_config_v2:
        if each.value.text:
            raise wrong(f"loss_fn_config.{each.key}", each.value.text, "a number")
        given[each.key] = each.value.number
    if unknown := sorted(given.keys() - settings.keys()):
        raise wrong(f"loss_fn_config.{unknown[0]}", given[unknown[0]], f"{' and '.join(settings) or 'nothing'} with {message.loss_fn}")
    if not all(map(math.isfinite, given.values())):
        raise wrong("loss_fn_config", given, "finite numbers")
    config = settings | given
    low, high = (config.get(f"clip_{end}_threshold", 1.0) for end in ("low", "high"))
    if not 0 <= low <= 1 <= high:  # else tokens whose ratio is 1 are clipped, which ppo gives no gradient
        raise wrong("loss_fn_config", config, "0 <= clip_low_threshold <= 1 <= clip_high_threshold: bounds of the ratio, as 0.8 and 1.2")
    if config.get("beta", 0.0) < 0:
        raise wrong("loss_fn_config.beta", config["beta"], "at least 0")
    if not 0 < len(message.data) <= MOST_DATUMS:
        raise wrong("data", f"{len(message.data) or 'no'} datums", f"from 1 to {MOST_DATUMS}")
    datums = [_datum(f"data.{index}", datum, needed, served) for index, datum in enumerate(message.data)]
    return Asked({"loss_fn": message.loss_fn, "loss_fn_config": config}, datums, sum(len(datum["tokens"]) for datum in datums))


def _tokens(name: str, datum: Any, served: ServedModel) -> NDArray[np.int32]:
    chunks = [np.empty(0, np.int32)]
    for chunk in datum.model_input:
        if not chunk.HasField("encoded_text"):
            raise wrong(f"{name}.model_input", "no text", "chunks of tokens; this server trains text alone")
        if len(chunk.encoded_text.tokens) % 4:
            raise wrong(f"{name}.model_input", f"{len(chunk.encoded_text.tokens)} bytes", "int32 token ids")
        chunks.append(np.frombuffer(chunk.encoded_text.tokens, "<i4"))
    tokens = checked_tokens(f"{name}.model_input", np.concatenate(chunks), served)
    if len(tokens) > served.context:
        raise wrong(f"{name}.model_input", f"{len(tokens)} tokens", f"at most the context, {served.context}")
    return tokens


def _datum(name: str, datum: Any, needed: tuple[str, ...], served: ServedModel) -> dict[str, NDArray[Any]]:
    tokens = _tokens(name, datum, served)
    inputs, wanted = {each.key: each.value for each in datum.loss_fn_inputs}, ("target_tokens", *needed)
    if unknown := sorted(inputs.keys() - {*wanted}):
        raise wrong(f"{name}.loss_fn_inputs.{unknown[0]}", "given", f"{', '.join(wanted)} alone")
    found: dict[str, NDArray[Any]] = {"tokens": tokens}
    for key in wanted:
        field_name = f"{name}.loss_fn_inputs.{key}"
        if key not in inputs and key != "weights":
            raise wrong(field_name, "absent", f"a tensor of {len(tokens)}, one for each token of model_input")
        values = _tensor(field_name, inputs[key], len(tokens)) if key in inputs else np.ones(len(tokens), np.float32)
        if key == "target_tokens":
            if values.dtype.kind != "i":
                raise wrong(field_name, "float32", "integers")
            found[key] = checked_tokens(field_name, values, served)
        elif len(bad := values[~np.isfinite(values)]):
            raise wrong(field_name, bad[0], "finite numbers")
        else:
            found[key] = values.astype(np.float32)
    if "logprobs" in found and len(bad := found["logprobs"][(found["logprobs"] > ROUNDING) & (found["advantages"] != 0)]):
        raise wrong(f"{name}.loss_fn_inputs.logprobs", bad[0], "at most 0, a logarithm of a probability, where the advantage is not 0")
    return found


def _tensor(name: str, given: Any, length: int) -> NDArray[Any]:
    if given.HasField("sparse_csr"):
        raise wrong(name, "sparse", "a dense tensor")
    dtype, size = DTYPES.get(given.dtype), len(given.dense)
    if dtype is None or size % dtype.itemsize:
        raise wrong(name, f"dtype {given.dtype}, {size} bytes", "float32, int64 or int32")
    if list(given.shape) not in ([], [length]) or size // dtype.itemsize != length:
        raise wrong(name, f"shape {list(given.shape) or [size // dtype.itemsize]}", f"[{length}], one value for each token of model_input")
    return np.frombuffer(given.dense, dtype)


def seed_of(given: int | None, client: str, number: int, index: int) -> int:
    """Returns the seed of one of a command's sequences: by the client's own seed, else by its key, so that a repetition gives the same."""
    words = f"{given}:{index}" if given is not None else f"{client}:{number}:{index}"
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=4).digest()) & LARGEST
