"""`[model]`: the policy."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from shared.config.section import Section
from shared.hub import hub_names


class ModelSection(Section):
    """The policy."""

    hf_checkpoint: Annotated[Path, AfterValidator(hub_names.checked_model)] = Field(
        description="the initial policy: a directory with config.json, safetensors and tokenizer.json, or a name on the Hugging Face hub, "
        "ORG/NAME or ORG/NAME@REVISION"
    )
    ref_load: Path | None = Field(
        default=None,
        description="HF checkpoint of the reference policy, of the policy's shape; default: the policy as the run's steps find it. A "
        "torch_dist directory, as slime has it, is taken for a conversion of hf_checkpoint",
    )
    trust_remote_code: bool = Field(
        default=False,
        description="run the Python code that a checkpoint brings (`auto_map`), in engines and in your own functions' tokenizers: only for "
        "a checkpoint whose code you have read",
    )

    @property
    def own_reference(self) -> Path | None:
        """Returns the HF checkpoint of a reference policy that does not start as the policy does; None where it does."""
        given = self.ref_load
        if given is None or given.resolve() == self.hf_checkpoint.resolve() or not (given / "config.json").is_file():
            return None
        return given
