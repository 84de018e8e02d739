"""An engine as a process: its flags, its health and its traces, the prefixes that it keeps, and why it ended."""

import os
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest

from services.rollout.client_adapters import adapter_flags
from services.rollout.engine import engine_client
from services.rollout.engine.engine_process import EngineCommand, EngineProcess, engine_end
from services.rollout.engine.generation import Generation, Span, without_older_prefix
from services.rollout.replica_command import FLAG, RUNNER, captured_requests, expert_flags, graph_flags, keeps_prefixes, parameter_flags
from services.rollout.request_slots import EngineLoad, SlotLimit
from services.rollout.rollout_service import profile_engine
from shared.config import devices
from shared.process.child_process import descendants
from shared.runtime.errors import ConfigError, MyxoError
from tests.support.run_config import run_config
from tests.support.tables import table
from tests.support.waiting import wait_until
from tests.unit.trainer.megatron.tiny import make_checkpoint

SERVED: dict[str, Any] = {"tinker": {"tinker_endpoint": True}}


@table(
    ("rollout", "captured", "flags"),
    [
        ({}, 512, {FLAG: 512}),
        ({"rollout_concurrency": 40}, 256, {FLAG: 256}),
        ({"rollout_concurrency": 300}, 300, {FLAG: 300}),
        ({"rollout_concurrency": 2000}, 512, {FLAG: 512}),
        ({"sglang": {"cuda_graph_max_bs_decode": 32}}, 32, {}),
        ({"sglang": {"--cuda-graph-bs-decode": ["8", "64"]}}, 64, {}),
        ({"sglang": {"disable-cuda-graph": True}}, None, {}),
    ],
)
def test_what_an_engine_captures(rollout: dict[str, Any], captured: int | None, flags: dict[str, int], tmp_path: Path) -> None:
    config = run_config(tmp_path, rollout=rollout)
    assert captured_requests(config, "cuda") == captured
    assert graph_flags(config, "cuda") == flags
    assert (captured_requests(config, "cpu"), graph_flags(config, "cpu")) == (None, {})


def test_a_colocated_engine_is_left_as_it_is(tmp_path: Path) -> None:
    config = run_config(tmp_path, trainer={"colocate": True})
    assert (captured_requests(config, "cuda"), graph_flags(config, "cuda")) == (256, {})


def test_slots_stay_within_what_is_captured() -> None:
    limit = SlotLimit(None, least=8, batch=2000, most=512)
    seen = {limit.note(EngineLoad(512, 0, 0.1), 512, 10_000 * now * now, now) for now in range(60)}
    assert seen == {512}


def test_a_record_of_experts_needs_kernels_that_leave_one(tmp_path: Path) -> None:
    make_checkpoint("gpt_oss", tmp_path / "oss")
    make_checkpoint("qwen3_moe", tmp_path / "qwen")
    plain = {"enable-return-routed-experts": True}

    def flags(model: str, device: str, **sglang: str) -> dict[str, Any]:
        sections: dict[str, Any] = {"model": {"hf_checkpoint": str(tmp_path / model)}, "rollout": {"sglang": sglang}}
        return expert_flags(run_config(tmp_path, **sections, trainer={"use_rollout_routing_replay": True}), device)

    assert flags("oss", "cuda") == flags("oss", "cuda", moe_runner_backend="triton") == {**plain, RUNNER: "triton"}
    assert flags("oss", "cpu") == flags("qwen", "cuda") == plain
    with pytest.raises(ConfigError, match="moe-runner-backend = 'triton_kernel': triton with use_rollout_routing_replay"):
        flags("oss", "cuda", moe_runner_backend="triton_kernel")
    unkept = run_config(tmp_path, model={"hf_checkpoint": str(tmp_path / "oss")})
    assert expert_flags(unkept, "cuda") == {"enable-return-routed-experts": False}


@table(
    ("capability", "given", "transport", "flag"),
    [
        (9.0, None, "nccl", None),
        (9.0, "auto", "nccl", None),
        (10.0, None, "nccl", "triton"),
        (10.0, None, "disk", "triton"),
        (10.0, "triton", "nccl", None),
        (10.0, "flashinfer_trtllm_routed", "disk", None),
        (10.0, "auto", "nccl", "triton"),
    ],
)
def test_experts_lie_as_they_are_pushed(
    capability: float, given: str | None, transport: str, flag: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang would rearrange those that it loads itself, and not those that are pushed: these would not fit, or lie in the wrong places."""
    monkeypatch.setattr(devices, "gpu_capabilities", lambda: [capability])
    make_checkpoint("qwen3_moe", tmp_path)
    sections: dict[str, Any] = {"model": {"hf_checkpoint": str(tmp_path)}, "weights": {"update_weight_transport": transport}}
    config = run_config(tmp_path, rollout={"sglang": {RUNNER: given} if given else {}}, **sections)
    assert expert_flags(config, "cuda").get(RUNNER) == flag
    assert RUNNER not in expert_flags(config.with_fields(debug={"debug_rollout_only": True}), "cuda"), "nobody loads others"


def test_engines_compute_adapters_of_what_trains(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path / "model")

    def targets(**trainer: Any) -> Any:
        sections: dict[str, Any] = {"model": {"hf_checkpoint": str(tmp_path / "model")}, "rollout": {"num_rollout": 0}}
        config = run_config(tmp_path, **sections, trainer=trainer, **SERVED)
        return adapter_flags(config, "cuda").get("lora-target-modules")

    assert sorted(targets(lora_rank=4)) == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert targets(lora_rank=4, target_modules=["q_proj", "o_proj"]) == ["q_proj", "o_proj"]
    assert targets() is None


def test_engines_on_gpus_hold_trained_parameters_in_bfloat16(tmp_path: Path) -> None:
    def flags(device: str, train_dtype: str, **sections: Any) -> dict[str, Any]:
        return parameter_flags(run_config(tmp_path, trainer={"train_dtype": train_dtype}, **sections), device)

    assert flags("cuda", "float32") == flags("cuda", "bfloat16", rollout={"num_rollout": 0}, **SERVED) == {"dtype": "bfloat16"}
    assert flags("cpu", "bfloat16") == flags("cuda", "bfloat16", debug={"debug_rollout_only": True}) == {}


# --- when an engine that does not answer counts as hung


class Probed:
    """An engine whose probes begin 40 s apart and fail after 30 s, but for the numbers in ``answered``; it is paused at those in
    ``paused``."""

    def __init__(self, answered: set[int], paused: set[int]) -> None:
        self.now, self.asked, self._answered, self._paused = 0.0, 0, answered, paused

    def can_be_asked(self) -> bool:
        return self.asked not in self._paused

    async def probe(self, deadline: float) -> None:
        self.now += 30.0
        if self.asked not in self._answered:
            raise MyxoError("no answer")

    async def sleep(self, seconds: float) -> None:
        self.now, self.asked = self.now + seconds, self.asked + 1


@pytest.mark.parametrize(
    ("answered", "paused", "probes"), [(set(), set(), 2), ({2}, set(), 4), (set(), {2}, 4)], ids=["silent", "answers once", "is paused"]
)
async def test_silence_counts_from_the_first_probe_that_failed_in_a_row(
    answered: set[int], paused: set[int], probes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = Probed(answered, paused)
    monkeypatch.setattr(engine_client, "asyncio", SimpleNamespace(sleep=engine.sleep))
    monkeypatch.setattr(engine_client, "time", SimpleNamespace(monotonic=lambda: engine.now))
    hung = await engine_client.until_hung(engine, engine.can_be_asked, 60.0)
    assert hung == "it has answered no probe for 70 s, though its processes are there: no answer"
    assert engine.asked == probes


# --- traces of engines: where none can be written, none is begun


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


# --- where engines keep prefixes, and what a generation that began with those of older weights is worth

AGENT: dict[str, Any] = {"agent": "package.module:run"}


@table(
    ("rollout", "device", "read", "kept"),
    [
        ({}, "cuda", True, True),
        ({}, "cpu", True, False),
        (AGENT, "cpu", True, True),
        ({**AGENT, "in_flight_on_push": "abort"}, "cpu", True, True),
        ({"in_flight_on_push": "retract"}, "cuda", True, False),
        ({}, "cuda", False, False),
        ({"sglang": {"enable-deterministic-inference": True}}, "cuda", True, False),
        ({"sglang": {"enable-hierarchical-cache": True}}, "cpu", True, True),
    ],
)
def test_prefixes_are_kept_where_versions_can_be_told_apart(
    tmp_path: Path, rollout: dict[str, Any], device: str, read: bool, kept: bool
) -> None:
    assert keeps_prefixes(run_config(tmp_path, rollout=rollout), device, answers_are_read=read) is kept


def generation(cached: int, *spans: Span) -> Generation:
    count = spans[-1].end if spans else 0
    return Generation(np.arange(count, dtype=np.int32), np.zeros(count, np.float32), "stop", spans, cached)


def test_what_began_with_a_prefix_of_older_weights_is_as_if_aborted() -> None:
    for sound in (generation(0, Span(0, 4, 2)), generation(9, Span(0, 4, 1)), generation(9, Span(0, 2, 1), Span(2, 4, 2)), generation(9)):
        assert without_older_prefix(sound, 1) is sound
    dropped = without_older_prefix(generation(9, Span(0, 4, 2)), 1)
    assert (dropped.finish, len(dropped.tokens), len(dropped.log_probs), dropped.spans) == ("abort", 0, 0, ())


# --- where an engine of its own process lies, and why it has ended, by its log


MISSED = "[2026-11-25 12:00:00] Subprocess detokenizer (pid=4711) crashed with exit code -9. Triggering SIGQUIT."
TRACE = ["Traceback (most recent call last):", '  File "scheduler.py", line 1, in run', "    step()", "ValueError: no such layer"]


def test_the_missed_process_is_named_and_not_what_was_raised_after_it() -> None:
    assert engine_end(["ready", MISSED, *TRACE]) == "Subprocess detokenizer (pid=4711) crashed with exit code -9"
    assert engine_end([MISSED]) == "Subprocess detokenizer (pid=4711) crashed with exit code -9"


def test_what_was_raised_before_it_is_told_too() -> None:
    told = engine_end([*TRACE, "ending", MISSED])
    assert told == "Subprocess detokenizer (pid=4711) crashed with exit code -9, after ValueError: no such layer"


def test_without_it_the_last_exception_or_line_is_told() -> None:
    assert engine_end([*TRACE, "ending"]) == "ValueError: no such layer"
    assert engine_end(["one", "two"]) == "two"
    assert engine_end([]) == ""


def test_an_engine_that_ends_itself_is_told_with_its_own_words(tmp_path: Path) -> None:
    """SGLang misses one of its processes and ends the others; which of them is seen to be gone first is chance."""
    log = tmp_path / "log"
    engine = EngineProcess(EngineCommand(["sh", "-c", f"echo '{MISSED}'; exec sleep 600"], {}), log)
    try:
        wait_until(lambda: MISSED in (log.read_text() if log.exists() else ""), "the word")
        [server] = wait_until(lambda: [one.pid for one in descendants(engine.pid) if one.parent == engine.pid], "a process")
        assert engine.fault() == ""
        os.kill(engine.pid, signal.SIGSTOP)  # what watches it does not end yet
        os.kill(server, signal.SIGKILL)
        assert wait_until(engine.fault, "the fault") == "is ending: Subprocess detokenizer (pid=4711) crashed with exit code -9"
    finally:
        engine.kill()


def test_a_directory_too_long_for_sockets_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(ConfigError, match=r"TMPDIR = '.*x{100}': at most 68 bytes: an engine's sockets lie below it"):
        EngineProcess(EngineCommand(["true"], {}), tmp_path / "log")
    assert not list(long.iterdir())
