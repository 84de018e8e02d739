"""Megatron's flags as the trainer resolves them, against Megatron's own dataclasses."""

import dataclasses
from pathlib import Path

import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import AttnBackend

from docs import flag_tables, megatron_catalogue
from docs.flags import CATALOGUE
from services.trainer.megatron import megatron_backend
from shared.config import flag_table
from shared.config.trainer_section import OptimizerState
from shared.runtime.errors import ConfigError
from tests.support.run_config import run_config
from tests.unit.trainer.megatron.tiny import make_checkpoint


def test_the_catalogue_is_current() -> None:
    assert CATALOGUE.read_text() == megatron_catalogue.text()


def test_every_field_of_the_dataclasses_is_in_the_catalogue_or_no_text_can_say_it() -> None:
    known = {name for flag in flag_table.catalogue().values() for name in (flag.name, *flag.spellings)}
    known |= flag_table.SLIME.keys()
    unsaid = {
        field.name: str(field.type)
        for models in megatron_backend.GROUPS.values()
        for model in models
        for field in dataclasses.fields(model)
        if field.name not in known and not field.name.startswith("_")
    }
    assert [name for name, kind in unsaid.items() if "Callable" not in kind and "RecipeConfig" not in kind] == []
    assert "activation_func" in unsaid


def test_the_tables_name_flags_that_there_are() -> None:
    fields = {field.name for models in megatron_backend.GROUPS.values() for model in models for field in dataclasses.fields(model)}
    assert [name for name in (*flag_tables.FIXED, *flag_tables.DEFAULTS, *flag_tables.TRANSFORMER_ENGINE) if name not in fields] == []
    catalogue = flag_table.catalogue()
    assert [name for name, _ in flag_tables.SPELLINGS.values() if name not in catalogue] == []


def test_flags_go_to_their_dataclasses_with_their_types() -> None:
    given = {
        "moe-router-dtype": "fp64",
        "moe_z_loss_coeff": 0.1,
        "ddp_bucket_size": 1000,
        "apply_wd_to_qk_layernorm": True,
        "num_layers": 28,
        "num_moe_experts": 8,
        "use_mcore_models": True,
        "check_for_nan_in_loss_and_grad": False,
    }
    found = megatron_backend.resolve(given)
    assert found.transformer == {"moe_router_dtype": "fp64", "moe_z_loss_coeff": 0.1}
    assert found.ddp == {"bucket_size": 1000, "check_for_nan_in_grad": False}
    assert found.optimizer == {"apply_wd_to_qk_layernorm": True}
    assert found.architecture == {"num_layers": 28, "num_experts": 8}
    DistributedDataParallelConfig(**found.ddp)
    OptimizerConfig(**found.optimizer)


def test_plain_data_becomes_what_the_field_holds() -> None:
    assert megatron_backend.converted("transformer", "attention_backend", "flash") is AttnBackend.flash
    assert megatron_backend.converted("transformer", "fp8", None) is None


def test_the_actor_gets_what_is_given_and_the_checkpoint_is_compared(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path / "model")
    given = {"moe_router_dtype": "fp64", "ddp_bucket_size": 1000, "num_layers": 2, "hidden_size": 32, "swiglu": True}
    config = run_config(tmp_path, trainer={"megatron": given})
    found = megatron_backend.resolve(config.trainer.megatron)
    assert (found.transformer, found.optimizer, found.ddp) == ({"moe_router_dtype": "fp64"}, {}, {"bucket_size": 1000})
    megatron_backend.check_architecture(found, tmp_path / "model")
    wrong = run_config(tmp_path, trainer={"megatron": {**given, "num_layers": 36}})
    with pytest.raises(ConfigError, match=r"trainer.megatron.num_layers = 36: 2, as the checkpoint has"):
        megatron_backend.check_architecture(megatron_backend.resolve(wrong.trainer.megatron), tmp_path / "model")


@pytest.mark.parametrize("installed", [False, True])
def test_what_only_transformer_engines_layers_have_is_told_or_refused_beside_local_ones(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed or not: layers are local unless the flags say otherwise. Only kernels that local layers take, too, are of use to them."""
    monkeypatch.setattr(flag_table, "has_engine", lambda: installed)
    assert megatron_backend.resolve({"attention_backend": "auto", "no_rope_fusion": True, "moe_grouped_gemm": False}).transformer
    given = {"attention_backend": "flash", "persist_layer_norm": True, "moe_permute_fusion": True}
    taken = {"moe_permute_fusion": True} if installed else {}
    assert megatron_backend.resolve(given).transformer == taken
    told = dict(flag_table.without_effect(given))
    assert len(told) == len(given) - len(taken)
    assert all(("transformer_impl is local" if installed else "not installed") in reason for reason in told.values())
    with pytest.raises(ConfigError, match=r"trainer.megatron.fp8 = 'hybrid': .*transformer_impl = transformer_engine beside it"):
        megatron_backend.resolve({"fp8_format": "hybrid"})
    offloading = {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]}
    assert len([*flag_table.missing_engine(offloading)]) == (0 if installed else 2), "of the package, not of its layers"
    assert [*flag_table.missing_engine(offloading, here=False)] == [], "the trainer's machine may have it"
    engine = given | {"transformer_impl": "transformer_engine", "fp8": "hybrid"}
    if installed:
        assert megatron_backend.resolve(engine).transformer.keys() == engine.keys() and not dict(flag_table.without_effect(engine))
    else:
        with pytest.raises(ConfigError, match="transformer_impl = 'transformer_engine': local; Transformer Engine is not installed"):
            megatron_backend.resolve(engine)
        assert [*flag_table.missing_engine(engine, here=False)] == []


@pytest.mark.parametrize(
    "flag", ["defer_embedding_wgrad_compute", "delay_wgrad_compute", "ep_overlap_early_attn_memory_release", "fused_single_qkv_rope"]
)
def test_what_no_training_step_of_ours_can_do_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        megatron_backend.resolve({flag: True})
    megatron_backend.resolve({flag: False})


def test_defaults_are_what_a_run_has() -> None:
    catalogue = flag_table.catalogue()
    keeping = OptimizerState.of({"optimizer_cpu_offload": True})
    assert keeping is not None and keeping.offload_fraction == catalogue["optimizer_offload_fraction"].default
    assert (catalogue["transformer_impl"].default, *catalogue["transformer_impl"].choices) == ("local", "local", "transformer_engine")
