"""Answers that are streamed are told while the engine draws, and are what is recorded; stop strings end them also across two draws."""

import asyncio
import itertools
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from anthropic import AsyncAnthropic
from numpy.typing import NDArray
from openai import AsyncOpenAI, LengthFinishReasonError

from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.generation import GenerationRequest
from shared.data.tokenizer import Tokenizer
from shared.schema.messages import Sampling
from shared.sessions.session import Turn
from tests.integration.engine.bench import NewBench
from tests.integration.engine.conftest import Checkpoints
from tests.integration.engine.hall import CHUNK, NewHall
from tests.integration.engine.load import resting
from tests.integration.engine.reference import log_probs
from tests.integration.engine.test_gateway import exact
from tests.support.gateways import Played
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)


TOKENS, ENDLESS = 400, 1900
LONG = Sampling(temperature=1.0, max_new_tokens=TOKENS, min_new_tokens=TOKENS)
QUESTION: Any = [{"role": "user", "content": "count"}]
NAMED = {"Idempotency-Key": "the one"}


class Heard:
    """The pieces of a stream, and when they came."""

    def __init__(self) -> None:
        self.began, self.pieces, self.times = time.monotonic(), list[str](), list[float]()

    def add(self, piece: str) -> None:
        self.pieces.append(piece)
        self.times.append(time.monotonic() - self.began)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


async def chat(client: AsyncOpenAI, heard: Heard) -> str:
    options: Any = {"model": "0", "messages": QUESTION, "extra_headers": NAMED, "stream_options": {"include_usage": True}}
    async with client.chat.completions.stream(**options) as stream:
        async for event in stream:
            if event.type == "content.delta":
                heard.add(event.delta)
        with pytest.raises(LengthFinishReasonError) as cut:  # so this helper tells it
            await stream.get_final_completion()
    whole = cut.value.completion
    assert whole.usage is not None and whole.usage.completion_tokens == TOKENS and whole.choices[0].finish_reason == "length"
    return whole.choices[0].message.content or ""


async def responses(client: AsyncOpenAI, heard: Heard) -> str:
    async with client.responses.stream(model="0", input=QUESTION, extra_headers=NAMED) as stream:
        async for event in stream:
            if event.type == "response.output_text.delta":
                heard.add(event.delta)
            if event.type == "response.incomplete":
                whole = event.response
    assert whole.usage is not None and whole.usage.output_tokens == TOKENS
    return whole.output_text


async def messages(client: AsyncAnthropic, heard: Heard) -> str:
    async with client.messages.stream(model="0", max_tokens=TOKENS, messages=QUESTION, extra_headers=NAMED) as stream:
        async for piece in stream.text_stream:
            heard.add(piece)
        whole = await stream.get_final_message()
    assert whole.usage.output_tokens == TOKENS and whole.stop_reason == "max_tokens"
    return "".join(block.text for block in whole.content if block.type == "text")


async def test_the_streams_of_all_formats_are_told_as_they_are_drawn(hall: NewHall, checkpoint: Checkpoints) -> None:
    room = await hall()
    tokenizer = room.desk.rollout._tokenizer
    for speak in (chat, responses, messages):
        played, heard = await room.session(sampling=LONG), Heard()
        client: Any = (
            AsyncAnthropic(base_url=room.urls[0], api_key=played.key) if speak is messages else played.client(room.urls[0], max_retries=0)
        )
        async with client:
            telling = asyncio.create_task(speak(client, heard))
            await until(lambda heard=heard: len(heard.pieces) >= 5, "the first pieces", 240)
            log = await played.log()
            assert not log.turns and len(log.pending) == 1, "it was told when the turn had ended"
            whole = await telling
            again = Heard()
            assert await speak(client, again) == whole, "what was recorded is streamed to whoever asks again"
        [turn] = (await played.log()).turns.values()
        exact(turn, checkpoint(0), endless=True)
        assert heard.text == again.text == whole == tokenizer.decode(turn.completion)
        first, last = heard.times[0], heard.times[-1]
        print(f"{speak.__name__}: first text after {first:.3f} s, the last of {len(heard.pieces)} pieces after {last:.3f} s")


@pytest.mark.extra
async def test_a_client_that_leaves_ends_the_draw_and_a_killed_gateway_costs_no_token_that_was_recorded(hall: NewHall) -> None:
    room = await hall()
    other = await room.start()
    endless = Sampling(temperature=1.0, max_new_tokens=ENDLESS, min_new_tokens=ENDLESS)
    left, played = await room.session(sampling=endless), await room.session(sampling=LONG)
    async with left.client(room.urls[0], max_retries=0) as client:
        stream = await client.chat.completions.create(model="0", messages=QUESTION, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await until(lambda: resting(room.desk.client), "an engine without requests", 60)
    await until(lambda: no_more(left), "a turn that nobody draws", 60)

    async def recorded(least: int) -> Any:
        found = list((await played.log()).pending.values())
        return found[0] if found and len(found[0].completion) >= least else None

    async with played.client(room.urls[0], max_retries=0) as client, played.client(other, max_retries=0) as elsewhere:
        telling = asyncio.create_task(chat(client, Heard()))
        before = await until(lambda: recorded(2 * CHUNK), "tokens that are recorded", 120)
        room.processes[0].kill()
        with pytest.raises(Exception):  # noqa: B017  # the SDKs raise what their HTTP client does
            await telling
        heard = Heard()
        whole = await chat(elsewhere, heard)
    [turn] = (await played.log()).turns.values()
    assert turn.completion[: len(before.completion)].tolist() == before.completion.tolist()
    assert heard.text == whole == room.desk.rollout._tokenizer.decode(turn.completion)
    assert len(heard.pieces) > 1, "what was recorded, then what was drawn"


async def no_more(played: Played) -> bool:
    log = await played.log()
    return not log.turns and [len(turn.completion) < ENDLESS for turn in log.pending.values()] == [True]


EDGE_TOKENS, TURNS = 100, 8
MOST_STOPS = 32
"""More an engine does not take."""


def likely(text: str) -> list[str]:
    """The pairs of characters that are most frequent in what a model wrote: each is two tokens."""
    pairs = Counter(first + second for first, second in itertools.pairwise(text))
    return [pair for pair, _ in pairs.most_common(MOST_STOPS)]


def ends_rightly(tokenizer: Tokenizer, tokens: NDArray[np.int32], finish: str, stops: list[str]) -> str:
    """Returns a text with its special tokens, after asserting that it ends with the token that completes its first stop string, if any."""
    whole = tokenizer.decode(tokens, skip_special_tokens=False)
    if any(stop in whole for stop in stops):
        before = tokenizer.decode(tokens[:-1], skip_special_tokens=False)
        assert finish == "stop" and not any(stop in before for stop in stops), (finish, whole)
    return whole


async def told(played: Played, url: str, stream: bool) -> str:
    """What an unmodified client is told of one turn, at once or streamed."""
    asked: dict[str, Any] = {"model": "0", "messages": [{"role": "user", "content": "x"}], "stream": stream}
    async with played.client(url, max_retries=0) as client:
        answer: Any = await client.chat.completions.create(**asked)
        if not stream:
            return answer.choices[0].message.content or ""
        return "".join([chunk.choices[0].delta.content or "" async for chunk in answer if chunk.choices])


@pytest.mark.extra(each=True)
async def test_a_turn_that_is_recorded_in_parts(hall: NewHall, checkpoint: Checkpoints) -> None:
    """Every second stop string lies across two draws, and none of them is passed over, told, doubled or lost."""
    room = await hall(gateway={"gateway_checkpoint_tokens": 2})
    long = Sampling(temperature=1.0, max_new_tokens=400, min_new_tokens=400)
    stops = likely(await told(await room.session(sampling=long), room.urls[0], stream=False))
    sampling = Sampling(temperature=1.0, max_new_tokens=EDGE_TOKENS, stop=stops)
    sessions = [await room.session(sampling=sampling) for _ in range(TURNS)]
    texts = await asyncio.gather(*(told(one, room.urls[0], number % 2 == 0) for number, one in enumerate(sessions)))
    across, tokenizer = 0, room.desk.rollout._tokenizer
    for one, text in zip(sessions, texts, strict=True):
        [turn] = (await one.log()).turns.values()
        whole, shown = ends_rightly(tokenizer, turn.completion, turn.finish, stops), tokenizer.decode(turn.completion)
        stopped = next((stop for stop in stops if whole.endswith(stop)), "")
        assert text == (shown.removesuffix(stopped) if turn.finish == "stop" else shown)
        drawn_exactly(turn, checkpoint)
        across += bool(stopped) and len(turn.completion) % 2 == 1
    print(f"{across} of {TURNS} turns ended with a stop string across two draws")
    sampling = Sampling(temperature=0.0, repetition_penalty=2.0, max_new_tokens=24, min_new_tokens=24)
    penalised = await room.session(sampling=sampling, evaluation=True)
    await told(penalised, room.urls[0], stream=True)
    [turn] = (await penalised.log()).turns.values()
    [whole] = await room.desk.client.generate_group([GenerationRequest(tokens=turn.prompt, max_new_tokens=24)], sampling)
    assert turn.completion.tolist() == whole.tokens.tolist(), "what is penalised, the engine knows of one request alone"


def drawn_exactly(turn: Turn, checkpoint: Checkpoints) -> None:
    assert turn.spans == ((0, len(turn.completion), 0),)
    expected = log_probs(checkpoint(0).model, turn.prompt, turn.completion)
    np.testing.assert_allclose(turn.log_probs, expected, atol=1e-4)


async def test_samples_that_a_push_interrupts(new_bench: NewBench, client: EngineClient, checkpoint: Checkpoints) -> None:
    """The engine aborts them again and again, as pushes do that abort; each continues from its tokens."""
    desk = await new_bench()
    await desk.task("g00000001", n=4, sampling=Sampling(temperature=1.0, max_new_tokens=EDGE_TOKENS))
    stops = likely("".join([one.text for one in (await desk.generated())[1]]))
    await desk.task("g00000002", n=TURNS, sampling=Sampling(temperature=1.0, max_new_tokens=EDGE_TOKENS, stop=stops))

    async def interrupting() -> None:
        while True:
            await client.abort_all()
            await asyncio.sleep(0.02)

    aborting = asyncio.create_task(interrupting())
    try:
        _, samples = await asyncio.wait_for(desk.generated(), 240)
    finally:
        aborting.cancel()
    for one in samples:
        ends_rightly(desk.rollout._tokenizer, one.response, one.finish, stops)
        assert one.text == desk.rollout._tokenizer.decode(one.response)
        expected = log_probs(checkpoint(0).model, one.prompt, one.response)
        np.testing.assert_allclose(one.log_probs, expected, atol=1e-4)
