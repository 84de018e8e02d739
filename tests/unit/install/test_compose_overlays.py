"""Files that are laid over compose.yaml: they change services that are there, and keep what hardens them."""

from pathlib import Path

import pytest
import yaml

COMPOSE = Path(__file__).resolve().parents[3] / "deploy" / "compose"


def read(name: str) -> dict[str, dict[str, dict[str, object]]]:
    return dict(yaml.safe_load((COMPOSE / name).read_text()))


@pytest.mark.parametrize("name", ["compose.gpu.yaml", "compose.sandbox.yaml", "compose.tls.yaml"])
def test_an_overlay_changes_services_that_are_there(name: str) -> None:
    assert read(name)["services"].keys() <= read("compose.yaml")["services"].keys()


def test_sandboxes_are_allowed_to_the_reward_service_alone_and_without_rights() -> None:
    """Compose adds the lists of both files together."""
    [(service, changed)] = read("compose.sandbox.yaml")["services"].items()
    base = read("compose.yaml")["services"][service]
    assert service == "reward" and changed == {"security_opt": ["seccomp=unconfined", "apparmor=unconfined", "systempaths=unconfined"]}
    assert base["security_opt"] == ["no-new-privileges:true"] and base["cap_drop"] == ["ALL"] and base["user"] == "10001:10001"
