"""Sums of two three-digit numbers, and the two ways in which a demonstration answers one.

``237+945=`` is answered at once, ``1182``, or worked first: ``(12 08 11)1182`` holds the total of each column from the right, carry
included (7+5=12; 3+4+1=08; 2+9=11), so that the answer can be read off. Both are right. Answering at once needs every carry in one's
head, which is more than a short warm start teaches a tiny model; writing the columns down is not.
"""

import random
from dataclasses import dataclass

SMALLEST, LARGEST = 100, 999


@dataclass(frozen=True)
class Problem:
    """A sum of two three-digit numbers."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        return str(self.left + self.right)

    @property
    def working(self) -> str:
        """The columns' totals from the right, carry included, two digits each, in brackets."""
        totals, carry = [], 0
        for one, other in zip(reversed(str(self.left)), reversed(str(self.right)), strict=True):
            total = int(one) + int(other) + carry
            totals.append(f"{total:02d}")
            carry = total // 10
        return f"({' '.join(totals)})"


def draw(rng: random.Random, count: int) -> list[Problem]:
    """``count`` different problems; of ``a+b`` and ``b+a`` at most one, so that parts of the list have nothing in common.

    Raises ValueError where there are not that many.
    """
    numbers = LARGEST - SMALLEST + 1
    pairs = numbers * (numbers + 1) // 2
    if count > pairs:
        raise ValueError(f"{count} problems wanted, there are {pairs}")
    chosen: dict[frozenset[int], Problem] = {}
    while len(chosen) < count:
        left, right = rng.randint(SMALLEST, LARGEST), rng.randint(SMALLEST, LARGEST)
        chosen.setdefault(frozenset((left, right)), Problem(left, right))
    return list(chosen.values())


def as_prompt(problem: Problem) -> dict[str, str]:
    """A line of ``train.jsonl`` and ``heldout.jsonl``."""
    return {"prompt": problem.prompt, "label": problem.answer}


def as_demonstration(problem: Problem, worked: bool) -> dict[str, str]:
    """A line of ``sft.jsonl``; the trainer ends the response with the model's eos token."""
    return {"prompt": problem.prompt, "response": (problem.working if worked else "") + problem.answer}
