"""`deploy/kubernetes`, rendered and held to the schemas of the APIs, to the runs' configs, and to who may reach whom.

The renderer here knows what our kustomizations use, and no more; where there is a kubectl, its own rendering has to be the same.
"""

import json
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from services.rollout.replica_command import INSTANCE
from shared.accounts.permissions import ROLES, RUN_ACCOUNT
from shared.bus.streams import task_consumer
from shared.bus.subjects import TRAIN
from shared.config.service_sections import BusSection, RunSection
from shared.runtime.addresses import RANK_VARIABLES
from tests.support.tables import table

ROOT = Path(__file__).resolve().parents[3] / "deploy" / "kubernetes"
SCHEMAS = json.loads(Path(__file__).with_name("schemas").joinpath("kubernetes.json").read_text())
KUSTOMIZATIONS = ["base", "gpu-2x8", "gpu-32x8", "gpu-32x8-wide"]
KNOWN = {"apiVersion", "kind", "namespace", "resources", "generatorOptions", "configMapGenerator", "images", "patches"}

Object = dict[str, Any]


def rendered(directory: Path) -> list[Object]:
    """Returns what ``kubectl kustomize`` would print, in the order of the files."""
    plan = yaml.safe_load((directory / "kustomization.yaml").read_text())
    assert plan.keys() <= KNOWN and plan["generatorOptions"] == {"disableNameSuffixHash": True}
    objects: list[Object] = []
    for name in plan["resources"]:
        path = directory / name
        objects += rendered(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))
    for generated in plan["configMapGenerator"]:
        data = {name: (directory / name).read_text() for name in generated["files"]}
        objects = [found for found in objects if (found["kind"], found["metadata"]["name"]) != ("ConfigMap", generated["name"])]
        objects.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generated["name"]}, "data": data})
    for patch in plan.get("patches", []):
        target, change = named(objects, patch["target"]["kind"], patch["target"]["name"]), yaml.safe_load(patch["patch"])
        if isinstance(change, dict):
            assert change == {"$patch": "delete", **{name: target[name] for name in ("apiVersion", "kind")}, "metadata": change["metadata"]}
            objects.remove(target)
            continue
        for operation in change:
            assert operation["op"] == "replace"
            *path, last = (int(part) if part.isdigit() else part for part in operation["path"].strip("/").split("/"))
            place: Any = target
            for part in path:
                place = place[part]
            assert last in place, operation["path"]
            place[last] = operation["value"]
    images = {image["name"]: image["newName"] for image in plan.get("images", [])}
    for found in objects:
        found["metadata"]["namespace"] = plan["namespace"]
        for container in containers(found):
            container["image"] = images.get(container["image"], container["image"])
    return objects


def named(objects: list[Object], kind: str, name: str) -> Object:
    return next(found for found in objects if (found["kind"], found["metadata"]["name"]) == (kind, name))


def pods(found: Object) -> Iterator[Object]:
    """Yields the templates of pods in an object."""
    if found["kind"] in ("Deployment", "Job"):
        yield found["spec"]["template"]
    elif found["kind"] == "LeaderWorkerSet":
        yield found["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    elif found["kind"] == "JobSet":
        for job in found["spec"]["replicatedJobs"]:
            yield job["template"]["spec"]["template"]


def containers(found: Object) -> Iterator[Object]:
    for pod in pods(found):
        yield from pod["spec"]["containers"]


@pytest.fixture(params=KUSTOMIZATIONS)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return rendered(ROOT / request.param)


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_kubectl_renders_the_same(name: str) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here")
    done = subprocess.run(["kubectl", "kustomize", str(ROOT / name)], capture_output=True, text=True, check=True)

    def key(found: Object) -> tuple[str, str]:
        return found["kind"], found["metadata"]["name"]

    theirs = sorted(yaml.safe_load_all(done.stdout), key=key)
    assert theirs == sorted(rendered(ROOT / name), key=key)


VALIDATORS = {
    kind: jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": SCHEMAS["$defs"]}) for kind, name in SCHEMAS["kinds"].items()
}


def test_every_object_is_one_of_its_api(objects: list[Object]) -> None:
    for found in objects:
        VALIDATORS[found["kind"]].validate(found)


@table("kind", ["Deployment", "JobSet", "ScaledObject", "NetworkPolicy", "LeaderWorkerSet"])
def test_a_field_that_the_api_lacks_is_found(kind: str) -> None:
    found = next(found for found in rendered(ROOT / "gpu-32x8-wide") if found["kind"] == kind)
    with pytest.raises(jsonschema.ValidationError):
        VALIDATORS[kind].validate({**found, "spec": {**found["spec"], "replicsa": 1}})


def test_numbers_are_those_of_the_run(objects: list[Object]) -> None:
    run = tomllib.loads(named(objects, "ConfigMap", "myxo-run")["data"]["run.toml"])
    RunSection.model_validate(run["run"])
    trainer, rollout = run["trainer"], run["rollout"]
    job = named(objects, "JobSet", "myxo-trainer")["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["completions"] == job["parallelism"] == trainer.get("actor_num_nodes", 1) and job["completionMode"] == "Indexed"
    engines = of_engines(objects)
    assert engines["spec"]["replicas"] == rollout.get("rollout_replicas", 1)
    nodes = rollout.get("sglang", {}).get("nnodes", 1)
    assert engines["kind"] == ("LeaderWorkerSet" if nodes > 1 else "Deployment")
    assert engines["spec"].get("leaderWorkerTemplate", {"size": 1})["size"] == nodes
    if rollout["rollout_device"] == "cuda":
        pods_of = (named(objects, "JobSet", "myxo-trainer"), engines)
        gpus = [int(next(containers(found))["resources"]["limits"]["nvidia.com/gpu"]) for found in pods_of]
        assert gpus == [trainer["actor_num_gpus_per_node"], rollout["rollout_num_gpus_per_engine"] // nodes]


def test_a_trainers_pod_is_followed_once_it_is_gone_unless_its_nodes_wait_for_each_other(objects: list[Object]) -> None:
    job = named(objects, "JobSet", "myxo-trainer")["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["podReplacementPolicy"] == ("Failed" if job["completions"] == 1 else "TerminatingOrFailed")


def of_engines(objects: list[Object]) -> Object:
    return next(
        found for found in objects if found["metadata"]["name"] == "myxo-rollout" and found["kind"] in ("Deployment", "LeaderWorkerSet")
    )


def test_the_pods_of_an_engine_share_a_name_that_no_other_engine_has() -> None:
    """LeaderWorkerSet labels each pod with its group's index; a service reads its rank from LWS_WORKER_INDEX."""
    [container] = containers(of_engines(rendered(ROOT / "gpu-32x8-wide")))
    first, second = container["env"]
    assert first["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['leaderworkerset.sigs.k8s.io/group-index']"
    assert (second["name"], second["value"]) == (INSTANCE, f"rollout-$({first['name']})")
    assert "LWS_WORKER_INDEX" in RANK_VARIABLES


def test_the_scaler_looks_at_the_runs_own_queue(objects: list[Object]) -> None:
    scaled = named(objects, "ScaledObject", "myxo-rollout")["spec"]
    run = named(objects, "ConfigMap", "myxo-environment")["data"]["MYXO_RUN"]
    consumer, asked = task_consumer(run, BusSection(), TRAIN), scaled["triggers"][0]["metadata"]
    assert (asked["account"], asked["stream"], asked["consumer"]) == (RUN_ACCOUNT, consumer.stream, consumer.name)
    target = scaled["scaleTargetRef"]
    assert scaled["minReplicaCount"] >= 1 and named(objects, target.get("kind", "Deployment"), target["name"]) == of_engines(objects)
    assert target.get("apiVersion", "apps/v1") == of_engines(objects)["apiVersion"]


def test_every_pod_has_no_rights_and_its_own_account(objects: list[Object]) -> None:
    for found in objects:
        for pod in pods(found):
            role = pod["metadata"]["labels"]["app.kubernetes.io/component"]
            [secret] = [volume["secret"]["secretName"] for volume in pod["spec"]["volumes"] if "secret" in volume]
            assert secret == f"myxo-{role}" and role in ROLES
            assert pod["spec"]["securityContext"]["runAsNonRoot"] and not pod["spec"]["automountServiceAccountToken"]
            for container in pod["spec"]["containers"]:
                context = container["securityContext"]
                assert context["readOnlyRootFilesystem"] and context["capabilities"] == {"drop": ["ALL"]}


def test_networks_are_the_planes_and_nothing_else(objects: list[Object]) -> None:
    """Everything is shut first; only trainer and engines reach each other at any port, and only agents come to a gateway: those of pods of
    their own, and those that rollout services play."""
    policies = {found["metadata"]["name"]: found["spec"] for found in objects if found["kind"] == "NetworkPolicy"}
    shut = policies.pop("myxo-nothing-else")
    assert shut["policyTypes"] == ["Ingress", "Egress"] and shut.keys() == {"podSelector", "policyTypes"}
    at_any_port = {name for name, spec in policies.items() for rule in spec.get("ingress", []) if "ports" not in rule}
    assert at_any_port == {"myxo-weights", "myxo-engine-doors"}
    [expression] = policies["myxo-weights"]["podSelector"]["matchExpressions"]
    assert expression["values"] == ["trainer", "rollout"]
    asking = policies["myxo-engine-doors"]["ingress"][0]["from"][0]["podSelector"]["matchExpressions"][0]["values"]
    assert asking == ["gateway", "reward"], "rewards of frozen models"
    assert policies["myxo-reward"]["egress"] == [{"to": [{"podSelector": policies["myxo-engine-doors"]["podSelector"]}]}]
    assert all("from" in rule for spec in policies.values() for rule in spec.get("ingress", []))
    agents, (came,) = {"matchLabels": {"myxo/agent": "true"}}, policies["myxo-gateway"]["ingress"]
    assert came["from"] == [{"podSelector": agents}, {"podSelector": policies["myxo-agents"]["podSelector"]}]
    assert policies["myxo-agents"]["podSelector"]["matchExpressions"][0]["values"] == ["rollout"]
    gone = [rule["to"][0]["podSelector"] for rule in policies["myxo-agents"]["egress"]]
    assert gone == [agents, policies["myxo-gateway"]["podSelector"]]


@pytest.mark.parametrize("chart", ["nats", "valkey"])
def test_servers_read_the_accounts_that_myxo_made(chart: str) -> None:
    values = (ROOT / "charts" / f"{chart}.yaml").read_text()
    assert yaml.safe_load(values)
    assert f"/credentials/{'nats' if chart == 'nats' else 'redis'}.conf" in values
