"""What a run has left, against each other: ledger, responses on disk, weights."""

import json
from pathlib import Path
from typing import Any

import nats
import numpy as np
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from shared.schema.sample import token_digest
from tests.chaos.fast.fast_config import RUN, FastShape
from tests.chaos.fast.scripted_weights import problems_of, version_of
from tests.chaos.ledger_check import LedgerCheck, LedgerFindings

MOST_PROBLEMS = 12


async def problems_of_remains(nats_url: str, root: Path, shape: FastShape) -> tuple[list[str], bytes]:
    """Returns what must not be, and the state that the weights are in by the ledger."""
    check = LedgerCheck(shape.staleness, shape.groups)
    for sequence, data in await _messages(nats_url, f"{RUN}-ledger"):
        check.take(sequence, data)
    found = check.end()
    problems = found.problems
    if not found.finished or found.steps != shape.steps:
        problems.append(f"{found.steps} of {shape.steps} steps were trained; finished: {found.finished}")
    problems += [f"{group} died: {end}" for group, end in found.ends.items() if end.startswith("dead")]
    problems += _responses(root / "rollouts", found)
    if found.finished:
        problems += _weights(root / "hf", found)
    return problems[:MOST_PROBLEMS], found.state


def _responses(directory: Path, found: LedgerFindings) -> list[str]:
    """Checks that every trained group is on disk as it was scored, and that each of its tokens was drawn by the version that it names."""
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


def _weights(directory: Path, found: LedgerFindings) -> list[str]:
    """Checks that the final weights are those that follow from what was trained."""
    from safetensors.torch import load_file

    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        return [f"there are no final weights in {directory}"]
    return [problem for path in paths for problem in problems_of(load_file(path), found.state, found.steps)][:2]


async def _messages(url: str, stream: str) -> list[tuple[int, bytes]]:
    """Returns every message of a stream, with its sequence."""
    connection = await nats.connect(url)
    try:
        js = connection.jetstream()
        config = ConsumerConfig(
            ack_policy=AckPolicy.NONE, deliver_policy=DeliverPolicy.ALL, name="chaos", inactive_threshold=60, mem_storage=True
        )
        info = await js.add_consumer(stream, config)
        pull = await js.pull_subscribe_bind("chaos", stream)
        found, pending = [], info.num_pending or 0
        while len(found) < pending:
            batch = await pull.fetch(min(256, pending - len(found)), timeout=10)
            found += [(message.metadata.sequence.stream, message.data) for message in batch]
        return found
    finally:
        await connection.close()
