"""Traces of engines: where none can be written, none is begun."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

from services.rollout.rollout_service import profile_engine
from tests.support.run_config import run_config


async def profiled(directory: Path) -> tuple[Any, Any]:
    """Has an engine trace a step; returns what the service logs, and what the engine is asked."""
    config = run_config(directory, debug={"profile_target": ["rollout"], "profile_step_start": 0, "profile_step_end": 1})
    config = config.with_fields(rollout={"rollout_device": "cpu"})
    buffer = SimpleNamespace(gauges={"trained_steps": 0})
    registry = SimpleNamespace(alive=AsyncMock(return_value=[buffer]))
    service: Any = SimpleNamespace(config=config, instance="rollout-0", log=Mock(), registry=registry)
    replica: Any = SimpleNamespace(serving=True, client=SimpleNamespace(transport=SimpleNamespace(post=AsyncMock())))
    await profile_engine(service, replica)
    return service.log, replica.client.transport.post


async def test_an_engine_is_asked_for_a_trace_only_where_it_can_be_written(tmp_path: Path) -> None:
    """SGLang makes the directory as the trace ends, within the engine, which dies where it cannot."""
    log, asked = await profiled(tmp_path)
    (_, request, *_), written = asked.await_args.args, log.info.call_args.kwargs["directory"]
    assert request["output_dir"] == written and Path(written).is_dir() and Path(written).parts[-2:] == ("profile", "rollout-0")
    Path(written).rmdir()
    Path(written).parent.rmdir()
    Path(written).parent.write_text("")
    log, asked = await profiled(tmp_path)
    asked.assert_not_awaited()
    assert log.error.call_args.args == ("engine_not_profiled",) and "profile" in log.error.call_args.kwargs["error"]
