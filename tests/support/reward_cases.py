"""Responses, labels and metadata over which rewards are compared: drawn from what models and data sets write, the same for a seed."""

import random
from collections.abc import Callable
from typing import Any

Case = tuple[str, Any, dict[str, Any]]
"""(response, label, metadata)"""

NUMBERS = [
    "0",
    "1",
    "-1",
    "5",
    "42",
    "1182",
    "1,042",
    "1,234,567",
    "0.5",
    ".5",
    "-0.25",
    "3.0",
    "12.5",
    "1e3",
    "1e-05",
    "007",
    "+7",
    "1234567890123",
]
FRACTIONS = [
    "1/2",
    "2/4",
    "-3/4",
    "\\frac{1}{2}",
    "\\dfrac{3}{4}",
    "\\tfrac12",
    "\\frac12",
    "\\frac{10}{4}",
    "5/2",
    "-\\frac{1}{3}",
    "\\frac1{72}",
]
EXPRESSIONS = [
    "x",
    "x^2",
    "x**2",
    "2x+1",
    "1+2x",
    "(x+1)^2",
    "x^2+2x+1",
    "\\sqrt{2}",
    "\\sqrt2",
    "sqrt(2)",
    "2\\sqrt{3}",
    "\\pi",
    "2\\pi",
    "3\\pi/2",
    "\\infty",
    "10^{10}",
    "10^10",
    "2^3",
    "8",
    "a+b",
    "b+a",
    "abc",
    "x=5",
    "k = 3",
    "n=4m",
    "\\frac{\\sqrt{3}}{2}",
    "x+y+z",
    "i",
    "e^x",
    "\\log 2",
    "3!",
    "|x|",
]
TUPLES = [
    "(1,2)",
    "(1, 2)",
    "[1,2]",
    "(1,2]",
    "(2,1)",
    "(0,\\infty)",
    "1,2",
    "1, 2",
    "\\{1,2\\}",
    "(\\frac{1}{2}, 0.5)",
    "(1,2,3)",
    "()",
    "[-1,1]",
    "x \\cup y",
]
WORDS = [
    "Paris",
    "paris",
    "\\text{Paris}",
    "\\text{(C)}",
    "C",
    "(C)",
    "yes",
    "No",
    "east",
    "\\text{east}",
    "\\text{ cm}",
    "5 apples",
    "Monday morning",
]
UNITS = [
    "5 cm",
    "5\\text{ cm}",
    "5 \\text{ cm}",
    "90^\\circ",
    "90^{\\circ}",
    "90 degrees",
    "12.5\\%",
    "12.5%",
    "12 %",
    "\\$5",
    "$5$",
    "$5.00",
    "3 hours",
    "3 \\text{ hours}",
    "5 meters^2",
    "5 million",
    "2 billion",
    "10:30",
    "3\\!000",
    "3,\\!000",
    "3{,}000",
    "1 000",
    "2 1/2",
    "2\\frac{1}{2}",
    "7 3/4",
    "\\mbox{5}",
    "5 or 6",
    "5 and 6",
    "1.0",
    "-2",
    "- 2",
    "\\left(1,2\\right)",
    "\\(5\\)",
    "\\[5\\]",
    "{5}",
    "\\textbf{5}",
    "\\overline{5}",
    "5 square units",
]
ANSWERS = [*NUMBERS, *FRACTIONS, *EXPRESSIONS, *TUPLES, *WORDS, *UNITS]

CHARACTERS = [
    *"0123456789.,/+-*^(){}[]=$% \n",
    "\\frac",
    "\\sqrt",
    "\\text{",
    "\\text{ ",
    "x",
    "y",
    "a",
    "\\",
    "\\boxed{",
    "}",
    "Answer:",
    "\\pi",
    " or ",
]
WRAPPED = [
    "So the answer is \\boxed{{{}}}.",
    "\\boxed{{{}}}",
    "It is 41. \\boxed{{7}} no, \\boxed{{{}}}",
    "\\boxed {{{}}}",
    "\\fbox{{{}}}",
    "I guess {}.",
    "{}",
    "",
    "\\boxed{{{}",
    "$\\boxed{{{}}}$ and then more words",
    "\\boxed{{\\boxed{{{}}}}}",
    "\\boxed{{{}}} }} {{",
    "Answer: {}",
    "answer:{}\nso it is",
    "The Answer is: {}",
    "ANSWER : {}\nAnswer: $ {} $",
    "Answer: \\boxed{{{}}}",
    "Answer: the {}",
    "Answer: x = {}",
]
THOUGHTS = [
    "",
    "<think>is it 41?</think>",
    "<think>\\boxed{41}</think>",
    "</think>a</think>",
    "###Response",
    "a ###Response ",
    "###Response \\boxed{1} ###Response",
]


def text(rng: random.Random, pieces: list[str], most: int) -> str:
    """Returns pieces at random, one after the other."""
    return "".join(rng.choice(pieces) for _ in range(rng.randint(0, most)))


def answer(rng: random.Random) -> str:
    """Returns an answer: mostly one that people write."""
    return rng.choice(ANSWERS) if rng.random() < 0.85 else text(rng, CHARACTERS, 8)


def wrapped(rng: random.Random, said: str) -> str:
    """Returns a response that says it in one of many ways."""
    return rng.choice(THOUGHTS[:1] * 3 + THOUGHTS) + rng.choice(WRAPPED[:2] * 6 + WRAPPED).replace("{}", said).replace("{{", "{").replace(
        "}}", "}"
    )


def mathematical(rng: random.Random) -> Case:
    """Returns a case of the rewards that compare mathematics."""
    label = answer(rng)
    said = label if rng.random() < 0.4 else rng.choice(_family(label)) if rng.random() < 0.7 else answer(rng)
    if rng.random() < 0.1:
        label = f"\\boxed{{{label}}}"
    return wrapped(rng, said), label, {}


def _family(label: str) -> list[str]:
    return next(family for family in (NUMBERS, FRACTIONS, EXPRESSIONS, TUPLES, WORDS, UNITS, [label]) if label in family)


def deepscaler(rng: random.Random) -> Case:
    """Returns a case whose response mostly has thoughts."""
    response, label, metadata = mathematical(rng)
    return (rng.choice(THOUGHTS[1:]) if rng.random() < 0.8 else "") + response, label, metadata


def integer(rng: random.Random) -> Case:
    """Returns a case of ``dapo``, whose labels are integers."""
    label = str(rng.choice([0, 1, 5, 7, 34, 42, 1182, 1234567, -3]))
    forms = [
        label,
        f"${label}$",
        f"{label}.0",
        f"{label} units",
        f"the {label}",
        f"x={label}",
        f"\\boxed{{{label}}}",
        f"{int(label):,}",
        f"\\text{{{label}}}",
        f"\\frac{label}2",
    ]
    said = rng.choice(forms) if rng.random() < 0.7 else answer(rng)
    ways = [
        "Answer: {}",
        "answer:{}",
        "Answer : {}\n",
        "Answer: 9\nAnswer: {}",
        "The answer is {}",
        "Answer:\n{}",
        "Answer: {}<|im_end|>",
        "x" * 290 + "Answer: {}",
        "Answer: {}" + " y" * 150,
    ]
    return rng.choice(ways).replace("{}", said), label, {}


def words(rng: random.Random) -> Case:
    """Returns a case of ``f1``."""
    pool = [
        "the",
        "a",
        "an",
        "cat",
        "sat",
        "on",
        "mat",
        "Mat",
        "mat.",
        "yes",
        "no",
        "noanswer",
        "Yes!",
        "don't",
        "42",
        "é",
        "A-b",
        " ",
        "\n",
    ]
    return " ".join(rng.choice(pool) for _ in range(rng.randint(0, 6))), " ".join(rng.choice(pool) for _ in range(rng.randint(0, 5))), {}


def multiple_choice(rng: random.Random) -> Case:
    """Returns a case of ``gpqa``."""
    choices = rng.sample(["Helium", "the Neon", "Argon gas", "Krypton", "10 m/s", "α decay", "A"], rng.randint(2, 5))
    letters = "ABCDEFGHIJ"[: len(choices)]
    metadata: dict[str, Any] = {}
    if rng.random() < 0.7:
        metadata["choices"] = choices if rng.random() < 0.7 else dict(zip(letters, choices, strict=True))
    if rng.random() < 0.3:
        metadata["valid_letters"] = list(letters.lower() if rng.random() < 0.3 else letters)
    if rng.random() < 0.3:
        metadata["correct_letter"] = rng.choice([*letters, " b ", "c", "", None, 3])
    if rng.random() < 0.2:
        metadata[rng.choice(["correct_answer", "answer_text"])] = rng.choice(choices)
    label: Any = rng.choice([*letters, rng.choice(letters).lower(), *choices, rng.randrange(6), 1.0, "", None, "Radon", True])
    said = rng.choice([*letters, *choices, rng.choice(letters).lower(), "Z", "nothing"])
    ways = [
        "Answer: {}",
        "the answer is {}",
        "{}",
        "({})",
        "{} is correct",
        "{} is the correct one",
        "Option {} or option B",
        "final answer {}",
        "<think>answer A</think>{}",
        "I choose {}. Not C.",
        "",
        "an answer x: {}",
    ]
    return rng.choice(ways).replace("{}", said), label, metadata


def boxed(draw: Callable[[random.Random], Case]) -> Callable[[random.Random], Case]:
    """Returns what draws cases of the same reward behind ``boxed_``."""

    def drawn(rng: random.Random) -> Case:
        response, label, metadata = draw(rng)
        return wrapped(rng, response), label, metadata

    return drawn


CASES: dict[str, Callable[[random.Random], Case]] = {
    "boxed_dapo": boxed(integer),
    "boxed_deepscaler": boxed(deepscaler),
    "boxed_f1": boxed(words),
    "boxed_gpqa": boxed(multiple_choice),
    "boxed_math": boxed(mathematical),
    "dapo": integer,
    "deepscaler": deepscaler,
    "f1": words,
    "gpqa": multiple_choice,
    "math": mathematical,
}
"""What draws a case of each reward."""


def cases(name: str, count: int, seed: int = 0) -> list[Case]:
    """Returns ``count`` different cases of a reward."""
    rng, found = random.Random(f"{name}{seed}"), dict[str, Case]()
    while len(found) < count:
        case = CASES[name](rng)
        found.setdefault(repr(case), case)
    return list(found.values())
