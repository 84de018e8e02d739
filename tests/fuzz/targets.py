"""What decodes bytes of other processes, accounts or machines: each with valid inputs to spoil, and the errors that it may raise.

A decoder that lets any other error out would take its service down with it.
"""

import asyncio
import json
import random
import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from services.rollout.engine.generation import GenerationRequest, parse_group, wire_rid
from services.rollout.engine.transport import EngineError
from shared.config import config_reading, flags
from shared.data.data_files import DataFile
from shared.data.data_files import parse as parse_data_file
from shared.data.rows import open_rows
from shared.environment import environment_url, protocol
from shared.model.families import read_architecture
from shared.model.hf_checkpoint import read_headers
from shared.process import call_server
from shared.runtime.errors import BadInput, BadMessage, ConfigError
from shared.runtime.safe_files import parse_json
from shared.schema import codec, sample
from shared.schema.messages import Message
from shared.schema.sample import Sample
from shared.transfer import tensor_file
from shared.transfer.digest import TensorDigest, decoded_digests, of_bytes, version_digest
from shared.transfer.manifest import Manifest, lay_out
from shared.transfer.tensor_file import TensorFileBroken, TensorFiles
from shared.transfer.weight_checkpoint import (
    CHECKPOINT_FILE,
    BrokenCheckpoint,
    FileSum,
    WeightCheckpoint,
    apply_delta,
    encode_delta,
    load_checkpoint,
)
from tests.fuzz.mutations import as_json, as_msgpack, spoiled_bytes, spoiled_text
from tests.support.rollout_reader import RolloutReader
from tests.support.valid_messages import every_message, example

ROOT = Path(__file__).resolve().parents[2]

Spoil = Callable[[random.Random, bytes], bytes]


@dataclass(frozen=True)
class Target:
    """``read`` takes spoiled bytes; raises one of ``refusals`` or nothing."""

    seeds: Sequence[bytes]
    read: Callable[[bytes], object]
    refusals: tuple[type[BaseException], ...]
    spoil: Spoil = spoiled_bytes


def spoiled_msgpack(dice: random.Random, data: bytes) -> bytes:
    return spoiled_text(dice, data, lambda known: msgpack.unpackb(known, strict_map_key=False), as_msgpack)


def spoiled_json(dice: random.Random, data: bytes) -> bytes:
    return spoiled_text(dice, data, json.loads, as_json)


# --- the bus and the store


def read_message(data: bytes) -> None:
    """What decodes can be passed on, and is the same on the other side."""
    message = Message.decode(data)
    assert Message.decode(message.encode()).encode() == message.encode()


def a_sample() -> Sample:
    tokens = {"prompt": [0, 1, 2], "response": [0, 1, 2, 3, 4], "log_probs": -0.5, "segments": [(0, 2, 1), (2, 5, 2)]}
    return example(Sample, **tokens, text="one two", label="7", metadata={"source": ["a", 1, None]}, prompt_text="What is 3 + 4?")


def read_samples(data: bytes) -> None:
    """Samples that are read can be worked with."""
    for one in sample.decode([data]):
        one.meta(), one.length, one.versions(), repr(one.name)
        codec.pack(vars(one))


async def _frame(data: bytes) -> object:
    stream = asyncio.StreamReader()
    stream.feed_data(data)
    stream.feed_eof()
    return await call_server.read_frame(stream)


# --- weights


def tensor_bytes() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.safetensors")
        data = np.arange(24, dtype=np.uint8)
        tensor_file.write(path, {"a.weight": ("float32", (2, 3), data), "b": ("uint8", (24,), data)})
        return path.read_bytes()


def in_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """Reads from a file of that name, in a directory of its own."""
    folder = Path(tempfile.mkdtemp(prefix="myxo-fuzz-"))
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)

    def decode(data: bytes) -> object:
        path.write_bytes(data)
        return read(path)

    return decode


def described_version() -> bytes:
    data = np.arange(24, dtype=np.uint8)
    tensors = {"a.weight": TensorDigest("float32", (2, 3), of_bytes(data))}
    files = {"model.safetensors": FileSum(200, "0" * 32), "config.json": FileSum(3, "1" * 32)}
    known = WeightCheckpoint(path=Path("v000012"), version=12, digest=version_digest(tensors), tensors=tensors, files=files)
    return known.model_dump_json().encode()


def read_version(path: Path) -> None:
    found = load_checkpoint(path.parent)
    found.tensor_files()
    found.check_files(contents=True)


def delta(encoding: str, item: int = 4) -> tuple[list[bytes], Callable[[bytes], object]]:
    old = np.zeros(400, dtype=np.uint8)
    new = old.copy()
    new[7:90] = 3
    parts = encode_delta(old, new, item, encoding)  # type: ignore[arg-type]
    packed = as_msgpack({name: part.tobytes() for name, part in parts.items()})

    def read(data: bytes) -> object:
        try:
            held = {str(name): np.frombuffer(part, np.uint8) for name, part in msgpack.unpackb(data).items()}
        except Exception:
            return None  # the envelope is this test's own
        return apply_delta(old.copy(), held, item)

    return [packed], read


# --- the engine and environments

REQUESTS = [GenerationRequest(np.array([1, 2], np.int32), 4, rid="a"), GenerationRequest(np.array([1, 2], np.int32), 4, rid="b")]


def engine_answer(versions: bool) -> bytes:
    def one(rid: str) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": wire_rid(rid), "output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None]], "finish_reason": {"type": "stop"},
            "weight_version": "3", "cached_tokens": 1, "num_retractions": 0,
        }  # fmt: skip
        if versions:
            meta["weight_versions"] = [{"start": 0, "end": 1, "version": "2"}, {"start": 1, "end": 2, "version": "3"}]
        return {"meta_info": meta, "output_ids": [7, 8]}

    return as_json([one("a"), one("b")])


def read_answer(data: bytes) -> object:
    try:
        answer = json.loads(data)
    except ValueError:
        return None  # the transport refuses it
    return parse_group(answer, REQUESTS, 2, frozenset({3}), "engine")


def scores(data: bytes) -> object:
    return protocol.read_scores(parse_json(data), 2, "test")


# --- configs and flags


def flag_words(data: bytes) -> list[str]:
    return shlex.split(data.decode(errors="replace").replace("\0", " "))


def read_flags(data: bytes) -> None:
    try:
        words = flag_words(data)
    except ValueError:
        return  # the shell's own
    given = flags.read(words)
    assert all(isinstance(problem, BadInput) for problem in given.problems)
    read_values(given.overrides)


def read_values(over: dict[str, Any]) -> object:
    given = {
        "run": {"name": "x"}, "model": {"hf_checkpoint": "m"}, "data": {"prompt_data": "p.jsonl"}, "reward": {"rm_type": "math_verify"},
        "rollout": {"num_rollout": 3, "rollout_batch_size": 4, "n_samples_per_prompt": 4}, "trainer": {"actor_num_gpus_per_node": 8},
    }  # fmt: skip
    return config_reading.parse({section: {**given.get(section, {}), **over.get(section, {})} for section in {*given, *over}})


def read_config_values(data: bytes) -> object:
    """A config as `submit` puts it on the bus."""
    try:
        values = json.loads(data)
    except ValueError:
        return None
    return read_values(values) if isinstance(values, dict) and all(isinstance(fields, dict) for fields in values.values()) else None


SLIME = b"""--rollout-batch-size 32 --n-samples-per-prompt 8 --num-rollout 100 --rollout-max-response-len 8192 --rollout-temperature 0.8
--global-batch-size 256 --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --eps-clip 0.2
--eps-clip-high 0.28
--tensor-model-parallel-size 2 --sequence-parallel --use-dynamic-batch-size --max-tokens-per-gpu 9216 --lr 1e-6 --weight-decay 0.1
--sglang-mem-fraction-static 0.7 --eval-prompt-data aime a.jsonl --apply-chat-template --rm-type math --prompt-data 'a.jsonl@[0:10]*0.5'"""


def rows(path: Path) -> None:
    found = open_rows([DataFile(path)], "data.prompt_data")
    for index in range(len(found)):
        found[index]


def responses(path: Path) -> None:
    list(RolloutReader(path.parent).records())


RECORD = {
    "group": "000007", "attempt": 0, "step": 3, "outcome": "trained", "reason": None, "at": 1.5, "prompt": "x", "label": "7",
    "samples": [{"index": 0, "reward": 1.0, "parts": {"a": 1.0}, "removed": False, "stale": False, "finish": "stop", "prompt_length": 3,
                 "length": 2, "segments": [[0, 2, 1]], "response": "7"}],
}  # fmt: skip
ROW = as_json({"prompt": [{"role": "user", "content": "What is 3 + 4?"}], "label": "7", "metadata": {"tools": [{"type": "function"}]}})
CONFIG = as_json({
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "max_position_embeddings": 512, "tie_word_embeddings": True, "attention_bias": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
})  # fmt: skip
INDEX = as_json({"metadata": {"total_size": 48}, "weight_map": {"a.weight": "model.safetensors", "b": "model.safetensors"}})

NAMES = (BadMessage, BadInput)


def targets() -> dict[str, Target]:
    """All targets by name; made when they are needed."""
    messages = {
        f"message-{kind}": Target([message.encode()], read_message, (BadMessage,), spoiled_msgpack)
        for kind, message in every_message().items()
    }
    xor, overwrite = delta("xor"), delta("overwrite")
    tensors, toml = tensor_bytes(), (ROOT / "examples/arithmetic/quickstart.toml").read_bytes()
    manifest = lay_out([("a", "bfloat16", (2, 3)), ("b", "uint8", ())], 100, "adapter", 0.5).encoded
    return messages | {
        "codec": Target([codec.pack({"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": [1, "x"]})],
            codec.unpack, (BadMessage,), spoiled_msgpack),
        "samples": Target(sample.encode([a_sample(), a_sample()], 10_000), read_samples, (BadMessage,), spoiled_msgpack),
        "frames": Target([call_server.frame([1, {"a": 1}])], lambda data: asyncio.run(_frame(data)), (BadMessage, EOFError)),
        "tensor-file": Target([tensors], in_file("x.safetensors", lambda path: TensorFiles([path]).digests()), (TensorFileBroken,)),
        "tensor-header": Target(
            [tensors[8 : 8 + int.from_bytes(tensors[:8], "little")]],
            in_file("x.safetensors", lambda path: _with_length(path)), (TensorFileBroken,), spoiled_json,
        ),
        "checkpoint": Target([described_version()], in_file(f"v000012/{CHECKPOINT_FILE}", read_version), (BrokenCheckpoint,), spoiled_json),
        "manifest": Target([manifest], Manifest.decode, (BadMessage,), spoiled_json),
        "digests": Target(
            [as_json({"a": ["float32", [2],
            7]})], lambda data: decoded_digests(parse_json(data)), (ValueError, TypeError, AttributeError), spoiled_json
        ),
        "delta-xor": Target(*xor, (BadMessage,), spoiled_msgpack),
        "delta-overwrite": Target(*overwrite, (BadMessage,), spoiled_msgpack),
        "delta-magnitude": Target(*delta("magnitude", 2), (BadMessage,), spoiled_msgpack),
        "hf-index": Target([INDEX],
            in_file("model.safetensors.index.json", lambda path: read_headers(path.parent)), (ConfigError,), spoiled_json),
        "hf-config": Target([CONFIG], in_file("config.json", lambda path: read_architecture(path.parent)), (ConfigError,), spoiled_json),
        "engine-answer": Target([engine_answer(False), engine_answer(True)], read_answer, (EngineError,), spoiled_json),
        "environment-scores": Target(
            [as_json({"rewards": [1.0, {"reward": 0.5, "parts": 1.0}]})], scores, (protocol.EnvironmentFailed, ValueError), spoiled_json
        ),
        "environment-description": Target(
            [as_json({"protocol": 1, "name": "x", "verbs": ["score"], "timeout": 3.0})],
            lambda data: protocol.read_description(parse_json(data), "test"), (protocol.EnvironmentFailed, ValueError), spoiled_json,
        ),
        "environment-url": Target(
            [b"http://host:8080/path", b"nats:name", b"http://[::1]:80"],
            lambda data: environment_url.parse(data.decode(errors="replace")), (ValueError,)
        ),
        "data-file": Target([b"a.jsonl@[0:10]*0.5", b"hf:org/name:train@[5:]"],
            lambda data: parse_data_file(data.decode(errors="replace")), (ValueError,)),
        "config": Target([toml], in_file("x.toml", lambda path: config_reading.load(path)), (BadInput,)),
        "config-values": Target(
            [as_json({"run": {"name": "x"}, "trainer": {"lr": 1e-6}, "rollout": {"sglang": {"a": 1}}, "algorithm": {"eps_clip": 0.2}})],
            read_config_values, (BadInput,), spoiled_json,
        ),
        "slime-flags": Target([SLIME], read_flags, (BadInput,)),
        "rows": Target([ROW + b"\n" + ROW + b"\n"], in_file("x.jsonl", rows), (ConfigError,)),
        "row": Target([ROW], in_file("x.jsonl", rows), (ConfigError,), spoiled_json),
        "responses": Target([as_json(RECORD) + b"\n"], in_file("000000.jsonl", responses), ()),
    }  # fmt: skip


def _with_length(path: Path) -> object:
    header = path.read_bytes()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(48))
    return TensorFiles([path])
