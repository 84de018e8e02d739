"""Samples as they lie in the store: tokens, log-probs, mask and version segments, kept aligned in one place.

A group's samples are encoded into one or more blobs (MessagePack, arrays as raw bytes); a reference lists the keys. Here are also the
experts that an engine chose for a sample's tokens (rollout routing replay), the part of a response that the model itself sampled, and what
becomes of a sample that is longer than a micro-batch (`rollout.overlong_samples`).
"""

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pydantic
import xxhash
from numpy.typing import NDArray

from shared.model.architecture import Architecture
from shared.rewards.reference import Reference
from shared.runtime.errors import BadMessage
from shared.runtime.safe_files import parse_json
from shared.schema import codec
from shared.schema.kept_tokens import Kept
from shared.schema.message import LARGEST_REWARD, MAX_KEYS, MAX_PARTS, MAX_SPANS, ROLE, Parts, Reason, Reward, is_part_name, is_reward
from shared.schema.messages import SampleMeta

Choices = NDArray[np.int16]  # int16 [T - 1, layers with experts, experts a token]


@dataclass(frozen=True)
class ExpertChoices:
    """What a model's choices look like.

    Args:
        layers: indices of the layers with experts. total: all layers. per_token: experts that each token goes through in a layer.
        count: experts of a layer.
    """

    layers: tuple[int, ...]
    total: int
    per_token: int
    count: int

    @classmethod
    def of(cls, architecture: Architecture) -> "ExpertChoices | None":
        """Returns those of a model; None for one without experts."""
        if architecture.experts is None:
            return None
        layers = tuple(index for index in range(architecture.num_layers) if architecture.is_moe_layer(index))
        return cls(layers, architecture.num_layers, architecture.experts.per_token, architecture.experts.count)

    def read(self, encoded: str, rows: int) -> Choices:
        """Returns an engine's answer: base64 of int32 [rows, all layers, experts a token], of which layers without experts are left out.

        Raises ValueError: another size than ``rows`` asks for, or an expert that there is not.
        """
        try:
            flat = np.frombuffer(base64.b64decode(encoded, validate=True), "<i4")
        except (binascii.Error, ValueError, TypeError) as error:
            raise ValueError(f"experts that cannot be read: {error}") from None
        return self.taken(flat, rows)

    def taken(self, given: NDArray[np.integer], rows: int) -> Choices:
        """Returns choices of ``rows`` tokens from integers in that order, of all layers or of those with experts. Raises ValueError."""
        token = self.total * self.per_token
        if given.size == rows * len(self.layers) * self.per_token:
            found = given.reshape(rows, len(self.layers), self.per_token)
        elif given.size == rows * token:
            found = given.reshape(rows, self.total, self.per_token)[:, self.layers]
        else:
            raise ValueError(f"{given.size} experts for {rows} tokens, {self.total} layers and {self.per_token} experts a token")
        if self._has_unknown(found):
            raise ValueError(f"experts from {found.min()} to {found.max()}; the model's are 0 to {self.count - 1}")
        return np.ascontiguousarray(found, np.int16)

    def _has_unknown(self, experts: NDArray[np.integer]) -> bool:
        return bool(experts.size) and not (int(experts.min()) >= 0 and int(experts.max()) < self.count)

    def problem(self, given: Choices | None, rows: int) -> str | None:
        """Returns why these are not the choices of ``rows`` tokens; None where they are."""
        if given is None:
            return f"routed_experts are missing: use_rollout_routing_replay trains {rows} tokens through the experts that the engine chose"
        wanted = (rows, len(self.layers), self.per_token)
        if given.shape != wanted:
            return (
                f"routed_experts has the shape {list(given.shape)}; expected {list(wanted)}: tokens but the last, layers, experts a token"
            )
        if self._has_unknown(given):
            return f"routed_experts holds {given.min()} to {given.max()}; the model's experts are 0 to {self.count - 1}"
        return None


ScoredText = Literal["own", "last_turn", "full"]

# The most tokens in a row that are taken for sampled ones whose log-prob was rounded to 0.0, between others that are not trained
SURE_TOKENS = 3


def sampled(mask: NDArray[Any], log_probs: NDArray[Any] | None) -> NDArray[np.bool_]:
    """Returns which tokens of a response the model itself sampled: bool [R].

    These are the trained ones, and those that have a log-prob though they are not trained, such as stale or removed ones: tokens of tools
    and environments have none.

    Args:
        mask: [R], not 0 where a token is trained. log_probs: [R], 0 or not finite where a token has none; None: no token has one.
    """
    trained = np.asarray(mask) != 0
    if log_probs is None:
        return trained
    own = trained | (np.nan_to_num(log_probs, posinf=0, neginf=0) != 0)
    for before, after in pairwise(np.flatnonzero(own)):
        if 1 < after - before <= SURE_TOKENS + 1 and not (trained[before] and trained[after]):
            own[before:after] = True
    return own


def turns_of(own: NDArray[Any], response: NDArray[Any], decode: Callable[[NDArray[Any]], str]) -> list[str]:
    """Returns the texts of the runs of a response's tokens that are the model's own; none where all are, or no token is known to be.

    Args:
        own, response: [R]. decode: tokens to text.
    """
    if own.all() or not own.any():
        return []
    return [decode(response[start:end]) for start, end in runs(own)]


def runs(where: NDArray[Any]) -> list[tuple[int, int]]:
    """Returns the (start, end) of each run of true entries in a bool array."""
    edges = np.flatnonzero(np.diff(where.astype(np.int8), prepend=0, append=0)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def scored_text(text: str, turns: Sequence[str], which: ScoredText) -> str:
    """Returns what is scored of a response. Its turns stand on lines of their own, so that no word begins in one and ends in another.

    Args:
        text: the whole response. turns: the model's own, none where the whole response is.
    """
    if not turns or which == "full":
        return text
    return turns[-1] if which == "last_turn" else "\n".join(turns)


SCHEMA = 1  # Version of the payload's schema
MAX_TURNS = 1 << 14  # The most turns of a sample

TurnReward = tuple[int, int, float]  # The reward of the turn that sampled the response's tokens ``start`` to ``end`` (exclusive)

# The range of a trained token's log-prob. It is at most 0, but engines round: 1e-3 changes an importance weight by a thousandth. What is
# below cannot have been sampled, and its square or its sum over a batch would not be finite any more.
LOG_PROBS = -1e4, 1e-3

# numpy's kinds that a sample's arrays may be of, and the type that they travel as
_ARRAYS: dict[str, tuple[str, np.dtype[Any]]] = {
    "prompt": ("iu", np.dtype("<i4")),
    "response": ("iu", np.dtype("<i4")),
    "log_probs": ("f", np.dtype("<f4")),
    "mask": ("bu", np.dtype("|u1")),
}

_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
_FINISH = ("stop", "length", "abort")


@dataclass(frozen=True)
class SampleLimits:
    """What a run knows of all its samples. By default: what the arrays can hold.

    vocabulary: token ids lie in [0, vocabulary), by the ``vocab_size`` of the model's config. newest: the newest weight version that there
    can be (`shared.schema.versions.newest_possible`). There is no oldest one: what becomes of stale samples is the buffer's decision.
    log_probs_reader: what reads the rollout's log-probs (`RunConfig.log_probs_reader`), so that no trained token may lack them.
    choices: of the model, where training replays the rollout's experts, so that no sample with trained tokens may lack them.
    kept: whether training replays the tokens that samplers kept, so that none may lack these. pictures: says why a sample's pictures are
    not those of its tokens (`shared.data.media.picture_check`); None: they are not compared.
    """

    vocabulary: int = 1 << 31
    newest: int = (1 << 31) - 1
    log_probs_reader: str | None = None
    choices: ExpertChoices | None = None
    kept: bool = False
    pictures: "Callable[[Sample], str | None] | None" = None


UNLIMITED = SampleLimits()


class InvalidSample(BadMessage):
    """A stored sample that is not valid. ``position``: in its group's payload."""

    def __init__(self, name: str, position: int, problem: str) -> None:
        self.position, self.problem = position, problem
        super().__init__(f"sample {name}: {problem}")


@dataclass
class Sample:
    """One trajectory: the form that rollout makes, the store keeps and trainer, reward and buffer read.

    prompt: int32 [P], P at least 1; response: int32 [R]; log_probs: float32 [R], the engine's for exactly those tokens, None where a
    function of the user's has not kept them; mask: uint8 [R], 1 where the token is trained; segments: (start, end, version) spans that tile
    [0, R) in order; text: the decoded response; turns: the texts of what the model itself sampled of it
    (`shared.schema.sample`), none where all of it is; rollout: the index of the group's rollout that it comes from, by default its own
    ``index``; samples that fan out of one rollout share it.
    given_reward: the reward, or those by name, that a generate function of the user's gave; the reward service uses it in place of scoring.
    role: who of several that play a rollout together it is of, "" where there are no roles: rewards are compared within a role.
    attributes: what such a function set on the sample besides the fields here, for the user's reward function.
    routed_experts: int16 [P + R - 1, layers with experts, experts a token], those that the engine chose; None if not asked for.
    kept: the tokens that the sampler kept at each place of the response; None if not asked for.
    pictures: PNGs of what the tokens show, and WAVs of sounds, in order (`shared.data.media`).
    turn_rewards: of each turn (start, end, reward), in order, without overlap, 0.0 if it was given none; empty if turns are not known.
    """

    group: str
    index: int
    prompt: NDArray[np.int32]
    response: NDArray[np.int32]
    log_probs: NDArray[np.float32] | None
    mask: NDArray[np.uint8]
    segments: list[tuple[int, int, int]]
    finish: Literal["stop", "length", "abort"]
    text: str
    prompt_text: Any = ""
    label: str | None = None
    label_json: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    rollout: int = -1
    given_reward: float | dict[str, float] | None = None
    role: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)
    routed_experts: Choices | None = None
    turns: list[str] = field(default_factory=list)
    turn_rewards: list[TurnReward] = field(default_factory=list)
    kept: Kept | None = None
    pictures: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        if self.rollout < 0:
            self.rollout = self.index

    @property
    def has_ids(self) -> bool:
        """Returns whether its token ids are there, not only its text."""
        return bool(len(self.prompt)) or not self.segments

    @property
    def name(self) -> str:
        """Returns the name of this sample in errors: its group's id, and its index in the group."""
        return f"{self.group}/{self.index}"

    @property
    def reference(self) -> Reference:
        """Returns what its response is compared with."""
        return Reference(self.label, self.label_json, self.metadata)

    @property
    def length(self) -> int:
        """Returns the number of tokens of prompt and response."""
        return len(self.prompt) + len(self.response)

    def check(self, limits: SampleLimits = UNLIMITED) -> None:
        """Raises BadMessage, naming the sample, for one that is not valid. It is called where a sample crosses a trust boundary."""
        problem = self.problem(limits)
        if problem is not None:
            raise BadMessage(f"sample {self.name}: {problem}")

    # The place of an array's largest value is found in a fourth of the time that numpy takes for the value itself.
    def problem(self, limits: SampleLimits = UNLIMITED) -> str | None:
        """Returns why this is no valid sample, with the field and the numbers; None for a valid one. This is all that validity means.

        The parts have their types and lengths and fit together; the prompt is not empty; token ids and versions are within the limits; the
        mask holds 0 and 1; log-probs of trained tokens are in `LOG_PROBS`. What is masked out may have any log-prob, or none (NaN).
        """
        return (
            self._field_problem()
            or self._token_problem(limits.vocabulary)
            or self._alignment_problem()
            or self._log_prob_problem(limits.log_probs_reader)
            or self._segment_problem(limits.newest)
            or self._routing_problem(limits.choices)
            or self._kept_problem(limits)
            or self._turn_problem()
            or self._picture_problem(limits)
        )

    def _picture_problem(self, limits: SampleLimits) -> str | None:
        given: object = self.pictures
        if not isinstance(given, tuple) or not all(isinstance(picture, bytes) and picture for picture in given):
            return "pictures is not a list of encoded pictures"
        return None if limits.pictures is None else limits.pictures(self)

    def _turn_problem(self) -> str | None:
        end = 0
        if not isinstance(self.turn_rewards, list) or len(self.turn_rewards) > MAX_TURNS:
            return f"turn_rewards is not a list of at most {MAX_TURNS} turns (start, end, reward)"
        for number, turn in enumerate(self.turn_rewards):
            problem = f"turn_rewards holds {str(turn)[:80]} at {number}; expected (start, end, reward)"
            if not isinstance(turn, tuple) or len(turn) != 3 or not type(turn[0]) is type(turn[1]) is int:
                return problem
            if not end <= turn[0] <= turn[1] <= len(self.response):
                return f"{problem}, a span from {end} to {len(self.response)}"
            if not _is_given_reward(turn[2], False):
                return f"{problem}, a reward up to {LARGEST_REWARD:g}"
            end = turn[1]
        return None

    def _field_problem(self) -> str | None:
        for name, (kinds, _) in _ARRAYS.items():
            array, absent = getattr(self, name), name == "log_probs" and self.log_probs is None
            if not absent and not _is_array(array, kinds):
                return f"{name} is not a one-dimensional array of {'floats' if kinds == 'f' else 'integers'}"
        for name in ("index", "rollout"):
            if type(value := getattr(self, name)) is not int or not 0 <= value < 1 << 31:
                return f"{name} is {str(value)[:80]!r}, not an integer from 0"
        if self.finish not in _FINISH:
            return f"finish is {str(self.finish)[:80]!r}; expected one of {', '.join(_FINISH)}"
        if not isinstance(self.group, str) or not isinstance(self.text, str) or not isinstance(self.label, str | None):
            return "group and text are text, label is text or None"
        if (problem := self._given_problem()) is not None:
            return problem
        return None if len(self.prompt) else "prompt is empty; the first response token needs a predecessor"

    def _given_problem(self) -> str | None:
        if not isinstance(self.role, str) or (self.role and not re.match(ROLE, self.role)):
            return f"role is {str(self.role)[:80]!r}; expected 1 to 64 letters, digits, '-' and '_'"
        if type(self.label_json) is not bool or (self.label_json and not _is_json(self.label)):
            return f"label_json is {str(self.label_json)[:80]!r} and label {str(self.label)[:80]!r}; expected JSON text where it is true"
        if not isinstance(self.turns, list) or not all(isinstance(turn, str) for turn in self.turns):
            return "turns is not a list of texts"
        for name in ("metadata", "attributes"):
            if not isinstance(getattr(self, name), dict):
                return f"{name} is not a map"
        if self.given_reward is not None and not _is_given_reward(self.given_reward):
            return f"given_reward is {str(self.given_reward)[:80]!r}; expected a number up to {LARGEST_REWARD:g}, or {MAX_PARTS} by name"
        return None

    def _token_problem(self, vocabulary: int) -> str | None:
        for name in ("prompt", "response"):
            ids = getattr(self, name)
            unsigned = ids.view(_UNSIGNED[ids.itemsize])  # in which negative ids are larger than any vocabulary
            if len(ids) and unsigned.item(unsigned.argmax()) >= vocabulary:
                position = int(np.argmax(unsigned >= vocabulary))
                return f"{name} holds token {ids[position]} at {position}, which is not in [0, {vocabulary})"
        return None

    def _alignment_problem(self) -> str | None:
        length = len(self.response)
        for name, values in (("log_probs", self.log_probs), ("mask", self.mask)):
            if values is not None and len(values) != length:
                return f"{name} has {len(values)} entries for {length} response tokens"
        if length and self.mask.item(self.mask.argmax()) > 1:
            return f"mask holds {self.mask.max()}; expected 0 and 1"
        return None

    def _log_prob_problem(self, reader: str | None) -> str | None:
        least, most = LOG_PROBS
        values = self.log_probs
        if values is None:
            return f"log_probs are missing: {reader}" if reader is not None and self.mask.any() else None
        # all of them at once first, in which one NaN makes a comparison false: what is masked out nearly always fits, too
        if not len(values) or (values.item(values.argmin()) >= least and values.item(values.argmax()) <= most):
            return None
        wrong = self.mask.astype(bool) & ~((values >= least) & (values <= most))
        if not wrong.any():
            return None
        position = int(np.argmax(wrong))
        return f"log_probs holds {values[position]} at {position}, a trained token; expected a finite number, at most 0"

    def _segment_problem(self, newest: int) -> str | None:
        length, tiled = len(self.response), 0
        for start, end, version in self.segments:
            if start != tiled or end <= start:
                return f"segments do not tile the {length} response tokens: ({start}, {end}, {version}) comes where {tiled} are covered"
            if not 0 <= version <= newest:
                return f"segments name version {version}; versions lie between 0 and {newest}, the newest that there can be"
            tiled = end
        return None if tiled == length else f"segments end at {tiled}, the response at {length}"

    def _routing_problem(self, choices: ExpertChoices | None) -> str | None:
        given = self.routed_experts
        if given is not None and not (isinstance(given, np.ndarray) and given.ndim == 3 and given.dtype == np.int16):
            return "routed_experts is not an array of int16 [tokens, layers, experts a token]"
        return None if choices is None or not self.mask.any() else choices.problem(given, self.length - 1)

    def _kept_problem(self, limits: SampleLimits) -> str | None:
        if self.kept is not None:
            return self.kept.problem(self.response, limits.vocabulary)
        missing = "kept is missing: support_replay trains each token over those that the engine's sampler kept for it"
        return missing if limits.kept and self.mask.any() else None

    def versions(self) -> NDArray[np.int32]:
        """Returns the weight version of each response token: int32 [R]."""
        out = np.empty(len(self.response), dtype=np.int32)
        for start, end, version in self.segments:
            out[start:end] = version
        return out

    def meta(self, digest: int = 0) -> SampleMeta:
        """Returns the metadata for references: length, trained tokens, and the weight versions that these are of.

        Args:
            digest: its `token_digest`, by who scores it.

        Raises BadMessage where these are more than `MAX_SPANS`.
        """
        trained: dict[int, int] = {}
        for start, end, version in self.segments:
            trained[version] = trained.get(version, 0) + int(np.count_nonzero(self.mask[start:end]))
        versions = sorted(version for version, count in trained.items() if count) or sorted(trained) or [0]
        if len(versions) > MAX_SPANS:
            raise BadMessage(f"sample {self.name}: its tokens are of {len(versions)} weight versions; the most is {MAX_SPANS}")
        return SampleMeta(
            tokens=len(self.response),
            oldest=versions[0],
            newest=versions[-1],
            finish=self.finish,
            trained=sum(trained.values()),
            spans=tuple((version, trained[version]) for version in versions) if len(versions) > 1 else (),
            digest=digest,
        )

    def token_digest(self) -> int:
        """Returns the digest of its tokens, by which the audit knows them again."""
        return token_digest(self.prompt, self.response)


@pydantic.dataclasses.dataclass(slots=True, kw_only=True, config=pydantic.ConfigDict(extra="forbid"))
class Score:
    """The reward of one sample, within `shared.schema.message`; ``parts`` holds named rewards where the environment gives several.

    ``removed``: a sample filter took the sample out of the loss; its reward still counts in the group. ``unread``: why the verifier could
    not read the response, so that the reward is 0; empty where it could.
    """

    reward: Reward
    parts: Parts = field(default_factory=dict)
    removed: bool = False
    unread: Reason = ""


def _is_array(given: object, kinds: str) -> bool:
    return isinstance(given, np.ndarray) and given.ndim == 1 and given.dtype.kind in kinds


def _is_given_reward(given: object, named: bool = True) -> bool:
    if isinstance(given, dict) and named:
        return len(given) <= MAX_PARTS and all(is_part_name(name) and _is_given_reward(number, False) for name, number in given.items())
    return isinstance(given, int | float) and not isinstance(given, bool) and is_reward(given)


def _is_json(label: str | None) -> bool:
    try:
        parse_json(label or "")
    except ValueError:
        return False
    return True


def segments_of(versions: NDArray[np.int32]) -> list[tuple[int, int, int]]:
    """Returns the spans (start, end, version) that tile the versions of a response's tokens, int32 [R]."""
    if not versions.size:
        return []
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return [(start, end, int(versions[start])) for start, end in pairwise(edges)]


def token_digest(*tokens: NDArray[Any]) -> int:
    """Returns the digest of token ids, 64 bits, of all arrays as one.

    It is xxHash's: what keeps others from changing a sample is its payload's digest (`shared.schema.digests`).
    """
    found = xxhash.xxh3_64()
    for part in tokens:
        found.update(np.ascontiguousarray(part, "<i4").data)
    return found.intdigest()


def rollouts(samples: Iterable[Sample]) -> tuple[int, ...]:
    """Returns which rollout each sample of a group comes from; empty if each rollout gave one sample."""
    indices = tuple(sample.rollout for sample in samples)
    return indices if len(set(indices)) < len(indices) else ()


def encode(samples: Sequence[Sample], blob_bytes: int) -> list[bytes]:
    """Returns blobs of about ``blob_bytes`` each, `MAX_KEYS` at most, in sample order. The caller has checked the samples.

    Pictures lie once in the first blob, by the SHA-256 of what they hold, by which samples name them; they do not count in its size.
    """
    batches: list[list[dict[str, Any]]] = [[]]
    pictures = {picture: hashlib.sha256(picture).hexdigest() for sample in samples for picture in sample.pictures}
    size, fewest = 0, -(-len(samples) // MAX_KEYS)
    for sample in samples:
        if size >= blob_bytes and len(batches[-1]) >= fewest:
            batches.append([])
            size = 0
        entry = vars(sample) | {"pictures": [pictures[picture] for picture in sample.pictures]}
        for name, (_, dtype) in _ARRAYS.items():
            if (values := entry[name]) is not None:
                entry[name] = codec.array(values, dtype)
        batches[-1].append(entry)
        size += _encoded_size(sample)
    held = {"pictures": {name: picture for picture, name in pictures.items()}} if pictures else {}
    return [codec.pack({"schema": SCHEMA, "samples": batch} | (held if not at else {})) for at, batch in enumerate(batches)]


def _encoded_size(sample: Sample) -> int:
    """Returns about how many bytes a sample takes, without its pictures."""
    size = len(sample.prompt) * 4 + len(sample.response) * 9 + len(sample.text) + sum(map(len, sample.turns)) + 200
    size += 20 * len(sample.turn_rewards)
    size += 0 if sample.routed_experts is None else sample.routed_experts.nbytes
    return size + (0 if sample.kept is None else sum(values.nbytes for values in sample.kept))


def decode(blobs: Iterable[bytes], limits: SampleLimits = UNLIMITED) -> list[Sample]:
    """Reads `encode`'s blobs back, and checks the samples; arrays are read-only views of the blobs.

    Raises BadMessage; of a sample that is not valid InvalidSample.
    """
    samples: list[Sample] = []
    pictures: dict[str, bytes] = {}
    for blob in blobs:
        content = codec.unpack(blob)
        schema = content.get("schema") if isinstance(content, dict) else None
        if not codec.is_schema(schema, SCHEMA):
            raise BadMessage(f"payload of schema {schema!r:.100}; this side reads {SCHEMA}")
        try:
            pictures |= content.get("pictures", {})
            read = [_sample(entry, pictures) for entry in _list(content["samples"])]
        except (TypeError, KeyError) as error:
            raise BadMessage(f"payload sample with unexpected fields: {error}") from error
        for position, sample in enumerate(read, len(samples)):
            if (problem := sample.problem(limits)) is not None:
                raise InvalidSample(sample.name, position, problem)
        samples += read
    return samples


def _sample(entry: Any, pictures: Mapping[str, bytes]) -> Sample:
    if not isinstance(entry, dict):
        raise TypeError(f"a {type(entry).__name__} where a sample belongs")
    turns = [tuple(_list(turn)) for turn in _list(entry.get("turn_rewards", []))]
    kept = None if entry.get("kept") is None else Kept(*_list(entry["kept"]))
    segments = [_segment(*_list(segment)) for segment in _list(entry["segments"])]
    shown = tuple(pictures[name] for name in _list(entry.get("pictures", [])))
    return Sample(**{**entry, "segments": segments, "turn_rewards": turns, "kept": kept, "pictures": shown})


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"a {type(value).__name__} where a list belongs")
    return value


def _segment(start: int, end: int, version: int) -> tuple[int, int, int]:
    if not type(start) is type(end) is type(version) is int:
        raise TypeError(f"segment ({start!r}, {end!r}, {version!r})")
    return start, end, version


OverlongPolicy = Literal["truncate", "mask", "drop", "alone"]
Shown = Callable[[Sample, int], tuple[int, tuple[bytes, ...]]]  # `MediaRule.shown`
NO_LIMIT = 1 << 31  # The most tokens of a sample where the policy is ``alone``: a longer sample than a micro-batch holds is one by itself


def too_long(tokens: int, longest: int) -> str:
    """Returns what is wrong with a sample of so many tokens, as the end of a sentence about it."""
    return (
        f"has {tokens} tokens, a micro-batch holds at most {longest}: raise max_tokens_per_gpu or context_parallel_size "
        "(with torch the model's own bound of sparse attention stays), or lower rollout_max_response_len"
    )


def fitted(samples: Sequence[Sample], longest: int, policy: OverlongPolicy, shown: Shown | None = None) -> list[Sample]:
    """Returns a group's samples with none over ``longest`` tokens: of a longer one the beginning of its response, trained or masked.

    ``text`` stays whole, for the reward is that of all that was made. ``shown``: how many of a sample's first tokens end in no picture, and
    their pictures. Raises BadMessage, naming the sample, where the policy is to drop the group, where a prompt leaves no room for a
    response, and where nothing of the group would be trained.
    """
    if all(sample.length <= longest for sample in samples):
        return list(samples)
    found = [sample if sample.length <= longest else _cut(sample, longest, policy, shown) for sample in samples]
    if not any(sample.mask.any() for sample in found):
        raise BadMessage(f"no sample of group {samples[0].group} that could be trained fits: {_described(samples, longest)}")
    return found


def _cut(sample: Sample, longest: int, policy: OverlongPolicy, shown: Shown | None) -> Sample:
    length, pictures = (longest, sample.pictures) if shown is None else shown(sample, longest)
    room = length - len(sample.prompt)
    if policy == "drop" or room < 1:
        raise BadMessage(_described([sample], longest))
    return replace(
        sample,
        response=sample.response[:room],
        log_probs=None if sample.log_probs is None else sample.log_probs[:room],
        mask=sample.mask[:room] if policy == "truncate" else np.zeros(room, np.uint8),
        segments=[(start, min(end, room), version) for start, end, version in sample.segments if start < room],
        turn_rewards=[(min(start, room), min(end, room), reward) for start, end, reward in sample.turn_rewards],
        kept=sample.kept and sample.kept.part(0, room),
        routed_experts=None if sample.routed_experts is None else sample.routed_experts[: length - 1],
        pictures=pictures,
        finish="length",
    )


def _described(samples: Sequence[Sample], longest: int) -> str:
    sample = max(samples, key=lambda sample: sample.length)
    return f"sample {sample.name} {too_long(sample.length, longest)}"
