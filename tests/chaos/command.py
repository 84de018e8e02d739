"""``python -m tests.chaos --seeds A:B``: runs whose processes are killed and frozen by schedules drawn from seeds, and what came of them.

Each seed is a whole run on this machine, in forked processes with a scripted engine and optimizer step (`tests.chaos.fast`). Exit code 0:
every seed passed; 1: some did not; 2: bad input. A seed that failed leaves its directory; ``--replay`` runs it again, alike as far as
processes on a machine can be, and ``--minimise`` takes faults away as long as it still fails.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.chaos import results_page
from tests.chaos.schedule import KINDS, LOSSY, Schedule, drawn

JOBS_PER_CORE = 3
"""Runs at once on a core: most of a run's time is spent waiting."""

POLL_S = 0.1
SEED_SECONDS, REAL_SEED_SECONDS = 600.0, 2400.0
"""The times after which a seed's own process is taken for hung."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=_range, default=range(0, 20), metavar="A:B", help="the seeds A to B, B excluded (default 0:20)")
    parser.add_argument("--fast", action="store_true", help="with the scripted engine and trainer (the default)")
    parser.add_argument("--real", action="store_true", help="with SGLang and Megatron: minutes a seed, and only processes are disturbed")
    parser.add_argument("--faults", default=",".join(KINDS), help=f"kinds of faults that may come, of: {', '.join(KINDS)}")
    parser.add_argument("--deterministic", action="store_true", help="synchronous runs, each compared bit by bit with an undisturbed one")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one seed, and keep its directory")
    parser.add_argument("--minimise", type=int, metavar="SEED", help="take faults of a failing seed away, one after another")
    parser.add_argument("--print", action="store_true", dest="show", help="print the schedules and run nothing")
    parser.add_argument("--jobs", type=int, help=f"runs at once (default: {JOBS_PER_CORE} a core; of real ones 1)")
    parser.add_argument(
        "--hours", type=float, metavar="N", help="a soak: one run for so long, whose memory, files and queues must not grow"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every seed's result there, one JSON object a line")
    parser.add_argument("--page", action="store_true", help="write the table of recovery times, or a soak's, into docs/reliability.md")
    parser.add_argument(
        "--results", type=Path, nargs="+", metavar="FILE", help="run nothing: show, or write, what --json has written of earlier runs"
    )
    parser.add_argument("--keep", action="store_true", help="keep the directories of all seeds")
    given = parser.parse_args(arguments)
    if given.results:
        return _earlier(parser, given.results, given.page)
    kinds = tuple(kind.strip() for kind in given.faults.split(","))
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"--faults: {unknown[0]!r} is none of {', '.join(KINDS)}")
    chosen = [seed for seed in (given.replay, given.minimise) if seed is not None] or given.seeds
    schedules = [drawn(seed, kinds, deterministic=given.deterministic, real=given.real) for seed in chosen]
    if given.show:
        print("\n".join(map(str, schedules)))
        return 0
    jobs = given.jobs or (1 if given.real else JOBS_PER_CORE * (os.cpu_count() or 1))
    suite = Suite(jobs, keep=given.keep or given.replay is not None, real=given.real)
    if given.hours is not None:
        from tests.chaos import soak

        return soak.main(given.hours, suite.model, given.json, page=given.page)
    if given.minimise is not None:
        return _minimise(suite, schedules[0])
    results = _run(suite, schedules, given.deterministic, given.json)
    return _report(results, given.page)


def _earlier(parser: argparse.ArgumentParser, paths: Sequence[Path], page: bool) -> int:
    """Reports what earlier runs have written. Of a seed that ran several times the last result counts."""
    try:
        lines = [json.loads(line) for path in paths for line in path.read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        parser.error(f"--results: {error}")
    if lines and "series" in lines[0]:
        from tests.chaos import soak

        return soak.report(lines[0], page=page)
    return _report(results_page.joined(lines), page)


def _report(results: Sequence[dict[str, Any]], page: bool) -> int:
    """Prints the figures of seeds, and writes them into the page. Returns the exit code."""
    if page:
        results_page.write(results)
    failed = [result["seed"] for result in results if result["problems"]]
    print(f"{len(results) - len(failed)} of {len(results)} seeds passed" + (f"; failed: {', '.join(map(str, failed))}" if failed else ""))
    print(results_page.table(results))
    return 1 if failed else 0


class Suite:
    """Starts seeds, each in a process of its own. ``jobs``: at once. ``real``: with SGLang and Megatron."""

    def __init__(self, jobs: int, *, keep: bool, real: bool = False) -> None:
        self._jobs, self._keep, self._real = max(1, jobs), keep, real
        self.variant = "real" if real else "fast"
        self._seconds = REAL_SEED_SECONDS if real else SEED_SECONDS
        self.directory = Path(tempfile.mkdtemp(prefix="myxo-chaos-"))
        model = self.directory / "model"
        if real:
            from tests.chaos.real import real_variant

            self.model = real_variant.write_model(model)
            return
        from tests.chaos.fast import fast_config, preload  # importing all that a run consists of takes seconds
        from tests.support import forking

        assert preload.MODULES
        self.model = fast_config.write_model(model)
        forking.install()
        forking.settle()

    def results(self, schedules: Sequence[Schedule]) -> Iterator[dict[str, Any]]:
        """Yields the results of schedules as they end."""
        waiting, running = list(enumerate(schedules)), dict[int, tuple[Schedule, Any, Path, float]]()
        while waiting or running:
            while waiting and len(running) < self._jobs:
                index, schedule = waiting.pop(0)
                running[index] = (schedule, *self._start(index, schedule), time.monotonic())
            for index, (schedule, process, path, began) in list(running.items()):
                if process.poll() is None and time.monotonic() - began < self._seconds:
                    continue
                del running[index]
                yield self._result(schedule, process, path)
            time.sleep(POLL_S)

    def _start(self, index: int, schedule: Schedule) -> tuple["subprocess.Popen[bytes]", Path]:
        result = self.directory / f"result-{index}-{time.monotonic_ns()}.json"
        given = {
            "schedule": schedule.as_json(),
            "model": str(self.model),
            "parent": str(self.directory),
            "keep": self._keep,
            "real": self._real,
            "result": str(result),
        }
        with result.with_suffix(".log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.one_seed"], stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        assert process.stdin is not None
        process.stdin.write(json.dumps(given).encode())
        process.stdin.close()
        return process, result

    @staticmethod
    def _result(schedule: Schedule, process: "subprocess.Popen[bytes]", path: Path) -> dict[str, Any]:
        if process.poll() is None:
            process.kill()
            process.wait()
        if path.is_file():
            found: dict[str, Any] = json.loads(path.read_text())
            path.unlink()
            path.with_suffix(".log").unlink()
            return found
        last = path.with_suffix(".log").read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        problem = f"the suite itself failed: {last[0]}; see {path.with_suffix('.log')}"
        return {
            "seed": schedule.seed,
            "schedule": schedule.as_json(),
            "problems": [problem],
            "faults": [],
            "seconds": 0.0,
            "cpu_s": 0.0,
            "ending": "",
        }


def _run(suite: Suite, schedules: Sequence[Schedule], deterministic: bool, path: Path | None) -> list[dict[str, Any]]:
    """Runs all, shows each as it ends, and returns the results in the order of their ends."""
    results: list[dict[str, Any]] = []
    expected = _undisturbed(suite, schedules) if deterministic else {}
    commit = results_page.commit()
    with open(path or os.devnull, "w") as file:
        for result in suite.results(schedules):
            result |= {"commit": commit, "variant": "deterministic" if deterministic else suite.variant}
            wanted = expected.get(json.dumps(result["schedule"]["shape"]))
            if wanted is not None and result.get("state") != wanted and not _gave_up(result):
                result["problems"].append("its last weights are not those of the same run undisturbed")
            results.append(result)
            file.write(json.dumps(result) + "\n")
            file.flush()
            _show(result, len(results), len(schedules))
    return results


def _gave_up(result: dict[str, Any]) -> bool:
    """Returns whether a run was robbed of what it had stored, and gave up groups or itself: others were trained in their place."""
    robbed = any(fault["kind"] in LOSSY for fault in result["schedule"]["faults"])
    return robbed and bool(result.get("given_up") or result.get("exit_code"))


def _undisturbed(suite: Suite, schedules: Sequence[Schedule]) -> dict[str, str]:
    """Returns the last state of each shape of run, undisturbed; runs that differ in nothing else share one."""
    shapes = {json.dumps(schedule.as_json()["shape"]): schedule.undisturbed() for schedule in schedules}
    print(f"{len(shapes)} undisturbed runs to compare with", flush=True)
    found = {}
    for result in suite.results(list(shapes.values())):
        if result["problems"]:
            raise SystemExit(f"a run that nothing disturbed failed: {result['problems']}; see {result['directory']}")
        found[json.dumps(result["schedule"]["shape"])] = result["state"]
    return found


def _show(result: dict[str, Any], done: int, total: int) -> None:
    verdict = "FAILED" if result["problems"] else "ok"
    filled = round(20 * done / total)
    bar = "#" * filled + "." * (20 - filled)
    faults = "; ".join(fault["fault"] for fault in result["faults"]) or "undisturbed"
    print(f"[{bar}] {done}/{total}  seed {result['seed']}  {verdict}  {result['seconds']:.0f} s, {result['cpu_s']:.1f} s of CPU  {faults}")
    for problem in [*result["problems"], *([f"it ended: {result['ending']}"] if result["ending"] else [])]:
        print(f"    {problem}")
    if result["problems"]:
        print(f"    python -m tests.chaos --replay {result['seed']}; its files are in {result.get('directory', '')}")
    sys.stdout.flush()


def _minimise(suite: Suite, schedule: Schedule) -> int:
    """Takes faults away as long as the seed fails, and prints what is left."""
    least = minimised(schedule, lambda tried: bool(next(suite.results([tried]))["problems"]))
    if least is None:
        print(f"seed {schedule.seed} passes")
        return 0
    print(f"these faults are enough:\n{least}")
    return 1


def minimised(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule | None:
    """Returns a schedule that fails, and of which no fault can be taken away without its passing; None where the given one passes."""
    if not fails(schedule):
        return None
    index = 0
    while index < len(schedule.faults):
        shorter = schedule.without(index)
        if fails(shorter):
            schedule = shorter
        else:
            index += 1
    return schedule


def _range(text: str) -> range:
    first, _, end = text.partition(":")
    try:
        return range(int(first), int(end)) if end else range(int(first), int(first) + 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: A:B, as 0:1000") from None
