"""Makes the guessing game's model and data. Its demonstrations show two ways to play, and not which one pays."""

import argparse
import random
from pathlib import Path

from examples.arithmetic import tiny_model
from examples.environments.guessing.guessing import MOST_GUESSES

PROMPT, LARGEST, EOS = "guess:", 9, tiny_model.EOS


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/guessing/data"), help="where the files go")
    parser.add_argument("--demonstrations", type=int, default=4096, metavar="N")
    parser.add_argument("--halving", type=float, default=0.3, metavar="SHARE", help="demonstrations of a player who halves what is left")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    dice = random.Random(options.seed)
    prompts = [{"prompt": PROMPT, "metadata": {"number": number, "largest": LARGEST}} for number in range(LARGEST + 1)]
    tiny_model.write_lines(options.folder / "train.jsonl", prompts)
    tiny_model.write_lines(options.folder / "heldout.jsonl", prompts)
    guesses = [demonstration(dice, dice.random() < options.halving) for _ in range(options.demonstrations)]
    tiny_model.write_lines(options.folder / "sft.jsonl", guesses)
    parameters = tiny_model.save(options.folder / "model", seed=options.seed, layers=2, hidden_size=128)
    print(f"{options.folder}: a model of {parameters:,} parameters, {len(prompts)} games, {options.demonstrations} demonstrated guesses")


def demonstration(dice: random.Random, halves: bool) -> dict[str, str]:
    """Returns one guess in the middle of a game, by a player who halves what is left or by one who heeds nothing."""
    number, low, high, said = dice.randint(0, LARGEST), 0, LARGEST, ""
    for _ in range(dice.randrange(MOST_GUESSES)):
        guess = _guess(dice, halves, low, high)
        if guess == number:
            break
        low, high = (max(low, guess + 1), high) if number > guess else (low, min(high, guess - 1))
        said += f"{guess}{EOS}{'>' if number > guess else '<'}"
    return {"prompt": PROMPT + said, "response": str(_guess(dice, halves, low, high))}


def _guess(dice: random.Random, halves: bool, low: int, high: int) -> int:
    return (low + high + dice.randint(0, 1)) // 2 if halves else dice.randint(0, LARGEST)


if __name__ == "__main__":
    main()
