"""The probe of the containers, against real health sides."""

import asyncio
import os
import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry

from shared.runtime import http_endpoints
from shared.runtime.embedded_servers import free_port


async def probe(address: str, *words: str) -> tuple[int, str]:
    """Exit code and standard output of the probe in a container whose service has this ``MYXO_HTTP``."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "shared.runtime.healthcheck", *words, env=os.environ | {"MYXO_HTTP": address}, stdout=subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode is not None
    return process.returncode, out.decode()


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
async def test_the_probe_says_what_the_service_says(ok: bool, code: int) -> None:
    app = http_endpoints.health_app(lambda: {"ok": ok, "state": "ready"}, CollectorRegistry())
    port = free_port()
    async with http_endpoints.serving(app, f"127.0.0.1:{port}"):
        assert (await probe(f"0.0.0.0:{port}"))[0] == code
        found, said = await probe("0.0.0.0:1", f"127.0.0.1:{port}/healthz")
    assert found == code
    assert '"state":"ready"' in said


async def test_a_service_that_does_not_answer_is_not_well() -> None:
    code, said = await probe(f"0.0.0.0:{free_port()}")
    assert code == 1
    assert "nobody answers" in said
