"""``slime.utils.processing_utils``: transformers' tokenizer and processor, which user's functions call in many ways.

transformers is imported when the first is asked for: it is there where engines run, and importing it takes seconds.
"""

import importlib
import logging
from typing import Any

log = logging.getLogger(__name__)


def load_tokenizer(name_or_path: str, **options: Any) -> Any:
    """Returns transformers' tokenizer of a checkpoint."""
    return _transformers().AutoTokenizer.from_pretrained(name_or_path, **options)


def load_processor(name_or_path: str, **options: Any) -> Any:
    """Returns transformers' processor of a checkpoint, None where it has none, as a model of text alone."""
    transformers = _transformers()
    try:
        found = transformers.AutoProcessor.from_pretrained(name_or_path, **options)
    except (OSError, ValueError) as error:
        log.info("%s has no processor: %s", name_or_path, error)
        return None
    return found if isinstance(found, transformers.ProcessorMixin) else None


def _transformers() -> Any:
    return importlib.import_module("transformers")
