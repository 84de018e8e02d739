"""What `myxo up` says of GPUs that are too small for a config, by the memory that nvidia-smi tells of."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from myxo.preflight.inspection import Inspection, Note
from myxo.preflight.run_plan import check_gpu_memory, settle_trainer
from shared.bus import runs
from shared.config import devices
from shared.runtime.errors import BadInput, ConfigError
from tests.support.run_config import run_config
from tests.unit.myxo.test_memory_plans import SHAPE

Findings = list[BadInput | Note]
Fields = dict[str, object]


@pytest.mark.parametrize(
    ("mebibytes", "sections", "tokens"),
    [
        (143_771, {"trainer": {"train_device": "cuda", "recompute": True}}, (32768, 8192)),
        (143_771, {"trainer": {"train_device": "cuda", "recompute": True, "max_tokens_per_gpu": 5000}}, (5000, 8192)),
        (143_771, {"trainer": {"train_device": "cuda", "max_tokens_per_gpu": 5000, "log_probs_chunk_size": -1}}, (5000, -1)),
        (143_771, {"trainer": {"train_device": "cpu"}, "rollout": {"rollout_device": "cpu"}}, (8192, 2048)),
        (143_771, {"trainer": {"train_device": "cuda"}, "debug": {"debug_rollout_only": True}}, (8192, 2048)),
        (143_771, {"trainer": {"train_device": "cuda", "tensor_model_parallel_size": 3, "actor_num_gpus_per_node": 3}}, (8192, 2048)),
        (0, {"trainer": {"train_device": "cuda"}}, (8192, 2048)),
    ],
)
def test_tokens_are_settled_where_the_trainers_gpus_are(
    mebibytes: int, sections: dict[str, Fields], tokens: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without GPUs, or a layout that divides the model, they are those of a CPU, and nothing is said."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SHAPE))
    if mebibytes:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho {mebibytes}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":" if mebibytes else None)
    found, said = settle_trainer(Inspection(run_config(tmp_path, **sections), starts=True))
    assert (found["max_tokens_per_gpu"], found["log_probs_chunk_size"]) == tokens
    assert bool(said) == (8192 in tokens and 2048 not in tokens)


@pytest.mark.parametrize(("fresh", "tokens"), [(False, (3000, 512)), (True, (8192, 512))])
def test_a_run_continues_with_the_tokens_that_it_began_with(fresh: bool, tokens: tuple[int, int], tmp_path: Path) -> None:
    begun = run_config(tmp_path, trainer={"max_tokens_per_gpu": 3000, "log_probs_chunk_size": 100})
    begun.run.root.mkdir(parents=True)
    runs.freeze(begun.run.root, begun)
    config = run_config(tmp_path, trainer={"train_device": "cuda", "log_probs_chunk_size": 512})
    found, said = settle_trainer(Inspection(config, fresh=fresh))
    assert said == ("" if fresh else "max_tokens_per_gpu = 3000: what `auto` was when the run began")
    assert (found["max_tokens_per_gpu"], found["log_probs_chunk_size"]) == tokens


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Findings]:
    """Returns what the check finds with GPUs of so many MiB and trainer's fields, of which one rank with 8192 tokens is the default."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SHAPE))

    def check(
        mebibytes: int, debug: dict[str, object] | None = None, rollout: dict[str, object] | None = None, **trainer: object
    ) -> Findings:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho {mebibytes + 512}\necho {mebibytes}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        fields = {"train_device": "cuda", "recompute": True, **trainer}
        engines = {"rollout_device": "cuda", **(rollout or {})}
        return list(check_gpu_memory(Inspection(run_config(tmp_path, trainer=fields, rollout=engines, debug=debug or {}), starts=True)))

    return check


def test_a_trainer_that_is_surely_too_large_is_refused_with_what_would_help(found: Callable[..., Findings]) -> None:
    (problem,) = found(46_068)
    assert isinstance(problem, ConfigError) and problem.field == "trainer.actor_num_gpus_per_node" and problem.value == 1
    assert "optimizer" in str(problem) and "--optimizer-cpu-offload" in str(problem)
    (note,) = found(46_068, debug={"ignore_memory_plan": True})
    assert isinstance(note, Note) and "may fail" in note.text


def test_gpus_that_the_run_may_not_use_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA and nvidia-smi number GPUs each in an order of its own, but in PCI_BUS_ID: other numbers say nothing of which are meant."""
    (tmp_path / "nvidia-smi").write_text(
        "#!/bin/sh\nfor word; do case $word in --id=*) echo 81559; exit;; esac; done\necho 6138\necho 81559\n"
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    for given, mebibytes in (("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", 81_559), ("GPU-8932f9", 6_138), ("0", 6_138), ("", 6_138)):
        monkeypatch.setenv(devices.VISIBLE, given)
        assert devices.gpu_bytes() == mebibytes << 20
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv(devices.VISIBLE, "1")
    assert devices.gpu_bytes() == 81_559 << 20


def test_near_the_limit_it_is_told_on_either_side(found: Callable[..., Findings]) -> None:
    texts = [[type(finding).__name__ for finding in found(size)] for size in (71_000, 76_000, 143_771)]
    assert texts == [["Note"], ["Note"], []]


def test_activations_name_the_tokens_of_a_micro_batch(found: Callable[..., Findings]) -> None:
    (problem,) = found(81_559, recompute=False, max_tokens_per_gpu=32768, log_probs_chunk_size=-1)
    assert isinstance(problem, ConfigError) and problem.field == "trainer.max_tokens_per_gpu"


def test_an_engine_is_looked_at_too_and_processes_on_cpus_are_not(found: Callable[..., Findings]) -> None:
    (problem,) = found(143_771, rollout={"sglang": {"mem-fraction-static": 0.04}})
    assert isinstance(problem, ConfigError) and problem.field == "rollout.rollout_num_gpus_per_engine"
    assert found(2_000, train_device="cpu", rollout={"rollout_device": "cpu"}) == []


def test_a_frozen_model_that_a_gpu_cannot_hold_is_named_with_the_numbers(found: Callable[..., Findings]) -> None:
    (problem,) = found(143_771, rollout={"models": {"judge": {"sglang": {"mem-fraction-static": 0.04}}, "user": {"device": "cpu"}}})
    assert isinstance(problem, ConfigError) and problem.field == "rollout.models.judge.num_gpus_per_engine"
    assert re.search(r"engine of judge: needs [\d.]+ GB of a GPU, there are [\d.]+", str(problem))
