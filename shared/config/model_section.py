"""`[model]`: the policy."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from shared.config.section import MUTABLE, Section
from shared.hub import hub_names


class ModelSection(Section):
    """The policy."""

    hf_checkpoint: Annotated[Path, AfterValidator(hub_names.checked_model)] = Field(
        description="the initial policy: a directory with config.json, safetensors and tokenizer.json, or a name on the Hugging Face hub, "
        "ORG/NAME or ORG/NAME@REVISION"
    )
    ref_load: Path | None = Field(
        default=None,
        description="slime's checkpoint of the reference policy. Here that starts from hf_checkpoint, as the policy does: a torch_dist "
        "directory is taken for a conversion of it, another HF checkpoint is refused",
        **MUTABLE,
    )
