r"""The training endpoint beside a Myxo run that does the same: tokens/s and seconds of a step, LoRA, importance sampling.

On two GPUs, of which trainer and engine have one each, or on one, which they share::

    python -m benchmarks.tinker_endpoint --json FILE

First ``myxo serve`` and a client that speaks the SDK's protocol, with a loop like the cookbook's: save weights for a sampler, sample all
groups at once, one forward_backward in chunks as the SDK cuts them, one optim_step. With ``--clients N`` as many clients at once, which
share trainer and engine. Then a run under ``myxo up`` at staleness 0, pushes of adapters. FILE is written after each part.

Figures. Step: from one step's end to the next one's. ``tokens_per_s``: of responses. A client's parts: ``save``, ``sample``, ``train``
(forward, backward and optimizer step), seconds. ``gpu_busy``: each GPU's share of that time in which a kernel ran.
"""

import argparse
import asyncio
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.command_line import write
from benchmarks.end_to_end.gpu_watch import GpuWatch
from benchmarks.end_to_end.length_distribution import LengthDistribution, rows
from benchmarks.end_to_end.model_shapes import SIZES, config_of, write_checkpoint
from benchmarks.end_to_end.whole_run import RunPlan, measured
from services.gateway.tinker.command_book import KEY_VARIABLE
from services.gateway.tinker.requests import MESSAGES
from shared.config import devices
from shared.process.child_process import with_parent

ROOT = Path(__file__).parents[1]
KEY = "tml-key-of-a-benchmark-alone"
RANK, PROMPT_TOKENS, CHUNK_BYTES, CHUNK_DATUMS = 32, 64, 5_000_000, 128
KERNELS = {"attention-backend": "triton", "sampling-backend": "pytorch", "grammar-backend": "none"}
SHARED = {"mem-fraction-static": "0.3"}  # of an engine that shares its GPU with the trainer
TOKENS = 8192  # of a micro-batch, by which the trainer of either has room beside it
START_SECONDS, END_SECONDS = 240.0, 60.0


class Client:
    """One client, by the protocol of the SDK."""

    def __init__(self, http: aiohttp.ClientSession, url: str, session: str, model: str) -> None:
        self._http, self._url, self._session, self._model, self._number = http, f"{url}/api/v1", session, model, 0

    @classmethod
    async def create(cls, http: aiohttp.ClientSession, url: str, base: str) -> "Client":
        self = cls(http, url, "", "")
        self._session = (await self._post("create_session", {}))["session_id"]
        lora = {"base_model": base, "lora_config": {"rank": RANK, "seed": 1}}
        self._model = (await self._post("create_model", {"session_id": self._session, "model_seq_id": 0, **lora}))["model_id"]
        await self._result(f"{self._model}/0")
        return self

    async def _post(self, path: str, body: Any) -> Any:
        kind = {"data": body, "headers": {"Content-Type": "application/x-protobuf"}} if isinstance(body, bytes) else {"json": body}
        async with self._http.post(f"{self._url}/{path}", **kind) as answer:
            found = await answer.json()
            assert answer.status == 200, found
            return found

    async def _result(self, request: str) -> Any:
        while True:
            async with self._http.post(f"{self._url}/retrieve_future", json={"request_id": request}) as answer:
                if answer.status == 408:
                    continue
                if answer.content_type == "application/json":
                    found = await answer.json()
                    assert "error" not in found, found
                    return found
                return await answer.read()

    async def _command(self, path: str, **body: Any) -> Any:
        self._number += 1
        number = {"model_id": self._model, "seq_id": self._number}
        return (await self._post(path, {**body, **number}))["request_id"]

    async def save(self, step: int) -> str:
        """Returns a sampler of the weights as they are."""
        request = await self._command("save_weights_for_sampler", sampling_session_seq_id=step)
        return str((await self._result(request))["sampling_session_id"])

    async def sample(self, sampler: str, number: int, prompt: list[int], count: int, sampling: dict[str, Any]) -> list[tuple[Any, Any]]:
        """Returns tokens and log-probs of a prompt's samples."""
        asked = {"prompt": {"chunks": [{"tokens": prompt}]}, "num_samples": count, "sampling_params": sampling}
        found = await self._post("asample", {"sampling_session_id": sampler, "seq_id": number, **asked})
        answer = MESSAGES["SampleResponse"].FromString(await self._result(found["request_id"]))
        return [(np.frombuffer(one.tokens, "<i4"), np.frombuffer(one.logprobs, "<f4")) for one in answer.sequences]

    async def train(self, data: list[Any]) -> None:
        """Takes an optimizer step on datums, in chunks."""
        requests = []
        for begin in range(0, len(data), CHUNK_DATUMS):
            self._number += 1
            message = MESSAGES["ForwardBackwardRequest"](model_id=self._model, seq_id=self._number, loss_fn="importance_sampling")
            message.data.extend(data[begin : begin + CHUNK_DATUMS])
            requests.append((await self._post("forward_backward", message.SerializeToString()))["request_id"])
        requests.append(await self._command("optim_step", adam_params={"learning_rate": 1e-9, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}))
        await asyncio.gather(*map(self._result, requests))


def datum(prompt: list[int], tokens: Any, log_probs: Any, advantage: float) -> Any:
    """A sample as the cookbook's loop trains it."""
    before, text = len(prompt) - 1, np.concatenate([prompt, tokens[:-1]]).astype("<i4")
    inputs = {
        "target_tokens": np.concatenate([np.zeros(before), tokens]).astype("<i8"),
        "logprobs": np.concatenate([np.zeros(before), log_probs]).astype("<f4"),
        "advantages": np.concatenate([np.zeros(before), np.full(len(tokens), advantage)]).astype("<f4"),
    }
    given = [
        {"key": name, "value": {"dense": v.tobytes(), "dtype": 2 if v.dtype == "<i8" else 1, "shape": [len(v)]}}
        for name, v in inputs.items()
    ]
    return MESSAGES["Datum"](model_input=[{"encoded_text": {"tokens": text.tobytes()}}], loss_fn_inputs=given)


async def looped(client: Client, options: argparse.Namespace, stops: list[int], end: float) -> list[dict[str, float]]:
    """Returns seconds and tokens of each step of one client."""
    rng, found = np.random.default_rng(id(client)), []
    sampling = {"max_tokens": options.cap, "temperature": 1.0, "stop": stops}
    for step in range(options.steps):
        if time.monotonic() > end:
            break
        began = time.monotonic()
        sampler = await client.save(step)
        saved = time.monotonic()
        vocabulary = config_of(options.shape, "float32")["vocab_size"]
        prompts = [rng.integers(3, vocabulary, PROMPT_TOKENS).tolist() for _ in range(options.batch)]
        groups = await asyncio.gather(
            *(client.sample(sampler, number, prompt, options.samples, sampling) for number, prompt in enumerate(prompts))
        )
        sampled = time.monotonic()
        data = [datum(prompt, *one, float(rng.normal())) for prompt, group in zip(prompts, groups, strict=True) for one in group]
        await client.train(data)
        parts = {"save": saved - began, "sample": sampled - saved, "train": time.monotonic() - sampled}
        tokens = float(sum(len(one[0]) for group in groups for one in group))
        found.append({"seconds": time.monotonic() - began, "tokens": tokens, **parts})
        print({name: round(value, 3) for name, value in found[-1].items()}, file=sys.stderr, flush=True)
    return found


async def served(url: str, base: str, options: argparse.Namespace, stops: list[int], clients: int) -> dict[str, Any]:
    """Returns the figures of clients at once; the first two steps are left out."""
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(headers={"X-Api-Key": KEY}, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        made = [await Client.create(http, url, base) for _ in range(clients)]
        watch, began, end = GpuWatch(options.gpus).start(), time.time(), time.monotonic() + options.seconds
        found = [steps[2:] for steps in await asyncio.gather(*(looped(client, options, stops, end) for client in made))]
        watch.stop()
    every = [step for steps in found for step in steps]
    if not every:
        return {"clients": clients, "problem": f"no step after the first two within {options.seconds:g} s"}
    middle = {name: round(statistics.median(step[name] for step in every), 4) for name in every[0]}
    rate = sum(sum(step["tokens"] for step in steps) / sum(step["seconds"] for step in steps) for steps in found if steps)
    return {"clients": clients, "steps": len(every), "tokens_per_s": round(rate, 1), **middle, "gpu_busy": watch.busy(began, time.time())}


def endpoint(options: argparse.Namespace, directory: Path, model: Path, keep: Any) -> None:
    """Starts the endpoint, and measures its clients."""
    dtype = "bfloat16" if options.device == "cuda" else "float32"
    lines = [
        '[run]\nname = "served"', f'dir = "{directory}/s"', f'[model]\nhf_checkpoint = "{model}"', "[console]\nconsole = false",
        f'[rollout]\nrollout_device = "{options.device}"', f'[rollout.sglang]\ndtype = "{dtype}"',
        *(f'{name} = "{value}"' for name, value in options.kernels.items()),
        f'[trainer]\nmax_tokens_per_gpu = {TOKENS}',
        f'train_device = "{options.device}"\ntrain_dtype = "{dtype}"\nlora_rank = {RANK}\nlora_alpha = {RANK}',
    ]  # fmt: skip
    (directory / "serve.toml").write_text("\n".join(lines) + "\n")
    command = with_parent([sys.executable, "-m", "myxo.main", "serve", str(directory / "serve.toml"), "--fresh"])
    output = directory / "served.out"
    stops = LengthDistribution.parse(f"geometric:{options.mean}", options.cap).stop_tokens(config_of(options.shape, dtype)["vocab_size"], 3)
    with (
        output.open("wb") as file,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, KEY_VARIABLE: KEY},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        ) as process,
    ):
        try:
            end = time.monotonic() + START_SECONDS
            while not (found := re.search(r"TINKER_BASE_URL=(\S+)", output.read_text())):
                if process.poll() is not None or time.monotonic() > end:
                    return keep({"problem": output.read_text()[-2000:]})
                time.sleep(0.2)
            for clients in options.clients:
                keep(asyncio.run(served(found[1], str(model), options, stops, clients)))
        finally:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SIZES), default="0.6b", help="of the model (default 0.6b)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of trainer and engine (default cuda)")
    for name, default, words in (
        ("mean", 128, "tokens of a response"), ("cap", 384, "tokens of the longest response"), ("batch", 16, "groups of a step"),
        ("samples", 8, "samples of a group"), ("steps", 8, "of each part"), ("seconds", 20, "for one part's steps"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{words} (default {default})")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2], metavar="N", help="at once, one part each (default 1 2)")
    parser.add_argument("--skip-run", action="store_true", help="measure the endpoint alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    options.gpus = list(dict.fromkeys(devices.visible_gpus()[:2])) if options.device == "cuda" else []
    options.kernels = (KERNELS | SHARED if len(options.gpus) == 1 else KERNELS) if options.gpus else {}
    given = options.gpus * 2 if len(options.gpus) == 1 else options.gpus  # trainer and engine have the first two that are listed
    if given:
        os.environ[devices.VISIBLE] = ",".join(given)
    names = ("shape", "device", "mean", "cap", "batch", "samples", "gpus")
    found: dict[str, Any] = {**{name: getattr(options, name) for name in names}, "rank": RANK, "run": None, "served": []}
    dtype = "bfloat16" if options.device == "cuda" else "float32"

    def keep(figures: dict[str, Any]) -> None:
        found["served"].append(figures)
        write(options.json, found)

    with tempfile.TemporaryDirectory(prefix="mx-") as name:
        directory, lengths = Path(name), LengthDistribution.parse(f"geometric:{options.mean}", options.cap)
        model, prompts, vocabulary = directory / "model", directory / "prompts.jsonl", config_of(options.shape, dtype)["vocab_size"]
        write_checkpoint(model, options.shape, dtype)
        prompts.write_text("".join(rows(lengths, 4096, options.samples, PROMPT_TOKENS, vocabulary, seed=0)))
        flags = (
            *("--rollout-device", options.device, "--train-device", options.device, "--train-dtype", dtype, "--sglang-dtype", dtype),
            *(word for key, value in options.kernels.items() for word in (f"--sglang-{key}", value)),
            *("--max-tokens-per-gpu", str(TOKENS)),
            *("--rollout-batch-size", str(options.batch), "--n-samples-per-prompt", str(options.samples)),
            *("--rollout-max-response-len", str(options.cap), "--lora-rank", str(RANK), "--lora-alpha", str(RANK)),
            *("--rollout-stop-token-ids", *map(str, lengths.stop_tokens(vocabulary, 3))),
        )
        endpoint(options, directory, model, keep)
        if not options.skip_run:
            own = (START_SECONDS, options.seconds, max(1, len(options.gpus)), tuple(given))
            found["run"] = measured(RunPlan(directory / "r", model, prompts, flags, options.steps, 2, *own), "run", 0)
            write(options.json, found)
    print(found)
    return int(any("problem" in figures for figures in found["served"]) or not found["served"])


if __name__ == "__main__":
    sys.exit(main())
