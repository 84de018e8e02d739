"""What the page *Clients* is answered: what each client has trained and sampled."""

import math

from services.console.pages.clients import MOST_LOSSES, ClientHistory
from services.console.run_source import RunSource
from shared.schema.client_commands import Command, CommandOutcome

TRAINED, SAMPLED = "a-0123456789abcdef:train:0", "a-0123456789abcdef:sample:0"


async def test_steps_losses_samples_and_failures() -> None:
    history = ClientHistory(RunSource("run", None, None, None))
    for number in range(MOST_LOSSES + 2):
        history.take(Command(client=TRAINED, number=number, at=1.0, verb="forward_backward"))
        history.take(CommandOutcome(client=TRAINED, number=number, at=2.0, figures={"loss:sum": float(number), "tokens": 2.0}))
    history.take(Command(client=TRAINED, number=900, at=3.0, verb="optim_step"))
    history.take(CommandOutcome(client=TRAINED, number=900, at=4.0, figures={"updates": 1.0}))
    history.take(Command(client=TRAINED, number=901, at=5.0, verb="save_weights"))
    history.take(CommandOutcome(client=TRAINED, number=901, at=6.0, error="the name is taken", category="user"))
    history.take(Command(client=SAMPLED, number=1, at=7.0, verb="sample"))
    sampled, trained = await history.newest(10)
    assert (sampled.client, sampled.waiting, sampled.losses) == (SAMPLED, 1, [])
    assert (trained.steps, trained.waiting, trained.failed, trained.error) == (1, 0, 1, "the name is taken")
    assert (len(trained.losses), trained.losses[-1], trained.tokens) == (MOST_LOSSES, (MOST_LOSSES + 1) / 2, 2 * (MOST_LOSSES + 2))
    history.take(CommandOutcome(client=TRAINED, number=902, at=6.5, figures={"loss:sum": math.nan, "tokens": 2.0}))
    [_, trained] = await history.newest(10)
    assert len(trained.losses) == MOST_LOSSES and trained.losses[-2:] == [(MOST_LOSSES + 1) / 2, None]
    history.take(CommandOutcome(client=SAMPLED, number=1, at=8.0, figures={"tokens": 5.0, "sequences": 2.0}))
    [first] = await history.newest(1)
    assert (first.sequences, first.waiting, first.losses) == (2, 0, [])
