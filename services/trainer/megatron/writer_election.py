"""Who writes which part of a checkpoint: everything once in each directory, in shares of about the same size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class HeldPart:
    """A part of a checkpoint that a rank holds.

    Args:
        nbytes: its size. main: whether it is one of those parts that together make up the whole without overlap. Others repeat, cut in
            another way perhaps, what another rank holds: a tied embedding is on the first and on the last pipeline stage.
    """

    nbytes: int
    main: bool = True


@dataclass
class Elected:
    """The parts, by name, that a rank writes: ``main`` ones, and ``copies`` that its directory would otherwise lack."""

    main: set[str] = field(default_factory=set)
    copies: set[str] = field(default_factory=set)


def elect(held: Sequence[Mapping[str, HeldPart]], directories: Sequence[Sequence[int]]) -> list[Elected]:
    """Returns what each rank writes. All ranks find the same.

    Args:
        held: by rank, the parts that it holds by their names; a part of one name is the same on all ranks.
        directories: the ranks that see each directory; the first one's are those that share rank 0's.
    """
    elected = [Elected() for _ in held]
    for number, ranks in enumerate(directories):
        mains, copies = dict[str, list[int]](), dict[str, list[int]]()
        for rank in ranks:
            for name, part in held[rank].items():
                (mains if part.main else copies).setdefault(name, []).append(rank)
        size = {name: held[holders[0]][name].nbytes for name, holders in (mains | copies).items()}
        load = dict.fromkeys(ranks, 0)
        for name in sorted(mains, key=lambda name: (len(mains[name]) > 1, -size[name], name)):  # what only one can write, first
            load[writer := _least_loaded(mains[name], load)] += size[name]
            elected[writer].main.add(name)
        for name in sorted(copies.keys() - mains.keys()) if number else ():
            load[writer := _least_loaded(copies[name], load)] += size[name]
            elected[writer].copies.add(name)
    return elected


def _least_loaded(ranks: Sequence[int], load: Mapping[int, int]) -> int:
    return min(ranks, key=lambda rank: (load[rank], rank))
