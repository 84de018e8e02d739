"""The example environments: their rewards are those of the quick start's own verifier, and their containers ask for little."""

import importlib.util
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.support.quickstart_reward import quickstart_reward

EXAMPLES = Path(__file__).parents[3] / "examples"


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_python_example_rewards_sums_as_the_quick_start_does() -> None:
    example = loaded(EXAMPLES / "environments" / "python-fastapi" / "environment.py")
    rng = random.Random(0)
    for _ in range(30):
        total = rng.randint(100, 999) + rng.randint(100, 999)
        working = f"({rng.randint(0, 18):02d} {rng.randint(0, 18):02d} {rng.randint(0, 18):02d})"
        responses = [str(total), f"{working}{total}", f"{working}{total + 10}", str(total - 1), f"{total}.", f" {total}", "", "no idea"]
        group = example.Group.model_validate({"label": str(total), "samples": [{"response": text} for text in responses]})
        rewards = example.score(group)["rewards"]
        assert [entry["reward"] for entry in rewards] == [quickstart_reward(text, str(total)) for text in responses]
        assert [entry["worked"] for entry in rewards] == [float(text.startswith("(")) for text in responses]


@pytest.mark.parametrize("name", ["node", "python-fastapi"])
def test_an_example_joins_from_outside_and_is_allowed_little(name: str) -> None:
    compose: dict[str, Any] = yaml.safe_load((EXAMPLES / "environments" / name / "compose.yaml").read_text())
    [(host, service)] = compose["services"].items()
    assert host == f"arithmetic-{name.removesuffix('-fastapi')}"
    assert service["networks"] == ["environments"]
    assert compose["networks"]["environments"] == {"name": "${MYXO_ENVIRONMENTS_NETWORK:-myxo-environments}", "external": True}
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert "ports" not in service
    lines = (EXAMPLES / "environments" / name / "Dockerfile").read_text().splitlines()
    assert "USER 65534:65534" in lines
    assert any(line.startswith("HEALTHCHECK") for line in lines)
