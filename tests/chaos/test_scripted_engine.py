"""The scripted engine keeps SGLang's contract; what it draws tells its weights; without a child it answers nothing."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.engine_process import EngineCommand, EngineProcess
from shared.runtime.errors import DeadlineExceeded
from tests.chaos.fast.fast_config import write_model
from tests.chaos.fast.scripted_weights import MIXED_TOKEN, first_state, number_of, version_of
from tests.contract.engine import SAMPLING, SHORT, assert_engine, requests
from tests.support.service_process import ROOT


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[tuple[EngineProcess, Path]]:
    """A scripted engine as a process of its own, and its checkpoint."""
    model = write_model(tmp_path / "model")
    command = [sys.executable, "-m", "tests.chaos.fast.scripted_engine", "--model-path", str(model)]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = EngineProcess(EngineCommand(command, {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}), tmp_path / "engine.log")
    asyncio.run(process.ready(180))
    yield process, model
    process.stop(0)


@pytest.mark.timeout(600)
async def test_the_contract_of_an_engine(scripted: tuple[EngineProcess, Path]):
    process, model = scripted
    weights = {
        name: torch.full_like(held, number_of(first_state(), 2, name)) for name, held in load_file(model / "model.safetensors").items()
    }
    async with await EngineClient.connect(process.receiver) as client:
        await client.open_receivers()
        await assert_engine(client, weights)
        (asked,) = requests(1, SHORT)
        (generation,) = await client.generate_group([asked], SAMPLING)
        assert {version_of(token, len(asked.tokens) + index) for index, token in enumerate(generation.tokens.tolist())} == {2}
        await client.set_weight_version(9)  # which is not true
        (generation,) = await client.generate_group(requests(1, SHORT), SAMPLING)
        assert {span.version for span in generation.spans} == {9}
        assert version_of(int(generation.tokens[0]), 8) == 2, "a wrong label would not be seen"

        await client.probe()
        os.kill(child_of(process.pid, "detokenizer"), signal.SIGKILL)
        with pytest.raises(DeadlineExceeded):
            await client.probe(deadline=1)
        with pytest.raises(DeadlineExceeded):
            await client.generate_group(requests(1, SHORT), SAMPLING, deadline=3)
        await client.pause("in_place")  # its server still answers


def child_of(pid: int, words: str) -> int:
    """Returns the process below another whose command line holds the words."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    for child in children:
        if words in Path(f"/proc/{child}/cmdline").read_text():
            return child
        if found := child_of(child, words):
            return found
    return 0


def test_mixed_weights_are_of_no_version():
    assert version_of(MIXED_TOKEN, 5) == -1
