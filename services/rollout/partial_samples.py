"""Holds a sample's tokens, log-probs and versions so far, across interruptions and from replica to replica."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from services.rollout.engine.generation import Generation
from shared.data.tokenizer import Tokenizer
from shared.schema.messages import Sampling, Task
from shared.schema.sample import Sample


@dataclass
class Partial:
    """A sample that is being generated. tokens: int32 [R]; log_probs: float32 [R]; segments tile [0, R); seed: None for none."""

    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    log_probs: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    segments: list[tuple[int, int, int]] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None
    seed: int | None = None

    def extend(self, generation: Generation, longest: int) -> None:
        """Appends the engine's output; an aborted generation leaves the sample unfinished."""
        offset = len(self.tokens)
        self.tokens = np.concatenate([self.tokens, generation.tokens])
        self.log_probs = np.concatenate([self.log_probs, generation.log_probs])
        for start, end, version in generation.spans:
            if self.segments and self.segments[-1][2] == version:
                self.segments[-1] = (self.segments[-1][0], offset + end, version)
            else:
                self.segments.append((offset + start, offset + end, version))
        if generation.finish != "abort":
            self.finish = generation.finish
        elif len(self.tokens) >= longest:
            self.finish = "length"


def restored(samples: Sequence[Sample], task: Task) -> list[Partial]:
    """Returns the partial samples that a task continues: those of its earlier attempt, or new ones where none of its tokens can be trained.

    Samples that had ended and whose newest token is older than ``task.renew_below`` begin anew; where the earlier attempt does not fit the
    task (another number of samples, more tokens than may be generated), all begin anew.
    """
    longest = task.sampling.max_new_tokens
    if len(samples) != task.n or any(len(sample.response) > longest for sample in samples):
        return [Partial() for _ in range(task.n)]
    return [_restored(sample, task.renew_below, longest) for sample in samples]


def _restored(sample: Sample, renew_below: int, longest: int) -> Partial:
    if sample.log_probs is None:  # of a function of the user's, whose place the engine has taken
        return Partial()
    ended: Literal["stop", "length"] | None = None if sample.finish == "abort" else sample.finish
    if ended is not None and all(version < renew_below for _, _, version in sample.segments):
        return Partial()
    if len(sample.response) == longest:
        ended = ended or "length"
    return Partial(sample.response, sample.log_probs, list(sample.segments), ended)


def samples_of_rollout(earlier: Sequence[Sample], index: int, task: Task) -> list[Sample]:
    """Returns what an earlier attempt left of a rollout: nothing where it had ended under weights that are too old by now."""
    found = [sample for sample in earlier if sample.rollout == index]
    old = [sample for sample in found if all(version < task.renew_below for _, _, version in sample.segments)]
    return [] if any(sample.finish != "abort" for sample in old) else found


def samples_of(task: Task, partials: Sequence[Partial], tokenizer: Tokenizer) -> list[Sample]:
    """Returns the task's samples as they are stored; unfinished ones have the finish reason ``abort``. Raises BadMessage."""
    samples = [
        Sample(
            group=task.group,
            index=index,
            prompt=task.prompt_tokens,
            response=partial.tokens,
            log_probs=partial.log_probs,
            mask=np.ones(len(partial.tokens), np.uint8),
            segments=partial.segments,
            finish=partial.finish or "abort",
            text=_text(task.sampling, partial, tokenizer),
            prompt_text=task.prompt,
            label=task.label,
            label_json=task.label_json,
            metadata=task.metadata,
        )
        for index, partial in enumerate(partials)
    ]
    for sample in samples:
        sample.check()
    return samples


def _text(sampling: Sampling, partial: Partial, tokenizer: Tokenizer) -> str:
    """Returns a response's text, by default without special tokens and with the stop string that ended it."""
    text = tokenizer.decode(partial.tokens, skip_special_tokens=sampling.skip_special_tokens is not False)
    if sampling.no_stop_trim is not False or partial.finish != "stop":
        return text
    ends = [at for stop in sampling.stop if (at := text.rfind(stop)) >= 0]
    return text[: min(ends)] if ends else text
