"""How fast weights get from a trainer to SGLang engines, beside what the wire can do and beside slime's way, all in one run.

``python -m benchmarks.weight_push [--gpus N] [--bucket-mib M] [--rounds N] [--json FILE]`` pushes a model of Qwen3-4B's shape in bfloat16,
8.04 GB of random weights, from Megatron-Core through the real pusher, bus and rollout services. Two GPUs: one trainer rank, one engine;
four: tensor parallelism of 2 and two engines. ``--device cpu``, on a small model, shows that the command works, nothing about speed.

Columns. ``seconds``: from the first bucket's export until every engine has loaded all of it and checked its digest; ``push_seconds``: from
the offer to the last commit. ``raw``: NCCL broadcasts of 1 GiB between GPUs of the same kind. ``slime's way``: buckets of 512 MiB, one
broadcast a tensor, one request to the engine a bucket. ``stall``: that a training step, begun with the push, waits for it before its
optimizer may change the weights. ``generation``: 32 generations that run through a push; the longest gap between two of their tokens.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.page_table import put_table
from benchmarks.trainer_mfu import SHAPE, micro_batch
from services.rollout.engine.engine_process import UnixConnection

RESULTS = Path(__file__).parent / "results" / "weight_push.json"
PAGE = Path(__file__).parents[1] / "docs" / "weights.md"
SLIME_BUCKET = 512 * 2**20
RAW_BYTES, RAW_TIMES = 2**30, 8
GENERATIONS, GENERATED = 32, 1500
START_SECONDS = 300
DIRECTORY = "WEIGHT_PUSH_DIRECTORY"
TORCHRUN = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
SMALL = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ENGINE_FLAGS = {
    "load-format": "dummy",
    "attention-backend": "triton",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "mem-fraction-static": 0.4,
    "cuda-graph-max-bs-decode": 32,
    "disable-prefill-cuda-graph": True,
}


def main() -> int:
    """The command line; as a rank under torchrun, the work itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, choices=(2, 4), default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--bucket-mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path, help=f"write the figures there; the repository's are in {RESULTS}")
    parser.add_argument("--write", action="store_true", help="put the figures of RESULTS into the docs; nothing is measured")
    parser.add_argument("--trace", type=Path, help="write a profile of one push there")
    arguments = parser.parse_args()
    if arguments.write:
        put_table(PAGE, "weight_push", table(json.loads(RESULTS.read_text())))
        return 0
    if "RANK" in os.environ:
        Bench(arguments).run()
        return 0
    from services.trainer.torchrun import run_ranks

    if arguments.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory(prefix="weight-push-") as directory:
        os.environ |= {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1", DIRECTORY: directory}
        run_ranks(arguments.gpus // 2, "benchmarks.weight_push", *sys.argv[1:])
    return 0


class Bench:
    """One trainer rank; rank 0 measures."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.rank = arguments, int(os.environ["RANK"])
        self.ranks = self.engines = arguments.gpus // 2
        self.on_gpu = arguments.device == "cuda"
        self.figures: dict[str, Any] = {}
        self.with_steps = 2 + arguments.rounds
        """From this version on, for as many rounds, a training step begins with the push."""

    def run(self) -> None:
        directory = Path(os.environ[DIRECTORY])
        model = directory / f"model-{self.rank}"
        self._write_model(model)
        if self.rank:
            self._with_trainer(model, None)
            return
        stage = self._stage(directory, model)
        own = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(TORCHRUN)}  # not for the engines
        with stage:
            os.environ |= own
            self._with_trainer(model, stage)

    # --- what is measured

    def _with_trainer(self, model: Path, stage: Any) -> None:
        from services.trainer.actor import Actor
        from services.trainer.commands import CommandBroadcast, Leave, Push
        from services.trainer.trainer_settings import TrainerSettings
        from services.trainer.weights.pusher import Pusher
        from shared.config.trainer_section import TrainerSection
        from shared.config.weights_section import WeightsSection

        weights = WeightsSection(update_weight_buffer_size=self.arguments.bucket_mib * 2**20, push_timeout=60)
        trainer = TrainerSection(lr=1e-6, tensor_model_parallel_size=self.ranks, collective_timeout=300)
        actor = Actor.create(TrainerSettings(trainer), model, random=True)
        pusher = Pusher(stage.link if stage is not None else None, actor.model, weights)
        channel = CommandBroadcast(600)
        if stage is None:
            while isinstance(order := channel.receive(), Push):
                self._begin(actor, pusher, order)
                pusher.wait()
            return
        stage.until("every engine", lambda cards: len(cards) == self.engines, START_SECONDS)
        log(f"{self.engines} engines are up")
        self._push(actor, pusher, channel, 0)  # makes the channels, traces how the engines load
        self._push(actor, pusher, channel, 1)
        plain = [self._push(actor, pusher, channel, version) for version in range(2, self.with_steps)]
        stepped = [self._push(actor, pusher, channel, self.with_steps + number) for number in range(self.arguments.rounds)]
        best = min(plain, key=lambda result: result.wire_seconds)
        self.figures |= {
            "gpus": self.arguments.gpus,
            "layout": f"TP{self.ranks}, {self.engines} engine{'s' if self.engines > 1 else ''}",
            "bytes": best.bytes,
            "seconds": round(best.wire_seconds, 5),
            "median_seconds": round(statistics.median(result.wire_seconds for result in plain), 5),
            "engine_seconds": round(best.engine_seconds, 5),
            "push_seconds": round(statistics.median(result.seconds for result in plain), 5),
            "gb_per_s": round(best.bytes / best.wire_seconds / 1e9, 1),
            "stall_seconds": round(statistics.median(result.stall for result in stepped), 5),
            "bucket_bytes": weights.update_weight_buffer_size,
        }
        log(json.dumps(self.figures))
        if self.arguments.trace is not None and self.on_gpu:
            self._profiled(actor, pusher, channel, 2 + 2 * self.arguments.rounds)
        engines = [engine_socket(process.words()) for process in stage.replicas.values()]
        if self.on_gpu:
            self.figures |= self._generation(engines[0], lambda: self._push(actor, pusher, channel, 4 + 2 * self.arguments.rounds))
            log(json.dumps(self.figures))
        pusher.wait()
        channel.send(Leave(done=True))
        if self.on_gpu:
            alone = self.ranks == 1  # slime's way is measured without the gathering over ranks, which it does first
            self._tell()  # what there is so far, should what follows fail
            tensors = [(name, tensor.clone()) for bucket in actor.export(SLIME_BUCKET) for name, tensor in bucket] if alone else []
            pusher.close()
            if tensors:
                self.figures["slime_way_gb_per_s"] = round(slime_way(engines[0], tensors), 1)
            self.figures["raw_gb_per_s"] = round(raw(self.ranks), 1)
            import torch

            self.figures |= {
                "of_raw": round(self.figures["gb_per_s"] / self.figures["raw_gb_per_s"], 3),
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
            }
        self._tell()

    def _push(self, actor: Any, pusher: Any, channel: Any, version: int) -> Any:
        """One push."""
        end = time.monotonic() + 120
        while (push := pusher.due(version)) is None:
            if time.monotonic() > end:
                raise SystemExit(f"no replica took version {version} within 120 s")
            time.sleep(0.05)
        channel.send(push)
        self._begin(actor, pusher, push)
        pusher.wait()
        results = pusher.results()
        if not results or len(results[-1].replicas) != self.engines:
            raise SystemExit(f"the push of version {version} failed: {results}")
        last = results[-1]
        log(f"version {version}: {last.seconds:.4f} s, wire {last.wire_seconds:.4f}, engine {last.engine_seconds:.4f}")
        return last

    def _begin(self, actor: Any, pusher: Any, push: Any) -> None:
        """The optimizer's update of the step before is over: a push waits for it on the device."""
        if self.on_gpu:
            import torch

            torch.cuda.synchronize()
        pusher.begin(push)
        if 0 <= push.version - self.with_steps < self.arguments.rounds:
            self._step(actor)

    def _step(self, actor: Any) -> None:
        from services.trainer.objective.loss import PolicyLoss
        from shared.config.algorithm import AlgorithmSection

        if self.on_gpu:  # the batch is of the large model's vocabulary
            actor.train_step([micro_batch(2048, 0)], PolicyLoss(AlgorithmSection()))

    def _profiled(self, actor: Any, pusher: Any, channel: Any, version: int) -> None:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            self._push(actor, pusher, channel, version)
        print(profiled.key_averages().table(sort_by="cuda_time_total", row_limit=15, max_name_column_width=60), flush=True)
        profiled.export_chrome_trace(str(self.arguments.trace))

    def _generation(self, engine: str, push: Any) -> dict[str, Any]:
        """Runs generations through a push."""
        times: list[list[float]] = [[] for _ in range(GENERATIONS)]
        finished: list[str] = []

        async def one(session: Any, number: int) -> None:
            prompt = [random.randrange(1000) for _ in range(64)]
            sampling = {"max_new_tokens": GENERATED, "temperature": 1.0, "ignore_eos": True}
            async with session.post(
                "http://engine/generate", json={"input_ids": prompt, "sampling_params": sampling, "stream": True}
            ) as answer:
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        times[number].append(time.monotonic())
                        said = json.loads(line[6:])
                finished.append(said["meta_info"]["finish_reason"]["type"])

        async def all_of_them() -> None:
            import aiohttp

            connector, timeout = aiohttp.UnixConnector(engine), aiohttp.ClientTimeout(300)
            async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2**24) as session:
                await asyncio.gather(*(one(session, number) for number in range(GENERATIONS)))

        running = threading.Thread(target=lambda: asyncio.run(all_of_them()))
        running.start()
        while not all(len(one) > 100 for one in times):
            time.sleep(0.05)
        began = time.monotonic()
        result = push()
        ended = time.monotonic()
        running.join(300)
        gaps = [b - a for one in times for a, b in pairwise(one) if began - 0.5 < b < ended + 2]
        usual = statistics.median(b - a for one in times for a, b in pairwise(one))
        return {
            "generations": GENERATIONS,
            "generations_finished": finished.count("length"),
            "generation_stall_seconds": round(max(gaps), 5),
            "generation_token_seconds": round(usual, 5),
            "generation_push_seconds": round(result.seconds, 5),
            "generation_stall_of_push": round(max(gaps) / result.seconds, 2),
        }

    # --- what it takes

    def _stage(self, directory: Path, model: Path) -> Any:
        from tests.support.pushing import Replicated

        device = {"rollout_device": self.arguments.device}
        flags = ENGINE_FLAGS if self.on_gpu else {"load-format": "dummy"}
        return Replicated(
            directory / "run",
            model,
            replicas=self.engines,
            environment=lambda number: {"CUDA_VISIBLE_DEVICES": str(self.ranks + number)} if self.on_gpu else {},
            rollout={**device, "sglang": flags, "max_staleness": 1},
            trainer={"train_device": self.arguments.device},
        )

    def _write_model(self, model: Path) -> None:
        from tests.support.tiny_model import character_tokenizer

        model.mkdir()
        character_tokenizer().save_pretrained(model)
        shape = {**SHAPE, **({} if self.on_gpu else SMALL), "architectures": ["Qwen3ForCausalLM"], "torch_dtype": "bfloat16"}
        (model / "config.json").write_text(json.dumps(shape))

    def _tell(self) -> None:
        print(table([self.figures]))
        if self.arguments.json is not None:
            rows = json.loads(self.arguments.json.read_text()) if self.arguments.json.is_file() else []
            key = (self.figures["gpus"], self.figures["layout"])
            rows = [row for row in rows if (row["gpus"], row["layout"]) != key]
            self.arguments.json.parent.mkdir(parents=True, exist_ok=True)
            self.arguments.json.write_text(json.dumps([*rows, self.figures], indent=1) + "\n")


def slime_way(engine: str, tensors: list[tuple[str, Any]], rounds: int = 5) -> float:
    """GB/s of the best round: buckets of 512 MiB, each announced to the engine, one broadcast a tensor."""
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore
    from torch.distributed.distributed_c10d import _new_process_group_helper, _world

    minute = timedelta(seconds=60)
    store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    place = {"master_address": "127.0.0.1", "master_port": store.port, "rank_offset": 1, "world_size": 2}
    joined = in_thread(post, engine, "/init_weights_update_group", {**place, "group_name": "plain", "backend": "nccl"})
    group, _ = _new_process_group_helper(2, 0, [], dist.Backend("nccl"), PrefixStore("plain", store), group_name="plain", timeout=minute)
    _world.pg_group_ranks[group] = {0: 0, 1: 1}
    joined.join(60)
    buckets, size = [[]], 0
    for name, tensor in tensors:
        if buckets[-1] and size + tensor.nbytes > SLIME_BUCKET:
            buckets.append([])
            size = 0
        buckets[-1].append((name, tensor))
        size += tensor.nbytes
    post(engine, "/pause_generation", {"mode": "in_place"})
    seconds = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for bucket in buckets:
            request = {
                "names": [name for name, _ in bucket],
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                "shapes": [list(tensor.shape) for _, tensor in bucket],
                "group_name": "plain",
                "flush_cache": False,
            }
            told = in_thread(post, engine, "/update_weights_from_distributed", request)
            works = [dist.broadcast(tensor, 0, group=group, async_op=True) for _, tensor in bucket]
            for work in works:
                work.wait()
            told.join(60)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    post(engine, "/continue_generation", {})
    return sum(tensor.nbytes for _, tensor in tensors) / min(seconds) / 1e9


def raw(peer: int) -> float:
    """GB/s of NCCL broadcasts of 1 GiB from GPU 0 to GPU ``peer``: the wire's limit here."""
    import torch
    import torch.multiprocessing as mp

    receiver = mp.get_context("spawn").Queue()
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(_raw_rank, args=(f"{directory}/store", (0, peer), receiver), nprocs=2, join=True)
    del torch
    return float(receiver.get())


def _raw_rank(rank: int, store: str, gpus: tuple[int, int], answer: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(gpus[rank])
    dist.init_process_group("nccl", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    flat = torch.empty(RAW_BYTES, dtype=torch.uint8, device="cuda")
    best = float("inf")
    for _ in range(6):
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(RAW_TIMES):
            dist.broadcast(flat, 0)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    if rank == 0:
        answer.put(RAW_BYTES * RAW_TIMES / best / 1e9)
    dist.destroy_process_group()


def engine_socket(words: str) -> str:
    """Where a replica's engine listens, from what its service has logged."""
    found = re.findall(r"unix:([^\s\"]+)", "\n".join(line for line in words.splitlines() if "engine_ready" in line))
    return str(found[-1])


def post(engine: str, path: str, body: Any) -> Any:
    connection = UnixConnection(Path(engine), 60)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return json.loads(connection.getresponse().read() or b"{}")


def in_thread(work: Any, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments)
    thread.start()
    return thread


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    """The figures as a table, the limit beside them."""

    def cells(row: dict[str, Any]) -> Iterator[str]:
        yield str(row["gpus"])
        yield row["layout"]
        yield f"{row['bytes'] / 1e9:.2f}"
        yield f"{row['seconds']:.4f} ({row['median_seconds']:.4f})"
        yield f"{row['gb_per_s']:.0f}"
        yield f"{row['engine_seconds']:.4f}"
        yield f"{row['bytes'] / row['engine_seconds'] / 1e9:.0f}"
        yield str(row.get("raw_gb_per_s", "–"))
        yield str(row.get("slime_way_gb_per_s", "–"))
        yield f"{row['stall_seconds']:.4f} s"
        gap, share = row.get("generation_stall_seconds"), row.get("generation_stall_of_push")
        yield "–" if gap is None else f"{gap:.3f} s ({share} of the push)"

    def lines() -> Iterator[str]:
        heads = ["GPUs", "layout", "GB", "seconds (median)", "GB/s", "engine: seconds", "GB/s", "raw GB/s", "slime's way GB/s", "stall"]
        heads.append("generation's gap")
        yield "| " + " | ".join(heads) + " |"
        yield "|---" * len(heads) + "|"
        for row in rows:
            yield "| " + " | ".join(cells(row)) + " |"

    return "\n".join(lines())


if __name__ == "__main__":
    sys.exit(main())
