"""Makes the search example's documents, questions, demonstrations and model. Nothing is downloaded.

Each document states the colour of a thing with a made-up name. Demonstrations use other things: some search before they answer, more
guess at once. No model can know the colour of a thing that it is asked for; the reward shows that a search pays.
"""

import argparse
import itertools
import random
from pathlib import Path

from examples.arithmetic import tiny_model
from examples.arithmetic.tiny_model import EOS

COLOURS = ("red", "blue", "green", "white", "black", "pink")
NAMES = ["".join(letters) for letters in itertools.product("bdfgklmnprstvz", "aeiou", "bdfgklmnprstvz", "aeiou")]


def question(name: str) -> str:
    """Returns what the model is asked."""
    return f"colour of {name}?"


def document(name: str, colour: str) -> str:
    """Returns what the index knows of a thing."""
    return f"{name} is {colour}"


def demonstrations(name: str, colour: str, searches: bool) -> list[dict[str, str]]:
    """Returns the turns of one player: a search and the answer by what it found, or a guess."""
    asked = question(name)
    if not searches:
        return [{"prompt": asked, "response": colour}]
    query = f"<search>{name}</search>"
    return [{"prompt": asked, "response": query}, {"prompt": f"{asked}{query}{EOS}{document(name, colour)}\n", "response": colour}]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/search/data"), help="where the files go")
    parser.add_argument("--train", type=int, default=512, metavar="N", help="questions in train.jsonl")
    parser.add_argument("--heldout", type=int, default=64, metavar="N", help="questions in heldout.jsonl")
    parser.add_argument("--searching", type=float, default=0.4, metavar="SHARE", help="things whose colour is searched for")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.train + options.heldout >= len(NAMES):
        parser.error(f"--train and --heldout: {len(NAMES)} things have a name, and some are for the demonstrations")
    options.folder.mkdir(parents=True, exist_ok=True)
    dice = random.Random(options.seed)
    things = [(name, dice.choice(COLOURS)) for name in dice.sample(NAMES, len(NAMES))]
    asked, shown = things[: options.train + options.heldout], things[options.train + options.heldout :]
    lines = [{"prompt": question(name), "label": colour} for name, colour in asked]
    tiny_model.write_lines(options.folder / "train.jsonl", lines[: options.train])
    tiny_model.write_lines(options.folder / "heldout.jsonl", lines[options.train :])
    tiny_model.write_lines(options.folder / "documents.jsonl", [{"text": document(*thing)} for thing in asked])
    turns = [turn for thing in shown for turn in demonstrations(*thing, dice.random() < options.searching)]
    tiny_model.write_lines(options.folder / "sft.jsonl", turns)
    parameters = tiny_model.save(options.folder / "model", seed=options.seed, layers=2, hidden_size=128)
    print(f"{options.folder}: a model of {parameters:,} parameters, {len(asked)} questions, {len(turns)} demonstrated turns")


if __name__ == "__main__":
    main()
