"""slime's ``ifbench``: 1 where a response keeps every instruction of its prompt, by the checkers of IFBench (Pyatkin et al. 2025).

The checkers are the Allen Institute's own package: ``pip install 'ifbench @ git+https://github.com/allenai/IFBench'``, or a checkout of it
on ``PYTHONPATH``, which slime makes by itself.
"""

from collections.abc import Mapping
from typing import Any

from shared.runtime.errors import nearest


def compute_ifbench_reward(response: str | None, label: Any = None, metadata: Mapping[str, Any] | None = None) -> float:
    """Returns 1.0 where the response keeps all instructions, strictly; else 0.0, and where the metadata name no instruction.

    Args:
        label: not looked at.
        metadata: ``instruction_id_list``; ``kwargs``, the arguments of each instruction, or of all; ``prompt_text``.

    Raises ImportError where IFBench is not installed, KeyError for an instruction that it does not have.
    """
    names = instructions(metadata or {})
    if response is None or metadata is None or not names:
        return 0.0
    arguments, prompt = _arguments(metadata.get("kwargs"), len(names)), metadata.get("prompt_text")
    text, asked = str(response or ""), "" if prompt is None else str(prompt)
    return float(all([_kept(name, given, asked, text) for name, given in zip(names, arguments, strict=True)]))


def instructions(metadata: Mapping[str, Any]) -> list[str]:
    """Returns the ids of a prompt's instructions."""
    named = (str(name).strip() for name in metadata.get("instruction_id_list") or [] if name is not None)
    return [name for name in named if name]


def check_instructions(metadata: Mapping[str, Any]) -> None:
    """Raises ValueError for an instruction that IFBench does not have, ImportError where that is not installed."""
    if unknown := [name for name in instructions(metadata) if name not in _checkers()]:
        raise ValueError(f"metadata.instruction_id_list names {unknown[0]!r}; {nearest(unknown[0], sorted(_checkers()))}")


def _checkers() -> Mapping[str, Any]:
    from ifbench.instructions_registry import INSTRUCTION_DICT

    found: Mapping[str, Any] = INSTRUCTION_DICT
    return found


def _kept(name: str, arguments: dict[str, Any], prompt: str, response: str) -> bool:
    instruction = _checkers()[name](name)
    instruction.build_description(**arguments)
    if "prompt" in (instruction.get_instruction_args() or {}):
        instruction.build_description(prompt=prompt)
    return bool(response.strip() and instruction.check_following(response))


def _arguments(given: Any, count: int) -> list[dict[str, Any]]:
    """Returns the arguments of each instruction, without those that are None; where some lack, those of the last one."""
    found = given if isinstance(given, list) else [given] * count
    found = [entry if isinstance(entry, dict) else {} for entry in found]
    found += found[-1:] * (count - len(found)) or [{}] * (count - len(found))
    return [{name: value for name, value in entry.items() if value is not None} for entry in found[:count]]
