"""Decides how a turn's tokens are drawn: by the task, where they are to be trained, and within its limits. It is pure.

The trainer computes log-probs under the run's temperature, and a policy is trained on what it would draw by itself. So in a session that is
trained the task's temperature, top-p, top-k and the like stand, whatever a client asks; it may end a turn earlier. In an evaluation the
client's own values stand. What a `Sampling` has no field for is refused by the formats (`services.gateway.wire`).
"""

from services.gateway.wire.request import RequestedSampling
from services.gateway.wire.turn_refused import TurnRefused, overlong_prompt
from shared.schema.messages import Sampling
from shared.sessions.session import Session

_DISTRIBUTION = {name: name for name in ("temperature", "top_p", "top_k", "repetition_penalty")} | {"min_tokens": "min_new_tokens"}
"""A request's fields that change which tokens are likely, with the task's: until ``min_new_tokens`` the engine forbids what ends a turn."""


def kept_by_task(session: Session, asked: RequestedSampling) -> tuple[str, ...]:
    """Returns the names of the fields that a client asked otherwise, and that stand as the task has them."""
    given = [name for name, field in _DISTRIBUTION.items() if getattr(asked, name) not in (None, getattr(session.sampling, field))]
    stops = ["stop_token_ids"] if asked.stop_token_ids != _further_stops(session, asked) else []
    return (*([] if session.evaluation else given), *stops, *(["seed"] if asked.seed is not None else []))


def _further_stops(session: Session, asked: RequestedSampling) -> tuple[int, ...]:
    """Returns the ids that end a turn by its client: none where the engine would forbid them for the task's ``min_new_tokens``."""
    return () if session.sampling.min_new_tokens and not session.evaluation else asked.stop_token_ids


def drawn_sampling(
    session: Session, asked: RequestedSampling, prompt: int, context: int, stop_ids: list[int], place: str = "messages"
) -> Sampling:
    """Returns how a turn is drawn.

    Args:
        prompt: tokens of the prompt. context: the most tokens of prompt and completion. stop_ids: tokens that end a turn of this model.
        place: the body's field with the prompt.

    Raises TurnRefused where the prompt leaves no room for a token.
    """
    task = session.sampling
    if prompt >= context:
        raise overlong_prompt(prompt, context - 1, place)
    given = {field: value for name, field in _DISTRIBUTION.items() if (value := getattr(asked, name)) is not None}
    fields = given if session.evaluation else {}
    most = min(asked.max_tokens or task.max_new_tokens, task.max_new_tokens, context - prompt)
    return task.model_copy(
        update=fields
        | {
            "max_new_tokens": most,
            "min_new_tokens": min(fields.get("min_new_tokens", task.min_new_tokens), most),
            "stop": list(dict.fromkeys([*task.stop, *asked.stop])),
            "stop_token_ids": list(dict.fromkeys([*task.stop_token_ids, *stop_ids, *_further_stops(session, asked)])),
        }
    )


def check_tokens(largest: int, vocabulary: int, field: str) -> None:
    """Raises TurnRefused where of ids from 0 to ``largest`` not all are tokens of the model's. ``field``: where they stand."""
    if largest >= vocabulary:
        raise TurnRefused(400, f"token id {largest} is not in [0, {vocabulary})", field=field, code="invalid_token")
