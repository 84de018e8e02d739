"""Prompts from a custom source: ``data.data_source = "package.module:make"``, or a class in slime's manner (`shared.data.source_process`).

``make(config)`` returns an object with ``get_samples(n)``: a list of n prompts, each an object with the keys of [data] or something with
the attributes ``prompt``, ``label`` and ``metadata``; a list of such (slime's groups) counts as its first. A source may also have
``state()``, a JSON value, and ``load_state(value)``, and ``observe(results)``, which hears what became of groups
(`ResultLog`): before the prompt of group k is drawn, the source is told, once, of all groups that had ended when group k
was admitted.

A source need not be reproducible, but a group's prompt must be. So each drawn prompt is written, with its number and the source's state
after it, to ``prompts/drawn.jsonl`` in the run's directory before it is used, and read from there afterwards. Another buffer reads that
file, continues from the last state, and tells what the ledger holds since; a source without states is first asked for as many prompts as
were drawn before, and told the same between them.

Which results a source hears before it draws the prompt of group k follows from the ledger alone: those of all groups that had ended when
group k was admitted, in the ledger's order. So a buffer that replays the ledger has the same results for the same prompts.
"""

import bisect
import json
import os
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from shared.config.run_config import RunConfig
from shared.data.prompts import BAD, OVERLONG, Prompt, PromptReader, TrainingPrompts, reason_to_leave_out
from shared.data.rows import RowEntry
from shared.data.source_process import FIELD, RENDERED, SourceProcess
from shared.data.tokenizer import Tokenizer
from shared.runtime.errors import ConfigError
from shared.schema.ledger import group_id


@dataclass(frozen=True, slots=True)
class GroupResult:
    """The end of a training group. number: how many were admitted before it. rewards: of its samples, empty where it was never scored.

    fate: ``trained``, ``dropped`` or ``dead``; reason: why, of the latter two.
    """

    number: int
    fate: str
    rewards: tuple[float, ...] = ()
    reason: str = ""

    def reported(self, group: str, entry: Mapping[str, Any], metadata_key: str, threshold: float) -> dict[str, Any]:
        """Returns the result as a source gets it. ``entry``: the group's prompt as it was drawn; ``threshold``: the reward that passes."""
        passed = sum(reward >= threshold for reward in self.rewards)
        return {
            "group": group,
            "number": self.number,
            "metadata": entry.get(metadata_key) or {},
            "rewards": list(self.rewards),
            "pass_rate": passed / len(self.rewards) if self.rewards else None,
            "fate": self.fate,
            "reason": self.reason,
        }


class ResultLog:
    """The results of a run in order, and how many there were when each group was admitted. Written by one thread, read by any.

    Results that were forgotten stay counted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results: list[GroupResult] = []
        self._forgotten = 0
        self._count = 0
        self._firsts, self._before = array("q"), array("q")

    def __len__(self) -> int:
        return self._count

    def add(self, results: Sequence[GroupResult]) -> None:
        """Appends results, in the order of the ledger."""
        with self._lock:
            self._results += results[max(0, self._forgotten - self._count) :]
            self._count += len(results)

    def admit(self, first: int) -> None:
        """Takes note that the groups from number ``first`` on are admitted after the results so far."""
        with self._lock:
            self._firsts.append(first)
            self._before.append(self._count)

    def before(self, number: int) -> int:
        """Returns how many results there were when group ``number`` was admitted."""
        with self._lock:
            position = bisect.bisect_right(self._firsts, number)
            return self._before[position - 1] if position else 0

    def between(self, start: int, end: int) -> list[GroupResult]:
        """Returns the results from position ``start`` up to ``end``. Raises ValueError where they were forgotten."""
        with self._lock:
            if start < self._forgotten:
                raise ValueError(f"results from {start} on are asked for; those before {self._forgotten} are forgotten")
            return self._results[start - self._forgotten : end - self._forgotten]

    def forget(self, count: int) -> None:
        """Lets go of the first ``count`` results of the run, also of those that are yet to be added."""
        with self._lock:
            del self._results[: max(0, count - self._forgotten)]
            self._forgotten = max(self._forgotten, count)


MOST_LEFT_OUT = 10_000  # The most consecutive prompts that may be left out before the source is given up
TOLD_AT_ONCE = 64  # The most results of one call of ``observe``
MOST_DEATHS = 3  # The most times in a row that a source's process may end, or not answer, over results, before it is told no more of them


class DrawnFile:
    """The prompts in a run's file of drawn ones, by number; it grows while it is used, by other processes too.

    A line: ``{"number", "drawn", "left_out", "observed", "untold", "state", "entry"}``: the source had been told ``observed`` results, but
    for the ranges ``untold``; with ``refused``, why it gave no prompt. A line that is cut off (its writer was killed) does not count, and
    of two with the same number only the first does.
    """

    def __init__(self, config: RunConfig) -> None:
        self.path = config.run.root / "prompts" / "drawn.jsonl"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b")
        except OSError as error:
            raise ConfigError("run.dir", str(self.path), f"cannot be written: {error.strerror}; drawn prompts are kept there") from None
        self._offsets = array("q")
        self._end = 0
        self.last: dict[str, Any] = {"drawn": 0, "left_out": {OVERLONG: 0, BAD: 0}, "observed": 0, "untold": [], "state": None}

    def __len__(self) -> int:
        return len(self._offsets)

    def record(self, index: int) -> dict[str, Any]:
        """Returns the line of the prompt that was drawn as number ``index``; from any thread."""
        start, end = [*self._offsets[index : index + 2], self._end][:2]
        line, _, _ = os.pread(self._file.fileno(), end - start, start).partition(b"\n")
        record: dict[str, Any] = json.loads(line)
        return record

    def catch_up(self) -> bool:
        """Reads the lines written since the last call. Returns whether there were any."""
        before = len(self)
        self._file.seek(self._end)
        while (line := self._file.readline()).endswith(b"\n"):
            try:
                record = json.loads(line)
            except ValueError:  # cut off, and ended by the next writer
                record = {"number": -1}
            start, self._end = self._end, self._end + len(line)
            if record["number"] == len(self):
                self._offsets.append(start)
                self.last = {key: record[key] for key in self.last}
        return len(self) > before

    def append(self, record: dict[str, Any]) -> None:
        """Writes a prompt; it counts when `catch_up` has read it."""
        line = json.dumps(record).encode() + b"\n"
        self._file.seek(0, os.SEEK_END)
        if self._file.tell() > self._end:  # half a line is there
            line = b"\n" + line
        self._file.write(line)
        self._file.flush()


class DrawnPrompts:
    """The prompts of a custom source, which runs in a process of its own. Prompts may be asked for from any thread. Raises ConfigError.

    Args:
        report: takes, from any thread, what went wrong with a source that was told results.

    ``results``: of the run's groups; whoever follows the ledger adds them.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer, report: Callable[[ConfigError], None] = lambda _: None) -> None:
        assert config.data.data_source is not None  # only made for runs that have one
        self._config, self._report = config, report
        self._reader = PromptReader(config, tokenizer)
        as_they_are = config.with_fields(data={"apply_chat_template": False, "add_special_tokens": False})
        self._rendered_reader = PromptReader(as_they_are, tokenizer)
        self._drawn = DrawnFile(config)
        self._drawn.catch_up()
        self._lock = threading.Lock()
        self._fresh: SourceProcess | None = SourceProcess(config)
        self._source: SourceProcess | None = None
        self.first_left_out: ConfigError | None = None
        self.observes, self._has_states = self._fresh.observes, self._fresh.has_states
        self.results = ResultLog()
        self._told, self._untold, self._deaths = 0, list[list[int]](), 0
        self._forget()

    def __len__(self) -> int:
        return len(self._drawn)

    @property
    def left_out(self) -> dict[str, int]:
        """Returns how many prompts were left out so far, by reason."""
        counts: dict[str, int] = self._drawn.last["left_out"]
        return counts

    def at(self, index: int) -> Prompt:
        """Returns the prompt of the group that was admitted as ``index``, drawn now if it never was. Raises ConfigError."""
        while index >= len(self._drawn):  # what was drawn waits for no source that draws others
            with self._lock:
                if self._drawn.catch_up():
                    self._leave()  # another buffer has drawn: ours is behind
                elif index >= len(self._drawn):
                    self._draw()
        record = self._drawn.record(index)
        if "refused" in record:
            raise self._refusal(record["refused"])
        return self._read(RowEntry(record["entry"], FIELD, lambda: f"{self._drawn.path}: prompt {index}"))

    def _read(self, entry: RowEntry) -> Prompt:
        rendered = RENDERED in entry.values and isinstance(entry.values.get(self._config.data.input_key), str)
        return (self._rendered_reader if rendered else self._reader).read(entry)

    def _leave(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None

    def _resumed(self) -> SourceProcess:
        """Returns the source, continued after the last prompt that was drawn."""
        while True:
            source, last = self._fresh or SourceProcess(self._config), self._drawn.last
            self._fresh, self._untold = None, merged([*last["untold"], *self._untold])
            if last["state"] is not None and source.has_states:
                source.load_state(last["state"])
                self._told = last["observed"]
                return source
            self._told = 0
            if self._replayed(source):
                return source

    def _replayed(self, source: SourceProcess) -> bool:
        """Draws all prompts again, and tells the results between them. Returns whether the source has survived it."""
        if not source.observes:
            source.skip(self._drawn.last["drawn"])
            return True
        skipped = 0
        for _, numbers in groupby(range(len(self._drawn)), self.results.before):
            *_, last = numbers
            if not self._tell(source, last):
                return False
            drawn = self._drawn.record(last)["drawn"]
            source.skip(drawn - skipped)
            skipped = drawn
        return True

    # --- results

    def _tell(self, source: SourceProcess, number: int) -> bool:
        """Tells the source what had ended when group ``number`` was admitted. Returns whether the source has survived it.

        The calls are the same ones after any restart: they end where a group was admitted, or after `TOLD_AT_ONCE` results.
        """
        until = self.results.before(number) if source.observes else self._told
        while self._told < until:
            end = min(until, self._told + TOLD_AT_ONCE)
            known = any(first <= self._told and end <= last for first, last in self._untold)
            if not known and not self._observe(source, self._told, end):
                return False
            self._told = end
        return True

    def _observe(self, source: SourceProcess, start: int, end: int) -> bool:
        if self._deaths >= MOST_DEATHS:
            self._untold = merged([*self._untold, [start, end]])
            return True
        try:
            failed = source.observe([self._message(position) for position in range(start, end)])
        except ConfigError as error:
            self._untold = merged([*self._untold, [start, end]])
            self._deaths += 1
            more = "is told no more until the buffer starts anew" if self._deaths == MOST_DEATHS else "continues without them"
            self._report(self._refusal(f"observe, of {end - start} results: {error.expected}; it {more}"))
            return False
        self._deaths = 0
        if failed is not None:
            self._report(self._refusal(f"observe, of {end - start} results, raised {failed}"))
        return True

    def _message(self, position: int) -> dict[str, Any]:
        [result] = self.results.between(position, position + 1)
        entry, data = self._drawn.record(result.number)["entry"], self._config.data
        return result.reported(group_id(result.number), entry, data.metadata_key, self._config.monitoring.passrate_threshold)

    def _forget(self) -> None:
        """Lets go of results that the source is never told again: its last state holds them."""
        if self._drawn.last["state"] is not None and self._has_states:
            self.results.forget(self._drawn.last["observed"])

    def follow(self) -> None:
        """Reads what another buffer has drawn, unless prompts are being drawn here: a buffer on standby needs no older results."""
        if self._lock.acquire(blocking=False):
            try:
                if self._drawn.catch_up():
                    self._leave()
                    self._forget()
            finally:
                self._lock.release()

    def _draw(self) -> None:
        """Writes the next prompt, or why the source gives none, which costs the group of that number and no other."""
        number = len(self._drawn)
        try:
            source = self._source = self._source or self._resumed()
            if not self._tell(source, number):
                self._source = None  # its process has ended over them
                return
            record = self._drawn_by(source, number)
            self._drawn.append(record)
        except (ConfigError, TypeError) as error:
            self._leave()
            words = error.expected if isinstance(error, ConfigError) else f"prompt {number} or the state behind it is not JSON: {error}"
            self._drawn.append(record := {"number": number, **self._drawn.last, "entry": {}, "refused": words})
        if not self._drawn.catch_up():
            raise self._refusal(f"prompt {number} could not be read back from {self._drawn.path}")
        if len(self._drawn) != number + 1 or self._drawn.last["drawn"] != record["drawn"]:
            self._leave()  # another buffer was faster: its prompt counts
        self._forget()

    def _drawn_by(self, source: SourceProcess, number: int) -> dict[str, Any]:
        """Returns the line of the next prompt. One that is bad, and not left out, is its group's, too."""
        drawn, left_out = self._drawn.last["drawn"], dict(self._drawn.last["left_out"])
        reported = {"number": number, "left_out": left_out, "observed": self._told, "untold": self._untold}
        for _ in range(MOST_LEFT_OUT):
            row, state = source.draw()
            drawn += 1
            try:
                self._read(RowEntry(row, FIELD, lambda: f"{self._config.data.data_source}: prompt {number}"))
            except ConfigError as error:
                if (reason := reason_to_leave_out(error, self._config.data)) is not None:
                    left_out[reason] += 1
                    self.first_left_out = self.first_left_out or error
                    continue
            return {**reported, "drawn": drawn, "entry": row, "state": state}
        words = f"{MOST_LEFT_OUT} prompts in a row do not fit; the last: {self.first_left_out}"
        return {**reported, "drawn": drawn, "entry": {}, "state": state, "refused": words}

    def _refusal(self, expected: str) -> ConfigError:
        return ConfigError(FIELD, self._config.data.data_source, expected)


def merged(ranges: list[list[int]]) -> list[list[int]]:
    """Returns ranges ``[first, end]`` in order, those that touch as one."""
    found: list[list[int]] = []
    for first, end in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1] = [found[-1][0], max(end, found[-1][1])]
        else:
            found.append([first, end])
    return found


PromptStream = TrainingPrompts | DrawnPrompts  # The prompt of each training group: the same for the same number, after any restart
