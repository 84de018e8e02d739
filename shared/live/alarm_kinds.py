"""The kinds of alarms that a run can raise; each value is how a sentence names it."""

from enum import Enum


class AlarmKind(Enum):
    """What may be wrong with a run although it goes on."""

    AWAY = "a server or service is away"
    RESTARTS = "services restart"
    HELD_BACK = "work is held back"
    NOT_FINITE = "the loss is not finite"
    LOGPROBS = "engine and trainer differ"
    ENTROPY = "entropy has collapsed"
    NO_SIGNAL = "groups teach nothing"
    TRUNCATION = "responses are cut off"
    UNREAD = "rewards are not read"
    DEAD = "groups die"
    DROPPED = "groups are dropped for their age"
    PUSH_GROWS = "pushes take longer and longer"
    DISK = "the disk fills"
    MEMORY = "memory runs out"
