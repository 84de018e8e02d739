"""How fast weights get from a trainer to SGLang engines, beside what the wire can do and beside slime's way, all in one run.

``python -m benchmarks.weight_push [--gpus N] [--shape 4b] [--pushes N] [--rounds N] [--json FILE]`` pushes a model of Qwen3-4B's shape in
bfloat16, 8.04 GB of random weights (or of Qwen3-0.6B's, 1.19 GB), from Megatron-Core through the real pusher, bus and rollout services, or
with ``--backend torch`` from transformers' model under FSDP2, whose float32 shards are cast as they are sent.
Two GPUs: one trainer rank, one engine. Four: the layouts `LAYOUTS` of two trainer ranks, one after the other. ``--device cpu``, on a small
model, shows that the command works, nothing about speed. FILE is written after each part, so that a run that is cut off leaves the figures
that it has.

Milliseconds. ``raw``: the bytes at the speed of NCCL broadcasts of 1 GiB between the same GPUs. ``push``: from the first bucket's export
until the trainer knows that every engine has loaded all of it and has the right digest. ``engine's part``: as the slowest engine counts
it, from the paused scheduler's first wait for a bucket. Phases, medians: ``pause``: from the request until the engine is told to pause,
while the transfer begins; ``transfer``: until all have loaded; ``check``: comparing digests; ``activate``: the commit. ``gap``: 32
generations run while ``--pushes`` pushes are made; of each push the longest time between two tokens of a generation. ``stall``: that a
training step, begun with the push, waits for it before its optimizer may change the weights. ``death``, where there are two engines: see
`benchmarks.push_death`. ``slime's way``: see `benchmarks.slime_push`,
with ``slime_way_bytes`` of the weights, where not all have room twice. A part that fails is named in ``not_measured`` of FILE.

A second table, for each part, says what was reached when on the way from the trainer's request to its end: all clocks are one machine's.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.page_table import put_table
from benchmarks.push_death import death_in_a_push
from benchmarks.push_figures import figures_of, page_rows, percentile, trace_table
from benchmarks.push_stage import LAYOUTS, SHAPES, push_engines, write_push_model
from benchmarks.raw_broadcast import TORCHRUN, raw_gb_per_s
from benchmarks.slime_push import SLIME_BUCKET, slime_way
from benchmarks.token_stream import gaps_of
from benchmarks.trainer_mfu import micro_batch
from shared.runtime.errors import MyxoError

RESULTS = Path(__file__).parent / "results" / "weight_push.json"
PAGE = Path(__file__).parents[1] / "docs" / "weights.md"
GENERATIONS = 32
STEPPING_VERSION = 10_000
"""From this version on, a training step begins with the push."""

PUSH_PAUSE_S = 0.15
"""The seconds between two pushes while engines generate: they are to generate again before the next."""

GENERATION_PART_S = 60.0
"""The longest that the part with generations takes; the pushes that were made by then count."""

SPARE_BYTES = 2**30
"""Of the GPU's memory that copies of the weights leave free: NCCL's channels, and the next bucket of the export."""

START_SECONDS = 600
PUSH_SECONDS = 120.0
DIRECTORY = "WEIGHT_PUSH_DIRECTORY"
RAW = "WEIGHT_PUSH_RAW"
"""The variable with what the bare wire does, measured before anything else uses the GPUs."""


def main() -> int:
    """The command line; as a rank under torchrun, the work itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, choices=tuple(LAYOUTS), default=2)
    parser.add_argument("--layout", choices=[name for of_gpus in LAYOUTS.values() for name in of_gpus], help="this one only")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", choices=("megatron", "torch"), default="megatron", help="what holds the trainer's weights")
    parser.add_argument("--bucket-mib", type=int, default=512)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="4b")
    parser.add_argument("--rounds", type=int, default=20, help="pushes to an engine that is idle, and as many beside training steps")
    parser.add_argument("--step", action="store_true", help="training steps also of the 4b shape, which need more than 80 GB")
    parser.add_argument("--pushes", type=int, default=100, help="pushes while the engine generates")
    parser.add_argument("--json", type=Path, help=f"write the figures there; the repository's are in {RESULTS}")
    parser.add_argument("--write", action="store_true", help="put the figures of RESULTS into the docs; nothing is measured")
    parser.add_argument("--trace", type=Path, help="write a profile of one push there")
    arguments = parser.parse_args()
    if arguments.write:
        put_table(PAGE, "weight_push", page_rows(json.loads(RESULTS.read_text())))
        return 0
    if "RANK" in os.environ:
        Bench(arguments).run()
        return 0
    layouts = LAYOUTS[arguments.gpus]
    if arguments.layout is not None and arguments.layout not in layouts:
        parser.error(f"--layout {arguments.layout} is none of --gpus {arguments.gpus}, which has {', '.join(layouts)}")
    return measured_layouts([arguments.layout] if arguments.layout else list(layouts), arguments)


def measured_layouts(names: list[str], arguments: argparse.Namespace) -> int:
    """Measures layouts one after the other, each by ranks under torchrun. Returns the exit code: of the last that failed, else 0."""
    from services.trainer.torchrun import run_ranks

    if arguments.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ |= {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1"}
    code = 0
    try:
        os.environ[RAW] = f"{raw_gb_per_s(arguments.gpus // 2, arguments.device):.1f}"
        log(f"the bare wire: {os.environ[RAW]} GB/s")
    except RuntimeError as error:
        log(f"the bare wire was not measured: {error}")
    for name in names:
        with tempfile.TemporaryDirectory(prefix="weight-push-") as directory:
            os.environ[DIRECTORY] = directory
            try:
                run_ranks(LAYOUTS[arguments.gpus][name].ranks, "benchmarks.weight_push", *sys.argv[1:], "--layout", name)
            except SystemExit as failed:
                log(f"{LAYOUTS[arguments.gpus][name].words}: failed with exit code {failed.code}")
                code = int(failed.code or 1)
    return code


class Bench:
    """One trainer rank; rank 0 measures."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.rank = arguments, int(os.environ["RANK"])
        self.layout = LAYOUTS[arguments.gpus][arguments.layout]
        self.on_gpu = arguments.device == "cuda"
        model = {"shape": arguments.shape} if self.on_gpu else {"shape": "small"}
        own = "" if arguments.backend == "megatron" else f", {arguments.backend} backend"
        self.figures: dict[str, Any] = {"gpus": arguments.gpus, "layout": f"{self.layout.words}{own}", **model}
        self.figures |= {"raw_gb_per_s": float(os.environ[RAW])} if RAW in os.environ else {}
        self._traces: list[str] = []
        self._version = 0
        self.steps = not self.on_gpu or self.layout.ranks > 1 or arguments.shape != "4b" or arguments.step

    def run(self) -> None:
        directory = Path(os.environ[DIRECTORY])
        model = directory / f"model-{self.rank}"
        write_push_model(model, self.arguments.shape if self.on_gpu else "small")
        if self.rank:
            self._with_trainer(model, None)
            return
        stage = push_engines(directory / "run", model, self.layout, self.arguments.device)
        own = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(TORCHRUN)}  # not for the engines
        with stage:
            os.environ |= own
            self._with_trainer(model, stage)

    # --- what is measured

    def _with_trainer(self, model: Path, stage: Any) -> None:
        from services.trainer.actor import Actor
        from services.trainer.backend import TrainerSettings
        from services.trainer.commands import CommandBroadcast, Leave, Push
        from services.trainer.weights.pusher import Pusher
        from shared.config.trainer_section import TrainerSection, WeightsSection

        weights = WeightsSection(update_weight_buffer_size=self.arguments.bucket_mib * 2**20, push_timeout=60)
        self.figures["bucket_bytes"] = weights.update_weight_buffer_size
        trainer = TrainerSection(lr=1e-6, collective_timeout=300, trainer_backend=self.arguments.backend, **self.layout.parallel)
        actor = Actor.create(TrainerSettings(trainer), model, random=True)
        pusher = Pusher(stage.link if stage is not None else None, actor.model, weights)
        channel = CommandBroadcast(600)
        if stage is None:
            while isinstance(order := channel.receive(), Push):
                self._begin(actor, pusher, order)
                pusher.wait()
            return
        stage.until("every engine", lambda cards: len(cards) == self.layout.engines, START_SECONDS)
        log(f"engines that are up: {self.layout.engines}")
        self._bench = actor, pusher, channel
        self._push()  # makes the channels, traces how the engines load
        self._push()
        self._measured("plain", [self._push() for _ in range(self.arguments.rounds)])
        engine = engine_socket(next(iter(stage.replicas.values())).words())
        self._part("generating", lambda: self._generation(engine))
        if self.steps:
            self._part("stepping", self._stepping)
        if self.arguments.trace is not None and self.on_gpu:
            self._part("profile", self._profiled)
        if self.layout.engines > 1:
            self._part("death", lambda: self._death(stage))
        pusher.wait()
        channel.send(Leave(done=True))
        pusher.close()
        if self.on_gpu and self.layout.ranks == 1:  # without the gathering over ranks, which it does first
            self._part("slime's way", lambda: self._slime_way(actor, engine))
        self._tell()

    def _part(self, part: str, work: Callable[[], None]) -> None:
        """Measures a further part; one that fails costs nothing of what there is, and is named beside it."""
        try:
            work()
        except (RuntimeError, OSError, MyxoError, SystemExit) as error:  # PyTorch's for memory is a RuntimeError
            said = str(error).splitlines()
            self.figures.setdefault("not_measured", {})[part] = f"{type(error).__name__}: {said[0] if said else ''}"
            log(f"{part} was not measured: {error}")

    def _stepping(self) -> None:
        self._version = STEPPING_VERSION
        stepped = [self._push() for _ in range(self.arguments.rounds)]  # a training step begins with each
        self.figures["stall_seconds"] = round(statistics.median(result.stall for result in stepped), 5)
        self._measured("stepping", stepped)

    def _slime_way(self, actor: Any, engine: str) -> None:
        """Measures with as much of the model as has room once more beside the trainer, whose optimizer's state is taken out first."""
        import torch

        from services.trainer.colocation import Offload

        Offload(actor.model, actor.optimizer).to_host("optimizer")
        tensors = copied(actor.export(SLIME_BUCKET), lambda: torch.cuda.mem_get_info()[0] - SPARE_BYTES)
        self.figures["slime_way_bytes"] = sum(tensor.nbytes for _, tensor in tensors)
        self.figures["slime_way_gb_per_s"] = round(slime_way(engine, tensors), 1)

    def _measured(self, part: str, results: list[Any], besides: Mapping[str, Any] | None = None) -> None:
        """Takes the figures of a part; those of ``plain`` are the benchmark's own."""
        found = {**figures_of(results), **(besides or {})}
        self._traces.append(trace_table(part, found["trace"]))
        if part == "plain":
            self.figures |= found
        else:
            self.figures[part] = found
        self._tell()

    def _generation(self, engine: str) -> None:
        """Pushes while the first engine generates."""
        vocabulary, tokens = (1000, 1500) if self.on_gpu else (30, 200)
        command = [sys.executable, "-m", "benchmarks.token_stream", engine, "--requests", str(GENERATIONS)]
        command += ["--tokens", str(tokens), "--vocabulary", str(vocabulary)]
        results, windows = [], []
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as streams:
            assert streams.stdin is not None and streams.stdout is not None
            streams.stdout.readline()
            end = time.monotonic() + GENERATION_PART_S
            while len(results) < self.arguments.pushes and time.monotonic() < end:
                time.sleep(PUSH_PAUSE_S)
                began = time.monotonic()
                results.append(self._push())
                windows.append((began, time.monotonic() + 0.02))
            time.sleep(PUSH_PAUSE_S)
            streams.stdin.close()
            said = json.loads(streams.stdout.read() or "null")
        if said is None:
            raise SystemExit("the generations beside the pushes ended before them")
        gaps = gaps_of(said["times"], windows)
        usual = [later - earlier for one in said["times"] for earlier, later in pairwise(one)]
        during: dict[str, Any] = {"generations": GENERATIONS, "ended": said["ended"]}
        if gaps and usual:
            during |= {"gap_p50": round(percentile(gaps, 0.5), 5), "gap_p99": round(percentile(gaps, 0.99), 5)}
            during |= {"gap_max": round(max(gaps), 5), "gaps": len(gaps), "token_seconds": round(statistics.median(usual), 5)}
        self._measured("generating", results, during)

    def _death(self, stage: Any) -> None:
        pusher, version = self._bench[1], self._version
        self._version += 1
        self.figures["death"] = death_in_a_push(stage, pusher, lambda: self._pushed(version))
        self._measured("after a death", [self._push()])

    def _push(self) -> Any:
        """Makes one push, of the next version."""
        version, self._version = self._version, self._version + 1
        results = self._pushed(version)
        if not results or len(results[-1].replicas) != self.layout.engines:
            raise SystemExit(f"the push of version {version} failed: {results}")
        last = results[-1]
        log(f"version {version}: {last.seconds:.4f} s, wire {last.wire_seconds:.4f}, engine {last.engine_seconds:.4f}")
        return last

    def _pushed(self, version: int) -> list[Any]:
        """Pushes a version to the replicas that are behind. Returns the push's result, if it succeeded for some."""
        actor, pusher, channel = self._bench
        end = time.monotonic() + PUSH_SECONDS
        while (push := pusher.due(version)) is None:
            if time.monotonic() > end:
                raise SystemExit(f"no replica took version {version} within {PUSH_SECONDS:g} s")
            time.sleep(0.05)
        channel.send(push)
        self._begin(actor, pusher, push)
        pusher.wait()
        return list(pusher.results())

    def _begin(self, actor: Any, pusher: Any, push: Any) -> None:
        """The optimizer's update of the step before is over: a push waits for it on the device."""
        if self.on_gpu:
            import torch

            torch.cuda.synchronize()
        pusher.begin(push)
        if push.version >= STEPPING_VERSION:  # the same on all ranks
            self._step(actor)

    def _step(self, actor: Any) -> None:
        from services.trainer.objective.loss import PolicyLoss
        from shared.config.algorithm import AlgorithmSection

        if self.on_gpu:  # the batch is of the large model's vocabulary
            actor.train_step([micro_batch(2048, 0)], PolicyLoss(AlgorithmSection()))

    def _profiled(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            self._push()
        print(profiled.key_averages().table(sort_by="cuda_time_total", row_limit=15, max_name_column_width=60), flush=True)
        profiled.export_chrome_trace(str(self.arguments.trace))

    def _tell(self) -> None:
        """Prints what there is so far, and writes it."""
        if self.on_gpu:
            import torch

            self.figures |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        print("\n\n".join([*self._traces, page_rows([self.figures])]), flush=True)
        self._traces = []
        if self.arguments.json is not None:
            rows = json.loads(self.arguments.json.read_text()) if self.arguments.json.is_file() else []
            key = ("gpus", "layout", "shape")
            rows = [row for row in rows if any(row.get(name) != self.figures[name] for name in key)]
            self.arguments.json.parent.mkdir(parents=True, exist_ok=True)
            self.arguments.json.write_text(json.dumps([*rows, self.figures], indent=1) + "\n")


def copied(buckets: Iterable[Any], free: Callable[[], int]) -> list[tuple[str, Any]]:
    """Returns copies of the tensors of buckets, of as many, from the first on, as have room.

    Args:
        free: returns the bytes that there are. A bucket that has no room ends it; the first is copied whatever is free.
    """
    tensors: list[tuple[str, Any]] = []
    for bucket in buckets:
        if tensors and sum(tensor.nbytes for _, tensor in bucket) > free():
            break
        tensors += [(name, tensor.clone()) for name, tensor in bucket]
    return tensors


def engine_socket(words: str) -> str:
    """Where a replica's engine listens, from what its service has logged."""
    found = re.findall(r"unix:([^\s\"]+)", "\n".join(line for line in words.splitlines() if "engine_ready" in line))
    return str(found[-1])


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
