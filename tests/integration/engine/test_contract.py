"""SGLang keeps the contract that the chaos suite's scripted engine keeps."""

from services.rollout.engine.engine_client import EngineClient
from tests.contract.engine import assert_engine
from tests.integration.engine.conftest import Checkpoints
from tests.support.weights_group import parameters


async def test_the_contract_of_an_engine(client: EngineClient, checkpoint: Checkpoints):
    await assert_engine(client, parameters(checkpoint(1).model))
