"""`[monitoring]`: measurements and where they go."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from shared.config.section import MUTABLE, Section, hook


class MonitoringSection(Section):
    """Measurements, and their destinations besides TensorBoard and Prometheus."""

    log_multi_turn: bool = Field(
        default=False, description="multi_turn/*: response lengths with and without tokens of tools, and rounds of each batch", **MUTABLE
    )
    log_passrate: bool = Field(default=False, description="passrate/pass@k of each batch, for k = 1, 2, 4, ...", **MUTABLE)
    passrate_threshold: float = Field(default=1.0, description="a sample passes with a reward of at least this", **MUTABLE)
    custom_rollout_log_function_path: str | None = hook("that logs a batch's samples; if it returns true, Myxo does not")
    custom_eval_rollout_log_function_path: str | None = hook("that logs an evaluation; if it returns true, Myxo does not")
    use_wandb: bool = Field(default=False, description="write to W&B, too; needs the extra wandb", **MUTABLE)
    wandb_project: str = Field(default="myxo", min_length=1, description="W&B project", **MUTABLE)
    wandb_group: str | None = Field(default=None, description="W&B group; default: the run's name", **MUTABLE)
    wandb_team: str | None = Field(default=None, description="W&B team; default: your own", **MUTABLE)
    wandb_mode: Literal["online", "offline", "disabled"] = Field(
        default="online",
        description="send at once, by WANDB_API_KEY in the trainer's environment, write files to sync, or turn use_wandb off",
        **MUTABLE,
    )
    wandb_dir: Path | None = Field(default=None, description="where W&B's files lie; default: the run's directory", **MUTABLE)
    wandb_host: str | None = Field(default=None, description="URL of a W&B server of your own", **MUTABLE)
    http_host: str = Field(
        default="127.0.0.1", min_length=1, description="where services serve /healthz and /metrics; MYXO_HTTP, host:port, wins", **MUTABLE
    )
    logprob_alarm: float = Field(
        default=0.1, gt=0, description="mean difference of engine's and trainer's log-probs at equal versions that is warned of", **MUTABLE
    )
    keep_rollouts: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="share of the training groups whose prompts and responses the buffer writes to rollouts/ in the run's directory, "
        "besides all held-out ones; 0 = nothing is kept",
        **MUTABLE,
    )
    keep_rollouts_bytes: int = Field(default=2**31, ge=2**20, description="of rollouts/; beyond it the oldest files are removed", **MUTABLE)
    keep_rollouts_tokens: bool = Field(
        default=False, description="keep token ids, masks and log-probs there, too: about 20 bytes a token more", **MUTABLE
    )

    def _complete(self) -> None:
        if self.wandb_mode == "disabled":
            self.use_wandb = False
