"""What does not go with groups from outside."""

from pathlib import Path

import pytest

from myxo.preflight.inspection import Inspection, Note
from myxo.preflight.machine_checks import check_ingest
from shared.config.service_sections import KEY_VARIABLE
from shared.runtime.errors import BadInput, ConfigError
from tests.support.run_config import run_config, write_jsonl


@pytest.fixture(autouse=True)
def prompts(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "prompts.jsonl")


@pytest.mark.parametrize("mode", ["beside", "alone"])
def test_groups_from_outside_lack_the_log_probs_of_teachers(tmp_path: Path, mode: str) -> None:
    with pytest.raises(BadInput, match=r"ingest.ingest_groups.*opd_teachers"):
        run_config(
            tmp_path,
            ingest={"ingest_groups": mode},
            algorithm={"use_opd": True, "opd_type": "sglang", "opd_teachers": {"math": "http://127.0.0.1:1"}},
        )


def test_who_generates_alone_is_alone(tmp_path: Path) -> None:
    function = {"rollout_function_path": "tests.support.rollout_functions:generate"}
    with pytest.raises(BadInput, match="rollout_function_path generates training groups as well"):
        run_config(tmp_path, ingest={"ingest_groups": "alone"}, rollout=function)
    assert run_config(tmp_path, ingest={"ingest_groups": "beside"}, rollout=function).ingest.ingest_groups == "beside"


def test_nothing_comes_in_unless_it_is_told(tmp_path: Path) -> None:
    assert run_config(tmp_path).ingest.ingest_groups == "off"
    with pytest.raises(BadInput, match="ingest_groups"):
        run_config(tmp_path, ingest={"ingest_groups": "on"})


def test_the_producers_key_is_missed_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(mode: str, starts: bool = True, **gateway: int) -> list[str]:
        config = run_config(tmp_path, ingest={"ingest_groups": mode}, gateway=gateway)
        return [one.text if isinstance(one, Note) else str(one) for one in check_ingest(Inspection(config, starts=starts))]

    monkeypatch.setenv(KEY_VARIABLE, "too short")
    with pytest.raises(ConfigError, match=rf"{KEY_VARIABLE} = '\*{{9}}': required with ingest.ingest_groups"):
        found("beside")
    assert found("off") == found("beside", starts=False) == []
    [note] = found("alone", gateway_replicas=0)
    assert "started elsewhere" in note
    monkeypatch.setenv(KEY_VARIABLE, "x" * 16)
    assert found("alone") == []
