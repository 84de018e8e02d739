"""Patterns over the names of parameters, and which parameters they leave to train."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shared.config.trainer_section import TrainerSection
from shared.runtime.errors import ConfigError

ONLY_TRAIN, FREEZE = "trainer.only_train_params_name_list", "trainer.freeze_params_name_list"


@dataclass(frozen=True)
class Freezing:
    """Regular expressions, looked for anywhere in Megatron's global parameter names (as ``decoder.layers.7.mlp.linear_fc1.weight``).

    Args:
        only_train: if there are some, parameters that none of them is found in are frozen. freeze: so are those that one of these is
            found in.
    """

    only_train: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()

    @classmethod
    def of(cls, trainer: TrainerSection) -> "Freezing":
        """Returns the patterns of a run's config."""
        return cls(tuple(trainer.only_train_params_name_list), tuple(trainer.freeze_params_name_list))

    @property
    def nothing(self) -> bool:
        return not self.only_train and not self.freeze

    def trains(self, name: str) -> bool:
        chosen = not self.only_train or any(re.search(pattern, name) for pattern in self.only_train)
        return chosen and not any(re.search(pattern, name) for pattern in self.freeze)

    def check(self, names: Sequence[str]) -> None:
        """Raises ConfigError for a pattern that is found in none of the model's ``names``, where nothing would train, and where Megatron
        could not compute the gradients."""
        for field, patterns in ((ONLY_TRAIN, self.only_train), (FREEZE, self.freeze)):
            for pattern in patterns:
                if not any(re.search(pattern, name) for name in names):
                    shown = ", ".join([*names[:2], *names[-2:]])
                    raise ConfigError(field, pattern, f"found in the name of a parameter, as Megatron has them: {shown}")
        if not any(map(self.trains, names)):
            field = FREEZE if self.freeze else ONLY_TRAIN
            raise ConfigError(field, list(self.freeze or self.only_train), "patterns that leave something to train; all is frozen")
        self._check_biases(names)

    def _check_biases(self, names: Sequence[str]) -> None:
        """Refuses a bias that trains beside a frozen weight: Megatron (0.16) silently gives it no gradient."""
        known = set(names)
        for name in names:
            weight = re.sub(r"\.bias(\d*)$", r".weight\1", name)
            if weight != name and weight in known and self.trains(name) and not self.trains(weight):
                field = FREEZE if self.freeze else ONLY_TRAIN
                raise ConfigError(field, list(self.freeze or self.only_train), f"frozen or trained together: {name} and {weight}")
