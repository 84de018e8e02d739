"""Which groups a list shows, and in which order: the query of the Samples page as SQL over the tables of `group_tables`. Pure."""

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, StringConstraints

from shared.schema.ledger import group_id
from shared.schema.message import Count

Status = Literal["outstanding", "requeued", "ready", "batched", "trained", "dropped", "dead", "evaluated", "failed"]
Order = Literal["changed", "admitted", "reward", "spread", "tokens", "longest", "truncated", "attempt", "seconds"]

MOST_ROWS = 200
"""Groups of one page at most."""

Text = Annotated[str, StringConstraints(min_length=1, max_length=200)]

_NUMBER = re.compile(r"g?([0-9]{1,9})\Z", re.ASCII)

Condition = tuple[str, tuple[Any, ...]]
"""An SQL expression, and the values of its question marks."""


class GroupQuery(BaseModel):
    """The selection, order and page of a list of groups; None: any.

    evaluation: held-out prompts in place of training groups. step: in the batch of that step. version: a trained token of that version, or
    between two that are; of held-out prompts the evaluated one. Rewards are the mean of a group's samples; tokens those of all its
    responses. group: its id or its number; of held-out prompts also the beginning. reason: part of the reason of its end. teaches: whether
    its rewards differ, for a group whose rewards are all alike moves no weight. truncated: whether a response ended at its length. retried:
    whether it was generated more than once. forked: whether a rollout gave several samples. since, until: of its last change, seconds since
    the epoch.
    """

    model_config = ConfigDict(extra="forbid")

    evaluation: bool = False
    status: list[Status] = Field(default=[], max_length=len(get_args(Status)))
    dataset: Text | None = None
    step: Count | None = None
    version: Count | None = None
    min_reward: FiniteFloat | None = None
    max_reward: FiniteFloat | None = None
    min_tokens: Count | None = None
    max_tokens: Count | None = None
    replica: Text | None = None
    group: Text | None = None
    reason: Text | None = None
    teaches: bool | None = None
    truncated: bool | None = None
    retried: bool | None = None
    forked: bool | None = None
    since: FiniteFloat | None = None
    until: FiniteFloat | None = None
    sort: Order = "changed"
    descending: bool = True
    limit: int = Field(default=50, ge=1, le=MOST_ROWS)
    offset: Count = 0

    def where(self, *, by_kind: bool = True) -> Condition:
        """Returns the condition on a row of ``groups``. by_kind: whether the kind's indexes, which have the orders, help to find it."""
        kind = "evaluation = ?" if by_kind else "+evaluation = ?"  # a plus keeps the database from choosing an index of the column
        conditions: list[Condition] = [(kind, (self.evaluation,)), *self._equal(), *self._bounds(), *self._flags()]
        if self.status:
            conditions.append((f"status IN ({','.join('?' * len(self.status))})", tuple(self.status)))
        if self.group is not None:
            conditions.append(_named(self.group))
        if self.reason is not None:
            conditions.append(("instr(lower(reason), lower(?)) > 0", (self.reason,)))
        if self.version is not None:
            conditions.append(self._of_version(self.version))
        return " AND ".join(text for text, _ in conditions), tuple(value for _, values in conditions for value in values)

    @property
    def filtered(self) -> bool:
        """Returns whether groups of the wanted kind are left out."""
        return self.where()[0] != "evaluation = ?"

    def order(self) -> str:
        """Returns the order; what is alike stands by its last change, and what has no such figure last."""
        direction = "DESC" if self.descending else "ASC"
        return f"{self.sort} {direction} NULLS LAST, changed {direction}, name {direction}"

    def _equal(self) -> list[Condition]:
        given = {"dataset": self.dataset, "step": self.step, "replica": self.replica}
        return [(f"{column} = ?", (value,)) for column, value in given.items() if value is not None]

    def _bounds(self) -> list[Condition]:
        least = {"reward": self.min_reward, "tokens": self.min_tokens, "at": self.since}
        most = {"reward": self.max_reward, "tokens": self.max_tokens, "at": self.until}
        bounds = [(column, ">=", value) for column, value in least.items()] + [(column, "<=", value) for column, value in most.items()]
        return [(f"{column} {sign} ?", (value,)) for column, sign, value in bounds if value is not None]

    def _flags(self) -> list[Condition]:
        given = {"spread > 0": self.teaches, "truncated > 0": self.truncated, "attempt > 0": self.retried, "forks > 0": self.forked}
        return [(text if value else f"NOT ({text})", ()) for text, value in given.items() if value is not None]

    def _of_version(self, version: int) -> Condition:
        if self.evaluation:
            return "version = ?", (version,)
        return "EXISTS (SELECT 1 FROM spans WHERE spans.name = groups.name AND ? BETWEEN oldest AND newest)", (version,)


def _named(text: str) -> Condition:
    """Returns the condition for a typed id: a number stands for its group, anything else for the beginning of an id."""
    if match := _NUMBER.match(text):
        return "name = ?", (group_id(int(match[1])),)
    return "substr(name, 1, ?) = ?", (len(text), text)
