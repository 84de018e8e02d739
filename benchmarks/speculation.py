"""What speculative decoding gives, and whether its tokens are the policy's: one model, engines that speculate and one that does not.

``python -m benchmarks.speculation [--device cuda] [--json FILE]`` makes a model with a layer that drafts (MiMo's), predictable by
construction, and starts an engine for each kind, all on one device; they are measured one after the other. FILE is written again and again
meanwhile. ``--device cpu`` does it with a tiny model. Exit code 1 with ``problems`` where something is wrong.

Figures. ``engines``: of each kind and number of requests at once ``tokens_per_s``, ``accept_length`` (tokens that a verification brought)
and ``times``, its speed over that of the engine that does not speculate. ``versions``: the policy changes with each version, pushed to the
engine over mapped memory: ``accept_length`` and ``times`` where the layers that draft stay as they were (``without``), and where those of
the new policy are pushed, as by a trainer that trains them (``with``). ``distribution``: by how many standard
deviations the counts of (place, token) of two engines differ more than those of independent samples would, over four runs of each: the
mean ``distance`` from plain decoding, and the ``floor`` that it must not pass, which is measured: the mean (``own``) of plain decoding's
distances from itself and four of its standard errors, at least 2. ``likeliest`` is the same for a verifier that takes the likeliest token
at one place, and must be above. ``logprob_diff``: of tokens as they were generated − as a prefill scores them; mean and largest of absolute
values.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.command_line import conditions
from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.engine_process import EngineProcess, FlagValue, engine_command
from services.rollout.engine.generation import Generation, GenerationRequest
from shared.config.speculation import OF_KIND
from shared.process.embedded_servers import free_port
from shared.schema.messages import Sampling
from shared.transfer.bucket_ring import bucket_views
from shared.transfer.manifest import lay_out
from shared.transfer.memory_channel import MemorySender
from tests.support.drafting_model import DraftingShape, of_policy, signs, write_drafting_model
from tests.support.two_samples import Responses, compared

SHAPES = {
    "cuda": DraftingShape(2048, 24, 16, 8, 6144, 32768, 4096, sharpness=16.0, dtype=torch.bfloat16),
    "cpu": DraftingShape(sharpness=6.0),
}
BATCHES, TOKENS, SAMPLES = {"cuda": (1, 8, 32, 64), "cpu": (1, 8)}, {"cuda": 256, "cpu": 64}, {"cuda": 4096, "cpu": 1024}
FLAGS: dict[str, dict[str, FlagValue]] = {
    "cuda": {
        **{"attention-backend": "triton", "sampling-backend": "pytorch", "grammar-backend": "none", "disable-prefill-cuda-graph": True},
        **{"mem-fraction-static": 0.5, "max-total-tokens": 65536, "max-running-requests": 64, "cuda-graph-max-bs-decode": 64},
    },
    "cpu": {},
}
FLIPPED = (0.0, 0.05, 0.1, 0.2)
"""The share of the policy's last norm whose signs each version changes."""

NEW, GROUP, SECONDS = 6, 64, 60.0
PROMPT = np.arange(5, 37, dtype=np.int32)
MEASURED = 2
RUNS = 4  # of each engine, one after another, for the test of distributions


class Measured:
    """One engine under measurement. ``kind``: of its speculation, or ``off``."""

    def __init__(self, kind: str, client: EngineClient, device: str) -> None:
        self.kind, self.client, self._device = kind, client, device
        self._pushes, self._channel = 0, MemorySender(f"speculation-{kind}", "127.0.0.1", 2, torch.device(device))
        self._joined = False

    async def generated(self, count: int, new: int, temperature: float = 1.0) -> list[Generation]:
        """Returns so many samples of ``new`` tokens, generated at once."""
        requests = [GenerationRequest(PROMPT, new, ignore_eos=True) for _ in range(count)]
        return await self.client.generate_group(requests, Sampling(temperature=temperature, max_new_tokens=new))

    async def speed(self, batch: int) -> dict[str, float]:
        """Returns tokens/s and accept length at ``batch`` requests at once, the fastest of `MEASURED`."""
        new, best, length = TOKENS[self._device], 0.0, 1.0
        await self.generated(batch, 16)
        for _ in range(MEASURED):
            began = time.monotonic()
            found = await self.generated(batch, new)
            best = max(best, batch * new / (time.monotonic() - began))
            if verifications := sum(one.verifications for one in found):
                length = sum(len(one.tokens) for one in found) / verifications
        return {"tokens_per_s": round(best, 1), "accept_length": round(length, 3)}

    async def logprob_diff(self) -> dict[str, float]:
        """Returns how far log-probs as generated are from those of a prefill of the same tokens."""
        found, differences = await self.generated(8, 64), []
        for one in found:
            whole = np.concatenate([PROMPT, one.tokens]).tolist()
            body = {"input_ids": whole, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "logprob_start_len": 0}
            answer = await self.client.transport.post("/generate", body, SECONDS, "")
            scored = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][len(PROMPT) :]]
            differences.append(np.abs(one.log_probs - np.array(scored, np.float32)))
        every = np.concatenate(differences)
        return {"mean": float(every.mean()), "max": float(every.max())}

    async def push(self, tensors: dict[str, torch.Tensor], version: int) -> None:
        """Pushes a version to the engine, as a colocated trainer does."""
        if not self._joined:
            await self.client.join_channels([self._channel.address], 1, timeout=SECONDS)
            await asyncio.to_thread(self._channel.join, SECONDS)
            self._joined = True
        self._pushes += 1
        table = [(name, str(one.dtype).removeprefix("torch."), tuple(one.shape)) for name, one in tensors.items()]
        manifest = lay_out(table, 1 << 28)

        def send() -> None:
            self._channel.announce(self._pushes, manifest, SECONDS)
            for index, bucket in enumerate(manifest.buckets):
                flat = self._channel.buffer(index, bucket.nbytes)
                for name, view in bucket_views(bucket, flat):
                    view.copy_(tensors[name])
                self._channel.send(index, flat)
            self._channel.finish()

        await self.client.begin_weight_update()
        sending = asyncio.create_task(asyncio.to_thread(send))
        await self.client.receive(version, self._pushes, [self._channel.name], deadline=SECONDS)
        await sending
        await self.client.end_weight_update()
        await self.client.set_weight_version(version)

    async def close(self) -> None:
        """Leaves the channel."""
        if self._joined:
            await self.client.leave_channels()
        self._channel.close()


class Benchmark:
    """The figures of one run, written whenever there is one more. ``options``: of the command line."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self.device = options, options.device
        self.figures: dict[str, Any] = {**conditions(), "device": self.device, "shape": str(SHAPES[self.device]), "engines": {}}
        self.figures |= {"versions": [], "distribution": {}, "logprob_diff": {}, "problems": []}

    def write(self) -> None:
        """Writes the figures."""
        if self._options.json is not None:
            self._options.json.write_text(json.dumps(self.figures, indent=2) + "\n")

    async def run(self, directory: Path) -> None:
        """Starts the engines and measures them."""
        kinds, flags = ("off", *self._options.kinds), FLAGS[self.device]
        tensors = await asyncio.to_thread(write_drafting_model, directory / "model", SHAPES[self.device], self.device)
        own: FlagValue = str(directory / "model")
        of_kind: dict[str, dict[str, FlagValue]] = {kind: dict(OF_KIND[kind]) for kind in kinds[1:]}
        async with AsyncExitStack() as stack:
            processes: dict[str, EngineProcess] = {}
            for kind in kinds:
                given = flags | of_kind.get(kind, {}) | ({"speculative-draft-model-path": own} if kind == "mtp" else {})
                command = engine_command(directory / "model", free_port(), device=self.device, random_seed=1, flags=given)
                processes[kind] = EngineProcess(command, self._options.log.with_suffix(f".{kind}.log"))
                stack.callback(processes[kind].stop, 0)
            engines: dict[str, Measured] = {}
            for kind, process in processes.items():
                try:
                    self.figures["engines"][kind] = {"start_seconds": round(await process.ready(self._options.start_seconds), 1)}
                    client = await stack.enter_async_context(await EngineClient.connect(process.receiver))
                    await client.open_receivers()
                    engines[kind] = Measured(kind, client, self.device)
                    stack.push_async_callback(engines[kind].close)
                except Exception as error:
                    self.figures["problems"].append(f"{kind}: {error}: {process.last_lines()[-1:]}")
                self.write()
            await self._measure(engines, tensors)

    async def _measure(self, engines: dict[str, Measured], tensors: dict[str, torch.Tensor]) -> None:
        figures = self.figures
        for batch in BATCHES[self.device]:
            for kind, engine in engines.items():
                found = await engine.speed(batch)
                figures["engines"][kind][f"{batch}"] = found
                found["times"] = round(found["tokens_per_s"] / figures["engines"]["off"][f"{batch}"]["tokens_per_s"], 3)
                self.write()
        runs: dict[str, list[Responses]] = {kind: [] for kind in engines}
        for _ in range(RUNS):  # by turns, so that what drifts does so in all of them
            for kind, engine in engines.items():
                rows = [one for _ in range(SAMPLES[self.device] // RUNS // GROUP) for one in await engine.generated(GROUP, NEW)]
                runs[kind].append([one.tokens.tolist() for one in rows])
        likeliest = Counter(row[1] for row in runs["off"][0]).most_common(1)[0][0]
        runs["likeliest"] = [[row for row in rows if row[1] == likeliest] for rows in runs["off"]]
        for kind in [kind for kind in runs if kind != "off"]:
            found_now = compared(runs["off"], runs[kind], NEW)
            figures["distribution"][kind] = {name: round(value, 2) for name, value in found_now._asdict().items()}
            if found_now.differs != (kind == "likeliest"):
                figures["problems"].append(f"{kind}: {found_now} from plain decoding")
        for kind, engine in engines.items():
            figures["logprob_diff"][kind] = await engine.logprob_diff()
        self.write()
        if "mtp" in engines:
            await self._versions(engines["mtp"], tensors)
        self.write()

    async def _versions(self, engine: Measured, tensors: dict[str, torch.Tensor]) -> None:
        shape, batch, version = SHAPES[self.device], BATCHES[self.device][1], 0
        plain = self.figures["engines"]["off"][f"{batch}"]["tokens_per_s"]
        old = signs(shape, 0.0)
        for flipped in FLIPPED:
            new, row = signs(shape, flipped), dict[str, Any](flipped=flipped)
            for name, draft in (("without", old), ("with", new)):
                version += 1
                began = time.monotonic()
                await engine.push(of_policy(tensors, new, draft), version)
                pushed = round(time.monotonic() - began, 2)
                found = await engine.speed(batch)
                row |= {name: {**found, "times": round(found["tokens_per_s"] / plain, 3), "push_seconds": pushed}}
            self.figures["versions"].append(row)
            self.write()
        last = self.figures["versions"][-1]
        if last["with"]["accept_length"] <= last["without"]["accept_length"]:
            self.figures["problems"].append("a draft that was pushed is accepted no more often than one that was not")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(SHAPES), default="cuda", help="of the engines")
    parser.add_argument("--kinds", nargs="*", choices=("mtp", "ngram"), default=["mtp", "ngram"], help="of speculation")
    parser.add_argument("--start-seconds", type=float, default=280, help="for the engines")
    parser.add_argument("--log", type=Path, default=Path("speculation.log"), help="the engines', with their kinds in the name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    found = Benchmark(options)
    with tempfile.TemporaryDirectory() as directory:
        try:
            asyncio.run(found.run(Path(directory)))
        except Exception as error:
            found.figures["problems"].append(f"{type(error).__name__}: {error}")
            found.write()
            raise
    print(json.dumps(found.figures, indent=2))
    return int(bool(found.figures["problems"]))


if __name__ == "__main__":
    raise SystemExit(main())
