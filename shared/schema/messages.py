"""The wire schema: every message that crosses the control plane, but for those about weights
(`shared.schema.weight_messages`) and about live services (`shared.schema.service_messages`).

The catalogue in ``docs/messages.md`` is generated from these models.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, FiniteFloat, StringConstraints, ValidationError
from pydantic.dataclasses import dataclass

from shared.runtime.errors import INFRASTRUCTURE, BadMessage, Fault
from shared.schema import codec
from shared.schema.message import (
    LARGEST,
    MAX_KEYS,
    MAX_PARTS,
    MAX_SAMPLES,
    MAX_SPANS,
    Count,
    Digest,
    Gauges,
    GroupId,
    Message,
    Name,
    Part,
    PartName,
    Parts,
    Reason,
    Reward,
    StoreKey,
    Timestamp,
    Tokens,
)

# --- the flow of a group: task, generated, scored


class Sampling(Part):
    """The sampling parameters of the engine. ``max_new_tokens``: tokens. ``stop`` holds strings, ``stop_token_ids`` ids.

    ``skip_special_tokens``, ``no_stop_trim``: of the response's text, not of its tokens; None: as for training samples.
    """

    temperature: float = Field(ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = -1
    max_new_tokens: int = Field(gt=0)
    stop: list[str] = []
    stop_token_ids: list[int] = []
    min_new_tokens: int = Field(default=0, ge=0)
    repetition_penalty: float = Field(default=1.0, gt=0, le=2)
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None

    @property
    def whole(self) -> bool:
        """Returns whether one request generates an answer from its beginning: an engine penalises what that very request has generated."""
        return self.repetition_penalty != 1


class Payload(Part):
    """A reference to a group's samples in the store: one or more blobs of ``bytes`` in all; no more than that is read.

    ``sizes``: bytes of each blob, where there are several. ``tokens``: the length of each sample, prompt and response together, so that a
    batch can be partitioned before anybody reads it. ``digest``: of the blobs (`shared.schema.digests`), by who wrote them; whoever
    reads them compares. Empty: no blob fits it.
    """

    keys: list[StoreKey] = Field(min_length=1, max_length=MAX_KEYS)
    bytes: int = Field(ge=0, le=1 << 40)
    sizes: tuple[Count, ...] = Field(default=(), max_length=MAX_KEYS)
    tokens: tuple[Count, ...] = Field(default=(), max_length=MAX_SAMPLES)
    digest: Digest = ""


# No `Part`: there is one for every sample, and in slots it takes a tenth of the memory, and less time.
@dataclass(slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class SampleMeta:
    """The metadata of one sample that decisions need without reading its payload.

    ``tokens``: length of the response; ``trained`` of them are. ``oldest``/``newest``: weight versions of its oldest and newest trained
    token; ``spans``: (version, trained tokens of it), where these are of several. ``digest``: `Sample.token_digest`, by who scored it.
    """

    tokens: Count
    oldest: Count
    newest: Count
    finish: Literal["stop", "length", "abort"]
    trained: Count = 0
    spans: tuple[tuple[Count, Count], ...] = Field(default=(), max_length=MAX_SPANS)
    digest: int = Field(default=0, ge=0, lt=1 << 64)


class GeneratedGroup(Part):
    """The samples of one attempt at a group, finished and in the store.

    ``started``/``ended``: seconds since the epoch, of the generation. ``rollouts``: of each sample, which of the task's n rollouts it comes
    from; empty where each gave one sample. ``aborted``: surplus rollouts that had not ended when n had (`rollout.surplus_rollouts`).
    """

    group: GroupId
    attempt: Count
    payload: Payload
    samples: list[SampleMeta] = Field(max_length=MAX_SAMPLES)
    rollouts: tuple[Count, ...] = Field(default=(), max_length=MAX_SAMPLES)
    aborted: Count = 0
    replica: Name
    started: Timestamp
    ended: Timestamp


class ScoredGroup(GeneratedGroup):
    """A group with the rewards of its samples, in order; it suffices to hand out its batch again.

    ``parts``: named rewards of each sample, empty where there are none. ``removed``: positions of samples that a sample filter took out of
    the loss; their rewards still count in the group. ``unread``: positions of samples that have 0 because the verifier could not read the
    response, or not in time, with the reason.
    """

    rewards: list[Reward] = Field(max_length=MAX_SAMPLES)
    parts: tuple[Parts, ...] = Field(default=(), max_length=MAX_SAMPLES)
    removed: tuple[Count, ...] = Field(default=(), max_length=MAX_SAMPLES)
    unread: tuple[tuple[Count, Reason], ...] = Field(default=(), max_length=MAX_SAMPLES)


class Task(Message):
    """A group to generate: ``n`` samples of one prompt. Subject ``<run>.task.<class>``.

    ``label_json``: the label is the JSON text of a number, a list or an object. ``generate_function``: path of the function that generates
    it; None: the run's. ``deadline``: seconds since the epoch, from which on it is not waited for; 0: there is none. ``min_version``: a
    replica on an older version hands the task back. ``attempt`` grows when a group is generated anew. ``partial``: samples of an earlier
    attempt to continue from; of those that had ended, the ones whose newest token is older than version ``renew_below`` are generated anew.
    ``pictures``: those that the prompt shows, a blob each, in the order of their tokens.
    """

    group: GroupId
    attempt: Count = 0
    n: int = Field(gt=0, le=MAX_SAMPLES)
    prompt: str | list[dict[str, Any]]
    prompt_tokens: Tokens
    label: str | None = None
    label_json: bool = False
    metadata: dict[str, Any] = {}
    pictures: Payload | None = None
    environment: Name
    sampling: Sampling
    generate_function: str | None = Field(default=None, max_length=256)
    min_version: Count
    deadline: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    partial: Payload | None = None
    renew_below: Count = 0


class Generated(Message, GeneratedGroup):
    """A group to be scored by ``environment``. Subject ``<run>.generated.<queue>``: verifiers that need the same libraries share one."""

    environment: Name


class Outcome(Message):
    """Base of the messages to the buffer about one attempt at a group. Subject ``<run>.scored.<role>``, by the role of who reports."""

    group: GroupId
    attempt: Count


class Scored(Outcome, ScoredGroup):
    """Rewards of a group. ``filtered``: why the dynamic sampling filter does not keep the group; None: it is kept."""

    filtered: Reason | None = None
    environment: Name


class Failed(Outcome):
    """Generation or scoring (``by``) gave the group up; the buffer makes it ``dead`` and frees its payload, where it has one.

    ``fault``: what was at fault (`shared.runtime.errors.Fault`).
    """

    reason: Reason
    by: Name
    fault: Fault = ""
    payload: Payload | None = None


def failure_of(data: bytes, reason: str, by: str) -> Failed | None:
    """Returns the failure of the group that a message of an attempt names although it cannot be decoded; None where it names none."""
    try:
        fields = codec.unpack(data)
        return Failed(group=fields["group"], attempt=fields["attempt"], reason=reason, by=by, fault=INFRASTRUCTURE)
    except (BadMessage, ValidationError, TypeError, LookupError):
        return None


class Interrupted(Outcome):
    """A replica stopped generating the group before its end; ``payload`` holds what its samples have so far, if they have anything.

    ``stale``: their oldest tokens have fallen behind the bound. Otherwise the replica leaves, or had to make room.
    """

    stale: bool
    replica: Name
    payload: Payload | None = None


class Discarded(Outcome):
    """A rollout function of the user's drew the group and handed it neither in nor back, as one does that filters groups itself.

    The buffer drops it. ``by``: whose function it was.
    """

    reason: Reason
    by: Name
    payload: Payload | None = None


class Wanted(Outcome):
    """A rollout function of the user's has finished what it drew and cannot end without ``count`` groups more: it will discard some.

    ``group``, ``attempt``: what it drew last. The buffer admits the groups ahead of those that will be dropped.
    """

    count: int = Field(gt=0, le=65536)
    by: Name
    payload: Payload | None = None


class Evaluate(Message):
    """The user's evaluation function is to evaluate weights of ``version``. Subject ``<run>.task.eval``, of runs that have one.

    ``deadline``: seconds since the epoch, from which on it is not waited for. A replica on an older version hands it back.
    """

    version: Count
    deadline: float = Field(ge=0, allow_inf_nan=False)


class EvalResult(Part):
    """What a set of held-out prompts came to.

    ``oldest``/``newest``: versions that drew its tokens. ``prompts``: of the set; ``failed`` of them have no rewards. ``samples``: the
    others' rollouts, which all figures are of; where there are none, the figures are 0, and ``reason`` may say why. ``rates``: ``pass@k``
    and ``pass^k``. ``lengths``: of responses in tokens: ``mean``, ``median``, ``min``, ``max``, ``p90``, ``p99``. ``truncated``: share of
    rollouts that ended at their length. ``metrics``: of an evaluation function, by its own names. ``logged``: a log function of the user's
    has logged it in Myxo's place.
    """

    dataset: Name
    oldest: Count
    newest: Count
    prompts: Count
    failed: Count
    samples: Count
    mean_reward: Reward
    rates: dict[str, FiniteFloat] = {}
    lengths: dict[str, FiniteFloat] = {}
    truncated: float = Field(default=0.0, ge=0, le=1)
    metrics: dict[PartName, FiniteFloat] = Field(default={}, max_length=MAX_PARTS)
    logged: bool = False
    reason: Reason = ""


class Evaluated(Outcome):
    """The user's evaluation function has given the result of one set, or has not.

    ``group``: the id of the set's first held-out prompt, which names the version. ``by``: whose function it was.
    """

    result: EvalResult
    by: Name
    payload: Payload | None = None


GroupOutcome = Scored | Failed | Interrupted | Discarded | Wanted | Evaluated  # The kinds of outcomes that there are


# --- the trainer's side of the buffer, request and reply: batches and their results


class BatchRequest(Message):
    """Trainer asks for the batch of ``step``, to be trained on weights of ``version``. Subject ``<run>.buffer.batch``.

    Idempotent: a step that was batched before is answered with the very same groups. ``hold``: wait a moment for a batch that is not there
    yet; without it the answer comes at once.
    """

    step: Count
    version: Count
    hold: bool = True


class BatchGroup(Part):
    """One group of a batch, with the rewards of its samples in payload order.

    ``removed``: positions of samples that a filter took out of the loss. ``stale``: positions of those that leave it because all their
    tokens are older than the batch's ``mask_below``. ``parts``: named rewards of each sample, empty where a function that is shown samples
    is not named or there are none.
    """

    group: GroupId
    payload: Payload
    rewards: list[Reward] = Field(max_length=MAX_SAMPLES)
    parts: tuple[Parts, ...] = Field(default=(), max_length=MAX_SAMPLES)
    removed: tuple[Count, ...] = Field(default=(), max_length=MAX_SAMPLES)
    stale: tuple[Count, ...] = Field(default=(), max_length=MAX_SAMPLES)


class RewardPart(Part):
    """One named reward over the ``samples`` of a batch that have it. ``std``: the population's."""

    samples: int
    mean: FiniteFloat
    std: FiniteFloat
    min: FiniteFloat
    max: FiniteFloat


class BatchAnswer(Message):
    """Base of the answers to a `BatchRequest`."""


class Batch(BatchAnswer):
    """The groups of one training step. ``version``: the weight version that staleness was bounded against.

    ``mask_below``: tokens of older versions leave the loss. ``parts``: named rewards of its samples.
    """

    step: Count
    version: Count
    mask_below: Count = 0
    groups: list[BatchGroup]
    parts: dict[str, RewardPart] = {}


class BatchPending(BatchAnswer):
    """No batch is ready: ``have`` of ``need`` groups are; ``waiting_for`` names in words the services that have the rest.

    ``store_full``: a checkpoint is wanted now, after which the payloads of the steps behind it are freed.
    """

    step: int
    have: int
    need: int
    waiting_for: str
    store_full: bool = False


class RunDone(BatchAnswer):
    """Every step is trained and durable and the last evaluation is in, or the run has failed for ``reason``: the trainer may leave."""

    reason: Reason = ""


class EvalFigures(EvalResult):
    """The figures of one set of held-out prompts, evaluated because weights of ``version`` went live.

    ``live``: the one that was live when the figures were known. ``late``: prompts that had not come back at the deadline. ``seconds``: from
    its start.
    """

    version: Count
    live: Count
    late: Count = 0
    seconds: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    @property
    def lag(self) -> int:
        """Returns by how many versions the figures were behind the live one when they were known."""
        return max(0, self.live - self.version)


class EvaluationsRequest(Message):
    """Trainer asks for the evaluations that ended after the first ``known`` ones. Subject ``<run>.buffer.evaluations``."""

    known: Count


class EvaluationsEnded(Message):
    """The next evaluations that have ended, in order, perhaps not all of them; empty where there are no more."""

    evaluations: list[EvalFigures]


class Attestation(Part):
    """What the trainer has trained in a step, by its own account (`shared.schema.digests`).

    ``oldest``: version of the oldest trained token. ``samples``: those with a trained token. ``tokens``: trained ones. ``digest``:
    of all tokens of these samples, in the batch's order.
    """

    oldest: int = Field(ge=-1, le=LARGEST)
    samples: Count
    tokens: int = Field(ge=0, lt=1 << 63)
    digest: Digest


class Trained(Message):
    """Trainer reports ``step`` as trained into weights of ``version``. Subject ``<run>.buffer.trained``. Idempotent.

    With the step's ``metrics`` it is the event ``<run>.trainer.step``, too. ``started``/``ended``: seconds since the epoch.
    """

    step: Count
    version: Count
    started: Timestamp
    ended: Timestamp
    attestation: Attestation | None = None
    metrics: dict[str, float] = {}


class BatchRefused(Message):
    """Trainer cannot train ``sample`` (its position in ``group``) of the batch of ``step``. Subject ``<run>.buffer.refused``.

    The buffer counts refusals of a group, each ``at`` (seconds since the epoch) once; at the third it has another take the group's place.
    """

    step: Count
    group: GroupId
    sample: Count
    reason: Reason
    at: Timestamp


class Durable(Message):
    """A checkpoint holding every step below ``steps`` is on disk: their payloads may go. Subject ``<run>.buffer.durable``."""

    steps: Count


class Accepted(Message):
    """The receiver has fulfilled the request, or recorded it durably."""


class Refused(Message):
    """The receiver refuses the request; ``reason`` says why in one line. ``error``: the class of its error."""

    reason: Reason
    error: Reason = ""


# --- the log of commands from outside: what clients of the training endpoint have asked for, and what became of each command

Verb = Literal[
    "create_model",
    "load_weights",
    "forward",
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "unload_model",
    "create_sampling_session",
    "sample",
]
MAKES = ("create_model", "load_weights")  # the verbs by which a client begins
TRAINED = ("create_model", "load_weights", "forward_backward", "optim_step")  # the verbs that change a client's state
MOST_ARGUMENTS = 1 << 16  # characters of a command's arguments
TENANT = r"[a-z0-9]{1,32}"
# TENANT-SESSION, then which of the session's models or samplers; part of a subject
ClientId = Annotated[str, StringConstraints(max_length=96, pattern=rf"^{TENANT}-[0-9a-f]{{16}}(:(train|sample):[0-9]{{1,9}})?$")]
Number = Annotated[int, Field(ge=0, lt=1 << 62)]
Json = Annotated[str, StringConstraints(max_length=MOST_ARGUMENTS)]


class LogEntry(Message):
    """Base of what the log of commands holds. ``client``: a model or a sampling session. ``number``: of the command, among its client's.

    There is one command and one outcome at most for each client and number.
    """

    client: ClientId
    number: Number
    at: Timestamp

    @property
    def key(self) -> tuple[str, int]:
        return self.client, self.number


class Command(LogEntry):
    """A command, as the endpoint has accepted it. Those that train are carried out in the order of their numbers, without a gap.

    ``arguments``: a JSON object. ``payload``: the rest of the request, in the store. ``digest``: of the request; another request under the
    same key is refused. ``refused``: why it is not carried out; it only takes its number. ``tokens``: that it counts for quotas.
    """

    verb: Verb
    arguments: Json = "{}"
    payload: Payload | None = None
    digest: str = Field(default="", max_length=64)
    refused: Reason = ""
    tokens: Number = 0


class CommandOutcome(LogEntry):
    """What became of a command. ``error``: why it failed, and then it has changed nothing. ``category``: of the error, whose fault it is.

    ``result``: a JSON object. ``payload``: the rest of the answer, in the store. ``figures``: for displays; ``expires``: when what it saved
    is removed. ``state``: digest of the client's weights after an optimizer step. ``bytes``: that it has written and that stay.
    """

    error: Reason = ""
    category: Literal["", "user", "server"] = ""
    result: Json = "{}"
    payload: Payload | None = None
    figures: Gauges = {}
    state: str = Field(default="", max_length=64)
    bytes: Number = 0


def is_expired(saved: CommandOutcome, now: float) -> bool:
    """Returns whether what a command has saved is to be removed. ``now``: seconds since the epoch."""
    return saved.figures.get("expires", now) < now


def weights_directory(trained: Path, path: str) -> Path:
    """Returns where saved weights with a path ``tinker://CLIENT/KIND/NAME`` lie; the endpoint has checked it. ``trained``: the run's."""
    client, kind, name = path.removeprefix("tinker://").split("/")
    return trained / "clients" / kind / client / name
