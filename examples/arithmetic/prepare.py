"""Makes the quick start's model and data: a tiny Qwen3 with random weights, demonstrations, training and held-out problems.

The same seed gives the same files. Nothing is downloaded.
"""

import argparse
import random
import sys
from pathlib import Path

try:  # as a script, its folder is where imports are found; as examples.arithmetic.prepare it is a package
    import problems
except ModuleNotFoundError:
    sys.path.insert(0, str(Path(__file__).parent))
    import problems


def main() -> None:
    """The command line."""
    parser = _parser()
    options = parser.parse_args()
    if options.hidden_size <= 0 or options.hidden_size % 64:
        parser.error(f"--hidden-size {options.hidden_size}: expected a multiple of 64")
    if not 0 <= options.worked <= 1:
        parser.error(f"--worked {options.worked}: expected a share between 0 and 1")
    for name in ("train", "heldout", "demonstrations", "layers"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: expected at least 1")
    folder: Path = options.folder
    done = folder / "prepared"
    if options.if_missing and done.exists():
        print(f"{folder}: there already, left as it is")
        return
    import tiny_model  # torch takes seconds to import: not before there is something to make

    folder.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    rng = random.Random(options.seed)
    sampled = problems.draw(rng, options.heldout + options.train + options.demonstrations)
    heldout, rest = sampled[: options.heldout], sampled[options.heldout :]
    train, demonstrated = rest[: options.train], rest[options.train :]
    worked = set(rng.sample(range(len(demonstrated)), round(len(demonstrated) * options.worked)))
    demonstrations = [problems.as_demonstration(problem, number in worked) for number, problem in enumerate(demonstrated)]
    tiny_model.write_lines(folder / "heldout.jsonl", map(problems.as_prompt, heldout))
    tiny_model.write_lines(folder / "train.jsonl", map(problems.as_prompt, train))
    tiny_model.write_lines(folder / "sft.jsonl", demonstrations)
    parameters = tiny_model.save(folder / "model", seed=options.seed, layers=options.layers, hidden_size=options.hidden_size)
    done.touch()
    print(f"{folder / 'model'}: Qwen3 with {parameters:,} random parameters and a tokenizer of characters")
    print(f"{folder}: {len(train)} problems to train on, {len(heldout)} held out,")
    print(f"  {len(worked)} worked and {len(demonstrations) - len(worked)} plain demonstrations")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/quickstart/data"), help="where the files go; made if missing")
    parser.add_argument("--if-missing", action="store_true", help="leave what a finished earlier call has made as it is")
    parser.add_argument("--seed", type=int, default=0, help="of the problems and of the model's weights")
    parser.add_argument("--train", type=int, default=4096, help="problems in train.jsonl", metavar="N")
    parser.add_argument("--heldout", type=int, default=256, help="problems in heldout.jsonl", metavar="N")
    parser.add_argument("--demonstrations", type=int, default=8192, help="problems in sft.jsonl", metavar="N")
    parser.add_argument("--worked", type=float, default=0.65, help="share of worked demonstrations", metavar="SHARE")
    parser.add_argument("--layers", type=int, default=2, help="of the model", metavar="N")
    parser.add_argument("--hidden-size", type=int, default=128, help="of the model, a multiple of 64", metavar="N")
    return parser


if __name__ == "__main__":
    main()
