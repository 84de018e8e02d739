"""slime's ``dapo``, ``f1``, ``gpqa`` and ``ifbench``, and the reward of reasoning-gym's tasks, each with its source named beside it."""

import importlib.util
import re
import string
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from types import ModuleType
from typing import Any

from shared.rewards.boxed_math import BOX, last_boxed
from shared.rewards.names import REASONING_GYM
from shared.runtime.errors import nearest

LAST_CHARACTERS = 300  # The characters at a response's end that are looked at
LAST_OF_BOX = 100  # The same where the answer has to stand in a box
ANSWER = r"(?i)Answer\s*:\s*([^\n]+)"
INVALID = "[INVALID]"  # The prediction of a response that names no answer
_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)

# fmt: off
# What is left out, one after the other
_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points", "feet", "minutes",
    "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students", "childrentickets", "multiples",
    "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ",
    "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots", "<|im_end|>", "<|endoftext|>",
)
# fmt: on
# Enclosing commands, and arguments without braces
_REWRITTEN = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r".*?\$(.*?)\$.*", r"$\1$"),
        (r"\\text\{(.*?)\}", r"\1"),
        (r"\\textbf\{(.*?)\}", r"\1"),
        (r"\\overline\{(.*?)\}", r"\1"),
        (r"\\boxed\{(.*)\}", r"\1"),
        (r"frac([^{])(.)", r"frac{\1}{\2}"),
        (r"sqrt([^{])", r"sqrt{\1}"),
    )
)


def compute_score(
    solution_str: str, ground_truth: Any, strict_box_verify: bool = False, pause_tokens_index: list[int] | None = None
) -> dict[str, Any]:
    """Returns ``score``, 1.0 or -1.0; ``acc``, whether the answer is right; ``pred``, the answer as it was read. Raises ValueError for a
    ``ground_truth`` that is no number."""
    right, found = verify(solution_str[-LAST_CHARACTERS:], ground_truth, strict_box_verify, pause_tokens_index)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": found}


def verify(
    response: str, answer: Any, strict_box_verify: bool = False, pause_tokens_index: list[int] | None = None
) -> tuple[bool, str | None]:
    """Returns whether the answer is right, and what was read; with ``strict_box_verify`` the box has to hold just the text."""
    if strict_box_verify:
        score, found = is_correct_strict_box(response, answer, pause_tokens_index)
        return score == 1, found
    named = re.findall(ANSWER, response)
    found = normalize_final_answer(named[-1] if named else INVALID)
    return found == str(int(float(normalize_final_answer(answer)))), found


def is_correct_strict_box(response: str, truth: str, pause_tokens_index: list[int] | None = None) -> tuple[int, str | None]:
    """Returns 1 where the last box in the last characters holds just ``truth``, else -1, and what it holds."""
    if pause_tokens_index is not None and len(pause_tokens_index) != 4:
        raise AssertionError(f"pause_tokens_index has {len(pause_tokens_index)} entries; expected 4")
    boxed = last_boxed_only_string(response[(pause_tokens_index[-1] if pause_tokens_index else 0) - LAST_OF_BOX :])
    found = None if boxed is None else remove_boxed(boxed)
    return (1 if found == truth else -1), found


def last_boxed_only_string(text: str) -> str | None:
    """Returns the last ``\\boxed{…}``; None where there is none, or it is not closed."""
    return last_boxed(text, BOX)


def remove_boxed(boxed: str | None) -> str:
    """Returns what stands inside of ``\\boxed{…}``. Raises AssertionError for anything else."""
    if boxed is None or not (boxed.startswith(BOX) and boxed.endswith("}")):
        raise AssertionError(f"box error: {boxed}")
    return boxed[len(BOX) : -1]


def normalize_final_answer(answer: Any) -> str:
    """Returns an answer without articles, units and markup, with braces around arguments."""
    text = str(answer).rpartition("=")[2]
    for before, after in _REPLACED:
        text = text.replace(before, after)
    for removed in _REMOVED:
        text = text.replace(removed, "")
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    text = text.replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()


_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WHOLE = ("yes", "no", "noanswer")  # Answers that are right as a whole or wrong


def f1_score(prediction: str | None, ground_truth: str) -> tuple[float, float, float]:
    """Returns F1, precision and recall of the prediction's words; all 0 where none is the truth's."""
    if prediction is None:
        return 0, 0, 0
    given, expected = normalize_answer(prediction), normalize_answer(ground_truth)
    if given != expected and (given in _WHOLE or expected in _WHOLE):
        return 0, 0, 0
    given_words, expected_words = given.split(), expected.split()
    common = sum((Counter(given_words) & Counter(expected_words)).values())
    if not common:
        return 0, 0, 0
    precision, recall = common / len(given_words), common / len(expected_words)
    return (2 * precision * recall) / (precision + recall), precision, recall


def normalize_answer(s: str) -> str:
    """Returns the words in small letters, without punctuation and articles, one space between them."""
    return " ".join(_ARTICLE.sub(" ", s.lower().translate(_PUNCTUATION)).split())


LETTERS = list(string.ascii_uppercase[:10])  # The letters of a question that says neither its letters nor its choices
ANSWERS = ("correct_letter", "correct_answer", "answer_text")  # The fields of a question's metadata that say what is right
# How a response names its letter, tried one after the other
_NAMED = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(?:answer|option|choice)\s*(?:is|:)?\s*([A-Z])",
        r"([A-Z])\s*(?:is\s*(?:the)?\s*correct)",
        r"final\s*(?:answer|option)\s*(?:is|:)?\s*([A-Z])",
    )
]
_LONE = re.compile(r"\b([A-Z])\b")
_OTHER = re.compile(r"[^a-z0-9]+")
_THOUGHT = "</think>"


def compute_gpqa_reward(response: str | None, label: Any, metadata: dict[str, Any] | None = None) -> float:
    """Returns 1.0 where the response names the right letter, or without a letter has the right answer's text in it; else 0.0. ``label``:
    the letter, the number of the choice from 0, or the text of the choice. ``metadata``: ``choices`` (a list, or an object by letter),
    ``valid_letters``, ``correct_letter``; ``correct_answer`` and ``answer_text`` name texts that are right, too."""
    if response is None:
        return 0.0
    metadata = metadata or {}
    among = metadata.get("choices") or []
    choices = list(among.values() if isinstance(among, dict) else among)
    letters = _letters(metadata.get("valid_letters"), choices)
    text = label.strip() if isinstance(label, str) else None
    right = _right_letter(label, text, metadata.get("correct_letter"), letters) or _letter_of(text, choices, letters)
    given = extract_letter(response, letters)
    if given and right:
        return float(given == right)
    texts = [str(choice) for letter, choice in zip(letters, choices, strict=False) if letter == right][:1]
    texts += [str(metadata[key]) for key in ("correct_answer", "answer_text") if metadata.get(key)]
    return _by_text(response, [*texts, *([text] if text else [])], given, right, text)


def extract_letter(response: str, letters: Iterable[str]) -> str | None:
    """Returns the letter that the response names after its thoughts, else the last lone capital one; None where there is none."""
    if not response:
        return None
    said, valid = response.rpartition(_THOUGHT)[2], {letter.upper() for letter in letters}
    named = (found[1].upper() for pattern in _NAMED if (found := pattern.search(said)) is not None)
    lone = reversed(_LONE.findall(said))
    return next((letter for letter in (*named, *lone) if letter in valid), None)


def _by_text(response: str, texts: list[str], given: str | None, right: str | None, label: str | None) -> float:
    said = _words(response.rpartition(_THOUGHT)[2])
    if any(wanted and wanted in said for wanted in map(_words, texts)):
        return 1.0
    return float(bool(given and not right and label and given == label.upper()))


def _letters(valid: Any, choices: list[Any]) -> list[str]:
    if valid:
        return [str(letter).upper() for letter in valid]
    return list(string.ascii_uppercase[: len(choices)]) if choices else LETTERS


def _right_letter(label: Any, text: str | None, named: Any, letters: list[str]) -> str | None:
    """Returns the letter that the metadata or the label name; a number as label goes before the metadata."""
    right = named.strip().upper() if isinstance(named, str) else None
    if text is not None:
        return text.upper() if not right and len(text) == 1 and text.upper() in letters else right
    if isinstance(label, int | float) and 0 <= int(label) < len(letters):
        return letters[int(label)]
    return right


def _letter_of(text: str | None, choices: list[Any], letters: list[str]) -> str | None:
    named = (letters[index] for index, choice in enumerate(choices) if _words(str(choice)) == _words(text or ""))
    return next(named, None) if text else None


def _words(text: str) -> str:
    return _OTHER.sub(" ", text.lower()).strip()


def compute_ifbench_reward(response: str | None, label: Any = None, metadata: Mapping[str, Any] | None = None) -> float:
    """Returns 1.0 where the response keeps all instructions, strictly; else 0.0, and where the metadata name no instruction. ``label``: not
    looked at. ``metadata``: ``instruction_id_list``; ``kwargs``, the arguments of each instruction, or of all; ``prompt_text``. Raises
    ImportError where IFBench is not installed, KeyError for an instruction that it does not have."""
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
