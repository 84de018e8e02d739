"""What ``--spec`` stands for: the family's layers, a user's module, or nothing that is here."""

import pytest

from shared.model import architecture_flags
from shared.model.architecture_flags import is_own_module
from shared.runtime.errors import ConfigError
from tests.support.tables import table

SPECS = "megatron.core.models.gpt.gpt_layer_specs"
ENGINE_SPEC = (SPECS, "get_gpt_layer_with_transformer_engine_spec")


@table(
    ("spec", "model_type", "own"),
    [
        ((), "qwen3", False),
        (("slime_plugins.models.glm4", "get_glm_spec"), "glm4", False),
        (("slime_plugins.models.qwen3_next", "get_qwen3_next_spec"), "qwen3_next", False),
        (("slime_plugins.models.qwen3_5", "get_qwen3_5_spec"), "qwen3_5_moe", False),
        ((SPECS, "get_gpt_layer_local_spec"), "qwen3", False),
        (("layers.of.mine", "spec"), "qwen3", True),
    ],
)
def test_a_users_module_is_told_from_what_the_family_has(spec: tuple[str, ...], model_type: str, own: bool) -> None:
    assert is_own_module(spec, model_type, {}) is own


@pytest.mark.parametrize(
    ("spec", "model_type", "words"),
    [
        (("slime_plugins.models.glm4", "get_glm_spec"), "qwen3", "layers are those of its glm4, and qwen3 has its own"),
        (("slime_plugins.models.qwen3_next", "get_qwen3_next_spec"), "qwen3", "layers are those of its qwen3_next"),
        (("megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"), "qwen3", "for models that are not here"),
        ((SPECS, "no_such_spec"), "qwen3", "for models that are not here"),
        (ENGINE_SPEC, "qwen3", "Transformer Engine is not installed"),
    ],
)
def test_layers_that_are_not_here_are_refused(spec: tuple[str, ...], model_type: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture_flags, "has_engine", lambda: False)
    with pytest.raises(ConfigError, match=f"trainer.spec.*{words}"):
        is_own_module(spec, model_type, {})


def test_layers_of_transformer_engine_go_with_its_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture_flags, "has_engine", lambda: True)
    assert not is_own_module(ENGINE_SPEC, "qwen3", {"transformer_impl": "transformer_engine"})
    with pytest.raises(ConfigError, match="transformer_engine for trainer.megatron.transformer_impl"):
        is_own_module(ENGINE_SPEC, "qwen3", {})
    with pytest.raises(ConfigError, match="local for trainer.megatron.transformer_impl"):
        is_own_module((SPECS, "get_gpt_layer_local_spec"), "qwen3", {"transformer_impl": "transformer_engine"})
