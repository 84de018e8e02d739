"""The directory of a run that is over and in which everything is odd that a run may hold: texts, figures, names, ends."""

import math
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from shared.bus import runs
from shared.config.run_config import RunConfig
from shared.data import rollout_files
from shared.data.rollout_files import RolloutRecord, RolloutSample
from shared.schema.ledger import group_id

SCRIPT = "<img src=x onerror='window.stolen = 1'><script>window.stolen = 2</script>"

TEXTS = {
    "markup": SCRIPT,
    "ansi": "\x1b[31mred\x1b[0m and \x1b[2J\x07 \x00",
    "right to left": "שלום עולם, 12 + 3 = 15 \u202eturned\u202c مرحبا",
    "chinese": "答案是四十二。" * 40,
    "emoji": "🎲🚀👩‍👩‍👧‍👦🏳️‍🌈 é ñ",
    "one long word": "supercalifragilistic" * 200,
    "many lines": "\n".join(f"{number:03d} | a line" for number in range(300)),
    "nothing": "",
}
"""Responses by what is odd in them."""

PARTS = {f"rubric/part_{number:02d}_of_the_answer": number / 30 for number in range(30)} | {"长度 🎯": 1.0, "שלום": 0.5, SCRIPT: 0.25}
"""More named rewards than a line has room for."""

STEPS = 12


def write_odd_run(config: RunConfig) -> Path:
    """Writes the directory; returns it."""
    root = write_empty_run(config)
    writer = SummaryWriter(str(root / "tensorboard"))
    for step in range(STEPS):
        values = {
            "rollout/raw_reward": step / STEPS,
            "train/loss": math.nan if step % 4 == 3 else 1.0 / (step + 1),
            "train/grad_norm": math.inf if step == 5 else 1.0 + step,
            "train/ppo_kl": math.nan,
            "rollout/response_len/mean": 1e12 * step,
            "eval/held out": 0.5,
            "eval/held out/version": step,
            **{f"rewards/{name}/mean": value for name, value in PARTS.items()},
        }
        for name, value in values.items():
            writer.add_scalar(name, value, step)
    writer.close()
    records = [_record(number, text) for number, text in enumerate(TEXTS.values())]
    records.append(RolloutRecord(group=group_id(90), attempt=3, status=rollout_files.DEAD, at=200.0, reason=f"{SCRIPT} {'because ' * 200}"))
    records.append(
        _record(91, "evaluated").model_copy(
            update={"group": "eval.held-out.2.0", "status": rollout_files.EVALUATED, "dataset": "held-out", "step": None}
        )
    )
    (root / rollout_files.DIRECTORY).mkdir(exist_ok=True)
    (root / rollout_files.DIRECTORY / "000001.jsonl").write_bytes(b"".join(record.line() for record in records))
    return root


def write_empty_run(config: RunConfig) -> Path:
    """Writes the directory of a run that has drawn nothing; returns it."""
    config.run.root.mkdir(parents=True, exist_ok=True)
    (config.run.root / runs.FROZEN).write_text(config.model_dump_json())
    return config.run.root


def _record(number: int, text: str) -> RolloutRecord:
    samples = [
        RolloutSample(
            index=index,
            reward=number / 10 + index,
            parts=PARTS if index == 0 else {"plain": math.nan},
            finish="length" if index else "stop",
            prompt_length=7,
            length=len(text),
            segments=[(0, len(text), number % 3)] if text else [],
            response=text,
            rollout=0 if index == 2 else index,
            role="coder 👩‍💻" if index == 2 else None,
        )
        for index in range(3)
    ]
    prompt = [
        {"role": "system", "content": SCRIPT},
        {"role": "user", "content": text},
        {"role": "tool", "content": None, "tool_calls": [{"name": "add"}]},
    ]
    return RolloutRecord(
        group=group_id(number),
        attempt=number % 2,
        status=rollout_files.TRAINED,
        step=number // 2,
        version=number // 2,
        at=100.0 + number,
        prompt=prompt,
        label=text[:100],
        metadata={text[:40] or "empty": text[:200], "figure": math.inf},
        samples=samples,
    )
