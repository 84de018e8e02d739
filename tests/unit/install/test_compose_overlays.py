"""Files that are laid over compose.yaml: they change services that are there, and keep what hardens them."""

import json
from pathlib import Path

import pytest
import yaml

from myxo.launch.launcher import SAVE_SECONDS
from myxo.launch.service_plan import TRAINERS
from shared.config import devices
from shared.sandbox.sandbox_command import REFUSED
from tests.support.tables import table

COMPOSE = Path(__file__).resolve().parents[3] / "deploy" / "compose"


def read(name: str) -> dict[str, dict[str, dict[str, object]]]:
    return dict(yaml.safe_load((COMPOSE / name).read_text()))


@table("name", ["compose.gpu.yaml", "compose.rocm.yaml", "compose.sandbox.yaml", "compose.tls.yaml"])
def test_an_overlay_changes_services_that_are_there(name: str) -> None:
    assert read(name)["services"].keys() <= read("compose.yaml")["services"].keys()


def test_tls_changes_nothing_else_and_whoever_speaks_to_the_bus_trusts_its_authority() -> None:
    base, tls = read("compose.yaml")["services"], read("compose.tls.yaml")["services"]
    assert tls["accounts"]["command"] == [*base["accounts"]["command"], "--tls"]  # type: ignore[misc]
    spoken = {name for name, service in base.items() if "NATS_URL_FILE" in str(service.get("environment"))}
    assert spoken == {name for name, service in tls.items() if "MYXO_CA_FILE" in str(service.get("environment"))}


def test_amds_gpus_are_given_to_the_torch_backend_and_planned_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    services = read("compose.rocm.yaml")["services"]
    for name in ("trainer", "critic", "rollout"):
        assert services[name]["devices"] == ["/dev/kfd", "/dev/dri"] and "-rocm:" in str(services[name]["image"])
        assert name == "critic" or "ROCM_IMAGE" in str(services[name]["build"])
    assert "--trainer-backend torch" in str(services["submit"]["command"]) and "nvidia" not in str(services).lower()
    for node, (simd, size) in enumerate([(0, 0), (256, 64 << 30), (256, 48 << 30)]):
        (bank := tmp_path / str(node) / "mem_banks" / "0").mkdir(parents=True)
        (tmp_path / str(node) / "properties").write_text(f"cpu_cores_count 4\nsimd_count {simd}\nbroken\n")
        (bank / "properties").write_text(f"heap_type 1\nsize_in_bytes {size}\n")
    monkeypatch.setattr(devices, "AMD_NODES", tmp_path)
    monkeypatch.setattr(devices, "of_each_gpu", lambda _: [])
    assert devices.amd_gpus() == [64 << 30, 48 << 30] and devices.gpu_bytes() == 48 << 30
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        assert devices.gpus() == 2 and devices.resolve("auto") == "cuda"


def test_a_stop_gives_trainers_as_long_as_a_stop_of_myxo_up() -> None:
    services = read("compose.yaml")["services"]
    assert {services[name]["stop_grace_period"] for name in TRAINERS} == {f"{SAVE_SECONDS:.0f}s"}


def test_who_reads_what_accounts_writes_is_restarted_where_it_is_written_anew() -> None:
    after = {
        name: service["depends_on"]
        for name, service in read("compose.yaml")["services"].items()
        if "accounts" in str(service.get("depends_on"))
    }
    changed = {"accounts": {"condition": "service_completed_successfully", "restart": True}}
    assert after == dict.fromkeys(("nats", "redis", "router"), changed)


def test_a_function_that_submit_finds_is_where_it_is_called() -> None:
    services = read("compose.yaml")["services"]
    for name in ("submit", "buffer", "reward", "rollout", "trainer", "critic"):
        places = str(services[name]["volumes"])
        assert "../../examples:/myxo/examples:ro" in places and "runs:/myxo/runs" in places, name


def test_sandboxes_are_allowed_to_the_reward_service_alone_and_without_rights() -> None:
    """Compose adds the lists of both files together."""
    [(service, changed)] = read("compose.sandbox.yaml")["services"].items()
    base = read("compose.yaml")["services"][service]
    assert service == "reward" and changed == {
        "security_opt": ["seccomp=sandbox-seccomp.json", "apparmor=unconfined", "systempaths=unconfined"]
    }
    assert base["security_opt"] == ["no-new-privileges:true"] and base["cap_drop"] == ["ALL"] and base["user"] == "10001:10001"


BUBBLEWRAPS = {"mount", "umount2", "pivot_root", "unshare", "sethostname"}
PYTHONS = {"memfd_create", "shmat", "shmctl", "shmget", "semget", "msgget"}


def test_the_reward_service_is_refused_what_sandboxes_are_but_for_what_makes_them() -> None:
    profile = json.loads((COMPOSE / "sandbox-seccomp.json").read_text())
    [rule] = profile["syscalls"]
    assert profile["defaultAction"] == "SCMP_ACT_ALLOW" and rule["action"] == "SCMP_ACT_ERRNO"
    assert set(rule["names"]) == REFUSED.keys() - BUBBLEWRAPS - PYTHONS


def test_who_is_on_two_networks_passes_nothing_on() -> None:
    services = read("compose.yaml")["services"]
    between = {name for name, service in services.items() if len(service.get("networks", [])) > 1}  # type: ignore[arg-type]
    assert between == {"reward", "gateway", "agent-proxy", "router", "myxo", "prometheus"}
    for name in between:
        assert services[name]["sysctls"] == {"net.ipv4.ip_forward": 0}, name
