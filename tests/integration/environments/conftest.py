"""The reward service's bench, and a server full of faults."""

from collections.abc import AsyncIterator

import pytest

from shared.runtime import http_endpoints
from shared.runtime.addresses import HttpAddress
from tests.integration.environments.live import odd_app
from tests.support.reward_bench import bench

__all__ = ["bench"]


@pytest.fixture
async def odd() -> AsyncIterator[str]:
    """URL of a server of `odd_app`."""
    async with http_endpoints.serving(odd_app(), HttpAddress("127.0.0.1", 0)) as address:
        yield f"http://{address}"
