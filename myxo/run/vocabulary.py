"""How many token ids a run's model has."""

from shared.config.run_config import RunConfig
from shared.hub import hub_resolve
from shared.model.families import read_architecture


def vocabulary(config: RunConfig) -> int:
    """Returns the ``vocab_size`` of the model's config.json: ids that the engine may draw and the trainer may embed.

    A model on the hub is in this machine's cache once the config is checked. Raises ConfigError.
    """
    local = hub_resolve.local(config, ("model.hf_checkpoint",), weights=False)
    return read_architecture(local.model.hf_checkpoint).vocab_size
