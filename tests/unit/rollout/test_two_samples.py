"""The test of speculation's distribution finds a wrong sampler, and no right one, also where a source scatters as bfloat16 does.

Drafts are verified as an engine on a CPU does it (`cpu_speculation.accept_equal`); the targets are what is planted."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from services.rollout.engine.cpu_speculation import accept_equal
from tests.support.tables import table
from tests.support.two_samples import compared

VOCABULARY, PLACES, DRAFTS, ROWS, RUNS, GROUP = 12, 5, 4, 1024, 4, 64
Targets = Callable[[Tensor, torch.Generator], Tensor]
"""Tokens [N] by logits [N, vocabulary]."""


def sampled(logits: Tensor, generator: torch.Generator) -> Tensor:
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)


def likeliest(logits: Tensor, generator: torch.Generator) -> Tensor:
    return logits.argmax(-1)


def colder(logits: Tensor, generator: torch.Generator) -> Tensor:
    return sampled(logits / 0.85, generator)


def likeliest_drafts(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Accepts a draft, which is the likeliest token, where its probability is over a threshold."""
    probs, best = logits.softmax(-1).max(-1)
    return torch.where(probs > 0.35, best, sampled(logits, generator))


POLICY = 1.2 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(7))
"""Logits by the token before."""


@functools.cache
def run(targets: Targets, seed: int, noise: float, drafted: bool) -> list[list[int]]:
    """Responses, each group's by logits with a ``noise`` of its own."""
    generator, found = torch.Generator().manual_seed(seed), []
    for _ in range(ROWS // GROUP):
        logits = POLICY + noise * torch.randn(POLICY.shape, generator=generator)
        rows = [[0] for _ in range(GROUP)]
        while min(map(len, rows)) <= PLACES:
            chain = [torch.tensor([row[-1] for row in rows])]
            for _ in range(DRAFTS - 1 if drafted else 0):
                chain.append(logits[chain[-1]].argmax(-1))
            drafts = torch.stack(chain, 1)
            tokens = targets(logits[drafts].flatten(0, 1), generator)
            for row, more in zip(rows, verified(drafts, tokens) if drafted else tokens[:, None].tolist(), strict=True):
                row += more
        found += [row[1:] for row in rows]
    return found


def verified(drafts: Tensor, targets: Tensor) -> list[list[int]]:
    count, size = drafts.shape
    places = torch.arange(count * size).view(count, size)
    following = torch.cat([torch.arange(1, size), torch.tensor([-1])]).expand(count, size)
    index, accepted = torch.full((count, size), -1), torch.zeros(count, dtype=torch.long)
    tokens = torch.zeros(count * size, dtype=torch.long)
    accept_equal(tokens, index, accepted, drafts, places, following, torch.full((count, size), -1), targets)
    return [tokens[row[: number + 1]].tolist() for row, number in zip(index, accepted.tolist(), strict=True)]


@table(
    ("targets", "noise", "differs"),
    [(sampled, 0.0, False), (sampled, 0.6, False), (likeliest, 0.6, True), (colder, 0.0, True), (likeliest_drafts, 0.0, True)],
)
def test_a_wrong_sampler_is_found_and_a_right_one_is_not(targets: Targets, noise: float, differs: bool) -> None:
    plain = [run(sampled, seed, noise, drafted=False) for seed in range(RUNS)]
    found = compared(plain, [run(targets, seed, noise, drafted=True) for seed in range(RUNS, 2 * RUNS)], PLACES)
    assert found.differs == differs, found
    if noise and not differs:
        assert found.own > 2.0, "the source scatters no more than independent samples do"
