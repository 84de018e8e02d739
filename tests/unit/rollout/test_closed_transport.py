"""Whoever asks an engine whose client was closed meanwhile finds it away."""

from pathlib import Path

import pytest

from services.rollout.engine.transport import EngineTransport, EngineUnreachable


async def test_a_closed_client_is_an_engine_out_of_reach(tmp_path: Path):
    transport = EngineTransport(tmp_path)
    await transport.close()
    with pytest.raises(EngineUnreachable, match="its client is closed"):
        await transport.post("/continue_generation", None, 1.0, "nothing was changed")
    with pytest.raises(EngineUnreachable, match="its client is closed"):
        async with transport.stream("/generate", b"{}"):
            pass
