"""The stand-in rollout service with a part of its groups poisoned, each kind in its turn.

The group's number decides: one that is made again is poisoned again.
"""

import os
from collections.abc import Callable
from typing import Any

from shared.schema.messages import Generated, Task
from shared.service.service_base import Service, run
from tests.integration.myxo.standin_rollout import Rollout
from tests.support.poison import POISON, poisoned

EVERY = int(os.environ.get("POISON_EVERY", "10"))
"""One group in so many is bad."""


def _payload(**fields: Any) -> Callable[[Generated], Generated]:
    """A change of a reference's payload, without validation."""
    return lambda message: message.model_copy(update={"payload": message.payload.model_copy(update=fields)})


REFERENCES: dict[str, tuple[Callable[[Generated], Generated], str]] = {
    "negative lengths": (_payload(tokens=(-1, 5)), "Generated.payload.tokens"),
    "other lengths": (_payload(tokens=(7, 7)), r"the payload's samples have .* tokens, by its reference \[7, 7\]"),
    "no such blob": (_payload(keys=["nothing"]), "nothing"),
    "a sample less": (
        lambda message: message.model_copy(update={"samples": message.samples[:1]}),
        "the payload holds 2 samples, its reference 1",
    ),
}
"""What is wrong with a reference → how it becomes so, and what the reason of its group's death says (a pattern)."""

KINDS = [*POISON, *REFERENCES]
LOOP = "12 " * 30_000
"""A response that no verifier should read to its end."""


def kind_of(group: str) -> str | None:
    """What is wrong with a group; None: nothing is."""
    number = int(group[1:]) if group.startswith("g") else 0
    return KINDS[number // EVERY % len(KINDS)] if number % EVERY == EVERY // 2 else None


def loops(group: str) -> bool:
    """Whether a group, with which nothing is wrong otherwise, has a sample that loops."""
    return group.startswith("g") and int(group[1:]) % EVERY == 0


class PoisonousRollout(Rollout):
    def written(self, task: Task, blobs: list[bytes]) -> list[bytes]:
        kind = kind_of(task.group)
        if kind in POISON:
            blobs[-1] = poisoned(blobs[-1], POISON[kind][0])
        elif loops(task.group):
            blobs[-1] = poisoned(blobs[-1], lambda sample: sample.update(text=LOOP))
        return blobs

    def sent(self, task: Task, message: Generated) -> Generated:
        kind = kind_of(task.group)
        return REFERENCES[kind][0](message) if kind in REFERENCES else message


async def serve(service: Service) -> None:
    await PoisonousRollout(service).work()


if __name__ == "__main__":
    run("rollout", serve)
