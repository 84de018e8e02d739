"""The tokenizer of a run, where this machine has it: for displays, which can do without and never download anything."""

import functools
import importlib.util
from dataclasses import replace
from typing import TYPE_CHECKING

from shared.config.run_config import RunConfig
from shared.hub import hub_resolve
from shared.hub.hub_client import Hub
from shared.runtime.errors import BadInput

if TYPE_CHECKING:
    from shared.data.tokenizer import Tokenizer


def local_tokenizer(config: RunConfig) -> "Tokenizer | None":
    """Returns the run's tokenizer; None where this machine has not got its files, or lacks the packages of the extra `buffer`."""
    try:
        path = hub_resolve.local(config, ("model.hf_checkpoint",), weights=False, hub=replace(Hub.of(), offline=True)).model.hf_checkpoint
        return _tokenizer(str(path))
    except BadInput:
        return None


@functools.lru_cache(maxsize=2)
def _tokenizer(model: str) -> "Tokenizer | None":
    if importlib.util.find_spec("tokenizers") is None or importlib.util.find_spec("jinja2") is None:
        return None
    from shared.data.tokenizer import Tokenizer

    return Tokenizer(model)
