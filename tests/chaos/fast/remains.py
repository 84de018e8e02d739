"""What a run has left beside its ledger, against that: responses on disk, weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from shared.schema.sample import token_digest
from tests.chaos.fast.scripted_weights import problems_of, version_of
from tests.chaos.ledger_check import LedgerFindings

UNKEPT = "rollouts_not_kept"
"""What the buffer logs where it could not write responses: they are kept for people to read, and no run waits for them."""


def problems_of_responses(root: Path, found: LedgerFindings, *, lossy: bool, full: bool) -> list[str]:
    """Checks that every trained group is on disk as it was scored, and that each of its tokens was drawn by the version that it names.

    Args:
        root: of the run. lossy: what the run had stored was taken away. full: its disk was, and it may have left groups out, and said so.
    """
    directory = root / "rollouts"
    excused = lossy or (full and any(UNKEPT in path.read_text(errors="replace") for path in (root / "logs").glob("buffer-*.log")))
    problems, kept = [], dict[str, dict[str, Any]]()
    for path in sorted(directory.glob("*.jsonl")):
        for line in path.read_bytes().splitlines():
            try:
                record = json.loads(line)
            except ValueError:  # the last line of a buffer that was killed
                continue
            kept[record["group"]] = record
            for sample in record["samples"]:
                problems += _labels(record["group"], sample)
    for group, digests in found.digests.items():
        if (record := kept.get(group)) is None:
            if not excused:  # else the payload may have gone once the trainer had read it
                problems.append(f"{group} was trained, and its responses are not on disk")
            continue
        own = [token_digest(np.array(sample["prompt_ids"]), np.array(sample["response_ids"])) for sample in record["samples"]]
        if own != digests:
            problems.append(f"{group} has other tokens on disk than it was scored with")
    return problems


def _labels(group: str, sample: dict[str, Any]) -> list[str]:
    """Returns the tokens of a sample that other weights have drawn than it says."""
    first = sample["prompt_length"]
    return [
        f"{group}/{sample['index']}: token {index} is labelled version {version}, and weights of {drawn} have drawn it"
        for start, end, version in sample["segments"]
        for index in range(start, end)
        if (drawn := version_of(sample["response_ids"][index], first + index)) != version
    ]


def problems_of_weights(directory: Path, found: LedgerFindings) -> list[str]:
    """Checks that the final weights are those that follow from what was trained."""
    from safetensors.torch import load_file

    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        return [f"there are no final weights in {directory}"]
    return [problem for path in paths for problem in problems_of(load_file(path), found.state, found.steps)][:2]
