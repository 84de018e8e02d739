"""What training computes, and how long it takes, where sequences share their beginnings: with sharing and without.

``python -m benchmarks.trainer_prefixes [--json FILE] [--steps N] [--write]`` trains the same micro-batches both ways, by the default
objective, on a CPU in float32 or, where there is a GPU, in bfloat16 with a model of Qwen3-1.7B's shape. ``--write`` puts the figures of
RESULTS into the docs. Every case says how many tokens its sequences have, how many of them are computed, the median seconds of a step
both ways (taken alternately; on a CPU those of its thread), and the largest difference of a trained token's log-prob.

- ``groups``: eight samples of each prompt, which is as long as a response.
- ``short prompts``: eight samples of each prompt, of 14 tokens before up to 20, as the quick start has them.
- ``turns``: conversations of eight turns whose template leaves out the reasoning of earlier ones, so that each turn is a sample: it repeats
  the conversation so far.
- ``forks``: agents that ask four times from each state that they keep.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.page_table import put_table

CPU_SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
GPU_SHAPE = CPU_SHAPE | {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
RESULTS = [Path(__file__).parent / "results" / f"{name}.json" for name in ("trainer_prefixes", "trainer_prefixes_gpu")]
PAGE = Path(__file__).parents[1] / "docs" / "trainer.md"

Draw = Callable[[int], list[int]]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--steps", type=int, default=7, help="timed steps of each case, each way")
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="default: all")
    parser.add_argument("--write", action="store_true", help="put the figures of RESULTS into the docs; nothing is measured")
    arguments = parser.parse_args()
    if arguments.write:
        for results in RESULTS:
            put_table(PAGE, "trainer_prefixes", table(json.loads(results.read_text())), results.stem)
        return 0
    rows = measure(arguments.case or list(CASES), arguments.steps)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))
    return 0


def groups(draw: Draw, long: int) -> list[tuple[list[int], int]]:
    """Sequences, each with how many of its last tokens are trained."""
    return [(prompt + draw(long), long) for prompt in (draw(long) for _ in range(2)) for _ in range(8)]


def short_prompts(draw: Draw, long: int) -> list[tuple[list[int], int]]:
    """As `groups`, of tens of tokens."""
    return [(prompt + draw(length), length) for prompt in (draw(14) for _ in range(32)) for length in range(6, 22, 2)]


def turns(draw: Draw, long: int) -> list[tuple[list[int], int]]:
    """Sequences, each of which repeats the observations and answers before it, but not what was thought."""
    found, part = [], long // 8
    for _ in range(3):
        kept: list[int] = []
        for _ in range(8):
            kept = kept + draw(part)
            thought, answer = draw(part), draw(part // 4)
            found.append((kept + thought + answer, len(thought + answer)))
            kept = kept + answer
    return found


def forks(draw: Draw, long: int) -> list[tuple[list[int], int]]:
    """Four continuations of each of three states, which continue from one another."""
    found, state = [], draw(long)
    for _ in range(3):
        drawn = [draw(long // 4) for _ in range(4)]
        found += [(state + own, len(own)) for own in drawn]
        state = state + drawn[0] + draw(long // 2)
    return found


CASES = {"groups": groups, "short prompts": short_prompts, "turns": turns, "forks": forks}


def measure(cases: list[str], steps: int) -> list[dict[str, Any]]:
    """Returns the figures of each case, all in this process."""
    import torch

    from services.trainer.actor import Actor
    from services.trainer.backend import TrainerSettings
    from shared.config.trainer_section import TrainerSection

    on_gpu = torch.cuda.is_available()
    shape, settings = (GPU_SHAPE, {"recompute": True}) if on_gpu else (CPU_SHAPE, {"train_dtype": "float32"})
    if not on_gpu:
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(shape))
        actor = Actor.create(TrainerSettings(TrainerSection(lr=0.0, **settings)), directory, random=True)
    where = torch.cuda.get_device_name() if on_gpu else "one CPU thread"
    rows = []
    for case in cases:
        rows.append(
            {"case": case, **compared(actor, CASES[case], 1024 if on_gpu else 256, steps), "device": where, "torch": torch.__version__}
        )
        print(line(rows[-1]), file=sys.stderr, flush=True)
    return rows


def compared(actor: Any, case: Callable[[Draw, int], list[tuple[list[int], int]]], long: int, steps: int) -> dict[str, Any]:
    """Returns the figures of one case."""
    import torch

    from services.trainer.objective.loss import PolicyLoss
    from services.trainer.packing import pack, shared_prefixes, spread
    from shared.config.algorithm import AlgorithmSection

    generator = np.random.default_rng(5)
    samples = [
        sample(tokens, trained)
        for tokens, trained in case(lambda n: generator.integers(0, actor.architecture.vocab_size, n).tolist(), long)
    ]
    packed = pack(samples, [1.0 / sum(len(one.response) for one in samples)] * len(samples))
    advantages = [torch.full((len(one.response),), float(generator.normal())) for one in samples]
    packed = packed.with_fields(advantages=spread(samples, advantages, "advantages"))
    found = shared_prefixes(packed.tokens.numpy(), packed.cu_seqlens.tolist())
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    loss, seconds = PolicyLoss(AlgorithmSection()), {"apart": [], "shared": []}
    log_probs = {}
    for number in range(steps + 1):
        for way, least in (("apart", None), ("shared", 0.0)):
            actor.model.least_saved = least
            began = clock()
            result = actor.train_step([packed], loss)  # which reads its loss from the device, and so waits for it
            assert result.skipped is None, result.skipped
            if number:  # the first warms up
                seconds[way].append(clock() - began)
            elif way not in log_probs:
                log_probs[way] = actor.log_probs([packed])[0].cpu() * packed.loss_mask
    apart, shared = (statistics.median(seconds[way]) for way in ("apart", "shared"))
    return {
        "sequences": len(samples),
        "tokens": len(found.back),
        "computed": len(found.computed),
        "saved": round(found.saved, 4),
        "apart_seconds": round(apart, 4),
        "shared_seconds": round(shared, 4),
        "ratio": round(shared / apart, 3),
        "log_prob_difference": float((log_probs["apart"] - log_probs["shared"]).abs().max()),
    }


def sample(tokens: list[int], trained: int) -> Any:
    """Returns a sample whose last tokens are its response."""
    from shared.schema.sample import Sample

    return Sample(
        group="benchmark",
        index=0,
        prompt=np.array(tokens[:-trained], np.int32),
        response=np.array(tokens[-trained:], np.int32),
        log_probs=np.full(trained, -7.0, np.float32),
        mask=np.ones(trained, np.uint8),
        segments=[(0, trained, 0)],
        finish="length",
        text="",
    )


def line(row: dict[str, Any]) -> str:
    """One case in a line of the table."""
    return (
        f"| {row['case']} | {row['sequences']} | {row['tokens']:,} | {row['computed']:,} | {row['saved']:.0%} | "
        f"{row['apart_seconds']:.3f} s | {row['shared_seconds']:.3f} s | {row['ratio']:.2f} | {row['log_prob_difference']:.0e} |"
    )


def table(rows: list[dict[str, Any]]) -> str:
    """The figures as a table."""
    head = "| case | sequences | their tokens | computed | saved | step | step, shared | ratio | log-probs differ by |"
    return "\n".join([head, "|---" * 9 + "|", *map(line, rows)])


if __name__ == "__main__":
    sys.exit(main())
