"""Makes the guessing game's model and data: its demonstrations are random guesses, which show the form of the game and no way to win it."""

import argparse
import json
import random
from pathlib import Path

from examples.arithmetic import tiny_model

PROMPT, LARGEST, EOS = "guess:", 9, tiny_model.EOS


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/guessing/data"), help="where the files go")
    parser.add_argument("--demonstrations", type=int, default=4096, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    dice = random.Random(options.seed)
    prompts = [{"prompt": PROMPT, "metadata": {"number": number, "largest": LARGEST}} for number in range(LARGEST + 1)]
    write(options.folder / "train.jsonl", prompts)
    write(options.folder / "heldout.jsonl", prompts)
    write(options.folder / "sft.jsonl", [demonstration(dice) for _ in range(options.demonstrations)])
    tiny_model.save(options.folder / "model", seed=options.seed, layers=2, hidden_size=128)


def demonstration(dice: random.Random) -> dict[str, str]:
    """Returns one guess after so many: any digit, whatever was said before."""
    said = "".join(f"{dice.randint(0, LARGEST)}{EOS}{dice.choice('<>')}" for _ in range(dice.randint(0, 5)))
    return {"prompt": PROMPT + said, "response": str(dice.randint(0, LARGEST))}


def write(path: Path, lines: list[dict[str, object]] | list[dict[str, str]]) -> None:
    """Writes one JSON object a line."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
