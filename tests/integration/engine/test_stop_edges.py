"""A stop string ends what is drawn also where it lies across two draws: of a turn that is recorded in parts, or that a push interrupts."""

import asyncio
import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.generation import GenerationRequest
from shared.data.tokenizer import Tokenizer
from shared.schema.messages import Sampling
from shared.sessions.session import Turn
from tests.integration.engine.bench import NewBench
from tests.integration.engine.conftest import Checkpoints
from tests.integration.engine.hall import NewHall
from tests.integration.engine.reference import log_probs
from tests.support.gateways import Played

pytestmark = pytest.mark.timeout(600)

TOKENS, TURNS = 100, 8
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
    sampling = Sampling(temperature=1.0, max_new_tokens=TOKENS, stop=stops)
    sessions = [await room.session(sampling=sampling) for _ in range(TURNS)]
    texts = await asyncio.gather(*(told(one, room.urls[0], number % 2 == 0) for number, one in enumerate(sessions)))
    across, tokenizer = 0, room.desk.rollout._tokenizer
    for one, text in zip(sessions, texts, strict=True):
        [turn] = (await one.log()).turns.values()
        whole, shown = ends_rightly(tokenizer, turn.completion, turn.finish, stops), tokenizer.decode(turn.completion)
        stopped = next((stop for stop in stops if whole.endswith(stop)), "")
        assert text == (shown.removesuffix(stopped) if turn.finish == "stop" else shown)
        exact(turn, checkpoint)
        across += bool(stopped) and len(turn.completion) % 2 == 1
    print(f"{across} of {TURNS} turns ended with a stop string across two draws")
    sampling = Sampling(temperature=0.0, repetition_penalty=2.0, max_new_tokens=24, min_new_tokens=24)
    penalised = await room.session(sampling=sampling, evaluation=True)
    await told(penalised, room.urls[0], stream=True)
    [turn] = (await penalised.log()).turns.values()
    [whole] = await room.desk.client.generate_group([GenerationRequest(tokens=turn.prompt, max_new_tokens=24)], sampling)
    assert turn.completion.tolist() == whole.tokens.tolist(), "what is penalised, the engine knows of one request alone"


def exact(turn: Turn, checkpoint: Checkpoints) -> None:
    assert turn.spans == ((0, len(turn.completion), 0),)
    expected = log_probs(checkpoint(0).model, turn.prompt, turn.completion)
    np.testing.assert_allclose(turn.log_probs, expected, atol=1e-4)


async def test_samples_that_a_push_interrupts(new_bench: NewBench, client: EngineClient, checkpoint: Checkpoints) -> None:
    """The engine aborts them again and again, as pushes do that abort; each continues from its tokens."""
    desk = await new_bench()
    await desk.task("g00000001", n=4, sampling=Sampling(temperature=1.0, max_new_tokens=TOKENS))
    stops = likely("".join([one.text for one in (await desk.generated())[1]]))
    await desk.task("g00000002", n=TURNS, sampling=Sampling(temperature=1.0, max_new_tokens=TOKENS, stop=stops))

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
