"""Takes what services send about groups (rewards, failures, interruptions) from their queue, and has the buffer decide about it.

A role's services report on a subject of their own, which only their account may publish on: a reward that a rollout replica reports is
none, whatever it claims. An outcome may name the blobs of its own attempt alone: the buffer frees what is named to it, and the trainer
reads it.
"""

import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from services.buffer import policy
from services.buffer.buffer_config import BufferConfig
from services.buffer.ledger_writer import BadRecord
from services.buffer.state import BufferState
from services.buffer.store_room import has_lost
from shared.bus.streams import scored_consumer
from shared.bus.subjects import GATEWAY, REWARD, ROLLOUT, Subjects
from shared.bus.work_queue import MessageLease, WorkQueue
from shared.runtime.errors import INFRASTRUCTURE, TASK
from shared.runtime.telemetry import declare_metrics
from shared.schema.ledger import PAYLOAD_LOST, LedgerRecord, is_evaluation
from shared.schema.messages import Discarded, Evaluated, Failed, GroupOutcome, Interrupted, Outcome, Scored, Wanted
from shared.service.service_base import Service

declare_metrics("outcomes_refused_total | | outcomes that came from somebody who may not report them, or cannot be")

FETCH = 256  # Outcomes that are taken at once
Decision = Callable[[], Sequence[LedgerRecord]]


# The outcomes that a role's services report
ROLE_OUTCOMES: dict[str, tuple[type[Outcome], ...]] = {
    ROLLOUT: (Failed, Interrupted, Discarded, Wanted, Evaluated),
    REWARD: (Scored, Failed),
    GATEWAY: (Failed,),
}


def source_refusal(names: Subjects, subject: str, outcome: Outcome) -> str | None:
    """Returns why an outcome that came on ``subject`` is not taken; None: it is."""
    if any(subject == names.scored(role) and isinstance(outcome, kinds) for role, kinds in ROLE_OUTCOMES.items()):
        return None
    return f"a {type(outcome).__name__} of {outcome.group} came on {subject}, on which none may be reported"


def checked(outcome: Outcome, subjects: Subjects, *, last: bool) -> GroupOutcome:
    """Returns the outcome, or the failure of its group that stands for one that is not taken.

    Args:
        last: whether it is delivered for the last time: buffers have died or stood still with it in hand.
    """
    assert isinstance(outcome, GroupOutcome)  # what is decoded is none of a base
    payload = outcome.payload
    keys = [] if payload is None else payload.keys
    prefix = subjects.payload_prefix(outcome.group, outcome.attempt)
    own = list(dict.fromkeys(key for key in keys if key.startswith(prefix)))
    fault = TASK
    if other := next((key for key in keys if not key.startswith(prefix)), None):
        reason = f"names the blob {other}, which is not its own"
    elif len(own) < len(keys):
        reason = "names a blob twice"
    elif last:
        reason, fault = "was delivered too often", INFRASTRUCTURE
    else:
        return outcome
    kept = None if payload is None or not own else payload.model_copy(update={"keys": own, "sizes": ()})
    return Failed(group=outcome.group, attempt=outcome.attempt, reason=f"its outcome {reason}", by=policy.BUFFER, fault=fault, payload=kept)


class OutcomeConsumer:
    """The queue of outcomes.

    Args:
        held: awaited before messages are acted on; it raises where another buffer is active. decide: has a decision made and recorded,
            and raises BadRecord where that cannot be. free: has payload keys removed from the store. admits: returns whether groups may be
            let in now; a rollout function that wants more asks again. most_pictures: of a prompt.
    """

    def __init__(
        self,
        service: Service,
        limits: BufferConfig,
        state: BufferState,
        held: Callable[[], Awaitable[None]],
        decide: Callable[[Decision], Awaitable[None]],
        free: Callable[[Iterable[str]], None],
        admits: Callable[[], bool],
        most_pictures: int = 0,
    ) -> None:
        self._service, self._limits, self._state = service, limits, state
        self._held, self._decide, self._free, self._admits, self._most_pictures = held, decide, free, admits, most_pictures
        self._queue = WorkQueue(service.bus, scored_consumer(service.run, service.config.bus), Outcome, self._unread, policy.BUFFER)

    async def run(self) -> None:
        """Takes outcomes until cancelled; acks each once it is in the ledger."""
        while True:
            fetched = await self._queue.fetch(FETCH)
            await self._held()  # a state that may be behind must not ignore any message
            leases = [lease for lease in fetched if not await self._misplaced(lease)]
            found = [(checked(lease.message, self._service.subjects, last=lease.last), lease) for lease in leases]
            for scored, row in itertools.groupby(found, lambda each: isinstance(each[0], Scored)):  # rewards in a row together
                pairs = list(row)
                if scored:
                    await self.settle([outcome for outcome, _ in pairs])
                for outcome, lease in pairs:
                    if isinstance(outcome, Wanted) and not self._admits():
                        self._service.log.info("wanted_groups_held_back", count=outcome.count, by=outcome.by)
                    elif not scored and not await self._generated_anew(outcome):
                        await self.settle([outcome])
                    await self._free_left(outcome)
                    await lease.ack()

    async def _free_left(self, outcome: GroupOutcome) -> None:
        """Frees what is not needed of an outcome, and what its prompt showed: before the ack, so that a death leaves nothing behind."""
        self._free(policy.unwanted(self._state, outcome))
        if self._most_pictures and not isinstance(outcome, Wanted):
            keys = self._service.subjects.picture_keys(outcome.group, outcome.attempt)
            await self._service.store.free(list(itertools.islice(keys, self._most_pictures)))

    async def _generated_anew(self, outcome: Outcome) -> bool:
        """Has a group generated anew that was given up because the store has lost its samples. False where it is none."""
        if not isinstance(outcome, Failed) or outcome.fault != INFRASTRUCTURE or outcome.payload is None:
            return False
        if not await has_lost(self._service, outcome.payload.keys):
            return False
        if is_evaluation(outcome.group):  # it ends without rewards, and no one is at fault
            await self.settle([outcome.model_copy(update={"reason": PAYLOAD_LOST})])
            return True
        await self._decide(lambda: policy.lost_failed(self._state, outcome, time.time()))
        group = self._state.groups.get(outcome.group)
        return group is not None and group.attempt > outcome.attempt

    async def _misplaced(self, lease: MessageLease[Outcome]) -> bool:
        """Returns whether an outcome came from somebody who may not report it; it is then gone from the queue."""
        reason = source_refusal(self._service.subjects, lease.subject, lease.message)
        if reason is not None:
            self._service.metrics.add("outcomes_refused")
            self._service.log.error("outcome_refused", group=lease.message.group, attempt=lease.message.attempt, error=reason)
            await lease.ack()
        return reason is not None

    async def _unread(self, failed: Failed) -> None:
        await self._held()
        await self.settle([failed])

    async def settle(self, outcomes: Sequence[GroupOutcome]) -> None:
        """Decides about outcomes together. One that cannot be recorded ends its own group, and holds nothing else up."""
        try:
            await self._decide(lambda: policy.outcomes(self._state, self._limits, outcomes, time.time()))
        except BadRecord as error:
            if len(outcomes) > 1:
                for outcome in outcomes:
                    await self.settle([outcome])
            else:
                await self._give_up(outcomes[0], str(error))

    async def _give_up(self, outcome: GroupOutcome, reason: str) -> None:
        self._service.metrics.add("outcomes_refused")
        self._service.log.error("outcome_refused", group=outcome.group, attempt=outcome.attempt, error=reason)
        if not isinstance(outcome, Failed):
            await self.settle([Failed(group=outcome.group, attempt=outcome.attempt, reason=reason, by=policy.BUFFER, fault=TASK)])
