"""Answers that are streamed are told while the engine draws, and are what is recorded."""

import asyncio
import time
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, LengthFinishReasonError

from shared.schema.messages import Sampling
from tests.integration.engine.conftest import Checkpoints
from tests.integration.engine.hall import CHUNK, NewHall
from tests.integration.engine.load import resting
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
