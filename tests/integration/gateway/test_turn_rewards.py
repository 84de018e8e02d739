"""Rewards that an agent posts for its turns, from the gateway to the advantages that are trained."""

from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from services.rollout.agent_groups import AgentGroups, Gateways
from services.rollout.engine.engine_client import EngineClient
from services.rollout.in_flight import InFlight
from services.rollout.replica import Replica
from services.rollout.request_slots import RequestSlots
from services.trainer import batches
from services.trainer.batches import ShardReader
from services.trainer.partition import partition_batch
from shared.bus.registry import Registry
from shared.bus.subjects import TRAIN
from shared.data.tokenizer import Tokenizer
from shared.process.embedded_servers import EmbeddedValkey
from shared.schema.sample import Sample, SampleLimits
from shared.service.service_base import Service
from shared.store.payload_store import BlockingStore
from tests.integration.buffer.conftest import NewRun, Served, new_run, served
from tests.integration.gateway.test_frameworks import tiny_model
from tests.integration.test_batches import inputs
from tests.support.agents import OUTCOMES, TURN_REWARDS
from tests.support.gateways import ready_gateway, started_gateway
from tests.support.scripted_replica import scripted_replica

__all__ = ["NewRun", "new_run", "served", "tiny_model"]

pytestmark = pytest.mark.timeout(300)

COEFFICIENT, GAMMA = 0.5, 0.5


def normalized(values: list[float]) -> list[float]:
    """A group's figures less their mean, by their deviation: GRPO's, written anew."""
    if len(values) < 2:
        return [0.0] * len(values)
    mean = sum(values) / len(values)
    deviation = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
    return [(value - mean) / (deviation + 1e-6) if deviation else 0.0 for value in values]


def expected(samples: list[Sample]) -> list[np.ndarray]:
    """The advantages of each sample's tokens, [R]: what its outcome and its turns' discounted rewards are worth beside the others'."""
    spans = []
    for sample in samples:
        edges = [0, *(np.flatnonzero(np.diff(sample.mask)) + 1).tolist(), len(sample.response)]
        spans.append([pair for pair in pairwise(edges) if sample.mask[pair[0]]])
    found = [np.zeros(len(sample.response)) for sample in samples]
    for own, mask, value in zip(found, (sample.mask for sample in samples), normalized(OUTCOMES), strict=True):
        own += value * mask
    for turn in range(max(map(len, TURN_REWARDS))):
        having = [index for index, rewards in enumerate(TURN_REWARDS) if len(rewards) > turn]
        returns = [sum(GAMMA**later * (reward or 0.0) for later, reward in enumerate(TURN_REWARDS[index][turn:])) for index in having]
        for index, value in zip(having, normalized(returns), strict=True):
            start, end = spans[index][turn]
            found[index][start:end] += COEFFICIENT * value
    return found


async def test_posted_rewards_of_turns_reach_the_advantages(
    served: Served, valkey: EmbeddedValkey, tiny_model: Path, tmp_path: Path
) -> None:
    """Agents play over a gateway and a scripted replica; the buffer's batch is read as the trainer reads it."""
    sections: dict[str, Any] = {
        "rollout": {
            "agent": "tests.support.agents:rewards_its_turns",
            "agent_workers": 1,
            "num_rollout": 1,
            "rollout_batch_size": 1,
            "n_samples_per_prompt": len(OUTCOMES),
        },
        "algorithm": {"turn_advantage_coef": COEFFICIENT, "turn_gamma": GAMMA},
    }
    player = await served(**sections)
    await player.live(0)
    tokenizer, run = Tokenizer(tiny_model), player.config.run.name
    registry = Registry(player.bus, run)
    service = Service("rollout", "rollout-1", run, player.bus, player.config, valkey.url)
    replica = Replica(service)
    replica.client = cast(EngineClient, object())  # its gateway asks the scripted one
    replica.served.engine_started()
    replica.served.serve(0, "")
    groups = AgentGroups(service, replica, tokenizer, Gateways(service))
    await groups.start()
    try:
        async with scripted_replica(registry, tokenizer, lambda prompt: f"Answer {len(prompt)}.", version=0):
            with started_gateway(0, tmp_path, player.environment("gateway-0")) as process:
                await ready_gateway(registry, 0, process)
                [lease] = await player.all_tasks(1)
                slots = RequestSlots.of(player.config).take(TRAIN, lease.message.n)
                played = await groups.group(lease.message, [], InFlight(player.config), slots)
    finally:
        await groups.close()
        await service.store.close()
    assert [one.given_reward for one in played.samples] == OUTCOMES
    await player.say(await player.scored(lease.message, played.samples, OUTCOMES))
    await lease.ack()
    batch = await player.batch(0)
    partition = partition_batch(batch, 1, 1, 1 << 20)
    shard = ShardReader(BlockingStore(valkey.url, run), 0, SampleLimits(tokenizer.vocabulary_size)).take(partition)
    read = batches.assemble(shard, shard.stats, player.config.algorithm, rank=0)
    trained = inputs(player.config.algorithm, valkey.url).with_advantages(read).per_sample("advantages")
    wanted = expected(played.samples)
    assert len({round(float(value), 3) for own in wanted for value in own}) > 5
    for index, own in enumerate(wanted):
        np.testing.assert_allclose(trained[index].numpy(), own, atol=1e-5)
