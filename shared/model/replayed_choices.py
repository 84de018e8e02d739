"""The experts that a run's samples must tell, for training to go through the same ones."""

from shared.config.run_config import RunConfig
from shared.model.families import read_architecture
from shared.runtime.errors import ConfigError
from shared.schema.sample import ExpertChoices

FIELD = "trainer.use_rollout_routing_replay"


def replayed_choices(config: RunConfig) -> ExpertChoices | None:
    """Returns what the choices of the run's model look like; None where training does not replay them.

    Raises ConfigError: the model has no experts, or cannot be read.
    """
    if not config.trainer.use_rollout_routing_replay:
        return None
    architecture = read_architecture(config.model.hf_checkpoint)
    if (choices := ExpertChoices.of(architecture)) is None:
        raise ConfigError(FIELD, True, f"false; {architecture.model_type} has no experts")
    return choices
