"""`[sft]`: the supervised warm start."""

from pydantic import Field

from shared.config.file_fields import Files
from shared.config.learning_rate import DecayStyle, LearningRateSchedule
from shared.config.section import Section


class SftSection(Section):
    """Supervised warm start before the first rollout."""

    sft_data: Files = Field(default=None, description="files of demonstrations, named as in eval_prompt_data; none = no warm start")
    sft_prompt_key: str = Field(default="prompt", description="key of the prompt, as in [data]")
    sft_response_key: str = Field(default="response", description="key of the demonstrated response (text)")
    sft_messages_key: str = Field(
        default="messages", description="key of a chat, in place of prompt and response: the assistant's turns are trained"
    )
    sft_num_epoch: int | None = Field(
        default=None, gt=0, description="passes over the demonstrations, in the place of sft_steps: each has len // sft_batch_size steps"
    )
    sft_steps: int = Field(default=100, gt=0, description="optimizer steps")
    sft_batch_size: int = Field(default=64, gt=0, description="demonstrations a step")
    sft_lr: float = Field(default=1e-5, ge=0, description="peak learning rate")
    sft_min_lr: float = Field(default=0.0, ge=0, description="floor of the decay")
    sft_warmup_iters: int = Field(default=0, ge=0, description="steps of linear warm-up")
    sft_warmup_fraction: float | None = Field(
        default=None, ge=0, lt=1, description="the warm-up as a share of the steps, in the place of sft_warmup_iters"
    )
    sft_lr_decay_style: DecayStyle = Field(default="constant", description="decay over sft_steps")

    @property
    def warmup_steps(self) -> int:
        """Returns the steps of the warm-up."""
        return self.sft_warmup_iters if self.sft_warmup_fraction is None else int(self.sft_warmup_fraction * self.sft_steps)

    @property
    def schedule(self) -> LearningRateSchedule:
        """Returns the learning-rate schedule. Raises ConfigError where there are too few steps for it."""
        return LearningRateSchedule(self.sft_lr, self.sft_min_lr, self.warmup_steps, self.sft_steps, self.sft_lr_decay_style)
