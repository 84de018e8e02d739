"""Rollouts that are episodes of an environment that steps: reset, then turns of the model and of the environment, until one is done.

The environment's messages become tokens that are not trained; the model's keep the ids, log-probs and versions that the engine gave. An
episode that is stopped keeps its session, and continues in the middle of its turn where the run lets rollouts continue (`partial_rollout`).
"""

import asyncio
import contextlib
import functools
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Literal, TypeVar

import numpy as np

from services.rollout.agent_groups import UNRECORDED
from services.rollout.custom_generate import CustomGenerate, parameters
from services.rollout.in_flight import Requests
from services.rollout.played_group import RETRY_PAUSE
from services.rollout.replica import Replica
from shared.config.eval_views import eval_view, group_config
from shared.data.stop_strings import end_across
from shared.data.tokenizer import Tokenizer, in_call_form
from shared.environment.environment_client import open_environment
from shared.environment.protocol import (
    CLOSE,
    CloseRequest,
    Description,
    Environment,
    EnvironmentAway,
    EnvironmentFailed,
    Reply,
    ResetRequest,
    StepRequest,
    TurnOutcome,
)
from shared.hooks import HookFailed, HookSample, Status
from shared.hooks.slime.http_requests import LONGEST_S, CallContext, HTTPStatusError, close_session, current_call, post
from shared.runtime.errors import ConfigError, DeadlineExceeded
from shared.runtime.tasks import awake_timeout, doubling
from shared.schema.ledger import is_evaluation
from shared.schema.messages import Task
from shared.service.service_base import Service

_PLACEHOLDER = "3c6ef372fe94f82b"  # stands for the model's message: no template has it


class EpisodeTokens:
    """The ids of one episode.

    ``as_chat``: through the chat template; else texts stand one behind the other. ``variables``: more of the template's.
    ``control_tokens``: what those are that the environment's texts spell, through the template: text, or control tokens (as_written)."""

    def __init__(
        self, tokenizer: Tokenizer, as_chat: bool, variables: dict[str, Any], control_tokens: Literal["text", "as_written"] = "text"
    ) -> None:
        self._tokenizer, self._as_chat = tokenizer, as_chat
        self._control = tokenizer.control_tokens[control_tokens if as_chat else "as_written"]
        self._variables = {key: self._control.guarded(value) if key == "tools" else value for key, value in variables.items()}

    def opening(self, prompt: str | list[dict[str, Any]], ids: Sequence[int], messages: Sequence[Reply]) -> list[int]:
        """Returns the ids that the first turn continues from: the prompt, and what ``reset`` has added. ``ids``: of the prompt alone, which
        stay where text is put behind text. Raises ConfigError."""
        if self._as_chat:
            first = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            formed = in_call_form(self._tokenizer, [*first, *messages], self._variables, keep_text=True)
            reported = self._guarded(formed[len(first) :])
            return self._ids(self._tokenizer.render([*formed[: len(first)], *reported], self._variables))
        return [*ids, *self._ids(_text(messages))]

    def reply(self, messages: Sequence[Reply], last: int | None) -> tuple[str, list[int]]:
        """Returns what stands behind the model's message up to its next one, as text and ids; none of it is the model's.

        ``last``: the token that ended the message, where it ended by itself: what the template ends a message with is not put there twice.
        Raises ConfigError where the template does not continue from a message as it ended one."""
        text = self._behind(messages) if self._as_chat else _text(messages)
        if last is not None and text.startswith(end := self._tokenizer.pieces([last])[0]):
            text = text[len(end) :]
        return self._control.plain(text), self._ids(text)

    def _behind(self, messages: Sequence[Reply]) -> str:
        said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PLACEHOLDER}]
        ended = self._tokenizer.render(said, {**self._variables, "add_generation_prompt": False})
        gone_on = self._tokenizer.render([*said, *self._guarded(messages)], self._variables)
        (_, found, end), (_, found_on, text) = ended.partition(_PLACEHOLDER), gone_on.partition(_PLACEHOLDER)
        if not (found and found_on) or not text.startswith(end):
            expected = "the chat template renders earlier messages anew; episodes need one that only appends"
            raise ConfigError("data.apply_chat_template", self._control.plain(gone_on)[-200:], expected)
        return text

    def _guarded(self, messages: Sequence[Reply]) -> list[Reply]:
        return [self._control.guarded(one) | {"role": one["role"]} for one in messages]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._control.encode(text).tolist()
        return ids


def _text(messages: Sequence[Reply]) -> str:
    return "".join(message["content"] for message in messages)


FIELD = "episode.episode_url"
CLOSE_SECONDS = 2.0  # the time for telling an environment that a session has ended: it forgets sessions by itself, too
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 3.0  # seconds between tries while an environment cannot be reached
_waits_for: ContextVar[str] = ContextVar("waits_for", default="")  # of a rollout's call: why its environment cannot be reached

Answer = TypeVar("Answer")


class EpisodeGenerate(CustomGenerate):
    """Plays the rollouts of groups in the run's environment."""

    field = FIELD

    def __init__(self, service: Service, replica: Replica, tokenizer: Tokenizer) -> None:
        super().__init__(service, replica, tokenizer)
        self.settings = service.config.episode
        assert self.settings.episode_url is not None  # only made for runs that have one
        self.run = service.run
        self.environment: Environment = open_environment("episode", self.settings.episode_url, service.bus, service.run)
        self._described: Description | None = None

    def path(self, task: Task) -> str | None:
        return self.environment.shown

    def longest(self, task: Task) -> int | None:
        """Returns the most tokens of an episode: those of its set of held-out prompts, or the run's."""
        view = eval_view(self._config, task.group)
        return self._config.rollout.rollout_max_context_len if view is None else view.max_context_len

    async def start(self) -> None:
        """Has nothing to start: the environment is a service of its own."""

    async def close(self) -> None:
        """Closes the connections to the environment, and to the engine's proxy."""
        await self.environment.close()
        await close_session()

    async def call(
        self, task: Task, index: int, sample: HookSample, requests: Requests, seconds: float, alone: bool
    ) -> tuple[list[HookSample], tuple[int, bool]]:
        """Plays a rollout, or continues with it. Raises HookFailed, DeadlineExceeded, or EnvironmentAway where it waited for that."""
        token, address = uuid.uuid4().hex, self.replica.proxy.address
        assert address is not None  # it is open from the engine's start on
        self.replica.proxy.calls[token] = requests
        current_call.set(CallContext(token, f"{address[0]}:{address[1]}", time.monotonic() + seconds + LONGEST_S))  # this call ends it
        try:
            async with awake_timeout(seconds, self.asleep):
                return [await _Episode(self, task, index, sample, requests, f"{self.replica.proxy.url}/generate").played()], UNRECORDED
        except TimeoutError:
            raise EnvironmentAway(self.environment.label, why) if (why := _waits_for.get()) else self.late(task, index) from None
        except EnvironmentFailed as error:
            raise HookFailed(FIELD, self.environment.shown, error.reason) from None
        except (HTTPStatusError, ConfigError, KeyError, TypeError) as error:
            raise HookFailed(FIELD, self.environment.shown, f"{type(error).__name__}: {error}") from None
        finally:
            del self.replica.proxy.calls[token]

    async def description(self) -> Description:
        """Returns the environment's description, which is asked for once. Raises EnvironmentFailed for one that does not step."""
        if self._described is None:
            described = await self.asked("describe", self.environment.describe)
            if not described.steps:
                verbs = ", ".join(described.verbs)
                raise EnvironmentFailed(self.environment.label, f"verbs is {verbs}; expected 'reset' and 'step' for episodes")
            self._described = described
        return self._described

    async def asked(self, awaited: str, ask: Callable[[float], Awaitable[Answer]]) -> Answer:
        """Returns an answer, asked for again for as long as no one can be reached; a repeat does no harm. Raises EnvironmentFailed, also
        where a step's connections still break after `episode_timeout`: what the model wrote may be what ends the environment."""
        deadline, label, may_break = self.settings.episode_timeout, self.environment.label, math.inf
        pauses = doubling(FIRST_PAUSE, LONGEST_PAUSE)
        while True:
            try:
                answer = await ask(deadline)
                _waits_for.set("")
                return answer
            except EnvironmentAway as error:
                _waits_for.set(error.reason)
                if (broke := error.broke and awaited.startswith("step")) and time.monotonic() > may_break:
                    raise EnvironmentFailed(label, f"{awaited}: {error.reason}") from None
                may_break = min(may_break, time.monotonic() + deadline) if broke else may_break
                if (pause := next(pauses)) == FIRST_PAUSE:
                    self._service.log.warning("environment_away", awaited=awaited, reason=str(error))
                await asyncio.sleep(pause)
            except DeadlineExceeded:
                raise EnvironmentFailed(label, f"{awaited} was not answered within {deadline:g} s (episode_timeout)") from None

    def tokens(self, task: Task, tools: list[dict[str, Any]]) -> EpisodeTokens:
        """Returns what makes the ids of an episode, as the run renders its prompts."""
        data = group_config(self._config, task.group).data
        variables = {**data.apply_chat_template_kwargs, **({"tools": tools} if tools else {})}
        as_chat = data.apply_chat_template or not isinstance(task.prompt, str)
        return EpisodeTokens(self.tokenizer, as_chat, variables, self.settings.episode_control_tokens)


class _Episode:
    """One episode. ``sample.episode`` holds where it is, so that it continues anywhere: session, turn, what was said, rewards, tools."""

    def __init__(self, run: EpisodeGenerate, task: Task, index: int, sample: HookSample, requests: Requests, engine: str) -> None:
        self._run, self._task, self._index, self._sample = run, task, index, sample
        self._requests, self._engine = requests, engine
        self._state: dict[str, Any] = getattr(sample, "episode", None) or {}

    async def played(self) -> HookSample:
        """Plays to the end, or until the rollout is stopped. Raises EnvironmentFailed, HTTPStatusError or ConfigError."""
        description, done, stopped = await self._run.description(), False, False
        try:
            if not self._state:
                await self._reset()
            while not done and self._state["turn"] < self._run.settings.episode_turns:
                finish, last = await self._said()
                if (stopped := finish == "abort") or finish == "full":
                    break
                outcome = await self._step(finish)
                done = outcome.done
                if not done and not self._append(outcome.messages, last):
                    break
            if stopped:
                self._sample.status = Status.ABORTED
            return self._sample if stopped else self._ended(done)
        finally:
            if not stopped and CLOSE in description.verbs and self._state:
                await self._close(done)

    async def _reset(self) -> None:
        task, sample = self._task, self._sample
        request = ResetRequest(
            run=self._run.run,
            episode=f"{task.group}.{task.attempt}.{self._index}.{uuid.uuid4().hex[:12]}",
            group=task.group,
            attempt=task.attempt,
            rollout=self._index,
            prompt=task.prompt,
            label=task.label,
            metadata=task.metadata,
            evaluation=is_evaluation(task.group),
        )
        opened = await self._run.asked("reset", lambda seconds: self._run.environment.reset(request, seconds))
        self._state = {"session": opened.session, "turn": 0, "said": "", "rewards": [], "tools": opened.tools}
        setattr(sample, "episode", self._state)  # noqa: B010  # an attribute of ours that goes along with the sample
        if opened.messages or opened.tools:
            sample.tokens = self._run.tokens(task, opened.tools).opening(task.prompt, sample.tokens, opened.messages)

    async def _said(self) -> tuple[str, int | None]:
        """Has the model say its message. Returns how it ended (stop, length, abort; full: no token is left) and a stop's last token."""
        while (room := self._room()) > 0:
            kept, seed = self._run.kept and not is_evaluation(self._task.group), self._run.seed(self._index)
            sampling = parameters(self._task.sampling, kept, seed) | {"max_new_tokens": room}
            if (fewest := self._task.sampling.min_new_tokens) > 0:  # of the whole response; the engine takes no more than the turn's room
                sampling["min_new_tokens"] = max(0, min(fewest - self._sample.response_length, room))
            body = {"input_ids": self._sample.tokens, "sampling_params": sampling, "return_logprob": True} | self._routing()
            whole = await post(self._engine, body)
            answer = self._up_to_stop(whole)
            beyond = len(whole["meta_info"]["output_token_logprobs"]) - len(answer["meta_info"]["output_token_logprobs"])
            meta = answer["meta_info"]
            encoded = meta.pop("routed_experts", None)  # in a form that `append_response_tokens` does not know
            logprobs = meta["output_token_logprobs"]
            ids, log_probs = [token for _, token, _ in logprobs], [log_prob for log_prob, _, _ in logprobs]
            self._sample.append_response_tokens(tokens=ids, log_probs=log_probs, meta_info=meta, text=answer["text"])
            self._route(encoded, beyond)
            self._state["said"] += self._without_end(answer["text"], ids if meta["finish_reason"]["type"] == "stop" else [])
            self._state["generated"] = self._state.get("generated", 0) + len(ids)
            finish = meta["finish_reason"]["type"]
            if finish == "stop":
                return "stop", ids[-1] if ids else None
            if finish == "length":
                return ("length", None) if self._left() > 0 else ("full", None)
            if self._requests.stopped.is_set():
                return "abort", None
            await asyncio.sleep(RETRY_PAUSE)  # the push that caused it is still in progress; the turn continues from its tokens
        return "full", None

    def _without_end(self, text: str, ids: list[int]) -> str:
        """Returns what a turn says without the control token that ends it, unless tasks ask for it. ``ids``: of a turn that has ended."""
        decode = self._run.tokenizer.decode
        if self._task.sampling.skip_special_tokens is False or not ids or decode(ids[-1:]):
            return text
        return text.removesuffix(decode(ids[-1:], skip_special_tokens=False))

    def _up_to_stop(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Returns the engine's answer up to the turn's end: an end token, or the last of a stop string that began in what it had before.
        Where it was aborted, and the turn has to be one request's, nothing is left of it."""
        meta, earlier = answer["meta_info"], self._state.get("generated", 0)
        ids = [token for _, token, _ in meta["output_token_logprobs"]]
        decode = functools.partial(self._run.tokenizer.decode, skip_special_tokens=False)
        sampling, before = self._task.sampling, self._sample.tokens[-earlier:] if earlier else []
        count = end_across(before, ids, sampling.stop, decode, ends=sampling.stop_token_ids)
        reason = meta["finish_reason"] if count is None else {"type": "stop"}
        if count is None:
            count = 0 if sampling.whole and reason["type"] == "abort" else len(ids)
        if count == len(ids):
            return answer | {"meta_info": meta | {"finish_reason": reason}}
        ended = {"output_token_logprobs": meta["output_token_logprobs"][:count], "finish_reason": reason}
        if "top_p_token_offsets" in meta:
            offsets = meta["top_p_token_offsets"][: count + 1]
            ended |= {"top_p_token_ids": meta["top_p_token_ids"][: offsets[-1]], "top_p_token_offsets": offsets}
        return {"text": self._run.tokenizer.decode(ids[:count]), "meta_info": {**meta, **ended, "completion_tokens": count}}

    def _routing(self) -> dict[str, Any]:
        if self._run.choices is None or is_evaluation(self._task.group):
            return {}
        known = self._sample.rollout_routed_experts
        return {"return_routed_experts": True, "routed_experts_start_len": 0 if known is None else len(known)}

    def _route(self, encoded: str | None, beyond: int) -> None:
        """Takes over the experts of the sequence's tokens but its last. Raises HookFailed for another number of them. ``beyond``: tokens
        that the engine generated and that were left out."""
        if encoded is None or self._run.choices is None:
            return
        known = self._sample.rollout_routed_experts
        try:
            rows = len(self._sample.tokens) - 1 - (0 if known is None else len(known))
            found = self._run.choices.read(encoded, rows + beyond)[:rows]
        except ValueError as error:
            raise HookFailed(FIELD, self._run.environment.shown, f"the engine returned invalid data: {error}") from None
        self._sample.rollout_routed_experts = found if known is None else np.concatenate([known, found])

    def _left(self) -> int:
        left = self._task.sampling.max_new_tokens - self._sample.response_length
        longest = self._run.longest(self._task)
        return left if longest is None else min(left, longest - len(self._sample.tokens))

    def _room(self) -> int:
        turn = self._run.settings.episode_turn_tokens
        return self._left() if turn is None else min(self._left(), turn - self._state.get("generated", 0))

    async def _step(self, finish: str) -> TurnOutcome:
        state = self._state
        message = {"role": "assistant", "content": state["said"]}
        request = StepRequest.model_validate(
            {"run": self._run.run, "session": state["session"], "turn": state["turn"], "message": message, "finish": finish}
        )
        outcome = await self._run.asked(f"step {state['turn']}", lambda seconds: self._run.environment.step(request, seconds))
        if outcome.reward is not None:
            state["rewards"].append({"reward": outcome.reward.reward, **outcome.reward.parts})
        end, reward = self._sample.response_length, 0.0 if outcome.reward is None else outcome.reward.reward
        state.setdefault("turns", []).append([end - state.get("generated", 0), end, reward])
        state["turn"], state["said"], state["generated"] = state["turn"] + 1, "", 0
        return outcome

    def _append(self, messages: list[Reply], last: int | None) -> bool:
        text, ids = self._run.tokens(self._task, self._state["tools"]).reply(messages, last)
        if len(ids) >= self._left():
            return False
        self._sample.append_response_tokens(tokens=ids, trainable=False, text=text)
        return True

    def _ended(self, done: bool) -> HookSample:
        sample, state = self._sample, self._state
        if done and not state["rewards"]:
            raise EnvironmentFailed(self._run.environment.label, "done is true and no step had a reward; expected at least one")
        sample.reward = total(state["rewards"], self._run.settings.episode_reward)
        sample.metadata = {**sample.metadata, "turns": state["turn"]}
        setattr(sample, "turn_rewards", state.get("turns", []))  # noqa: B010  # no field of slime's
        sample.status = Status.COMPLETED if done else Status.TRUNCATED
        return sample

    async def _close(self, done: bool) -> None:
        with contextlib.suppress(EnvironmentAway, EnvironmentFailed, DeadlineExceeded):  # it forgets the session by itself
            await self._run.environment.end(CloseRequest(run=self._run.run, session=self._state["session"], done=done), CLOSE_SECONDS)


def total(rewards: list[Mapping[str, float]], rule: str) -> float | dict[str, float]:
    """Returns an episode's reward of its steps': their sum, name by name, or the last; 0 where there is none."""
    if not rewards:
        return 0.0
    names = {name for reward in rewards for name in reward}
    found = dict(rewards[-1]) if rule == "last" else {name: sum(reward.get(name, 0.0) for reward in rewards) for name in names}
    return found if len(found) > 1 else found["reward"]
