"""A guessing game: the environment thinks of a number, the model guesses, and is answered whether the number is higher or lower.

``myxo env run examples.environments.guessing.guessing:GuessingGame --port 8080`` serves it.
"""

import random
import re
from typing import Any

MOST_GUESSES = 6
_NUMBER = re.compile(r"\d+")


class GuessingGame:
    """One number from 0 to ``metadata.largest`` (9) for each episode: ``metadata.number``, else one drawn for the group."""

    def reset(self, request: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, str]]]:
        """Returns the state of an episode, and what the model sees behind its prompt."""
        metadata = request["metadata"]
        largest = int(metadata.get("largest", 9))
        number = metadata.get("number", random.Random(request["group"]).randint(0, largest))
        return {"number": int(number), "guesses": 0}, []

    def step(self, state: dict[str, Any], message: dict[str, Any], request: dict[str, Any]) -> tuple[list[dict[str, str]], Any, bool]:
        """Returns what the model sees next, the reward of its guess, and whether the game is over. An early win is worth more."""
        state["guesses"] += 1
        found = _NUMBER.search(str(message.get("content", "")))
        if found is not None and int(found[0]) == state["number"]:
            return [], {"reward": 1.0 - (state["guesses"] - 1) / MOST_GUESSES, "won": 1.0}, True
        if state["guesses"] >= MOST_GUESSES:
            return [], {"reward": 0.0, "won": 0.0}, True
        said = "?" if found is None else ">" if state["number"] > int(found[0]) else "<"
        return [{"role": "user", "content": said}], None, False
