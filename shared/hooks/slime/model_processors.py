"""``slime.utils.processing_utils``: transformers' tokenizer and processor, which user's functions call in many ways.

transformers is imported when the first is asked for: it is there where engines run, and importing it takes seconds.
"""

import importlib
import logging
from typing import Any

log = logging.getLogger(__name__)

RUN = {"trust_remote_code": False}  # What the run's config says, once a process has its arguments (`shared.hooks.arguments`)


def load_tokenizer(name_or_path: str, **options: Any) -> Any:
    """Returns transformers' tokenizer of a checkpoint, whose own code is run only where ``model.trust_remote_code`` is set."""
    return _transformers().AutoTokenizer.from_pretrained(name_or_path, **_permitted(options))


def load_processor(name_or_path: str, **options: Any) -> Any:
    """Returns transformers' processor of a checkpoint, None where it has none, as a model of text alone."""
    transformers = _transformers()
    try:
        found = transformers.AutoProcessor.from_pretrained(name_or_path, **_permitted(options))
    except (OSError, ValueError) as error:
        log.info("%s has no processor: %s", name_or_path, error)
        return None
    return found if isinstance(found, transformers.ProcessorMixin) else None


VISION = ("build_processor_kwargs", "encode_image_for_rollout_engine", "process_vision_info")  # slime's functions for images


def __getattr__(name: str) -> Any:
    """Raises ImportError for `VISION`, AttributeError for what slime does not have either."""
    if name in VISION:
        raise ImportError(f"{name} is for images: Myxo's prompts and models are text")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _permitted(options: dict[str, Any]) -> dict[str, Any]:
    if options.get("trust_remote_code") and not RUN["trust_remote_code"]:
        log.warning("trust_remote_code=True of a function is not followed: model.trust_remote_code is false")
        return {**options, "trust_remote_code": False}
    return options


def _transformers() -> Any:
    return importlib.import_module("transformers")
