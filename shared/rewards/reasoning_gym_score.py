"""The reward of a task of the package reasoning-gym: by the verifier of the generator that made it."""

import importlib.util
import re
import sys
from functools import cache
from types import ModuleType
from typing import Any

from shared.rewards.names import REASONING_GYM

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class _Missing(ModuleType):
    """Stands for pycosat, which only ``zebra_puzzles`` uses and which needs a compiler to be installed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ModuleNotFoundError(f"{self.__name__} is not installed: pip install {self.__name__}, which needs a C compiler")


def reasoning_gym_factory() -> Any:
    """Returns the package's module of generators and their verifiers. The first import takes seconds."""
    if "pycosat" not in sys.modules and importlib.util.find_spec("pycosat") is None:
        sys.modules["pycosat"] = _Missing("pycosat")
    import reasoning_gym.factory

    return reasoning_gym.factory


def task_problem(metadata: dict[str, Any]) -> str | None:
    """Returns what is wrong with the metadata of a prompt that ``reasoning_gym`` is to score; None where nothing is."""
    own = metadata.get(REASONING_GYM)
    if isinstance(own, dict) and isinstance(own.get("dataset"), str) and isinstance(own.get("metadata"), dict):
        return None
    return f"expected metadata.{REASONING_GYM} with dataset, the generator's name, and metadata, its task's, found {str(own)[:80]}"


def answer_of(response: str) -> str:
    """Returns what stands in the last ``<answer>`` after ``</think>``, or all that stands there; without white space at both ends."""
    said = response.rpartition("</think>")[2] or response
    found = _ANSWER.findall(said)
    return (found[-1] if found else said).strip()


def compute_reasoning_gym_reward(response: str, label: str | None, metadata: dict[str, Any]) -> float:
    """Returns the reward, 0 to 1, that the task's own verifier gives. Raises ValueError for a prompt that is no such task."""
    reasoning_gym_factory()  # seconds, which belong before the first call's deadline
    if (problem := task_problem(metadata)) is not None:
        raise ValueError(problem)
    own = metadata[REASONING_GYM]
    entry = {"question": own.get("question", ""), "answer": label, "metadata": own["metadata"]}
    return float(_verifier(own["dataset"])(answer=answer_of(response), entry=entry))


@cache
def _verifier(dataset: str) -> Any:
    factory = reasoning_gym_factory()
    if dataset not in factory.DATASETS:
        raise ValueError(f"metadata.{REASONING_GYM}.dataset is {dataset[:80]!r}, no generator of reasoning-gym")
    return factory.get_score_answer_fn(dataset)
