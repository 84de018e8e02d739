"""No bytes make a decoder raise anything but the refusal that its callers expect."""

import base64
import contextlib
import random
import time

import pytest

from shared.transfer.weight_checkpoint import BrokenCheckpoint
from tests.fuzz.targets import Target, targets

TARGETS = targets()

MESSAGES = {name: target for name, target in TARGETS.items() if name.startswith("message-")}
OTHERS = {name: target for name, target in TARGETS.items() if name not in MESSAGES}

SHORT, LONG = 0.6, 20.0
"""Seconds for one decoder; the kinds of messages share a few of them."""


def feed(name: str, target: Target, seconds: float, seed: int) -> int:
    """Feeds a decoder for so long; returns with how many inputs."""
    dice, ends, fed = random.Random(f"{name} {seed}"), time.monotonic() + seconds, 0
    for valid in target.seeds:
        with contextlib.suppress(BrokenCheckpoint):  # of a version whose files are not there
            target.read(valid)  # or the rest would spoil what is bad anyway
    while time.monotonic() < ends or fed < 50:
        data = dice.randbytes(dice.randrange(200)) if dice.random() < 0.02 else target.spoil(dice, dice.choice(target.seeds))
        fed += 1
        try:
            target.read(data)
        except target.refusals:
            continue
        except BaseException as error:
            shown = base64.b64encode(data[:3000]).decode()
            raise AssertionError(f"{name} let {type(error).__name__} out ({str(error)[:300]!a}) of input {fed}: b64 {shown}") from error
    return fed


def test_no_kind_of_message_is_forgotten() -> None:
    assert len(MESSAGES) > 40 and {"message-Generated", "message-Scored", "message-GroupsScored", "message-WeightsOffer"} <= MESSAGES.keys()


@pytest.mark.parametrize("name", OTHERS)
def test_a_decoder_refuses_what_it_cannot_read(name: str) -> None:
    assert feed(name, OTHERS[name], SHORT, 0) >= 50


def test_every_kind_of_message_is_read_or_refused() -> None:
    for name, target in MESSAGES.items():
        assert feed(name, target, SHORT / 6, 0) >= 50


@pytest.mark.extra
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TARGETS)
def test_a_decoder_refuses_what_it_cannot_read_for_longer(name: str) -> None:
    """Ten minutes and more for all; another seed each time, named by the failure."""
    seconds = LONG if name in OTHERS else LONG / 4
    assert feed(name, TARGETS[name], seconds, time.time_ns()) >= 50
