"""W&B, where a run asks for it (``use_wandb``); offline its files are written for ``wandb sync``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.config.run_config import RunConfig
from shared.runtime import extras

STEP = "step"
"""W&B's axis: its own step must only grow, and a resumed run makes steps again."""


class WeightsAndBiases:
    """A W&B run that goes on where the trainer does.

    Args:
        config: the run's; of its sections those of model, generation and training are sent. job: actor or critic.

    Raises ConfigError where the package is not installed.
    """

    def __init__(self, config: RunConfig, job: str) -> None:
        extras.check(config)
        import wandb

        asked = config.monitoring
        directory = asked.wandb_dir or config.run.root
        directory.mkdir(parents=True, exist_ok=True)
        name = config.run.name if job == "actor" else f"{config.run.name}-{job}"
        self._run = wandb.init(
            project=asked.wandb_project,
            entity=asked.wandb_team,
            group=asked.wandb_group or config.run.name,
            name=name,
            id=name,
            job_type=job,
            mode=asked.wandb_mode,
            dir=str(directory),
            resume="allow",
            config=_settings(config),
            settings=wandb.Settings(console="off", silent=True, **({"base_url": asked.wandb_host} if asked.wandb_host else {})),
        )
        self._run.define_metric("*", step_metric=STEP)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({STEP: step, **values})

    def close(self) -> None:
        self._run.finish()


def _settings(config: RunConfig) -> dict[str, Any]:
    sections = ("model", "rollout", "trainer", "sft", "algorithm", "weights")
    values = {section: value for section, value in config.model_dump(mode="json").items() if section in sections}
    values["rollout"].pop("sglang")  # an engine's flags may hold a key
    return values
