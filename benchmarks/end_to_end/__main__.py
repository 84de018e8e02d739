r"""How fast a whole run is at several bounds on staleness, beside what its engine and its trainer do alone.

``python -m benchmarks.end_to_end --shape tiny --device cpu --lengths geometric:24 --cap 64 --batch 4 --steps 8 --json FILE`` tries it out.
On two GPUs, one for the trainer and one for the engine::

    python -m benchmarks.end_to_end --shape 0.6b --device cuda --lengths geometric:656 --bounds 0 1 2 4 --orders completion fifo \
        --steps 14 --seconds 80 --sglang attention-backend=triton sampling-backend=pytorch grammar-backend=none \
        --json benchmarks/results/end_to_end.json

On four, an engine that two others join while the run trains::

    python -m benchmarks.end_to_end --bounds 2 --engines 1 --scale-to 3 --steps 20 --seconds 300 \
        --json benchmarks/results/end_to_end_scaled.json

Weights are random, rewards too; what is measured is time. First one run under ``myxo up`` for each bound, until it has made ``--steps`` or
its ``--seconds`` are over; then the engine alone, by this process: with several numbers of requests at once, each followed by another when
it ends; behind its rollout service, with prompts without end; and with a batch's requests that begin together and are not followed. The
trainer alone is the run at the smallest bound, in which each step's training has nothing beside it. FILE is written after each part;
``--write`` puts the tables of all `RESULTS` into docs/performance.md.

With ``--scale-to`` replicas join a run once it has made its warm-up and half of its other steps: each is
``python -m services.rollout`` with the bus's address, the run's name and a GPU of its own. The run continues until it has made the other
half, counted from ``bound`` + 1 steps after all of them serve. ``myxo audit`` then checks its whole ledger.

Figures. Step: the mean. g: seconds in which the engine alone draws a step's tokens, at its best; with N engines a Nth of them. h: seconds
from a batch's arrival to its last optimizer step. *limit*: max(g, h), or g + h where they share one GPU; U_sync = (N g + h) / (GPUs x
synchronous step). Exit code 1 where a bound from 2 on misses the goal of the limit, a bound above 0 is slower than 0, or a run that was to
be scaled was not measured after it or has no clean audit.
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, get_args

from benchmarks.agents.site import Machine
from benchmarks.command_line import write
from benchmarks.end_to_end import report
from benchmarks.end_to_end.length_distribution import LengthDistribution, rows
from benchmarks.end_to_end.model_shapes import SIZES, config_of, write_checkpoint
from benchmarks.end_to_end.prediction import MeasuredEngine, at_context, decoding, predicted
from benchmarks.end_to_end.whole_run import RunPlan, measured
from benchmarks.rollout_overhead.__main__ import flag
from benchmarks.rollout_overhead.engine_bench import FUNCTION, EngineLoadPlan, engine_bench
from services.buffer.policy import Order
from services.rollout.request_slots import MOST
from shared.config import devices
from shared.runtime import exit_codes
from shared.runtime.telemetry import silence_logs

RESULTS = sorted((Path(__file__).parents[1] / "results").glob("end_to_end*.json"))
"""The figures that the page has: of several shapes, colocated, and of a run to which engines were added while it trained."""

PROMPTS = 8192

OFFLOADED = {"4b"}
"""Shapes whose optimizer lies in host memory: their gradients, weights and Adam's state do not fit 80 GB together."""


def main() -> int:
    """The command line. Returns the exit code."""
    options = _parser().parse_args()
    if options.write:
        report.write_page([json.loads(path.read_text()) for path in RESULTS])
        return 0
    if problem := refused(options):
        print(problem, file=sys.stderr)
        return exit_codes.BAD_INPUT
    silence_logs()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what runs here is ended on the way out
    found = measure(options)
    print("\n\n".join(text for text in (report.table(found), report.scaled_table(found)) if text))
    for missed in (misses := report.misses(found)):
        print(f"missed: {missed}", file=sys.stderr)
    return int(bool(misses))


def refused(options: argparse.Namespace) -> str:
    """Returns why there is no such measurement; nothing where there is."""
    if options.engines < 1 or (options.scale_to is not None and options.scale_to <= options.engines):
        return "--engines is 1 at least, --scale-to more than that"
    if options.colocate and (options.engines > 1 or options.scale_to is not None):
        return "--colocate has one engine, on the trainer's GPU: neither --engines nor --scale-to"
    needed, there = len_devices(options), len(devices.visible_gpus())
    if options.device == "cuda" and needed > there:
        return f"trainer and engines need {needed} GPUs; there are {there}"
    return ""


def planned(options: argparse.Namespace) -> list[tuple[int, Order]]:
    """Returns bound and order of each run. At bound 0 a batch is all that is in flight: its groups have one order."""
    return [(bound, order) for bound in options.bounds for order in (options.orders if bound else options.orders[:1])]


def len_devices(options: argparse.Namespace) -> int:
    """Returns how many devices trainer and engines have, those that join included."""
    return 1 if options.colocate else 1 + (options.scale_to or options.engines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SIZES), default="0.6b", help="of the model (default 0.6b)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of trainer and engine (default cuda)")
    parser.add_argument(
        "--lengths", default="geometric:656", help="geometric:MEAN, lognormal:MEAN:SIGMA, file:PATH (default geometric:656)"
    )
    parser.add_argument("--cap", type=int, default=2048, metavar="N", help="tokens of the longest response (default 2048)")
    parser.add_argument("--prompt-tokens", type=int, default=64, metavar="N", help="tokens of a prompt (default 64)")
    parser.add_argument("--batch", type=int, default=32, metavar="N", help="groups of a step (default 32)")
    parser.add_argument("--samples", type=int, default=8, metavar="N", help="samples of a group (default 8)")
    parser.add_argument("--bounds", type=int, nargs="*", default=[0, 1, 2, 4], metavar="S", help="on staleness (default 0 1 2 4)")
    parser.add_argument(
        "--orders",
        nargs="+",
        choices=get_args(Order),
        default=["completion"],
        help="of the batches, each at all bounds above 0 (default completion)",
    )
    parser.add_argument("--colocate", action="store_true", help="trainer and engine take turns on one GPU")
    parser.add_argument("--engines", type=int, default=1, metavar="N", help="that a run begins with (default 1)")
    parser.add_argument("--scale-to", type=int, metavar="N", help="engines from the middle of a run on: others join while it trains")
    parser.add_argument("--steps", type=int, default=16, metavar="N", help="of a run, the warm-up included (default 16)")
    parser.add_argument(
        "--warm-up", type=int, default=5, metavar="N", help="steps that are left out, at most one more than the bound (default 5)"
    )
    parser.add_argument("--seconds", type=float, default=120, help="for the steps of one run (default 120)")
    parser.add_argument("--start-seconds", type=float, default=400, help="until a run has made its first step (default 400)")
    parser.add_argument("--alone", type=int, nargs="*", metavar="N", help="requests at once of the engine alone; none: left out")
    parser.add_argument("--alone-seconds", type=float, default=8, help="of each of its figures (default 8)")
    parser.add_argument("--sglang", nargs="*", type=flag, default=[], metavar="FLAG=VALUE", help="flags of the engine")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="more flags of myxo up")
    parser.add_argument("--directory", type=Path, help="where the runs lie (default: a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--go-on", action="store_true", help="keep what FILE has of the engine alone, and of other bounds")
    parser.add_argument("--take", nargs="+", type=Path, default=[], metavar="FILE", help="add the runs of these files, of the same load")
    parser.add_argument("--write", action="store_true", help="put the tables of RESULTS into the docs; nothing is measured")
    return parser


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Returns all figures; writes them after each part."""
    with tempfile.TemporaryDirectory(prefix="mx-") as name:
        directory = options.directory or Path(name)
        directory.mkdir(parents=True, exist_ok=True)
        return Measurement(options, directory.resolve()).made()


class Measurement:
    """One shape, one distribution of lengths, all bounds."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self._options, self._directory = options, directory
        self._on_gpu = options.device == "cuda"
        self._dtype = "bfloat16" if self._on_gpu else "float32"
        self._lengths = LengthDistribution.parse(options.lengths, options.cap)
        self._vocabulary: int = config_of(options.shape, self._dtype)["vocab_size"]
        self.found: dict[str, Any] = {
            **{
                name: getattr(options, name)
                for name in (
                    "shape",
                    "device",
                    "lengths",
                    "cap",
                    "prompt_tokens",
                    "batch",
                    "samples",
                    "orders",
                    "colocate",
                    "engines",
                    "scale_to",
                )
            },
            "dtype": self._dtype,
            "gpus": 1 if options.colocate or not self._on_gpu else 1 + options.engines,
            "capped_mean": round(self._lengths.capped_mean, 1),
            "flags": {**dict(options.sglang), "myxo": options.flags},
            "alone": [],
            "runs": [],
        }
        if options.go_on and options.json is not None and options.json.exists():
            before = json.loads(options.json.read_text())
            self.found |= {name: before[name] for name in ("alone", "alone_batch") if name in before}
            self.found |= {"runs": [run for run in before["runs"] if (run["bound"], run["order"]) not in planned(options)]}
        for path in options.take:
            self.found["runs"] += json.loads(path.read_text())["runs"]

    def made(self) -> dict[str, Any]:
        """Measures. Returns the figures."""
        options = self._options
        model, prompts = self._directory / "model", self._directory / "prompts.jsonl"
        self.found["parameters"] = write_checkpoint(model, options.shape, self._dtype)
        prompts.write_text("".join(rows(self._lengths, PROMPTS, options.samples, options.prompt_tokens, self._vocabulary, seed=0)))
        plan = RunPlan(
            directory=self._directory / "r",
            model=model,
            prompts=prompts,
            flags=tuple(self._flags()),
            steps=options.steps,
            warm_up=options.warm_up,
            start_s=options.start_seconds,
            run_s=options.seconds,
            gpus=self.found["gpus"],
            devices=tuple(devices.visible_gpus()[: len_devices(options)]) if self._on_gpu else (),
            engines=options.engines,
            scale_to=options.scale_to,
        )
        for bound, order in planned(options):
            name = f"bound-{bound}" if order == "completion" else f"bound-{bound}-{order.replace('_', '-')}"
            self.found["runs"].append({"order": order, **measured(plan, name, bound, ["--rollout-order", order])})
            self._keep(f"bound {bound}, {order} order")
        if options.alone != [] and "alone_batch" not in self.found:
            asyncio.run(self._engine_alone(model))
        self._predict()
        self._keep("the simulation")
        return self.found

    async def _engine_alone(self, model: Path) -> None:
        options, batch = self._options, self._options.batch * self._options.samples
        machine = Machine(options.device, 1, self._dtype, dict(options.sglang))
        prompts = EngineLoadPlan(
            self._lengths, self._vocabulary, options.samples, options.prompt_tokens, options.alone_seconds / 2, options.alone_seconds
        )
        levels = options.alone or sorted({max(1, batch * share // 4) for share in (1, 2, 4, 8)})
        self.found["alone"] = []
        async with engine_bench(self._directory / "e", model, machine, prompts, max(levels)) as bench:
            for at_once in levels:
                figures = await bench.direct(at_once, 1)
                self.found["alone"].append({"way": "one by one", "at_once": at_once, **figures.as_json()})
                self._keep(f"the engine alone, {at_once} requests at once")
            figures = await bench.through_service(max(levels))
            self.found["alone"].append({"way": "service", "at_once": max(levels), **figures.as_json()})
            self._keep("the engine with its service, and prompts without end")
            lengths, ends = await bench.one_batch(batch)
            decode = decoding(lengths, ends, options.prompt_tokens)
            self.found["alone_batch"] = {"requests": batch, "seconds": round(max(ends), 4), "decode_seconds": decode}
            self._keep("the engine alone, a batch that begins at once")

    def _flags(self) -> list[str]:
        options, lengths = self._options, self._lengths
        stops = [str(token) for token in lengths.stop_tokens(self._vocabulary, 3)]
        ends = ["--rollout-stop-token-ids", *stops] if lengths.by_stop_tokens else ["--custom-generate-function-path", FUNCTION]
        engine = {"dtype": self._dtype, **dict(options.sglang)}
        return [
            *("--rollout-device", options.device, "--train-device", options.device, "--train-dtype", self._dtype),
            *("--rollout-batch-size", str(options.batch), "--n-samples-per-prompt", str(options.samples)),
            *("--rollout-max-response-len", str(options.cap)),
            *ends,
            *(word for name, value in engine.items() for word in (f"--sglang-{name}", value)),
            *(["--colocate"] if options.colocate else ["--rollout-replicas", str(options.engines)]),
            *(["--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d"] if options.shape in OFFLOADED and self._on_gpu else []),
            *options.flags,
        ]

    def _predict(self) -> None:
        """Adds limit, share of it, and the simulator's prediction."""
        runs = [run for run in self.found["runs"] if run.get("step_seconds")]
        if not self.found["alone"] or not runs:
            return
        synchronous = min(runs, key=lambda run: run["bound"])
        rate, h, engines = max(one["tokens_per_s"] for one in self.found["alone"]), synchronous["train_seconds"], self._options.engines
        shared, gpus = self._options.colocate or not self._on_gpu, self.found["gpus"]
        g = synchronous["step_response_tokens"] / rate
        self.found["split"] = report.split(g, h, synchronous["step_seconds"], gpus, shared, engines)
        self._compare(runs, runs, engines, rate, h)
        if (more := self._options.scale_to) is not None:
            scaled = [run for run in runs if "step_seconds" in run.get("scaled", {}).get("after", {})]
            self._compare(scaled, [run["scaled"]["after"] for run in scaled], more, rate, h)

    def _compare(self, runs: list[dict[str, Any]], figures: list[dict[str, Any]], engines: int, rate: float, h: float) -> None:
        """Adds to the figures of each run their share of the limit and what the simulation predicts for so many engines.

        Args:
            rate: tokens a second of an engine alone. h: seconds of training a step.
        """
        for run, each in zip(runs, figures, strict=True):
            g = each.get("step_response_tokens", run["step_response_tokens"]) / rate
            limit = report.limit(g, h, self._options.colocate or not self._on_gpu, engines)
            each["of_limit"] = round(limit / each["step_seconds"], 4)
        if self._options.colocate or "alone_batch" not in self.found or not figures:
            return
        options, one_by_one = self._options, [one for one in self.found["alone"] if one["running"] >= 1 and one.get("way") != "service"]
        speeds = [(one["running"], one["tokens_per_s"]) for one in one_by_one]
        push, batch = figures[-1].get("push_seconds") or 0.0, options.batch * options.samples
        decode = at_context(self.found["alone_batch"]["decode_seconds"], self._lengths.mean_context(options.prompt_tokens))
        engine = MeasuredEngine.of(decode, speeds, self._lengths.capped_mean)
        self.found["prefill_seconds"] = round(engine.prefill, 5)
        for run, each in zip(runs, figures, strict=True):
            slots = {run["bound"]: max(1, round((each.get("request_slots") or MOST * engines) / engines))}
            told = predicted(self._lengths, engine, batch, options.samples, h, push, slots, run["order"], engines)
            each["predicted_seconds"] = told[run["bound"]]

    def _keep(self, part: str) -> None:
        self.found["runs"].sort(key=lambda run: (run["bound"], get_args(Order).index(run["order"])))
        print(f"measured: {part}", file=sys.stderr, flush=True)
        write(self._options.json, self.found)


if __name__ == "__main__":
    sys.exit(main())
