"""Functions about the model that user's functions import from slime: ``utils.processing_utils``, transformers' tokenizer and processor;
``backends.megatron_utils.cp_utils`` and ``rollout.on_policy_distillation``, for functions of the objective.

transformers is imported when the first is asked for: it is there where engines run, and importing it takes seconds.

Here a function of the objective always gets whole responses, whatever the layout, and gives whole ones back: under context parallelism
there is nothing to gather or to cut. In distillation there is no reward but the log-probs of the teacher, which the rollout services ask.
"""

import importlib
import logging
from collections.abc import Sized
from typing import Any, TypeVar

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


_Values = TypeVar("_Values", bound=Sized)


def all_gather_with_cp(tensor: _Values, total_length: int, response_length: int) -> _Values:
    """Returns the values of a whole response, [response_length]: those given. Raises ValueError for another length."""
    return _whole(tensor, response_length)


def slice_log_prob_with_cp(log_prob: _Values, total_length: int, response_length: int) -> _Values:
    """Returns what a function hands back of a whole response, [response_length]: all of it. Raises ValueError for another length."""
    return _whole(log_prob, response_length)


def _whole(values: _Values, response_length: int) -> _Values:
    if len(values) != response_length:
        raise ValueError(f"{len(values)} values for a response of {response_length} tokens")
    return values


async def reward_func(args: Any, sample: Any, **keywords: Any) -> float:
    """Returns 0."""
    return 0.0


def post_process_rewards(args: Any, samples: list[Any], **keywords: Any) -> tuple[list[float], list[float]]:
    """Returns raw rewards and rewards, 0 for each sample."""
    return [0.0] * len(samples), [0.0] * len(samples)
