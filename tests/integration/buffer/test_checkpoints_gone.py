"""A trainer that comes back without its checkpoints, against a real buffer."""

import asyncio

import pytest

from services.trainer.control_client import ControlClient
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.runtime.errors import BadInput
from tests.integration.buffer.conftest import Served


async def test_a_trainer_is_told_once_that_its_checkpoints_are_gone_and_what_helps(
    served: Served, nats: EmbeddedNats, valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    player = await served()
    await player.live(0)
    for step in range(2):
        await player.batch(step, working=True)
        await player.trained(step)
        await player.durable(step + 1)
    for name, value in {"NATS_URL": nats.url, "MYXO_RUN": player.config.run.name, "REDIS_URL": valkey.url}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # a link takes the signals of the process's main thread, which this is not
    link = ControlClient()
    await asyncio.to_thread(link.__enter__)
    try:
        with pytest.raises(BadInput, match=r"step 0 was asked for; the next batch is of step 2: .* are gone; .*`myxo repair RUN`"):
            await asyncio.to_thread(link.batch, 0, 0)
    finally:
        await asyncio.to_thread(link.__exit__)
