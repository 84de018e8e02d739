"""`myxo plan`, and what `myxo up` says of GPUs that are too small for a config, by the memory that nvidia-smi tells of."""

import contextlib
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from myxo.commands.plan import planned
from myxo.main import main
from myxo.preflight import Source
from myxo.preflight.inspection import Inspection, Note
from myxo.preflight.run_plan import check_gpu_memory, remedies, settle_trainer
from shared.bus import runs
from shared.config import devices
from shared.config.trainer_section import TrainerSection
from shared.model.architecture import Experts
from shared.runtime.errors import BadInput, ConfigError
from tests.support.run_config import run_config
from tests.support.tables import table

ROOT = Path(__file__).parents[3]
READY = sorted((ROOT / "configs" / "models").glob("*.toml"))
GPU = 80_000_000_000

SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def told(*words: object) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(["plan", *map(str, words)])
    return code, out.getvalue()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's config over a model of which only config.json is there."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SHAPE))
    config = tmp_path / "run.toml"
    config.write_text(
        f'[run]\nname = "r"\n[model]\nhf_checkpoint = "{tmp_path}/model"\n[data]\nprompt_data = "prompts.jsonl"\n'
        "[rollout]\nnum_rollout = 1\nrollout_batch_size = 8\nn_samples_per_prompt = 8\n"
    )
    return config


@table("path", READY)
def test_a_ready_config_is_planned_by_itself_and_fits(path: Path) -> None:
    plan = planned(Source.of(path, []), GPU).plan
    assert plan.fits and all(need.total <= 0.9 * need.available for need in plan.trainer_needs)
    assert sum(need.ranks for need in plan.needs if need.role == "actor") == plan.config.trainer.ranks("actor")
    assert TrainerSection.model_validate(plan.config.trainer.model_dump()).tokens_per_gpu >= 8192
    assert planned(Source.of(path, []), 4 * GPU).plan.config.trainer.tokens_per_gpu >= plan.config.trainer.tokens_per_gpu


def test_tokens_fill_the_gpu_hold_the_longest_sample_and_stay_as_given(run: Path) -> None:
    """Explicit values win over the plan, and the other value is planned beside them."""

    def tokens(*words: str, gigabytes: int = 140) -> tuple[int | str, int | str, str]:
        found = planned(Source.of(run, ["--recompute", *words]), gigabytes * 10**9)
        trainer = found.plan.config.trainer
        return trainer.max_tokens_per_gpu, trainer.log_probs_chunk_size, " ".join(found.notes)

    assert tokens()[:2] == (32768, 8192) and "micro-batches of 32768 tokens a GPU" in tokens()[2] and "10% and what" in tokens()[2]
    assert [tokens(gigabytes=size)[:2] for size in (84, 86, 90, 100)] == [(2048, 2048), (8192, 2048), (8192, 4096), (16384, 8192)]
    assert tokens(gigabytes=80)[:2] == (8192, 2048) and "no size leaves the plan's margin" in tokens(gigabytes=80)[2]
    assert tokens("--max-tokens-per-gpu", "3000")[:2] == (3000, 8192)
    assert tokens("--max-tokens-per-gpu", "300000", "--log-probs-chunk-size", "-1") == (300000, -1, "")
    assert tokens("--max-tokens-per-gpu", "300000")[:2] == (300000, 2048)
    assert tokens("--rollout-max-response-len", "40000")[0] == 40000
    assert tokens("--rollout-max-response-len", "9000", gigabytes=80)[:2] == (9000, 2048)
    assert tokens("--pipeline-model-parallel-size", "4", "--actor-num-gpus-per-node", "4")[0] == 8192


def test_a_run_that_fits_and_one_that_does_not(run: Path) -> None:
    code, out = told(run, "--gpu-memory", 80, "--recompute")
    assert code == 0 and "It fits." in out and "tokens in the cache" in out
    code, out = told(run, "--gpu-memory", 80)
    assert code == 1 and "actor: needs" in out and "optimizer" in out
    assert "--optimizer-cpu-offload" in out and "which fits" in out


def test_every_remedy_does_what_it_says(run: Path) -> None:
    plan = planned(Source.of(run, ["--max-tokens-per-gpu", "16384", "--log-probs-chunk-size", "-1"]), GPU).plan
    (need,) = [need for need in plan.needs if not need.fits]
    found = remedies(plan, need)
    assert len(found) > 4
    for remedy in found:
        again = planned(Source.of(run, ["--max-tokens-per-gpu", "16384", "--log-probs-chunk-size", "-1", *remedy.flags.split()]), GPU).plan
        (changed,) = [other for other in again.needs if other.role == "actor"]
        assert (changed.total, changed.fits) == (remedy.total, remedy.fits) and changed.total < need.total, remedy.flags


def test_an_engine_that_is_too_small_names_how_many_gpus_it_takes(run: Path) -> None:
    answer = json.loads(told(run, "--gpu-memory", 10, "--json")[1])
    (engine,) = [need for need in answer["needs"] if need["role"] == "engine"]
    assert not engine["fits"] and engine["largest"] == "weights"
    assert engine["remedies"][0]["flags"] == "--rollout-num-gpus-per-engine 2" and engine["remedies"][0]["fits"]
    assert answer["fits"] is False and answer["engine"]["tokens"] == 0


def test_a_critic_and_colocation_are_counted(run: Path) -> None:
    plan = planned(Source.of(run, ["--advantage-estimator", "ppo", "--colocate", "--actor-num-gpus-per-node", "2"]), GPU).plan
    assert [need.of for need in plan.needs] == ["actor", "critic", "engine"]
    assert "colocated" in plan.needs[0].parts and "colocated" not in plan.needs[1].parts
    together = planned(Source.of(run, ["--colocate", "--no-offload-rollout", "--actor-num-gpus-per-node", "2"]), GPU).plan
    assert together.needs[0].total > 80e9 and plan.engine is not None
    assert together.needs[0].parts["colocated"] > plan.engine.budget


def test_a_lent_engine_is_counted_asleep_beside_the_trainer_and_awake_beside_its_weights(run: Path) -> None:
    roomy = planned(Source.of(run, ["--lend-gpus"]), 2 * GPU).plan
    assert [(need.of, need.field) for need in roomy.needs[2:]] == [("lent engine", "trainer.lent_mem_fraction_static")]
    assert roomy.fits and "lent engine" in roomy.needs[0].parts and "trainer" not in roomy.needs[2].parts
    tight = planned(Source.of(run, ["--lend-gpus"]), GPU).plan
    held = tight.stages("actor")[0]
    assert not tight.needs[2].fits
    assert tight.needs[2].parts["trainer"] > held.weights + held.gradients + held.optimizer - GPU // 2


def test_a_bucket_holds_a_tensor_of_all_experts(run: Path) -> None:
    plan = planned(Source.of(run, ["--colocate", "--actor-num-gpus-per-node", "2"]), GPU).plan
    shape = replace(plan.architecture, hidden_size=2880, experts=Experts(128, 4, 2880, normalize=True))
    apart, stacked = (replace(plan, architecture=replace(shape, stacked_experts=given)) for given in (False, True))
    largest = 128 * 2880 * 2 * 2880 * 2
    more = stacked.needs[0].parts["colocated"] - apart.needs[0].parts["colocated"]
    assert more == 2 * (largest - plan.config.weights.update_weight_buffer_size) > 0


EIGHT_BITS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def test_a_quantized_model_is_planned_by_its_config_alone(run: Path) -> None:
    def weights(**entries: object) -> int:
        (run.parent / "model" / "config.json").write_text(json.dumps(SHAPE | entries))
        engine = planned(Source.of(run, given), GPU).plan.engine
        assert engine is not None
        return engine.weights

    given: list[str] = []
    plain, ends = weights(), 2 * 151936 * 2560
    assert 0.49 < (weights(quantization_config=EIGHT_BITS) - ends) / (plain - ends) < 0.52
    given = ["--rollout-precision", "fp8"]
    assert weights() == weights(quantization_config=EIGHT_BITS)
    given = ["--rollout-precision", "int4"]
    assert 0.5 < (weights() - ends) / (plain - ends) < 0.57  # as pushed, and as kernels want them


def test_a_family_of_the_torch_backend_alone_is_planned(run: Path) -> None:
    """Its output layer counts where the files hold one: families have their own default for tied embeddings."""
    model = run.parent / "model"
    shape = {name: value for name, value in SHAPE.items() if name != "tie_word_embeddings"}
    (model / "config.json").write_text(json.dumps(shape | {"model_type": "gemma2"}))
    assert "model_type" in told(run)[1]

    def tied() -> bool:
        return planned(Source.of(run, ["--trainer-backend", "torch"]), GPU).plan.architecture.tied_embeddings

    assert not tied()
    ends = {"model.embed_tokens.weight": torch.empty(151936, 2560, dtype=torch.int8)}
    save_file(ends, model / "model.safetensors")
    assert tied()
    save_file({**ends, "embed_out.weight": torch.empty(151936, 2560, dtype=torch.int8)}, model / "model.safetensors")
    assert not tied()


def test_a_layout_that_does_not_divide_the_model_is_bad_input(run: Path) -> None:
    code, out = told(run, "--tensor-model-parallel-size", 3, "--actor-num-gpus-per-node", 3)
    assert code == 2 and "trainer.tensor_model_parallel_size" in out


def test_without_a_shape_the_missing_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[run]\nname = "r"\n')
    code, out = told(tmp_path / "run.toml")
    assert code == 2 and "model.hf_checkpoint" in out


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


def test_flags_that_change_nothing_are_said_with_the_plan(run: Path) -> None:
    assert "note: --balance-data changes nothing" in told(run, "--balance-data")[1]
