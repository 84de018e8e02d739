"""W&B: its offline files, and the refusal where it is not installed."""

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shared.config import devices
from shared.runtime.errors import ConfigError
from tests.support.run_config import run_config
from tests.support.waiting import until


def test_offline_a_runs_numbers_are_in_its_files(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from services.trainer.metrics_logger import WeightsAndBiases

    asked = {"use_wandb": True, "wandb_mode": "offline", "wandb_project": "sums", "wandb_dir": str(tmp_path / "w")}
    config = run_config(
        tmp_path,
        monitoring=asked,
        reward={"rm_type": "environment", "environment_url": "http://grader:8080"},
        rollout={"agent_options": {"url": "http://me:hush@agent/", "api_key": "hush"}},
    )
    for step, loss in ((3, 0.125), (4, 0.25)):  # the second life of a trainer continues under the same name
        writer = WeightsAndBiases(config, "actor")
        writer.write(3, {"train/loss": 0.5 - loss})  # the first value of a step stays
        writer.write(step, {"train/loss": loss, "rollout/raw_reward": 1.0})
        writer.write(2 + step, {"perf/step_time": 2.0})
        writer.close()
    for loss in (b"0.375", b"0.25"):  # W&B's own process writes them when it likes

        def written(loss: bytes = loss) -> bool:
            held = [file.read_bytes() for file in (tmp_path / "w" / "wandb").glob("offline-run-*/run-test-*.wandb")]
            assert not any(words in one for words in (b"grader:8080", b"hush") for one in held)
            return any(all(words in one for words in (b"train/loss", loss, b"perf/step_time", b"max_staleness")) for one in held)

        asyncio.run(until(written, f"a file of W&B with the loss {loss.decode()}"))


def test_no_address_of_the_run_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from services.trainer.metrics_logger import WeightsAndBiases

    sent: list[dict[str, Any]] = []
    run = SimpleNamespace(define_metric=lambda *_, **__: None)
    wandb = SimpleNamespace(init=lambda **given: sent.append(given["config"]) or run, Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(devices, "check", lambda _: None)
    url = "http://grader:8080"
    config = run_config(
        tmp_path,
        rollout={
            **{"agent": "a.b:c", "agent_options": {"url": url}, "agent_service": ["serve", url], "sglang": {"host": url}},
            **{"models": {"judge": {"sglang": {"host": url}}}, "engine_groups": [{"replicas": 1, "sglang": {"host": url}}]},
        },
        trainer={"train_env_vars": {"PROXY": url}},
        algorithm={"use_opd": True, "opd_type": "sglang", "opd_teachers": {"one": url}},
    )
    engines = config.rollout.model_copy(update={"external_engines": [url], "agent_command": ["play", url]})
    store = config.weights.model_copy(update={"object_store_url": url})
    WeightsAndBiases(config.model_copy(update={"rollout": engines, "weights": store}), "actor")
    assert "grader" not in json.dumps(sent) and sent[0]["trainer"]["lr"] == config.trainer.lr


def test_what_is_asked_for_without_being_installed_is_refused(tmp_path: Path) -> None:
    devices.check(run_config(tmp_path))
    config = run_config(tmp_path, monitoring={"use_wandb": True})
    if importlib.util.find_spec("wandb") is not None:
        devices.check(config)
        return
    with pytest.raises(ConfigError, match=r"monitoring.use_wandb = True: W&B is not installed: pip install 'myxo\[wandb\]'"):
        devices.check(config)
