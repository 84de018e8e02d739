"""Pure decisions about a turn: which turn a conversation continues, how tokens are sampled, where a stop string ends it, what its client is
answered, and what of its text is sure meanwhile.
"""

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from services.gateway.chat_tokens import ChatTokens, Messages, ParsedCall, ParsedTurn
from services.gateway.replicas import Hear
from shared.data.stop_strings import end_across, written
from shared.formats import request as wire
from shared.formats.openai_chat import UNCONSTRAINED
from shared.formats.request import TurnDelta, TurnRefused, TurnResult, deltas_of
from shared.formats.request_body import LONGEST_ID, check_tool_results, shallow
from shared.schema.message import LARGEST, MAX_SAMPLES
from shared.schema.messages import Sampling
from shared.sessions.session import Session, SessionLog, Turn, TurnGeneration


def digests(messages: Messages, tools: Messages) -> list[str]:
    """Returns the digest of each beginning of a conversation, by its number of messages: the first is that of none. ``tools``: and what
    else its prompts depend on (`ChatTurn.setting`)."""
    running = hashlib.sha256(_canonical(list(tools)))
    found = [running.hexdigest()]
    for message in messages:
        # reasoning does not identify a message: many clients do not send it back
        identity = {key: value for key, value in message.items() if key in ("role", "content", "name", "tool_call_id")}
        if message.get("role") == "assistant":
            identity.pop("name", None)
            identity["calls"] = [
                [call["function"]["name"], _parsed_arguments(call["function"]["arguments"])] for call in message.get("tool_calls") or ()
            ]
        running.update(b"\n" + _canonical(identity))
        found.append(running.hexdigest())
    return found


def thought_digest(reasoning: str) -> str:
    """Returns a digest of an answer's reasoning; empty where it has none."""
    return hashlib.sha256(found.encode()).hexdigest()[:32] if (found := reasoning.strip()) else ""


def continued(turns: Iterable[Turn], messages: Messages, tools: Messages) -> tuple[Turn, Messages] | None:
    """Returns the turn that a conversation continues, with the messages that are new; None where there is no such turn.

    Clients send the whole conversation each time. Each turn is stored with the digest of the messages up to its answer; the longest
    beginning of a request with such a digest is the turn that it continues. Of several that say the same, the one counts whose reasoning
    the client has sent back, else the newest; where it was edited, nothing is continued beyond it.
    """
    known: dict[str, list[Turn]] = {}
    for turn in turns:
        if turn.conversation:
            known.setdefault(turn.conversation, []).append(turn)
    found = digests(messages, tools)
    longest: tuple[Turn, Messages] | None = None
    for count in range(1, len(messages)):
        if alike := known.get(found[count]):
            thought = thought_digest(messages[count - 1].get("reasoning_content", ""))
            fitting = [turn for turn in alike if thought in ("", turn.thought) or not turn.thought]
            if not fitting:
                break
            longest = fitting[-1], messages[count:]
    return longest


def recalled(log: SessionLog, asked: wire.ChatTurn) -> wire.ChatTurn:
    """Returns a request with the stored conversation that it continues. Raises TurnRefused where that is not stored in this session."""
    turns, history, name = log.turns, list[Any](), asked.previous
    if not (name or asked.thread) or asked.request_id in turns:  # one that is repeated is answered as it was
        return asked
    if asked.thread:
        if asked.thread not in log.threads:
            raise wire.unknown_conversation(asked.thread, "conversation")
        name, further = log.threads[asked.thread]
        history = [message for messages in further.values() for message in json.loads(messages)]
    while name:
        if (turn := turns.get(name)) is None or not turn.messages:
            message = f"no response {name[:200]!r} is stored in this session"
            raise wire.TurnRefused(404, message, field="previous_response_id", code="previous_response_not_found")
        history, name = [*json.loads(turn.messages), *history], turn.after
    head, new = asked.messages[: asked.head], asked.messages[asked.head :]
    check_tool_results(messages := [*head, *history, *new], asked.place)
    return replace(asked, messages=messages, kept=[*history, *new] if asked.kept else ())


def _parsed_arguments(arguments: Any) -> Any:
    """Returns the arguments of a call as an object where they are one: some clients write their text anew, those in JavaScript 1.0 as 1."""
    try:
        return shallow(json.loads(arguments, parse_float=_number)) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


def _number(text: str) -> float:
    return int(found) if (found := float(text)).is_integer() else found


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


Constraints = Literal["refuse", "ignore", "enforce"]
TRAINED = (
    'constraints = "enforce" in [gateway] holds in evaluations alone: the log-probs of tokens under a constraint are not the policy\'s; '
    'in sessions that are trained "ignore" takes it without effect'
)


def unconstrained(asked: wire.ChatTurn, mode: Constraints, *, evaluation: bool, notes: bool) -> wire.ChatTurn:
    """Returns a request with those of its constraints alone that the engine enforces.

    Args:
        mode: of the run. ``ignore``: the rest are among what is ignored, and, with ``notes``, in words in the system's message.

    Raises TurnRefused for one that is not served.
    """
    if not asked.constraints or (mode == "enforce" and evaluation):
        return asked
    fields = [one.field for one in asked.constraints]
    if mode != "ignore":
        why = TRAINED if mode == "enforce" else f'not served: {UNCONSTRAINED}; constraints = "ignore" in [gateway] takes it without effect'
        raise wire.TurnRefused(400, why, field=fields[0], code="unsupported_value")
    ignored = tuple(sorted({*asked.ignored, *fields}))
    head, rest = asked.messages[0], list(asked.messages[1:])
    if head["role"] != "system":
        head, rest = {"role": "system", "content": ""}, list(asked.messages)
    said = "\n".join([head["content"]] * bool(head["content"]) + [one.note for one in asked.constraints])
    return replace(asked, constraints=(), ignored=ignored, messages=[{**head, "content": said}, *rest] if notes else asked.messages)


# A request's fields that change which tokens are likely, with the task's: until ``min_new_tokens`` the engine forbids what ends a turn
_DISTRIBUTION = {name: name for name in ("temperature", "top_p", "top_k", "repetition_penalty")} | {"min_tokens": "min_new_tokens"}


def fixed_by_task(session: Session, asked: wire.RequestedSampling) -> tuple[str, ...]:
    """Returns the names of the fields that a client asked otherwise, and that stand as the task has them."""
    given = [name for name, field in _DISTRIBUTION.items() if getattr(asked, name) not in (None, getattr(session.sampling, field))]
    seeded = session.evaluation and session.seed is not None
    stops = ["stop_token_ids"] if asked.stop_token_ids != _further_stops(session, asked) else []
    return (*([] if session.evaluation else given), *stops, *(["seed"] if asked.seed is not None and not seeded else []))


def _further_stops(session: Session, asked: wire.RequestedSampling) -> tuple[int, ...]:
    """Returns the ids that end a turn by its client: none where the engine would forbid them for the task's ``min_new_tokens``."""
    return () if session.sampling.min_new_tokens and not session.evaluation else asked.stop_token_ids


def turn_sampling(
    session: Session, asked: wire.RequestedSampling, prompt: int, context: int, stop_ids: list[int], place: str = "messages"
) -> Sampling:
    """Returns how a turn is sampled: by the task where it is trained, and within its limits.

    The trainer computes log-probs under the run's temperature, and a policy is trained on what it would sample by itself. So in a session
    that is trained the task's temperature, top-p, top-k and the like stand, whatever a client asks; it may end a turn earlier. In an
    evaluation the client's own values stand. What a `Sampling` has no field for is refused by the formats (`shared.formats`).

    Args:
        prompt: tokens of the prompt. context: the most tokens of prompt and completion. stop_ids: tokens that end a turn of this model.
        place: the body's field with the prompt.

    Raises TurnRefused where the prompt is empty, or leaves no room for a token.
    """
    task = session.sampling
    if not prompt:
        raise wire.TurnRefused(400, "expected a prompt of at least one token", field=place, code="invalid_value")
    if prompt >= context:
        raise wire.overlong_prompt(prompt, context - 1, place)
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
        raise wire.TurnRefused(400, f"token id {largest} is not in [0, {vocabulary})", field=field, code="invalid_token")


class TurnAnswers:
    """The answers of one model. ``model``: its name."""

    def __init__(self, chat: ChatTokens, model: str) -> None:
        self._chat, self._model = chat, model

    def chat(self, turn: Turn, session: Session, asked: wire.ChatTurn) -> wire.TurnResult:
        """Returns the next message of a conversation."""
        chat, begun = self._chat.varied(asked.variables), asked.prefill.lstrip()
        parsed = chat.parse(turn, asked.tools)
        if begun:  # parsers leave out white space where an answer begins, and there it does not
            completion = [*self._chat.tokenizer.encode(begun).tolist(), *turn.completion.tolist()]
            whole = chat.parse_tokens(turn.prompt.tolist(), completion, asked.tools)
            parsed = replace(whole, content=whole.content[len(begun) :]) if whole.content.startswith(begun) else parsed
        if asked.tool_choice == "none" or not asked.tools:
            parsed = replace(parsed, content=parsed.content + "".join(call.text for call in parsed.calls), calls=())
        return self._answer(turn, parsed, stops_of(session, asked), spelled=asked.logprobs)

    def tokens(self, turn: Turn, session: Session, asked: wire.TokenTurn) -> wire.TurnResult:
        """Returns the tokens that follow a prompt, and their text where that is asked for."""
        text = self._chat.tokenizer.decode(turn.completion) if asked.spelled else ""
        return self._answer(turn, ParsedTurn(text, "", ()), stops_of(session, asked), spelled=asked.logprobs)

    def _answer(self, turn: Turn, parsed: ParsedTurn, stops: Sequence[str], *, spelled: bool) -> wire.TurnResult:
        called = [call for call in parsed.calls if call.ok]
        malformed = [call for call in parsed.calls if not call.ok]
        ends = written(turn.completion, stops if turn.finish == "stop" else (), self._chat.text)
        content, stopped = _cut(parsed.content + "".join(call.text for call in malformed), ends)
        versions = [version for _, _, version in turn.spans] or [0]
        prompt, thought = len(turn.prompt), len(self._chat.tokenizer.encode(parsed.reasoning))
        return wire.TurnResult(
            request_id=turn.request,
            model=self._model,
            created=int(time.time()),
            content=content,
            finish="tool_calls" if called and turn.finish == "stop" else turn.finish,
            usage=wire.TurnUsage(prompt=prompt, completion=len(turn.completion), cached=min(turn.cached, prompt), reasoning=thought),
            versions=(min(versions), max(versions)),
            reasoning=parsed.reasoning,
            tool_calls=_called(called, turn.request),
            malformed_calls=[wire.MalformedCall(text=call.text, status=call.status) for call in malformed],
            stop_text=stopped,
            tokens=wire.TurnTokens(
                prompt=turn.prompt,
                completion=turn.completion,
                logprobs=turn.log_probs,
                texts=self._chat.tokenizer.token_bytes(turn.completion) if spelled else (),
                top=self._top(turn) if spelled else (),
            ),
        )

    def _top(self, turn: Turn) -> list[list[tuple[bytes, float]]]:
        """Returns the likeliest tokens at each place of a turn, most likely first, with their log-probs; none where none were asked for."""
        count = len(turn.completion)
        pairs = turn.top_log_probs.reshape(count, -1, 2) if count else np.empty((0, 0, 2))
        texts = iter(self._chat.tokenizer.token_bytes(pairs[..., 1].ravel().astype(np.int32)))
        return [[(next(texts), log_prob) for log_prob in row] for row in pairs[..., 0].tolist()]


def stops_of(session: Session, asked: wire.ChatTurn | wire.TokenTurn) -> list[str]:
    """Returns the strings that end a turn: the task's, and the request's own."""
    return [*session.sampling.stop, *asked.sampling.stop]


def _cut(content: str, stops: Sequence[str]) -> tuple[str, str | None]:
    found = max(((content.rfind(stop), stop) for stop in stops if stop in content), default=None)
    return (content, None) if found is None else (content[: found[0]], found[1])


def _called(calls: Sequence[ParsedCall], request: str) -> list[wire.CalledTool]:
    """Returns calls under the ids that the model gave them, or, of those that a client could not send back, under others."""
    found = dict[str, wire.CalledTool]()
    for index, call in enumerate(calls):
        text = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments if call.arguments is not None else {})
        own = call.id if call.id and call.id not in found and len(call.id) <= LONGEST_ID else f"call_{request[-24:]}_{index}"
        found[own] = wire.CalledTool(id=own, name=call.name, arguments=text)
    return list(found.values())


def turn_seed(log: SessionLog, asked: wire.ChatTurn | wire.TokenTurn) -> int | None:
    """Returns the seed of a turn that has begun, None where engines take none: in an evaluation the client's, where it gives one, else the
    session's. Each answer to one request has its own, and so has each request of the session for the very same prompt."""
    session, own, number = log.session, asked.sampling.seed if log.session.evaluation else None, asked.choice
    if session.seed is None:
        return None
    if own is None:
        begun, base = log.turns | log.pending, asked.request_id.removesuffix(f"n{number}")
        before = [begun[name] for name in takewhile(lambda name: name != asked.request_id, begun) if not name.startswith(base)]
        number += sum(np.array_equal(one.prompt, begun[asked.request_id].prompt) for one in before)
    return ((session.seed if own is None else own) + number * MAX_SAMPLES) & LARGEST


class StopStringTracker:
    """The edge between what a turn has, int32 [T], and what is sampled next. ``sampling``: with what ends it; ``text``: of tokens."""

    def __init__(self, before: NDArray[np.int32], sampling: Sampling, text: Callable[[Sequence[int]], str]) -> None:
        self._before, self._stops, self._ends, self._text = before, sampling.stop, sampling.stop_token_ids, text

    def whole(self, generated: TurnGeneration) -> TurnGeneration:
        """Returns what was sampled, up to the turn's end if that is in it."""
        count = end_across(self._before, generated.completion, self._stops, self._text, ends=self._ends)
        return generated if count is None else generated.stopped_at(count)

    def hearing(self, hear: Hear) -> Hear:
        """Returns a callback for the pieces of one request, which passes them to ``hear`` up to the turn's end."""
        heard: list[int] = []
        over = False

        def listen(piece: TurnGeneration) -> None:
            nonlocal over
            if over:
                return
            known = len(heard)
            heard.extend(piece.completion.tolist())
            count = end_across(self._before, heard, self._stops, self._text, since=known)
            over = count is not None
            hear(piece if count is None else piece.stopped_at(count - known))

        return listen


# The beginning of what some family's parser reads otherwise than as text
MARKER = re.compile(
    r"<[|/]?[^<>\s]{0,60}?(?:tool|think|function|invoke|parameter|channel|message|content|call|dsml|arg_|sep|turn)", re.IGNORECASE
)
MARKER_BEGUN = re.compile(r"<[^<>\s]{0,70}$")  # What may become one
CONTEXT = 8  # Tokens before new ones that are decoded with them: the text of a token may depend on its neighbours
# By how much a completion has to grow until the parser is asked again for the channel that is open: so often is never too often
PATIENCE = 1.1


class TurnText:
    """What of one turn's text is sure while it is sampled, sent piece by piece.

    The message is what the family's parser makes of the whole completion (`ChatTokens.parse`); what is sent earlier is its beginning to
    the letter. So the parser is asked once for the channel that is open, reasoning or content, by a letter that is appended and looked for;
    from there on plain tokens are decoded as they come. Held back is what the next tokens may still change: white space and parts of a
    character at the end, what may become a stop string or a marker, and all content from a marker on, since it may be a tool call.

    ``prompt``: token ids. ``stops``: strings that end the turn. ``whole``: nothing is sent before its end.
    """

    def __init__(self, chat: ChatTokens, prompt: Sequence[int], tools: Messages, stops: Sequence[str], *, whole: bool = False) -> None:
        self._chat, self._prompt, self._tools, self._stops = chat, list(prompt), tools, stops
        self._ids: list[int] = []
        self._reasoning, self._content = "", ""  # what was sent
        self._open: Literal["", "reasoning", "content"] = ""
        self._text = ""  # of the channel that is open
        self._read = 0  # tokens of which the text is made
        self._next_read = 0
        self._frozen = whole or not chat.streams_text  # nothing is sure any more before the turn's end

    def add(self, tokens: Sequence[int]) -> list[TurnDelta]:
        """Returns what is sure by these further tokens, and was not before."""
        self._ids += tokens
        if self._frozen:
            return []
        deltas: list[TurnDelta] = []
        if self._open and not self._append():
            deltas += self._sure_deltas()  # what came before the marker
            if self._open == "content" and not self._chat.plain_markers:
                self._frozen = True
                return deltas
            self._open, self._next_read = "", 0
        if not self._open and len(self._ids) >= self._next_read:
            deltas += self._read_channel()
        return deltas + self._sure_deltas()

    def finish(self, result: TurnResult) -> list[TurnDelta]:
        """Returns all of the whole turn that was not sent. Raises TurnRefused where what was sent is not its beginning."""
        reasoning, content = result.reasoning, result.content
        begins = reasoning.startswith(self._reasoning) and content.startswith(self._content)
        if not begins or (self._content and reasoning != self._reasoning):
            message = "the answer is not what was streamed of it; ask again: it was recorded, and is answered as a whole"
            raise TurnRefused(503, message, code="stream_diverged", retry_after_s=0.0)
        return deltas_of(replace(result, reasoning=reasoning[len(self._reasoning) :], content=content[len(self._content) :]))

    def _read_channel(self) -> list[TurnDelta]:
        """Asks the parser which channel is open, and for its text. Returns the rest of the reasoning where it has ended."""
        self._next_read = int(len(self._ids) * PATIENCE) + 1
        settled = self._settled()
        if not settled:
            return []
        parsed = self._chat.parse_tokens(self._prompt, [*self._ids[:settled], *self._chat.letter], self._tools)
        if parsed.calls:
            self._frozen = True
            return []
        if parsed.content.endswith(self._chat.LETTER):
            self._open, self._text = "content", parsed.content[: -len(self._chat.LETTER)]
        elif parsed.reasoning.endswith(self._chat.LETTER):
            self._open, self._text = "reasoning", parsed.reasoning[: -len(self._chat.LETTER)]
        sent = self._content if self._open == "content" else self._reasoning
        ended = self._open == "content" and parsed.reasoning != self._reasoning
        if not self._text.startswith(sent) or (ended and (self._content or not parsed.reasoning.startswith(self._reasoning))):
            self._frozen = True
            return []
        if not self._text.strip():
            self._open = ""  # white space at the beginning is the parser's affair
            return []
        self._read = settled
        if not ended:
            return []
        rest, self._reasoning = parsed.reasoning[len(self._reasoning) :], parsed.reasoning
        return [TurnDelta(reasoning=rest)]

    def _settled(self) -> int:
        """Returns the number of tokens before those at the end that may be a part of a character."""
        for count in range(len(self._ids), max(0, len(self._ids) - CONTEXT), -1):
            if self._whole(self._chat.text(self._ids[max(0, count - CONTEXT) : count]), count):
                return count
        return 0

    def _whole(self, text: str, count: int) -> bool:
        return not text.endswith("\ufffd") and self._ids[count - 1] not in self._chat.byte_ids

    def _append(self) -> bool:
        """Adds the text of further plain tokens. Returns False where there is one that may be a marker."""
        further = self._ids[self._read :]
        plain = next((index for index, token in enumerate(further) if token in self._chat.added_ids), len(further))
        start, end = max(0, self._read - CONTEXT), self._read + plain
        if plain:
            before, text = self._chat.text(self._ids[start : self._read]), self._chat.text(self._ids[start:end])
            if plain == len(further) and not self._whole(text, end):
                return True
            if not text.startswith(before):
                return False
            self._text, self._read = self._text + text[len(before) :], end
        return plain == len(further)

    def _sure_deltas(self) -> list[TurnDelta]:
        if not self._open or self._frozen:
            return []
        sent = self._content if self._open == "content" else self._reasoning
        sure = self._sure(len(sent))
        if len(sure) <= len(sent):
            return []
        if self._open == "content":
            self._content = sure
            return [TurnDelta(content=sure[len(sent) :])]
        self._reasoning = sure
        return [TurnDelta(reasoning=sure[len(sent) :])]

    def _sure(self, sent: int) -> str:
        """Returns the beginning of the text that nothing to come can change; ``sent``: characters that were sent before."""
        text, content = self._text, self._open == "content"
        ends = [at for stop in self._stops if content and (at := text.find(stop, sent)) >= 0]
        if (marker := MARKER.search(text, sent)) is not None:
            ends.append(marker.start())
        if ends:
            self._frozen = content
            if not content:  # the text may close the reasoning: the parser knows
                self._open = ""
            text = text[: min(ends)]
        else:
            held = [_overlap(text, stop) for stop in self._stops if content]
            begun = MARKER_BEGUN.search(text, max(sent, len(text) - 72))
            text = text[: len(text) - max([0, *held, *([] if begun is None else [len(text) - begun.start()])])]
        return text.rstrip().rstrip("\ufffd").rstrip()


def _overlap(text: str, stop: str) -> int:
    """Returns how many characters at the end of a text may be the beginning of a stop string."""
    return next((length for length in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:length])), 0)
