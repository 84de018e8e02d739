"""slime's ``f1``: how many words a response shares with the label (SQuAD, Rajpurkar et al. 2016; HotpotQA for yes and no)."""

import re
import string
from collections import Counter

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WHOLE = ("yes", "no", "noanswer")
"""Answers that are right as a whole or wrong."""


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
