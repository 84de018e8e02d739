"""Samples under generation: their output so far, and the engine's requests for them.

A group that is too old to be trained (`shared.schema.versions.is_too_stale`) is stopped, since its end would waste the engine;
so are all groups when the replica leaves.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.generation import Generation, Routed
from shared.config.run_config import RunConfig
from shared.data.stop_strings import written
from shared.data.tokenizer import Tokenizer
from shared.hooks.hook_sample import ENGINE_TIMES, NO_TIMES, add_times
from shared.runtime.errors import MyxoError
from shared.schema.kept_tokens import Kept
from shared.schema.messages import Sampling, Task
from shared.schema.sample import Choices, ExpertChoices, Sample
from shared.schema.versions import is_too_stale
from shared.sessions.session import joined

UNROUTED = "routed_experts_problem"  # the attribute of a sample that is not trained since the experts of its tokens are not known: why


@dataclass
class Partial:
    """A sample that is being generated. tokens: int32 [R]; log_probs: float32 [R]; segments tile [0, R); seed: None for none.

    ``choices``: of the model, where the experts of each token are asked for. ``routed``: those known so far, of the first tokens of prompt
    and response: a token keeps the experts of the pass that generated the token after it, also where later passes compute it again.
    ``unrouted``: why they are not known. ``kept``: the tokens that the sampler kept, where they are asked for. ``times``: of its requests
    so far (`engine_times`)."""

    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    log_probs: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    segments: list[tuple[int, int, int]] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None
    seed: int | None = None
    choices: ExpertChoices | None = None
    routed: Choices | None = None
    unrouted: str = ""
    kept: Kept | None = None
    times: Sequence[float] = NO_TIMES

    @property
    def routed_from(self) -> int | None:
        """Returns the first token of prompt and response whose experts are not known yet; None where they are not asked for."""
        return None if self.choices is None else 0 if self.routed is None else len(self.routed)

    def extend(self, generation: Generation, longest: int) -> None:
        """Appends the engine's output; an aborted generation leaves the sample unfinished."""
        offset = len(self.tokens)
        self.tokens = np.concatenate([self.tokens, generation.tokens])
        self.log_probs = np.concatenate([self.log_probs, generation.log_probs])
        self.segments = list(joined(self.segments, generation.spans, offset))
        if generation.kept is not None:
            self.kept = (self.kept or Kept.of([()] * offset)).followed_by(generation.kept)
        self.times = add_times(self.times, generation.times)
        if generation.routed is not None and self.choices is not None:
            self._route(self.choices, generation.routed)
        if generation.finish != "abort":
            self.finish = generation.finish
        elif len(self.tokens) >= longest:
            self.finish = "length"

    def _route(self, choices: ExpertChoices, found: Routed) -> None:
        try:
            read = choices.read(found.encoded, found.rows)[: found.rows - found.beyond]
        except ValueError as error:
            self.unrouted = f"the engine returned invalid data: {error}"
            return
        self.routed = read if self.routed is None else np.concatenate([self.routed, read[len(self.routed) - found.start :]])


def restored(samples: Sequence[Sample], task: Task, choices: ExpertChoices | None = None) -> list[Partial]:
    """Returns the partial samples that a task continues: those of `continued`; new ones where there is none, or one of more tokens than may
    be generated. ``choices``: of the model, where the experts of each token are asked for."""
    longest = task.sampling.max_new_tokens
    return [replace(_restored(sample, longest), choices=choices) for sample in continued(samples, task)]


def _restored(sample: Sample | None, longest: int) -> Partial:
    if sample is None or sample.log_probs is None or len(sample.response) > longest:  # None: a function's, whose place the engine has taken
        return Partial()
    full: Literal["length"] | None = "length" if len(sample.response) == longest else None
    ended = full if sample.finish == "abort" else sample.finish
    return Partial(sample.response, sample.log_probs, list(sample.segments), ended, routed=sample.routed_experts, kept=sample.kept)


def continued(earlier: Sequence[Sample], task: Task) -> list[Sample | None]:
    """Returns the sample that each of a task's rollouts continues: None where it begins anew, as one does that gave several."""
    return [found[0] if len(found := samples_of_rollout(earlier, index, task)) == 1 else None for index in range(task.n)]


def samples_of_rollout(earlier: Sequence[Sample], index: int, task: Task) -> list[Sample]:
    """Returns what an earlier attempt left of a rollout: nothing where it had ended under weights that are too old by now."""
    found = [sample for sample in earlier if sample.rollout == index]
    old = [sample for sample in found if all(version < task.renew_below for _, _, version in sample.segments)]
    return [] if any(sample.finish != "abort" for sample in old) else found


def samples_of(task: Task, partials: Sequence[Partial], tokenizer: Tokenizer, pictures: tuple[bytes, ...] = ()) -> list[Sample]:
    """Returns the task's samples as they are stored; unfinished ones have the finish reason ``abort``. Raises BadMessage. One that has
    ended without the experts of all its tokens, which were asked for, is not trained: its mask is 0 everywhere."""
    problems = [_routing_problem(partial, len(task.prompt_tokens)) for partial in partials]
    samples = [
        Sample(
            group=task.group,
            index=index,
            prompt=task.prompt_tokens,
            response=partial.tokens,
            log_probs=partial.log_probs,
            mask=np.full(len(partial.tokens), not problems[index], np.uint8),
            segments=partial.segments,
            finish=partial.finish or "abort",
            text=_text(task.sampling, partial, tokenizer),
            prompt_text=task.prompt,
            label=task.label,
            label_json=task.label_json,
            metadata=task.metadata,
            attributes={
                **({UNROUTED: problems[index]} if problems[index] else {}),
                **({ENGINE_TIMES: list(partial.times)} if any(partial.times) else {}),
            },
            routed_experts=partial.routed,
            kept=partial.kept,
            pictures=pictures,
        )
        for index, partial in enumerate(partials)
    ]
    for sample in samples:
        sample.check()
    return samples


def _routing_problem(partial: Partial, prompt: int) -> str:
    if partial.choices is None or partial.finish is None:
        return ""
    return partial.unrouted or partial.choices.problem(partial.routed, prompt + len(partial.tokens) - 1) or ""


def _text(sampling: Sampling, partial: Partial, tokenizer: Tokenizer) -> str:
    text = tokenizer.decode(partial.tokens, skip_special_tokens=sampling.skip_special_tokens is not False)
    if sampling.no_stop_trim is not False or partial.finish != "stop":
        return text
    stops = written(partial.tokens, sampling.stop, lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False))
    ends = [at for stop in stops if (at := text.rfind(stop)) >= 0]
    return text[: min(ends)] if ends else text


LEAVE_SECONDS = 3.0  # the time that a stopping replica waits for the engine to return its partial outputs
LEAVE_PAUSE = 0.1


class Stopped(MyxoError):
    """A group's generation was stopped because it is too old (``stale``), else because the replica leaves."""

    def __init__(self, group: str, stale: bool) -> None:
        self.stale = stale
        super().__init__(f"{group} was stopped {'for its age' if stale else 'because this replica leaves'}")


@dataclass(eq=False)
class Requests:
    """Requests that the engine holds together. ``rids``: their ids; a function of the user's sends new ones while it runs. ``stopped``: set
    when they are to end. ``stale``: why."""

    rids: set[str] = field(default_factory=set)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    stale: bool = False

    def stop(self, stale: bool) -> None:
        """Has them end with what they have."""
        self.stale |= stale
        self.stopped.set()


class InFlight:
    """The requests that the engine holds. A group may have two attempts among them: one whose lease expired, and its successor."""

    def __init__(self, config: RunConfig) -> None:
        self._max_staleness, self._policy = config.rollout.max_staleness, config.rollout.staleness_policy
        self._oldest: dict[Requests, int] = {}  # a group's requests → the version that its oldest token may be of
        self._sent: Counter[Requests] = Counter()  # how many of them are in the engine
        self.leaving = False

    @contextlib.contextmanager
    def tracked(self, group: str, requests: "Requests", oldest: int, version: int) -> Iterator[None]:
        """Registers, while the body runs, requests of a group whose oldest token may be of version ``oldest``. Raises
        Stopped where none must be sent. Where some of them are registered already, all are as old as the oldest: one that ends first leaves
        its tokens in the group."""
        lost = self._is_lost(oldest, version)
        if lost or self.leaving or requests.stopped.is_set():
            raise Stopped(group, stale=lost or requests.stale)
        self._oldest[requests] = min(oldest, self._oldest.get(requests, oldest))
        self._sent[requests] += 1
        try:
            yield
        finally:
            self._sent[requests] -= 1
            if not self._sent[requests]:
                del self._oldest[requests], self._sent[requests]

    async def stop_stale(self, client: EngineClient, version: int) -> None:
        """Has the engine abort the requests that are stale once ``version`` is served. Raises as `EngineClient.abort`."""
        stale = [requests for requests, oldest in self._oldest.items() if self._is_lost(oldest, version)]
        for requests in stale:
            requests.stop(stale=True)
        if rids := [rid for requests in stale for rid in requests.rids]:
            await client.abort(rids)

    def stop_all(self) -> None:
        """Has all groups end with what they have, for others to continue."""
        for requests in self._oldest:
            requests.stop(stale=False)

    async def leave(self, client: EngineClient | None) -> None:
        """Has the engine abort all requests; returns once it has, or after `LEAVE_SECONDS`."""
        self.leaving = True
        self.stop_all()
        with contextlib.suppress(TimeoutError, MyxoError):
            async with asyncio.timeout(LEAVE_SECONDS):
                while self._oldest and client is not None:
                    await client.abort_all()
                    await asyncio.sleep(LEAVE_PAUSE)  # a request may still have been in transit

    def _is_lost(self, oldest: int, version: int) -> bool:
        return is_too_stale(oldest, version, self._max_staleness, self._policy)
