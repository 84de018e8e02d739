"""What a delta of the weights weighs: GRPO steps of a real optimizer, each version written whole, as xor and as overwrite.

``python -m benchmarks.weight_delta [--case CASE] [--steps N] [--json FILE] [--write]``. Cases: ``quickstart`` (the quick start's model,
float32, its learning rate) and ``quickstart-bf16`` (the same, lr 1e-6) run on a CPU; ``qwen3-0.6b`` (that model's shape, random weights,
bfloat16, lr 1e-6) wants a GPU, ``qwen3-0.6b-short`` has samples of 16 tokens and takes minutes a step on a CPU, with 16 GB of memory. Every
case is a process of its own. Gradients are of GRPO's loss on random responses in groups of eight, half of which are rewarded; what a step
changes is decided by Adam's learning rate far more than by the gradient.

``--encode-only`` writes no files: it encodes every ``--every``-th tensor of each version after the first against the one before, by the
encoding that a run takes by itself, on all cores, and decodes it again; the case ``qwen3-4b`` is measured so, on a GPU of 141 GB.

The last version is put together from each chain and compared with the trainer's weights, bit for bit.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.command_line import conditions
from benchmarks.page_table import put_table
from benchmarks.trainer_mfu import SHAPE

RESULTS = Path(__file__).parent / "results" / "weight_delta.json"
PAGE = Path(__file__).parents[1] / "docs" / "weights.md"
PREPARE = Path(__file__).parents[1] / "examples" / "arithmetic" / "prepare.py"
GROUPS, SAMPLES = 4, 8
BUCKET_BYTES = 512 * 1024**2
FORMS = ("full", "xor", "overwrite")

QWEN3_06B = SHAPE | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}


@dataclass(frozen=True)
class Case:
    """``tokens``: of a sample, half of them its response. ``device``: where it is run."""

    dtype: str
    lr: float
    beta2: float
    tokens: int
    device: str


CASES = {
    "quickstart": Case("float32", 1e-4, 0.95, 40, "cpu"),
    "quickstart-bf16": Case("bfloat16", 1e-6, 0.95, 40, "cpu"),
    "qwen3-0.6b": Case("bfloat16", 1e-6, 0.98, 1024, "cuda"),
    "qwen3-0.6b-short": Case("bfloat16", 1e-6, 0.98, 16, "cpu"),
    "qwen3-4b": Case("bfloat16", 1e-6, 0.98, 1024, "cuda"),
}
LARGE = "qwen3-"
BY_DEFAULT = [name for name in CASES if not name.startswith(LARGE)]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help=f"default: {' '.join(BY_DEFAULT)}")
    parser.add_argument("--steps", type=int, default=5, help="versions after the first")
    parser.add_argument("--json", type=Path, help=f"put the cases' figures there, beside those of other cases; {RESULTS.name} is shown")
    parser.add_argument("--write", action="store_true", help="put the figures of RESULTS into the docs; nothing is measured")
    parser.add_argument("--encode-only", action="store_true", help="encode in memory, and write no files")
    parser.add_argument("--every", type=int, default=8, metavar="N", help="of the tensors, that --encode-only takes")
    parser.add_argument("--only", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.encode_only and arguments.only is None:
        rows = [row for case in arguments.case or BY_DEFAULT for row in encoded(case, arguments.steps, arguments.every, arguments.json)]
        return int(not rows)
    if arguments.only is not None:
        print(json.dumps(measure(arguments.only, arguments.steps)))
        return 0
    if arguments.write:
        put_table(PAGE, "weight_delta", table(json.loads(RESULTS.read_text())))
        return 0
    rows = []
    for case in arguments.case or BY_DEFAULT:
        environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if CASES[case].device == "cpu" else {})}
        command = [sys.executable, "-m", "benchmarks.weight_delta", "--only", case, "--steps", str(arguments.steps)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
        if done.returncode:
            print(f"{case}: failed with exit code {done.returncode}", file=sys.stderr)
            return 1
        rows += json.loads(done.stdout.strip().splitlines()[-1])
    if arguments.json is not None:
        measured = {row["case"] for row in rows}
        kept = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps([row for row in kept if row["case"] not in measured] + rows, indent=1) + "\n")
    print(table(rows))
    return 0


def measure(name: str, steps: int) -> list[dict[str, Any]]:
    """One case, in this process: a row for each step."""
    from services.trainer.actor import Actor
    from services.trainer.backend import TrainerSettings
    from services.trainer.objective.loss import PolicyLoss
    from shared.config.algorithm import AlgorithmSection
    from shared.config.trainer_section import TrainerSection
    from shared.transfer.weight_checkpoint import LocalCheckpoint, WeightCheckpoints

    case = CASES[name]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        trainer = TrainerSection(
            train_dtype=case.dtype, lr=case.lr, weight_decay=0.01, adam_beta2=case.beta2, recompute=case.device == "cuda"
        )
        actor = Actor.create(TrainerSettings(trainer), checkpoint(name, directory / "model"), random=name.startswith(LARGE))
        loss = PolicyLoss(AlgorithmSection())
        chains = {form: WeightCheckpoints(directory / form) for form in FORMS}
        bases = {form: LocalCheckpoint(directory / f"{form}-base") for form in FORMS[1:]}
        before = exported(actor)
        for form, snapshots in chains.items():
            link, _ = written(snapshots, 0, before)
            if form in bases:
                bases[form].copy_from(link)
        for step in range(1, steps + 1):
            result = actor.train_step(micro_batches(case, actor.architecture.vocab_size, step), loss)
            assert result.skipped is None, result.skipped
            tensors = exported(actor)
            row = {"case": name, "dtype": case.dtype, "lr": case.lr, "step": step, "changed": round(changed(before, tensors), 5)}
            for form, snapshots in chains.items():
                link, seconds = written(snapshots, step, tensors, bases.get(form), form)
                row |= {f"{form}_bytes": link.bytes, f"{form}_seconds": round(seconds, 3)}
            chains["full"].retain(1)
            rows.append(row)
            before = tensors
        for form in bases:
            check_equal(LocalCheckpoint(directory / "rebuilt").follow(chains[form], steps).path, before)
            rows[-1][f"{form}_rebuilt"] = "bit-equal"
        actor.close()
    return rows


def encoded(name: str, steps: int, every: int, path: Path | None) -> list[dict[str, Any]]:
    """What versions weigh as changes, in this process, a row for each step, printed and written as they come."""
    import numpy as np

    from services.trainer.actor import Actor
    from services.trainer.backend import TrainerSettings
    from services.trainer.objective.loss import PolicyLoss
    from shared.config.algorithm import AlgorithmSection
    from shared.config.trainer_section import TrainerSection
    from shared.transfer.manifest import ITEM_BYTES
    from shared.transfer.weight_checkpoint import apply_delta, encode_delta

    case, rows, chosen = CASES[name], list[dict[str, Any]](), set[str]()
    trainer = TrainerSection(train_dtype=case.dtype, lr=case.lr, weight_decay=0.01, adam_beta2=case.beta2, recompute=case.device == "cuda")
    with tempfile.TemporaryDirectory() as place:
        actor = Actor.create(TrainerSettings(trainer), checkpoint(name, Path(place) / "model"), random=name.startswith(LARGE))
    loss = PolicyLoss(AlgorithmSection())

    def taken() -> dict[str, tuple[int, Any]]:
        buckets = exported(actor, chosen or None)
        return {name: (ITEM_BYTES[dtype], data) for bucket in buckets for name, (dtype, _, data) in bucket.items()}

    chosen |= set(sorted(taken())[::every])
    before = taken()
    for step in range(1, steps + 1):
        actor.train_step(micro_batches(case, actor.architecture.vocab_size, step), loss)
        after = taken()

        def weigh(tensor: str, old: Any = before, new: Any = after) -> tuple[int, int]:
            item, data = new[tensor]
            parts = encode_delta(old[tensor][1], data, item, "auto")
            if parts:
                apply_delta(again := old[tensor][1].copy(), parts, item)
                assert np.array_equal(again, data), tensor
            return sum(len(part) for part in parts.values()), int((old[tensor][1].view(f"u{item}") != data.view(f"u{item}")).sum())

        began = time.perf_counter()
        with ThreadPoolExecutor() as pool:
            weighed = list(pool.map(weigh, sorted(after, key=lambda tensor: -after[tensor][1].nbytes)))
        seconds, full = time.perf_counter() - began, sum(data.nbytes for _, data in after.values())
        elements = sum(data.nbytes // item for item, data in after.values())
        row = {"case": name, "lr": case.lr, "step": step, "tensors": len(after), "full_bytes": full, "encoded_and_decoded_seconds": seconds}
        row |= {"delta_bytes": sum(size for size, _ in weighed), "changed": sum(count for _, count in weighed) / elements}
        rows.append(row | {"share": row["delta_bytes"] / full})
        print(json.dumps(rows[-1]), flush=True)
        if path is not None:
            path.write_text(json.dumps({**conditions(), "rows": rows}, indent=1) + "\n")
        before = after
    actor.close()
    return rows


def written(snapshots: Any, version: int, tensors: list[dict[str, Any]], base: Any = None, form: Any = "xor") -> tuple[Any, float]:
    """A link, and the seconds that it took."""
    from services.trainer.weights.snapshot_writer import WeightCheckpointWriter

    began = time.perf_counter()
    draft = WeightCheckpointWriter(snapshots, version, base, form)
    for bucket in tensors:
        draft.add(bucket)
    return draft.publish(), time.perf_counter() - began


def checkpoint(name: str, directory: Path) -> Path:
    """The case's model: only its shape where the weights are to be Megatron's random ones."""
    if name.startswith(LARGE):
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(SHAPE if name == "qwen3-4b" else QWEN3_06B))
    else:
        few = [f"--{what}={count}" for what, count in (("train", 1), ("heldout", 1), ("demonstrations", 1))]  # only the model is wanted
        subprocess.run([sys.executable, str(PREPARE), str(directory.parent / "data"), *few], check=True, stdout=subprocess.DEVNULL)
        (directory.parent / "data" / "model").rename(directory)
    return directory


def exported(actor: Any, only: Collection[str] | None = None) -> list[dict[str, Any]]:
    """The weights as drafts take them, bucket by bucket; ``only``: those of these names."""
    import torch

    return [
        {
            name: (
                str(tensor.dtype).removeprefix("torch."),
                tuple(tensor.shape),
                tensor.detach().cpu().clone().contiguous().view(-1).view(torch.uint8).numpy(),
            )
            for name, tensor in bucket
            if only is None or name in only
        }
        for bucket in actor.export(BUCKET_BYTES)
    ]


def micro_batches(case: Case, vocabulary: int, step: int) -> list[Any]:
    """A step's groups, one micro-batch each."""
    import numpy as np
    import torch

    from services.trainer.packing import pack, spread
    from shared.schema.sample import Sample

    batches = []
    response = case.tokens // 2
    for group in range(GROUPS):
        generator = np.random.default_rng([step, group])
        prompt = generator.integers(0, vocabulary, case.tokens - response).astype(np.int32)
        samples = [
            Sample(
                group=f"g{group}",
                index=number,
                prompt=prompt,
                response=generator.integers(0, vocabulary, response).astype(np.int32),
                log_probs=np.full(response, -math.log(vocabulary), np.float32),
                mask=np.ones(response, np.uint8),
                segments=[(0, response, 0)],
                finish="length",
                text="",
            )
            for number in range(SAMPLES)
        ]
        advantages = [torch.full((response,), 1.0 if number % 2 else -1.0) for number in range(SAMPLES)]
        packed = pack(samples, [1.0 / (GROUPS * SAMPLES * response)] * SAMPLES)
        batches.append(packed.with_fields(advantages=spread(samples, advantages, "advantages")))
    return batches


def changed(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> float:
    """The share of all elements that differ between two versions."""
    from shared.transfer.manifest import ITEM_BYTES

    differing = total = 0
    for old, new in zip(before, after, strict=True):
        for name, (dtype, _, data) in new.items():
            words = f"u{ITEM_BYTES[dtype]}"
            differing += int((old[name][2].view(words) != data.view(words)).sum())
            total += len(data) // ITEM_BYTES[dtype]
    return differing / total


def check_equal(path: Path, tensors: list[dict[str, Any]]) -> None:
    """Raises AssertionError."""
    import numpy as np

    from shared.transfer.tensor_file import TensorFiles

    held = TensorFiles(sorted(path.glob("*.safetensors")))
    assert sorted(held.tensors) == sorted(name for bucket in tensors for name in bucket)
    for bucket in tensors:
        for name, (dtype, shape, data) in bucket.items():
            assert held.tensors[name] == (dtype, shape) and np.array_equal(held[name], data), name


def table(rows: list[dict[str, Any]]) -> str:
    """The figures as a table."""
    head = ["| model | dtype | lr | step | elements changed | full | xor | overwrite |", "|---|---|---|---|---|---|---|---|"]
    return "\n".join([*head, *map(line, rows)])


def line(row: dict[str, Any]) -> str:
    """One step in a line of the table."""
    full = row["full_bytes"]

    def part(encoding: str) -> str:
        size = row[f"{encoding}_bytes"]
        return f"{size / 1e6:.2f} MB ({size / full:.1%})"

    return (
        f"| {row['case']} | {row['dtype']} | {row['lr']:g} | {row['step']} | {row['changed']:.1%} | {full / 1e6:.2f} MB | "
        f"{part('xor')} | {part('overwrite')} |"
    )


if __name__ == "__main__":
    sys.exit(main())
