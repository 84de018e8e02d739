"""Whether the checkpoints hold the models that their config.json describes, and whether Megatron's flags describe the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from myxo.preflight.inspection import Inspection, architecture_of
from shared.config import megatron_flags
from shared.model import architecture_flags, hf_checkpoint
from shared.model.architecture import Architecture
from shared.model.tensor_table import hf_tensors
from shared.runtime.errors import ConfigError


def check_actor(inspection: Inspection) -> Iterator[ConfigError]:
    """Yields what is wrong with the policy's config.json, its weights, and its tokenizer's size."""
    architecture, config = inspection.architecture, inspection.config
    if isinstance(architecture, ConfigError):
        tokenizers = inspection.tokenizer_problem  # it may have met the same file
        if tokenizers is None or tokenizers.value != architecture.value:
            yield architecture
        return
    if architecture is None:
        return
    yield from _weights(config.model.hf_checkpoint, architecture, "model.hf_checkpoint")
    rows, tokenizer = architecture.vocab_size, inspection.tokenizer
    if tokenizer is not None and tokenizer.vocabulary_size > rows:
        wanted = f"a tokenizer of at most {rows} tokens, vocab_size in config.json; its tokenizer.json has {tokenizer.vocabulary_size}"
        yield ConfigError("model.hf_checkpoint", str(config.model.hf_checkpoint), wanted)
    if outside := [token for token in config.rollout.rollout_stop_token_ids if not 0 <= token < rows]:
        yield ConfigError("rollout.rollout_stop_token_ids", outside[0], f"ids from 0 to {rows - 1}, the model's vocabulary")


def check_other_models(inspection: Inspection) -> Iterator[ConfigError]:
    """Yields what is wrong with the checkpoints of the critic and of the teacher, where they are others than the policy's."""
    config, actor = inspection.config, inspection.architecture
    if config.algorithm.has_critic and (critic := config.trainer.critic_load) is not None:
        found = architecture_of(critic)
        if isinstance(found, ConfigError):
            yield found if found.field != "model.hf_checkpoint" else ConfigError("trainer.critic_load", found.value, found.expected)
        else:
            yield from _weights(critic, found, "trainer.critic_load")
    if (teacher := config.algorithm.opd_teacher_load) is not None and isinstance(actor, Architecture):
        if not teacher.is_dir():
            yield ConfigError("algorithm.opd_teacher_load", str(teacher), "no such directory; give a checkpoint of the policy's shape")
        else:  # it runs in the actor's own modules
            yield from _weights(teacher, actor, "algorithm.opd_teacher_load")


def check_flags(inspection: Inspection) -> Iterator[ConfigError]:
    """Yields which of Megatron's architecture flags differ from the checkpoint, and what needs Transformer Engine where that is missing."""
    given, catalogue = inspection.config.trainer.megatron, megatron_flags.catalogue()
    if isinstance(architecture := inspection.architecture, Architecture):
        described = {name: value for name, value in given.items() if name in catalogue and "architecture" in catalogue[name].groups}
        yield from architecture_flags.differences(described, architecture)
    if inspection.starts:
        yield from megatron_flags.missing_engine(given)


def _weights(directory: Path, architecture: Architecture, field: str) -> Iterator[ConfigError]:
    held, problems = hf_checkpoint.read_shapes(directory, field)  # raises ConfigError
    yield from problems
    if not problems:
        unread = hf_checkpoint.draft_prefixes(architecture)
        yield from hf_checkpoint.tensor_problems(directory, held, hf_tensors(architecture), unread, field)
