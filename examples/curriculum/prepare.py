"""Makes the example's model, its demonstrations and its held-out sums, one file for each number of digits. Nothing is downloaded."""

import argparse
import random
from pathlib import Path

from examples.arithmetic import tiny_model
from examples.arithmetic.problems import Problem, as_demonstration, as_prompt
from examples.curriculum.growing_sums import MOST_DIGITS, operands


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/curriculum/data"), help="where the files go")
    parser.add_argument("--demonstrations", type=int, default=8192, help="in sft.jsonl, of all lengths", metavar="N")
    parser.add_argument("--heldout", type=int, default=64, help="problems of each length", metavar="N")
    parser.add_argument("--worked", type=float, default=0.65, help="share of worked demonstrations", metavar="SHARE")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    dice = random.Random(options.seed)
    for digits in range(1, MOST_DIGITS + 1):
        problems = [Problem(*operands(dice, digits)) for _ in range(options.heldout)]
        tiny_model.write_lines(options.folder / f"heldout_{digits}.jsonl", [as_prompt(problem) for problem in problems])
    lengths = range(1, MOST_DIGITS + 1)  # longer ones take more showing
    sampled = [Problem(*operands(dice, digits)) for digits in dice.choices(lengths, lengths, k=options.demonstrations)]
    tiny_model.write_lines(options.folder / "sft.jsonl", [as_demonstration(problem, dice.random() < options.worked) for problem in sampled])
    parameters = tiny_model.save(options.folder / "model", seed=options.seed, layers=2, hidden_size=128)
    print(f"{options.folder}: a model of {parameters:,} parameters, {len(sampled)} demonstrations of sums of 1 to {MOST_DIGITS} digits")


if __name__ == "__main__":
    main()
