"""What slime refuses at its start and Myxo alone would take: a command line without a config is held to it, as slime's own would be.

Where Myxo gives the combination a meaning, a TOML file may have it.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from shared.config.run_config import RunConfig
from shared.runtime.errors import ConfigError


class SlimeRule(NamedTuple):
    """A combination that slime refuses. broken: takes the config. expected: what would be right; a TOML file need not have it so."""

    field: str
    broken: Callable[[RunConfig], Any]
    expected: str


def _deltas(config: RunConfig) -> bool:
    return config.weights.update_weight_mode == "delta"


RULES = (
    SlimeRule(
        "algorithm.normalize_advantages",
        lambda config: "reinforce_plus_plus" in config.algorithm.advantage_estimator and not config.algorithm.normalize_advantages,
        "true with an --advantage-estimator of REINFORCE++, which whitens its advantages",
    ),
    SlimeRule(
        "trainer.freeze_params_name_list",
        lambda config: config.trainer.freeze_params_name_list and config.trainer.only_train_params_name_list,
        "none beside --only-train-params-name-list; give one of them",
    ),
    SlimeRule(
        "weights.update_weight_mode",
        lambda config: _deltas(config) and config.trainer.colocate,
        "full with --colocate: engines take the weights out of the trainer's memory",
    ),
    SlimeRule(
        "weights.update_weight_mode",
        lambda config: _deltas(config) and not config.trainer.colocate and config.weights.update_weight_transport != "disk",
        "full, or --update-weight-transport disk: what is pushed to engines is whole",
    ),
)


def problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yields what slime would refuse."""
    for rule in RULES:
        if rule.broken(config):
            section, name = rule.field.split(".")
            yield ConfigError(rule.field, getattr(getattr(config, section), name), rule.expected)
