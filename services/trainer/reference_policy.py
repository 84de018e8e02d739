"""The reference policy of a run with a KL term: version 0 or a checkpoint of its own, later the policy after the last multiple of
``ref_update_interval`` steps."""

import shutil
from contextlib import AbstractContextManager
from pathlib import Path

from services.trainer.actor import Actor
from services.trainer.parallel.frozen_weights import FrozenWeights
from shared.schema.versions import newest_due


class ReferencePolicy:
    """The reference policy on one rank. References that a resume may need are on disk: repeated steps are trained against the same one.

    Args:
        first: where HF weights of version 0 lie; later ones are stored beside it. interval: steps between references; None: there is one.
        keep_steps: the most steps between the oldest checkpoint that is kept and the newest. own: a HF checkpoint that the reference starts
            from, in the place of version 0.
    """

    def __init__(self, actor: Actor, first: Path, interval: int | None, keep_steps: int, own: Path | None = None) -> None:
        self._actor, self._first, self._interval, self._keep_steps, self._own = actor, first, interval, keep_steps, own
        self._weights: FrozenWeights | None = None
        self._made = 0  # the multiple of the interval that the one in use is of

    def save_first(self) -> None:
        """Stores the present policy, version 0, where the reference starts from it. A collective of all ranks."""
        if self._own is None:
            self._actor.save_hf(self._first)

    def load(self, steps: int) -> None:
        """Loads the reference that is in use after so many training steps from disk. A collective of all ranks."""
        made, model = made_at(steps, self._interval), self._actor.model
        self._made = made
        if made == 0 and self._own is not None:
            self._weights = FrozenWeights.from_hf(model, self._own)
        else:
            self._weights = FrozenWeights.of_saved_policy(model, self._directory(made))

    def renew(self, steps: int) -> None:
        """Makes the present policy the reference, if a new one is due after so many steps. A collective of all ranks."""
        if self._weights is None or (made := made_at(steps, self._interval)) <= self._made:
            return
        self._made = made
        self._actor.save_hf(self._directory(made))
        self._weights = FrozenWeights.of_policy(self._actor.model)
        needed = made_at(max(steps - self._keep_steps, 0), self._interval)
        for directory in self._first.parent.glob(f"{self._first.name}-*"):
            if directory.name.rpartition("-")[2].isdigit() and int(directory.name.rpartition("-")[2]) < needed:
                shutil.rmtree(directory, ignore_errors=True)  # every rank may try

    def in_place_of_the_policy(self) -> AbstractContextManager[None]:
        """Gives the model the reference's weights in the body."""
        assert self._weights is not None
        return self._weights.in_place_of(self._actor.model)

    def _directory(self, steps: int) -> Path:
        return self._first if steps == 0 else self._first.with_name(f"{self._first.name}-{steps:08d}")


def made_at(steps: int, interval: int | None) -> int:
    """Returns the training steps after which the reference in use after ``steps`` was made."""
    return 0 if interval is None else newest_due(steps, interval)
