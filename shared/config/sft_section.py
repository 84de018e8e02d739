"""`[sft]`: the supervised warm start."""

from pydantic import Field

from shared.config.file_fields import Files
from shared.config.learning_rate import DecayStyle
from shared.config.section import Section


class SftSection(Section):
    """Supervised warm start before the first rollout."""

    sft_data: Files = Field(default=None, description="files of demonstrations, named as in eval_prompt_data; none = no warm start")
    sft_prompt_key: str = Field(default="prompt", description="key of the prompt, as in [data]")
    sft_response_key: str = Field(default="response", description="key of the demonstrated response (text)")
    sft_messages_key: str = Field(
        default="messages", description="key of a chat, in place of prompt and response: the assistant's turns are trained"
    )
    sft_steps: int = Field(default=100, gt=0, description="optimizer steps")
    sft_batch_size: int = Field(default=64, gt=0, description="demonstrations a step")
    sft_lr: float = Field(default=1e-5, gt=0, description="peak learning rate")
    sft_warmup_iters: int = Field(default=0, ge=0, description="steps of linear warm-up")
    sft_lr_decay_style: DecayStyle = Field(default="constant", description="decay over sft_steps")
