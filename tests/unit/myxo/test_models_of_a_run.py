"""Several models under one run: how they are given, what is refused, and which service and GPUs each engine gets."""

import json
from pathlib import Path
from typing import Any

import pytest

from myxo.launch.node_placement import place
from myxo.launch.service_plan import filled, plan
from myxo.preflight.engine_checks import check_models
from myxo.preflight.inspection import Inspection, Note
from myxo.preflight.machine_checks import check_gateways
from myxo.preflight.run_plan import RunPlan, engine_table
from shared.config import config_reading, devices
from shared.config.config_reading import load, parse, read
from shared.config.rollout_section import TRANSFER
from shared.config.run_config import RunConfig
from shared.model.families import read_architecture
from shared.runtime.errors import BadInput, ConfigError, raise_problems
from tests.support.run_config import values
from tests.support.tables import table
from tests.unit.myxo.test_memory_plans import SHAPE

RUN = {"num_rollout": 4, "rollout_batch_size": 8, "n_samples_per_prompt": 2, "rollout_device": "cuda"}
JUDGE = {"hf_checkpoint": "/m/judge", "num_gpus_per_engine": 2}


def of_yaml(directory: Path, text: str, given: str = "", per_engine: int = 1) -> RunConfig:
    """The config of a run with slime's file; ``given``: further lines of `[rollout]`."""
    (directory / "engines.yaml").write_text(text)
    run = directory / "run.toml"
    run.write_text(
        f"""[run]
name = "several"
[model]
hf_checkpoint = "/m/policy"
[data]
prompt_data = "prompts.jsonl"
[rollout]
num_rollout = 1
rollout_batch_size = 8
n_samples_per_prompt = 2
rollout_num_gpus_per_engine = {per_engine}
sglang_config = "{directory}/engines.yaml"
{given}
"""
    )
    return load(run)


TEACHERS = """sglang:
  - name: student
    update_weights: true
    server_groups:
      - {worker_type: regular, num_gpus: 10, num_gpus_per_engine: 2, overrides: {mem_fraction_static: 0.82}}
  - name: code
    model_path: /m/code
    update_weights: false
    num_gpus_per_engine: 2
    server_groups:
      - {worker_type: regular, num_gpus: 4, overrides: {disable_cuda_graph: true}}
      - {worker_type: placeholder, num_gpus: 1}
"""
PLACEHOLDER = """sglang:
  - name: default
    model_path: /m/policy
    engine_groups:
      - {worker_type: regular, num_gpus: 6, num_gpus_per_engine: 2}
      - {worker_type: regular, num_gpus: 4, num_gpus_per_engine: 4}
      - {worker_type: placeholder, num_gpus: 2}
"""
BOTH = """sglang:
  - name: actor
    num_gpus_per_engine: 2
    server_groups: [{worker_type: prefill, num_gpus: 4}, {worker_type: decode, num_gpus: 8, num_gpus_per_engine: 4}]
  - {name: ref, update_weights: false, server_groups: [{worker_type: regular, num_gpus: 4}]}
"""
PLAIN = """sglang:
  - {name: actor, server_groups: [{worker_type: regular, num_gpus: 4}]}
  - {name: ref, server_groups: [{num_gpus: 2, overrides: {model_path: /m/ref, context-length: 64}}]}
"""


@table(
    ("text", "gpus", "name", "groups", "models"),
    [
        (TEACHERS, 15, "student", [("regular", 5, 2)], {"code": ("/m/code", [("regular", 2, 2), ("placeholder", 1, 2)])}),
        (PLACEHOLDER, 12, "default", [("regular", 3, 2), ("regular", 1, 4), ("placeholder", 2, 1)], {}),
        (BOTH, 16, "actor", [("prefill", 2, 2), ("decode", 2, 4)], {"ref": (None, [("regular", 4, 1)])}),
        (PLAIN, 6, "actor", [("regular", 4, 1)], {"ref": ("/m/ref", [("regular", 2, 1)])}),
    ],
)
def test_slimes_files_come_to_the_same_form(
    text: str, gpus: int, name: str, groups: list[Any], models: dict[str, Any], tmp_path: Path
) -> None:
    rollout = of_yaml(tmp_path, text, f"rollout_num_gpus = {gpus}").rollout

    def shapes(model: str) -> list[tuple[str, int, int]]:
        return [(group.worker_type, group.replicas, group.num_gpus_per_engine) for group in rollout.groups_of(model)]

    assert (rollout.policy_name, rollout.all_gpus, shapes("")) == (name, gpus, groups)
    assert rollout.rollout_replicas == sum(count for kind, count, _ in groups if kind != "placeholder")
    given = {model: (own.hf_checkpoint and str(own.hf_checkpoint), shapes(model)) for model, own in rollout.models.items()}
    assert given == models
    with pytest.raises(BadInput, match=f"{gpus}.*(all groups|x rollout_num_gpus_per_engine)|{gpus // 2} x"):
        of_yaml(tmp_path, text, f"rollout_num_gpus = {gpus + 1}")


def test_the_flags_of_a_group_stand_over_those_of_its_model_and_the_runs(tmp_path: Path) -> None:
    config = of_yaml(tmp_path, TEACHERS, "[rollout.sglang]\nmem-fraction-static = 0.5\npage-size = 16")
    [policy, code] = [config.of_engines(model) for model in ("", "code")]
    assert policy.rollout.sglang == {"page-size": 16, "mem_fraction_static": 0.82}
    assert (code.rollout.rollout_num_gpus_per_engine, str(code.model.hf_checkpoint)) == (2, "/m/code")
    assert code.rollout.sglang == {"mem-fraction-static": 0.5, "page-size": 16, "disable_cuda_graph": True}
    assert code.debug.debug_rollout_only and not policy.debug.debug_rollout_only


@table(
    ("text", "said"),
    [
        ("models: []", "unknown key 'models'; valid are sglang"),
        ("", "its top.*expected a mapping with the key sglang"),
        ("sglang: [{name: a, server_groups: [{num_gpus: 0}]}]", r"server_groups\[0\].num_gpus.*greater than 0"),
        ("sglang: [{name: a, num_gpus_per_engine: -1, server_groups: [{num_gpus: 1}]}]", "num_gpus_per_engine.*greater than 0"),
        ("sglang: [{name: a}]", "sglang.0.': expected server_groups"),
        ("sglang: [{name: a, groups: []}]", "sglang.0.': unknown key 'groups'"),
        ("sglang: [{name: a, server_groups: [{num_gpu: 1}]}]", "unknown key 'num_gpu'; did you mean num_gpus"),
        ("sglang: [{name: a, server_groups: [{num_gpus: 1, worker_type: reguler}]}]", "worker_type.*'regular'"),
        (
            "sglang: [{name: a, server_groups: [{num_gpus: 3, num_gpus_per_engine: 2}]}]",
            "num_gpus = 3, expected a multiple of num_gpus_per_",
        ),
        ("sglang: [{name: a, server_groups: [{num_gpus: 1}]}, {name: b, server_groups: [{num_gpus: 1}]}]", "a and b have it"),
        ("sglang: [{name: a, update_weights: false, server_groups: [{num_gpus: 1}]}]", "none has it"),
        ("sglang: [{name: a, server_groups: [{num_gpus: 1}]}, {name: a, server_groups: [{num_gpus: 1}]}]", "two models have one name"),
        ("sglang: [{name: a, update_weights: true, model_path: /m/other, server_groups: [{num_gpus: 1}]}]", "begin with the run's"),
        (
            "sglang: [{name: a, server_groups: [{num_gpus: 1, overrides: {model_path: /x}}, {num_gpus: 1, overrides: {model_path: /y}}]}]",
            "one model_",
        ),
        ("sglang: [{name: a, server_groups: [{num_gpus: 1}, {num_gpus: 1, worker_type: decode}]}]", "decode, regular do not go together"),
        ("sglang: [{name: a, server_groups: [{num_gpus: 1, worker_type: placeholder}]}]", "placeholders only reserve GPUs"),
    ],
)
def test_a_file_that_does_not_add_up_is_refused_with_its_place(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=said):
        of_yaml(tmp_path, text)


@table(
    ("rollout", "said"),
    [
        ({"models": {"policy": JUDGE}}, "'policy' is policy_name"),
        ({"models": {"a judge": JUDGE}}, "'a judge': a name of letters"),
        ({"models": {"judge": {"hf_chekpoint": "/m/judge"}}}, "unknown key 'hf_chekpoint'; did you mean hf_checkpoint"),
        ({"models": {"judge": {**JUDGE, "groups": [{"num_gpus": 2}]}}}, "leave replicas and num_gpus_per_engine out"),
        ({"models": {"judge": {"groups": [{"num_gpus": 2}, {"num_gpus": 2, "worker_type": "prefill"}]}}}, "judge: regular groups alone"),
        ({"rollout_replicas": 2, "models": {"judge": JUDGE}, "rollout_num_gpus": 8}, r"4, the GPUs of all groups: policy 2 .* \+ judge 2"),
        ({"rollout_replicas": 3, "engine_groups": [{"num_gpus": 2}]}, "engine_groups say how many"),
        ({"engine_groups": [{"num_gpus_per_engine": 2}]}, "expected num_gpus or replicas"),
        ({"engine_groups": [{"num_gpus": 2, "worker_type": "prefill"}]}, "there are 2 of prefill and 0 of decode"),
    ],
)
def test_tables_that_do_not_add_up_are_refused(rollout: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=said):
        parse(values(tmp_path, rollout={**RUN, **rollout}))


def test_no_frozen_model_has_a_name_of_the_trained_one_at_gateways(tmp_path: Path) -> None:
    for name in ("named", "alias", "model", "judge"):
        (tmp_path / name).mkdir()
        config = several(tmp_path / name, {"models": {name: JUDGE}})
        gateway = config.gateway.model_copy(update={"gateway_replicas": 1, "gateway_models": ["alias"]})
        config = config.model_copy(update={"gateway": gateway, "run": config.run.model_copy(update={"name": "named"})})
        found = [
            one for one in check_gateways(Inspection(config)) if isinstance(one, ConfigError) and "is trained by this one" in one.expected
        ]
        assert [one.field for one in found] == ([] if name == "judge" else [f"rollout.models.{name}"])


def test_a_teacher_that_the_run_does_not_have_is_refused(tmp_path: Path) -> None:
    teaching = {"use_opd": True, "opd_type": "sglang", "opd_teachers": {"first": "jugde"}}
    wrong = "neither http://host:port nor a model of .rollout.models.; did you mean judge"
    for section in ({"algorithm": teaching}, {"reward": {"rm_type": "judge", "judge_url": "jugde"}}):
        with pytest.raises(BadInput, match=wrong):
            parse(values(tmp_path, rollout={**RUN, "models": {"judge": JUDGE}}, **section))


def several(tmp_path: Path, rollout: dict[str, Any], **trainer: Any) -> RunConfig:
    for name in ("model", "judge"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(SHAPE))
        (tmp_path / name / "tokenizer.json").write_text("{}")
    return parse(values(tmp_path, rollout={**RUN, **rollout}, trainer={"train_device": "cuda", **trainer}))


MODELS = {
    "engine_groups": [{"num_gpus": 2}, {"num_gpus": 4, "num_gpus_per_engine": 4, "sglang": {"mem-fraction-static": 0.6}}],
    "models": {"judge": {"num_gpus_per_engine": 2, "replicas": 2}, "reference": {"device": "cpu"}},
}


def test_each_engine_has_a_service_with_gpus_and_a_config_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpus", lambda: 12)
    config = several(tmp_path, MODELS)
    engines = [(one.instance, one.model, one.group, one.gpus) for one in devices.engine_instances(config) if one.on_gpus]
    assert engines == [
        *(("rollout-0", "", 0, 1), ("rollout-1", "", 0, 1), ("rollout-2", "", 1, 4)),
        *(("model-judge-0", "judge", 0, 2), ("model-judge-1", "judge", 0, 2)),
    ]
    specs = {spec.instance: spec for spec in plan(config, "nats://localhost:4222") if spec.command[-1] == "services.rollout"}
    shown = {name: (spec.service, spec.environment.get(devices.VISIBLE)) for name, spec in specs.items()}
    assert shown == {
        **{"rollout-0": ("rollout", "1"), "rollout-1": ("rollout", "2"), "rollout-2": ("rollout", "3,4,5,6")},
        **{"model-judge-0": ("model", "7,8"), "model-judge-1": ("model", "9,10"), "model-reference-0": ("model", None)},
    }
    placed = {one.instance: (one.node, one.gpus) for one in place(config, 2, 8) if one.role == "rollout"}
    assert placed["model-judge-0"] == (0, (1, 2)) and placed["rollout-2"] == (1, (0, 1, 2, 3)) and placed["model-reference-0"] == (0, ())
    model, own = devices.engine_of(config, "model-judge-1")
    assert (model, own.rollout.rollout_num_gpus_per_engine) == ("judge", 2)
    assert devices.engine_of(config, "rollout-2")[1].rollout.sglang == {"mem-fraction-static": 0.6}


def test_the_policys_engines_fill_what_frozen_models_leave(tmp_path: Path) -> None:
    config = several(tmp_path, {"models": MODELS["models"]})
    assert filled(config, 1, 8, trains=True)[0].rollout.rollout_replicas == 8 - 1 - 4


@table(
    ("given", "said"),
    [
        ({devices.MODEL_VARIABLE: "jugde"}, "did you mean judge"),
        ({devices.GROUP_VARIABLE: "2"}, "a group of policy, 0 to 1"),
        ({devices.MODEL_VARIABLE: "judge", devices.GROUP_VARIABLE: "1"}, "a group of judge, 0 to 0"),
    ],
)
def test_a_service_that_is_told_of_an_engine_that_is_not_there_ends(given: dict[str, str], said: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError, match=said):
        for name, value in given.items():
            patch.setenv(name, value)
        devices.engine_of(several(tmp_path, MODELS), "elsewhere")


def apart(
    prefill: tuple[int, int] = (1, 1), decode: tuple[int, int] = (1, 1), page: dict[str, Any] | None = None, **given: Any
) -> dict[str, Any]:
    """Groups of so many engines of so many GPUs."""
    groups = [
        {"worker_type": kind, "replicas": count, "num_gpus_per_engine": size, "sglang": flags}
        for kind, (count, size), flags in (("prefill", prefill, page or {}), ("decode", decode, {}))
    ]
    return {"engine_groups": groups, **given}


LMCACHE = {"enable-lmcache": True}
BACKEND_OF_JUDGE = f"rollout.models.judge.groups.0.sglang.{TRANSFER}"


@table(
    ("rollout", "trainer", "field", "said"),
    [
        (apart(decode=(1, 3), prefill=(2, 4)), {}, "rollout.engine_groups.1.num_gpus_per_engine", "a multiple of 4, the GPUs of a prefill"),
        ({"models": {"judge": {"groups": apart()["engine_groups"]}}, "sglang": {TRANSFER: "fake"}}, {}, BACKEND_OF_JUDGE, "nixl or"),
        (apart(sglang={"speculative-algorithm": "NGRAM"}), {}, "rollout.engine_groups.0.sglang.speculative-algorithm", "none where"),
        (apart(page={"page-size": 16}), {}, "rollout.engine_groups.1.sglang.page-size", "16, as the prefill engines have it"),
        ({**apart(), "in_flight_on_push": "retract"}, {}, "rollout.in_flight_on_push", "in_place or abort where"),
        (apart(), {"use_rollout_routing_replay": True}, "trainer.use_rollout_routing_replay", "a prompt's experts stay"),
        (apart(), {"colocate": True, "actor_num_gpus_per_node": 2}, "rollout.engine_groups", "none with"),
        ({"engine_groups": [{"num_gpus": 2, "worker_type": "encoder"}]}, {}, "rollout.engine_groups.0.worker_type", "prefill and decode"),
        ({"models": {"judge": {"hf_checkpoint": "/nowhere"}}}, {}, "rollout.models.judge.hf_checkpoint", "no such directory"),
        ({"models": {"judge": {"num_gpus_per_engine": 3}}}, {}, "rollout.models.judge.num_gpus_per_engine", "attention heads"),
        ({"models": {"judge": {"sglang": {"tp-size": 2}}}}, {}, "rollout.models.judge.sglang.tp-size", "the rollout service sets this one"),
        (
            {"engine_groups": [{"replicas": 1, "sglang": LMCACHE}]},
            {},
            "rollout.engine_groups.0.sglang.enable-lmcache",
            "none in engines that get pushes",
        ),
        (
            {"models": {"judge": {"num_gpus_per_engine": 16}}, "gpus_per_node": 8},
            {},
            "rollout.models.judge.num_gpus_per_engine",
            "at most gpus_per_node = 8",
        ),
        (
            {"engine_groups": [{"num_gpus": 1}, {"num_gpus": 1}]},
            {"colocate": True, "actor_num_gpus_per_node": 2},
            "rollout.engine_groups",
            "none with",
        ),
    ],
)
def test_what_an_engine_cannot_serve_is_refused_under_its_own_field(
    rollout: dict[str, Any], trainer: dict[str, Any], field: str, said: str, tmp_path: Path
) -> None:
    found = [one for one in check_models(Inspection(several(tmp_path, rollout, **trainer))) if not isinstance(one, Note)]
    assert any(isinstance(one, ConfigError) and one.field == field and said in one.expected for one in found), list(map(str, found))


def test_a_frozen_models_engines_may_keep_what_they_have_computed(tmp_path: Path) -> None:
    rollout = {"models": {"judge": {**MODELS["models"]["judge"], "sglang": LMCACHE}}}
    assert not [one for one in map(str, check_models(Inspection(several(tmp_path, rollout)))) if "lmcache" in one and "install" not in one]


def test_the_number_of_prefill_servers_divides_the_engines(tmp_path: Path) -> None:
    def laid(**given: Any) -> list[tuple[str, int, int]]:
        given = {**RUN, "rollout_num_gpus": 8, "rollout_num_gpus_per_engine": 2, **given}
        reading = read(None, values(tmp_path, rollout=given))
        raise_problems(reading.problems)
        assert reading.config is not None
        return [(group.worker_type, group.replicas, group.num_gpus_per_engine) for group in reading.config.rollout.engines()]

    assert laid(prefill_num_servers=1) == [("prefill", 1, 2), ("decode", 3, 2)]
    with pytest.raises(ConfigError, match="fewer than the run's engines, of which there are 4"):
        laid(prefill_num_servers=4)
    with pytest.raises(ConfigError, match="given besides engine_groups"):
        laid(prefill_num_servers=1, engine_groups=[{"num_gpus": 8}])


def test_a_plan_has_each_group_and_names_the_one_that_lacks_memory(tmp_path: Path) -> None:
    shape, config = None, several(tmp_path, {**MODELS, "models": {"judge": {"sglang": {"mem-fraction-static": 0.01}}}})
    shape = read_architecture(config.model.hf_checkpoint)
    planned = RunPlan(config, shape, 80 * 10**9, models={"judge": shape})
    needs = {need.of: need for need in planned.needs if need.role == "group"}
    assert list(needs) == ["engine, group 0", "engine, group 1", "engine of judge"]
    assert [need.fits for need in needs.values()] == [True, True, False]
    assert needs["engine of judge"].field == "rollout.models.judge.num_gpus_per_engine"
    shown = engine_table(planned)
    assert shown is not None and [column.header for column in shown.columns][1:] == ["engine, group 0", "engine, group 1", "judge"]


@table("text", [TEACHERS, PLACEHOLDER, BOTH, PLAIN])
def test_a_config_is_the_same_after_the_bus_and_as_printed(text: str, tmp_path: Path) -> None:
    config = of_yaml(tmp_path, text)
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    printed = tmp_path / "printed.toml"
    printed.write_text(config_reading.dump(config))
    assert load(printed) == config
