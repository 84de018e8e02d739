"""Credentials that are planted in a config: files, prints, errors and other programs do not get them."""

import io
import json
import logging
import tomllib
from pathlib import Path

import pytest
import structlog

from shared.bus import runs
from shared.config import config_reading
from shared.config.config_reading import parse
from shared.config.run_config import RunConfig
from shared.runtime import telemetry
from shared.runtime.errors import ConfigError, Problems
from shared.runtime.safe_text import is_masked, without_credentials
from tests.support.run_config import run_config

PLANTED = {
    "reward": {
        "rm_type": "remote_rm",
        "rm_url": "https://me:hush@rm.example.org/score?token=hush&level=3",
        "judge_url": "https://judge:hush@judge.example.org/v1",
        "judge_model": "m",
        "judge_sampling": {"temperature": 0.0, "api_key": "hush"},
        "judge_key_variable": "JUDGE_KEY",
        "reward_key": "score",
        "environments": {"grader": "http://me:hush@grader:8080"},
    },
    "rollout": {"agent_options": {"url": "http://me:hush@agent/", "auth": {"bearer": "hush"}, "notes": "key sk-hushhushhushhushhush"}},
    "run": {"custom_args": {"hf_token": "hush", "database": "postgres://me:hush@db/x", "steps": 3, "access_key_id": "hush"}},
    "data": {"label_key": "answer"},
}


def test_neither_the_directorys_config_nor_what_is_printed_holds_what_was_planted(tmp_path: Path) -> None:
    config = run_config(tmp_path, **PLANTED)
    whole = runs.freeze(tmp_path, config)
    assert runs.frozen(tmp_path) == config == RunConfig.model_validate_json(whole.read_text()), "the run continues with what it had"
    assert whole.stat().st_mode & 0o777 == 0o600
    other = json.loads((tmp_path / runs.FROZEN).read_text())
    (tmp_path / runs.FROZEN).write_text(json.dumps(other | {"rollout": {**other["rollout"], "num_rollout": 9}}))
    newer = runs.frozen(tmp_path)
    assert newer is not None and newer.rollout.num_rollout == 9, "an older release writes that file alone"
    runs.freeze(tmp_path, config)
    whole.unlink()  # as for anybody but its owner
    written = (tmp_path / runs.FROZEN).read_text()
    assert "hush" not in written and "hush" not in config_reading.dump(config.shown())
    copy = runs.frozen(tmp_path)
    assert copy is not None and copy.reward.rm_url == "https://…@rm.example.org/score?token=…&level=3"
    assert (copy.reward.reward_key, copy.reward.judge_key_variable, copy.data.label_key) == ("score", "JUDGE_KEY", "answer")
    assert copy.run.custom_args["steps"] == 3
    assert runs.differences(copy, config) == [] == runs.differences(config, copy)
    other = config.model_copy(update={"rollout": config.rollout.model_copy(update={"n_samples_per_prompt": 8})})
    assert [problem.field for problem in runs.differences(copy, other)] == ["rollout.n_samples_per_prompt"]
    assert config.shown().shown() == config.shown()
    with pytest.raises(Problems) as refused:
        parse(copy.model_dump(mode="json"))
    fields = [problem.field for problem in refused.value.problems if isinstance(problem, ConfigError)]
    reward = [f"reward.{name}" for name in ("environments", "judge_sampling", "judge_url", "rm_url")]
    assert sorted(fields) == [*reward, "rollout.agent_options", "run.custom_args"]
    earlier = RunConfig.model_validate_json(written.replace("…@", ""))
    assert runs.differences(earlier, config) == [], "an earlier release left no mark of a URL's user"


def test_a_printed_table_with_a_null_is_refused_like_others(tmp_path: Path) -> None:
    config = run_config(tmp_path, run={"custom_args": {"api_key": "hush", "notes": None}})
    assert parse(tomllib.loads(config_reading.dump(config))) == config
    with pytest.raises(ConfigError, match=r"run\.custom_args.*stands for a credential"):
        parse(tomllib.loads(config_reading.dump(config.shown())))
    with pytest.raises(ConfigError, match=r"run\.custom_args.*expecting property name"):
        parse(config.model_dump(mode="json") | {"run": {"name": "r", "custom_args": "{"}})


def test_each_mark_of_a_credential_is_known_and_no_other_ellipsis(tmp_path: Path) -> None:
    for words in (
        "http://me:hush@h/",
        "http://hush@h",
        "http://h/sk-hushhushhushhush0/v1",
        "key hf_hushhushhushhushh",
        "http://h?api_key=hush",
    ):
        masked = without_credentials(words)
        assert is_masked({"agent_options": json.dumps({"notes": [None, masked]})}), "a table as JSON text, where it holds a null"
        assert "hush" not in masked and is_masked(masked) and not is_masked(words) and without_credentials(masked) == masked
    free = {"truncation_mark": "…", "url": "http://h?after=…"}
    assert run_config(tmp_path, rollout={"agent_options": free}, run={"custom_args": free}).run.custom_args == free


def test_a_config_without_credentials_is_written_as_it_is(tmp_path: Path) -> None:
    config = run_config(tmp_path, reward={"rm_type": "environment", "environment_url": "http://grader:8080"})
    assert config.shown() is config
    (tmp_path / runs.PRIVATE).touch()
    assert runs.freeze(tmp_path, config) == tmp_path / runs.FROZEN and not (tmp_path / runs.PRIVATE).exists()
    assert parse(json.loads(config.model_dump_json(exclude_unset=True))).shown().reward == config.reward


def test_text_keeps_what_is_no_credential() -> None:
    kept = ["me@example.org", "http://host/a@b", "http://h?level=3&key_column=x", "a:b", "keys", "sk-short", "nats:grader", "x?y=z"]
    assert without_credentials(kept) == [*kept[:2], "http://h?level=3&key_column=…", *kept[3:]]
    urls = "nats://u:p@one:4222,redis://:p@two/0?password=p ws://t@h"
    assert without_credentials(urls) == "nats://…@one:4222,redis://…@two/0?password=… ws://…@h"


def test_no_log_line_holds_what_was_planted_but_the_consoles_own_address_is_whole() -> None:
    before, stream = structlog.get_config(), io.StringIO()
    handlers = logging.getLogger().handlers[:]
    try:
        telemetry.configure_logs("r", "reward", "reward-1", stream=stream)
        log = structlog.get_logger()
        log.error(
            "failed", error="no answer of http://me:hush@rm/score?token=hush", tasks=["redis://:hush@store"], more={"u": "ws://hush@h"}
        )
        logging.getLogger("library").warning("cannot reach %s", "https://me:hush@host/")
        try:
            raise ValueError("Authorization of sk-hushhushhushhushhush at http://me:hush@judge/v1 was refused")
        except ValueError:
            log.exception("died")
        assert "hush" not in telemetry.last_error.text and "http://…@judge/v1" in telemetry.last_error.text
        assert "hush" not in stream.getvalue() and "http://…@rm/score?token=…" in json.loads(stream.getvalue().splitlines()[0])["error"]
        log.info(telemetry.CONSOLE_SERVES, url="http://127.0.0.1:1/?token=shown")
        assert "token=shown" in stream.getvalue()
    finally:
        structlog.configure(**before)
        logging.getLogger().handlers[:] = handlers
