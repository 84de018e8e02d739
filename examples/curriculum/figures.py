"""Reports how the difficulty of a run moved: ``python -m examples.curriculum.figures runs/curriculum [--picture PATH]``.

It reads the responses that the run has kept, whose prompts say at which level they were sampled.
"""

import argparse
from collections import defaultdict
from pathlib import Path

from shared.data.reasoning_gym_source import LEVEL
from shared.data.rollout_files import DIRECTORY, files, kept_lines, read_record
from shared.schema.ledger import group_number

WINDOW = 32
"""Groups that a mean is over."""


def levels(run: Path) -> list[tuple[int, int, float]]:
    """Returns (number, level, pass rate) of each scored training group with a level, in the order of admission."""
    found, kept = [], {}
    for path in files(run / DIRECTORY):
        for start, line, head in kept_lines(path):
            if head is not None and head.dataset is None and (record := read_record(path, start, len(line))) is not None:
                kept[record.group, record.attempt] = record
    for record in kept.values():
        rewards = [sample.reward for sample in record.samples if sample.reward is not None]
        if rewards and LEVEL in record.metadata:
            found.append((group_number(record.group), record.metadata[LEVEL], sum(reward >= 1 for reward in rewards) / len(rewards)))
    return sorted(found)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the run's directory")
    parser.add_argument("--picture", type=Path, help="write a picture there, too")
    options = parser.parse_args()
    found = levels(options.run)
    if not found:
        parser.error(f"{options.run}: no kept responses of prompts with a level")
    by_level = defaultdict(list)
    for number, level, rate in found:
        by_level[level].append((number, rate))
    print(f"level  groups  first  last   pass rate: first {WINDOW}  last {WINDOW}")
    for level, groups in sorted(by_level.items()):
        rates = [rate for _, rate in groups]
        begin, end = (sum(part) / len(part) for part in (rates[:WINDOW], rates[-WINDOW:]))
        print(f"{level:5}  {len(groups):6}  {groups[0][0]:5}  {groups[-1][0]:5}  {begin:18.2f}  {end:7.2f}")
    if options.picture is not None:
        draw(found, options.picture)


def draw(found: list[tuple[int, int, float]], path: Path) -> None:
    """Writes the level and the pass rate over the groups as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 5), layout="constrained")
    numbers, rates = [number for number, _, _ in found], [rate for _, _, rate in found]
    above.step(numbers, [level for _, level, _ in found], color="#d9731a")
    above.set_ylabel("level")
    parts = [rates[max(0, at - WINDOW) : at] for at in range(1, len(rates) + 1)]
    below.plot(numbers, [sum(part) / len(part) for part in parts], color="#2a6fbb")
    below.set_ylabel(f"pass rate, mean of {WINDOW} groups")
    below.set_xlabel("group")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
