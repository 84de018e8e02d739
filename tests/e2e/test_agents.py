"""An agent over OpenAI's SDK trains a policy, in a whole run on real engines; gateways and replicas come and go meanwhile."""

import itertools
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.schema import codec
from shared.schema.messages import Batch
from shared.schema.sample import Sample, decode
from shared.schema.service_messages import ServiceStatus
from tests.e2e.launched import LaunchedRun, gauge

RUN_SECONDS = 900

FLAGS = ("--agent", "examples.agents.openai_calculator:run", "--surplus-rollouts", "1", "--eval-interval", "5", "--rollout-replicas", "2")

GOING = (("services.gateway", signal.SIGKILL), ("services.rollout", signal.SIGTERM)) * 2 + (("services.rollout", signal.SIGKILL),)
"""Who goes, and how: a replica that is asked to go leaves in order, and another one comes."""


@pytest.mark.extra
@pytest.mark.timeout(RUN_SECONDS + 300)
def test_an_agent_trains_while_gateways_and_replicas_come_and_go(small_run: Callable[..., Path], tmp_path: Path) -> None:
    steps = 2 * len(GOING) + 2
    config = small_run("agents", steps=steps, staleness=1)
    with LaunchedRun(config, tmp_path / "runs" / "agents", "agents", FLAGS) as run:
        for number, (program, word) in enumerate(GOING):
            run.until("a step", lambda cards, step=2 * number + 1: trained(cards) >= step, RUN_SECONDS)
            os.kill(run.child(program), word)
        assert run.wait(RUN_SECONDS) == 0, run.said()
        summary = run.summary()
    assert (summary["audit"], summary["steps"]) == ("ok", steps)
    assert summary["groups"]["trained"] == 4 * steps  # type: ignore[index]
    assert summary["max_staleness_seen"] <= 1  # type: ignore[operator]


def trained(cards: list[ServiceStatus]) -> float:
    return gauge(cards, "buffer", "trained_steps")


CROWD = ("--agent", "tests.support.agents:three_turns", "--n-samples-per-prompt", "5", "--rollout-max-response-len", "24")


@pytest.mark.extra
@pytest.mark.timeout(3 * RUN_SECONDS)
def test_two_hundred_rollouts_are_trained_over_deaths_and_pushes(small_run: Callable[..., Path], tmp_path: Path) -> None:
    """A push after each step, in place; a tenth of the clients are gone in the middle; the gateway is killed five times.

    Each turn of each rollout is trained once, and the ledger accounts for all."""
    steps, config = 10, small_run("crowd", steps=10, staleness=2)
    config.write_text(re.sub(r"\[sft\].*?(?=\[bus\])", "", config.read_text(), flags=re.DOTALL))  # version 0 is the checkpoint itself
    dumps = tmp_path / "dumps"
    kept = ("--save-debug-rollout-data", f"{dumps}/{{rollout_id}}")
    with LaunchedRun(config, tmp_path / "runs" / "crowd", "crowd", (*CROWD, *kept)) as run:
        for step in range(1, steps, 2):
            run.until(f"step {step}", lambda cards, step=step: trained(cards) >= step and has_gateway(run), RUN_SECONDS)
            run.kill(run.child("services.gateway"))
        assert run.wait(RUN_SECONDS) == 0, run.said()
        summary = run.summary()
    assert (summary["audit"], summary["steps"]) == ("ok", steps)
    assert summary["groups"]["trained"] == 4 * steps  # type: ignore[index]
    samples = [sample for step in range(steps) for sample in dumped(dumps / str(step))]
    rollouts = len({(sample.group, sample.rollout) for sample in samples})
    turns = [turn for sample in samples for turn in drawn_turns(sample)]
    assert rollouts >= 4 * steps * 4 and len(turns) == 3 * rollouts, "each turn is trained once"


def has_gateway(run: LaunchedRun) -> bool:
    """Whether the one that was killed has been started again."""
    try:
        return run.child("services.gateway") > 0
    except AssertionError:
        return False


def dumped(path: Path) -> list[Sample]:
    """The samples of a dumped batch."""
    content = codec.unpack(path.read_bytes())
    groups = Batch.decode(content["batch"]).groups
    return [sample for group in groups for sample in decode([content["blobs"][key] for key in group.payload.keys])]


def drawn_turns(sample: Sample) -> Iterator[tuple[Any, Any, Any, list[tuple[int, int]]]]:
    """Yields of each turn that a sample trains: prompt, completion, log-probs, and (version, end) of its spans."""
    tokens, versions = np.concatenate([sample.prompt, sample.response]), sample.versions()
    edges = np.flatnonzero(np.diff(sample.mask.astype(int), prepend=0, append=0))
    for start, end in edges.reshape(-1, 2):
        cuts = [start, *(np.flatnonzero(np.diff(versions[start:end])) + start + 1), end]
        spans = [(int(versions[begin]), int(stop - start)) for begin, stop in itertools.pairwise(cuts)]
        yield tokens[: len(sample.prompt) + start], sample.response[start:end], sample.log_probs[start:end], spans
