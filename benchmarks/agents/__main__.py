r"""What agents cost, on this machine, from one command: ``python -m benchmarks.agents --json benchmarks/results/agents.json``.

On one GPU, with engines of the shape of Qwen3-0.6B::

    python -m benchmarks.agents --device cuda --shape 0.6B --sessions 128 --crowd 512 --turns 4 --tokens 256 --crowd-tokens 128 \
        --gateways 4 --agent-workers 8 --at-once 32 --json benchmarks/results/agents_gpu.json

and for sessions that do not all fit::

    python -m benchmarks.agents --device cuda --shape 0.6B --parts oversubscribe --sessions 24 --turns 10 --opening 8000 --further 256 \
        --tokens 32 --json benchmarks/results/agents_oversubscribe_gpu.json

Every service is the real one, in a process of its own, in a run that trains nothing. Parts (``--parts``):

- ``pace``: tokens per second of conversations by the engine alone, by a replica's door and through a gateway (goal: `PACE` of the engine);
- ``prefixes``: tokens per second and prompt tokens computed, with and without prefix cache and session affinity, over ``--replicas``;
- ``overhead``: what one gateway adds to a request, by format, with short conversations and with 20 turns of 8,000 tokens;
- ``oversubscribe``: tokens per second of conversations that have ``--oversubscribe`` times as many tokens as one engine keeps, request by
  request at its door and session by session through a gateway (goal: `OVERSUBSCRIBED` times as many);
- ``crowd``: ``--crowd`` sessions at once by `openai`'s client, over the whole way: refusals, lost sessions, memory, and whose CPU it takes.

Exit code 1 where a goal is missed: the pace by token ids, a lost session, a refusal that does not say when to come back.
"""

import argparse
import asyncio
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.agents.crowd import crowded
from benchmarks.agents.figures import misses, tables
from benchmarks.agents.model import SHAPES, write_model
from benchmarks.agents.overhead import by_format
from benchmarks.agents.pace import Load, compared, oversubscribed, prefilled
from benchmarks.agents.site import Machine, run_config, site
from shared.data.tokenizer import Tokenizer
from shared.runtime.telemetry import silence_logs

PARTS = ("pace", "prefixes", "overhead", "oversubscribe", "crowd")


def main() -> int:
    """The command line. Returns the exit code."""
    options = _parser().parse_args()
    silence_logs()
    figures = asyncio.run(measure(options))
    for table in tables(figures):
        Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    for missed in (found := misses(figures)):
        print(f"missed: {missed}", file=sys.stderr)
    return int(bool(found))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what is measured (default: all)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the engines (default cpu)")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="GPUs that the engines share, in turn (default 1)")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint with a chat template; default: random weights of --shape")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="tiny", help="of the model where none is given (default tiny)")
    parser.add_argument("--dtype", help="of the engines (default float32 on a CPU, else bfloat16)")
    parser.add_argument("--sessions", type=int, default=16, metavar="N", help="at once, for pace and prefixes (default 16)")
    parser.add_argument("--crowd", type=int, default=512, metavar="N", help="sessions at once of the crowd (default 512)")
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="of a conversation (default 3)")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="drawn in a turn, in the mean (default 128)")
    parser.add_argument("--crowd-tokens", type=int, default=16, metavar="N", help="drawn in each turn of the crowd (default 16)")
    parser.add_argument("--opening", type=int, default=256, metavar="N", help="tokens of the first message (default 256)")
    parser.add_argument("--further", type=int, default=32, metavar="N", help="tokens of each other message (default 32)")
    parser.add_argument("--oversubscribe", type=float, default=2.0, metavar="F", help="conversations' tokens over those kept (default 2)")
    parser.add_argument("--replicas", type=int, default=2, metavar="N", help="of prefixes and crowd (default 2)")
    parser.add_argument("--gateways", type=int, default=1, metavar="N", help="of the crowd (default 1); the other parts have one")
    parser.add_argument("--agent-workers", type=int, metavar="N", help="processes for agents of each replica (default: the run's)")
    parser.add_argument("--requests", type=int, default=120, metavar="N", help="of each figure of overhead, about (default 120)")
    parser.add_argument("--at-once", type=int, default=8, metavar="N", help="conversations at once of overhead's second figure (default 8)")
    parser.add_argument("--repetitions", type=int, default=5, metavar="N", help="of pace; of prefixes half as many (default 5)")
    parser.add_argument("--sglang", nargs="*", type=_flag, default=[], metavar="FLAG=VALUE", help="flags of the engines")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    return parser


def _flag(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text}: FLAG=VALUE, as in attention-backend=triton")
    return name, value


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of the parts that are asked for, and what they were measured on."""
    dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    machine = Machine(options.device, options.gpus, dtype, dict(options.sglang))
    found: dict[str, Any] = {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{len(os.sched_getaffinity(0))} cores",
        "device": f"{machine.device}, {machine.dtype}",
        "model": str(options.model) if options.model else f"random weights, {options.shape}",
        "packages": {name: importlib.metadata.version(name) for name in ("sglang", "openai")},
    }
    with tempfile.TemporaryDirectory(prefix="mx-") as name:
        directory = Path(name)
        model = options.model or await asyncio.to_thread(write_model, directory / "model", options.shape)
        if "overhead" in options.parts:
            async with site(directory, run_config(directory, "overhead-c", model, machine, 1, True), machine) as made:
                await made.start_gateways(1)
                found["overhead"] = await by_format(made, Tokenizer(model).eos_id or 0, options.requests, options.at_once)
                _keep(found, options, "overhead")
        if "oversubscribe" in options.parts:
            load = _load(options)
            kept = int(load.longest * load.sessions / options.oversubscribe)
            small = replace(machine, sglang={**machine.sglang, "max-total-tokens": str(kept)})
            async with site(directory, run_config(directory, "oversubscribed-d", model, small, 1, True), small) as made:
                url = await made.start_replica()
                await made.start_gateways(1)
                found["oversubscribe"] = {"kept": kept, **await oversubscribed(made, url, load, options.repetitions)}
                _keep(found, options, "oversubscribe")
        if {"pace", "prefixes", "crowd"} & set(options.parts):
            await _with_engines(options, machine, directory, model, found)
    found["machine"] += f", not reserved: load {os.getloadavg()[0]:.1f} at the end"
    return found


def _keep(found: dict[str, Any], options: argparse.Namespace, part: str) -> None:
    """Says that a part is measured, and writes what there is by now: a run that breaks off leaves that."""
    print(f"{time.strftime('%H:%M:%S')} measured: {part}", file=sys.stderr, flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


def _load(options: argparse.Namespace) -> Load:
    return Load(options.sessions, options.turns, options.opening, options.further, options.tokens)


async def _with_engines(options: argparse.Namespace, machine: Machine, directory: Path, model: Path, found: dict[str, Any]) -> None:
    load = _load(options)
    crowd = Load(options.crowd, options.turns, options.further, options.further, options.crowd_tokens)
    repetitions, replicas = options.repetitions, options.replicas if {"prefixes", "crowd"} & set(options.parts) else 1
    rollout: dict[str, Any] = {
        "rollout_concurrency": options.crowd,
        "agent_options": {"turns": options.turns, "further": options.further},
        **({"agent_workers": options.agent_workers} if options.agent_workers else {}),
    }
    async with site(directory, run_config(directory, "agents-a", model, machine, replicas, True, **rollout), machine) as made:
        url = await made.start_replica()
        await made.start_gateways(1)
        if "pace" in options.parts:
            found["pace"] = await compared(made, url, load, repetitions)
            _keep(found, options, "pace")
        for _ in range(replicas - 1):
            await made.start_replica()
        if "prefixes" in options.parts:
            found["prefixes"] = {
                "cache and affinity": await prefilled(made, load, -(-repetitions // 2), apart=False),
                "cache alone": await prefilled(made, load, -(-repetitions // 2), apart=True),
            }
            _keep(found, options, "prefixes with cache")
        if "crowd" in options.parts:
            await made.start_gateways(options.gateways)
            found["crowd"] = {"gateways": options.gateways, "replicas": replicas, **await crowded(made, crowd)}
            _keep(found, options, "crowd")
    if "prefixes" in options.parts:
        async with site(directory, run_config(directory, "agents-b", model, machine, replicas, False, **rollout), machine) as made:
            for _ in range(replicas):
                await made.start_replica()
            await made.start_gateways(1)
            found["prefixes"]["affinity alone"] = await prefilled(made, load, -(-repetitions // 2), apart=False)
            found["prefixes"] |= {"load": vars(load), "replicas": replicas}


if __name__ == "__main__":
    sys.exit(main())
