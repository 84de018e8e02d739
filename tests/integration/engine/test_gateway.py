"""Clients of an ordinary API play sessions over a real gateway and a real engine: what is recorded of them is what was drawn."""

import asyncio
import functools
import json
import time
from typing import Any

import aiohttp
import anthropic
import numpy as np
import pytest
import torch
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, AuthenticationError, BadRequestError, ConflictError, NotFoundError
from openai.types.chat import ChatCompletion

from services.gateway.chat_tokens import TOOL
from shared.schema.kept_tokens import Kept
from shared.schema.messages import Sampling
from shared.schema.sample import Sample
from shared.sessions.session import SessionEnded, Turn, trajectories
from tests.integration.engine.conftest import Checkpoint, Checkpoints
from tests.integration.engine.hall import CHUNK, NewHall
from tests.integration.engine.load import resting
from tests.integration.engine.reference import log_probs, top_log_probs
from tests.support.gateways import Played
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)

EXACT = 1e-4
SPECIAL = {0, 1, 2, 3}
"""The tokens that are left out of the text."""

END = 1
"""The token that ends a turn of these models."""


def exact(turn: Turn, *models: Checkpoint, endless: bool = False) -> None:
    """Asserts that a turn's log-probs are those of the versions that drew it; ``models`` by version. ``endless``: it could not end."""
    for start, end, version in turn.spans:
        prompt = np.concatenate([turn.prompt, turn.completion[:start]])
        banned = [END] if endless else []
        expected = log_probs(models[version].model, prompt, turn.completion[start:end], banned=banned)
        np.testing.assert_allclose(turn.log_probs[start:end], expected, atol=EXACT)


async def said(client: AsyncOpenAI, messages: list[Any], **options: Any) -> ChatCompletion:
    return await client.chat.completions.create(model="0", messages=messages, **options)


async def test_a_conversation_over_a_push_is_recorded_as_it_was_drawn(hall: NewHall, checkpoint: Checkpoints) -> None:
    """Three turns by the `openai` SDK, one of them after a push, one streamed; then the same in a session of its own key."""
    room = await hall()
    played = await room.session()
    messages: list[Any] = [{"role": "user", "content": "what is 2+2?"}]
    async with played.client(room.urls[0]) as client:
        assert (await client.models.list()).data[0].id == "0"
        first = await said(client, messages, logprobs=True)
        messages += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "and 3+3?"}]
        await room.pushed(checkpoint(1).model, 1)
        second = await said(client, messages, extra_body={"min_version": 1}, logprobs=True, top_logprobs=5)
        messages += [second.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "thanks"}]
        with pytest.raises(ConflictError, match="version 1, older than the 7"):
            await said(client.with_options(max_retries=0), messages, extra_body={"min_version": 7})
        parts = [part async for part in await said(client, messages, stream=True, stream_options={"include_usage": True})]
    log = await played.log()
    turns = list(log.turns.values())
    assert [turn.request for turn in turns] == [first.id, second.id, parts[0].id] and not log.pending
    for turn in turns:
        exact(turn, checkpoint(0), checkpoint(1))
        assert 1 <= len(turn.completion) <= 24
    assert [{version for _, _, version in turn.spans} for turn in turns] == [{0}, {1}, {1}]
    assert turns[1].cached == 0, "what older weights have computed is nobody's prefix"
    assert 0 < turns[2].cached < len(turns[2].prompt)
    told = first.choices[0].logprobs
    assert told is not None and told.content is not None
    np.testing.assert_allclose([one.logprob for one in told.content], turns[0].log_probs, atol=1e-6)
    likeliest = [place.top_logprobs for place in second.choices[0].logprobs.content]
    expected, ids = top_log_probs(checkpoint(1).model, turns[1].prompt, turns[1].completion, 5)
    np.testing.assert_allclose([[one.logprob for one in row] for row in likeliest], expected, atol=EXACT)
    np.testing.assert_array_equal(turns[1].top_log_probs.reshape(-1, 5, 2)[..., 1], ids)
    assert first.usage is not None and (first.usage.prompt_tokens, first.usage.completion_tokens) == (
        len(turns[0].prompt),
        len(turns[0].completion),
    )
    tokenizer = room.desk.rollout._tokenizer
    streamed = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert streamed == tokenizer.decode(turns[2].completion)
    trained = 0
    for found in trajectories(turns):
        arrays = {"prompt": found.prompt, "response": found.response, "log_probs": found.log_probs, "mask": found.mask}
        Sample(group="g", index=0, **arrays, segments=found.segments, finish=found.finish, text="").check()
        trained += int(found.mask.sum())
    assert trained == sum(len(turn.completion) for turn in turns)


async def test_a_turn_goes_on_over_an_abort_and_another_gateway_takes_it_over(hall: NewHall, checkpoint: Checkpoints) -> None:
    """A push aborts the turn in its middle, then the gateway is killed −9: its client's retry continues elsewhere what was recorded."""
    room = await hall(rollout={"in_flight_on_push": "abort", "max_staleness": 9})
    other = await room.start()
    long = Sampling(temperature=1.0, max_new_tokens=600, min_new_tokens=600)
    played = await room.session(sampling=long)
    question = [{"role": "user", "content": "count"}]
    named = {"Idempotency-Key": "the one"}

    async def drawn(least: int, version: int) -> Any:
        found = list((await played.log()).pending.values())
        enough = bool(found) and len(found[0].completion) >= least and found[0].spans[-1][2] == version
        return found[0] if enough else None

    async with played.client(room.urls[0], max_retries=0) as client, played.client(other) as elsewhere:
        asking = asyncio.create_task(said(client, question, extra_headers=named, logprobs=True, top_logprobs=2))
        await until(lambda: drawn(CHUNK, 0), "the first tokens", 120)
        await room.pushed(checkpoint(1).model, 1)
        before = await until(lambda: drawn(3 * CHUNK, 1), "tokens of the new version", 120)
        room.processes[0].kill()
        with pytest.raises(Exception, match="onnection"):
            await asking
        answered, again = [await said(elsewhere, question, extra_headers=named, logprobs=True, top_logprobs=2) for _ in range(2)]
        named = {"Idempotency-Key": "another"}
        one, two = await asyncio.gather(*(said(elsewhere, question, extra_headers=named, logprobs=True) for _ in range(2)))
    log = await played.log()
    turn, twice = log.turns.values()
    assert one.choices == two.choices, "of two requests at once for one turn a gateway samples one, and the other waits"
    exact(twice, checkpoint(0), checkpoint(1), endless=True)
    assert answered.id == again.id == turn.request and answered.choices == again.choices
    likeliest = [place.top_logprobs for place in answered.choices[0].logprobs.content]
    assert np.array_equal([[one.logprob for one in row] for row in likeliest], turn.top_log_probs.reshape(600, 2, 2)[..., 0])
    assert len(turn.completion) == 600 and turn.finish == "length"
    assert turn.completion[: len(before.completion)].tolist() == before.completion.tolist()
    assert [version for _, _, version in turn.spans] == [0, 1]
    exact(turn, checkpoint(0), checkpoint(1), endless=True)


async def test_what_a_client_may_not_is_refused_in_its_own_form(hall: NewHall) -> None:
    room = await hall()
    one, other = await room.session(), await room.session(deadline=time.time() - 1)
    question = [{"role": "user", "content": "x"}]
    async with one.client(room.urls[0], max_retries=0) as client:
        with pytest.raises(BadRequestError, match="maximum context length") as caught:
            await said(client, [{"role": "user", "content": "x" * 5000}])
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(NotFoundError, match="gpt-4o"):
            await client.chat.completions.create(model="gpt-4o", messages=question)
        with pytest.raises(BadRequestError, match="temperature"):
            await said(client, question, temperature="warm")
        # the task's temperature stands: it is the trainer's
        whole = await client.chat.completions.with_raw_response.create(
            model="0", messages=question, temperature=0.0, max_tokens=5, user="somebody", tools=[TOOL]
        )
        assert whole.headers["X-Myxo-Sampling-Of-Task"] == "temperature" and whole.headers["X-Myxo-Ignored"] == "user, tools"
        for wrong in (one.key[:-1], one.key + "0", f"sk-myxo-{other.session.id}-{one.key.rpartition('-')[2]}", "sk-nothing"):
            with pytest.raises(AuthenticationError):
                await said(client.with_options(api_key=wrong), question)
    log = await one.log()
    [turn] = log.turns.values()
    assert len(turn.completion) <= 5
    async with other.client(room.urls[0], max_retries=0) as client:
        with pytest.raises(Exception, match="deadline has passed") as gone:
            await said(client, question)
        assert gone.value.status_code == 410
    await room.sessions.end(one.session.id, SessionEnded(at=time.time(), reward=1.0, reason="done"))
    async with one.client(room.urls[0], max_retries=0) as client:
        with pytest.raises(Exception, match="has ended: done") as gone:
            await said(client, question)
        assert gone.value.status_code == 410
    assert list((await one.log()).turns) == [turn.request]


async def test_tokens_in_tokens_out_and_no_door_without_its_key(hall: NewHall, checkpoint: Checkpoints) -> None:
    """The wire of token-in clients; and the replica's door serves gateways alone."""
    room = await hall()
    played = await room.session()
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {played.key}"}) as http:
        prompt = [10, 11, 12]
        for rest in ([], [20, 21]):
            body = {"model": "0", "token_ids": prompt + rest, "sampling_params": {"max_tokens": 6, "logprobs": 1}}
            async with http.post(f"{room.urls[0]}/inference/v1/generate", json=body) as answer:
                assert answer.status == 200, await answer.text()
                [choice] = (await answer.json())["choices"]
            assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
            prompt = prompt + rest + choice["token_ids"]
        async with http.post(f"{room.urls[0]}/inference/v1/generate", json=body | {"token_ids": [99999]}) as answer:
            assert answer.status == 400 and "99999 is not in" in await answer.text()
        door = room.desk.service.status().engine
        for path, headers in (("/generate", {}), ("/v1/models", {}), ("/internal/generate", {"X-Myxo-Gateway-Key": "guess"})):
            async with http.post(door + path, data=b"x", headers=headers | {"Content-Type": "application/msgpack"}) as answer:
                assert answer.status in (401, 404)
        await room.desk.service.store.free([f"{room.desk.service.run}:session:.gateway-key"])  # as where the store was emptied
        room.desk.replica.proxy.gateway_key = "another"
        async with http.post(f"{room.urls[0]}/inference/v1/generate", json=body | {"token_ids": prompt}) as answer:
            assert answer.status == 200, await answer.text()
            prompt += (await answer.json())["choices"][0]["token_ids"]
        names = list((await played.log()).turns)
        posted = [(0, 0.5, 200), (names[0], 0.5, 200), (0, 0.25, 409), (names[2], -1.0, 200), (3, 1.0, 400), (-1, 1.0, 400)]
        for turn, reward, status in [*posted, ("nobody", 1.0, 400), (True, 1.0, 400), (1, "much", 400), (1, 1e300, 400)]:
            async with http.post(f"{room.urls[0]}/v1/session/reward", json={"turn": turn, "reward": reward}) as answer:
                assert answer.status == status, await answer.text()
                assert status != 400 or (await answer.json())["error"]["param"].split(".")[0] in ("turn", "reward")
        async with http.post(f"{room.urls[0]}/v1/session/end", json={"reward": {"reward": 0.5, "exact": 1.0}}) as answer:
            assert answer.status == 200, await answer.text()
        for turn, status in ((1, 410), (0, 200)):  # what is known already is answered as before
            async with http.post(f"{room.urls[0]}/v1/session/reward", json={"turn": turn, "reward": 0.5}) as answer:
                assert answer.status == status, await answer.text()
    log = await played.log()
    assert log.rewards == {names[0]: 0.5, names[2]: -1.0}
    [found] = trajectories(log.turns.values())
    assert found.tokens.tolist() == prompt and len(log.turns) == 3, "each turn carries the one before on"
    assert [found.response[slice(*span)].tolist() for span in found.spans] == [turn.completion.tolist() for turn in log.turns.values()]
    assert log.ended is not None and log.ended.reward == {"reward": 0.5, "exact": 1.0}
    for turn in log.turns.values():
        exact(turn, checkpoint(0))


async def test_a_trained_turn_is_drawn_by_the_policy_whatever_its_client_asks(hall: NewHall, checkpoint: Checkpoints) -> None:
    """Asked not to end for a while, and to end at many tokens, the engine would forbid those: the log-probs would be another policy's."""
    room = await hall()
    played = await room.session()
    wishes = {"min_tokens": 20, "stop_token_ids": list(range(4, 40)), "temperature": 0.2, "top_k": 3, "repetition_penalty": 1.5}
    kept = "temperature, top_k, repetition_penalty, min_tokens"
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {played.key}"}) as http:
        for count in range(8):
            body = {"token_ids": [50, 60 + count], "sampling_params": {"max_tokens": 20, **wishes}}
            async with http.post(f"{room.urls[0]}/inference/v1/generate", json=body) as answer:
                assert answer.status == 200 and answer.headers["X-Myxo-Sampling-Of-Task"] == kept, await answer.text()
    turns = list((await played.log()).turns.values())
    for turn in turns:
        exact(turn, checkpoint(0))
    ended = [turn for turn in turns if turn.finish == "stop"]
    assert ended and all(len(turn.completion) < 20 for turn in ended), "they do end a turn"


async def test_turns_carry_the_tokens_that_the_sampler_kept(hall: NewHall, checkpoint: Checkpoints) -> None:
    """In pieces, streamed and whole; log-probs are the model's over these tokens."""
    room = await hall()
    played = await room.session(kept=50, sampling=Sampling(temperature=1.0, top_p=0.7, max_new_tokens=3 * CHUNK))
    messages: list[Any] = [{"role": "user", "content": "what is 2+2?"}]
    async with played.client(room.urls[0]) as client:
        messages += [(await said(client, messages)).choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "and?"}]
        assert [part async for part in await said(client, messages, stream=True)]
    turns = list((await played.log()).turns.values())
    for turn in turns:
        kept = Kept.unmarked(turn.kept)
        assert kept.problem(turn.completion, 1 << 30) is None and kept.counts.all() and kept.counts.max() > 1
        with torch.no_grad():
            logits = checkpoint(0).model(torch.tensor(turn.tokens[None].tolist())).logits[0, len(turn.prompt) - 1 : -1]
        own = [row[kept.part(at, at + 1).ids.tolist()].logsumexp(0) for at, row in enumerate(logits)]
        expected = logits[range(len(own)), turn.completion.tolist()] - torch.stack(own)
        np.testing.assert_allclose(turn.log_probs, expected, atol=EXACT)
    for found in trajectories(turns):
        assert found.kept is not None and found.kept.problem(found.response, 1 << 30) is None
        assert ((found.kept.counts > 0) == found.sampled).all()


async def test_several_answers_and_text_completions_are_turns_of_their_own(hall: NewHall, checkpoint: Checkpoints) -> None:
    """Whole and streamed; a conversation continues from the second of three answers, which continue an earlier turn."""
    room = await hall()
    played, texts = await room.session(), await room.session()
    messages: list[Any] = [{"role": "user", "content": "what is 2+2?"}]
    async with played.client(room.urls[0]) as client:
        messages += [(await said(client, messages)).choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "and?"}]
        several = await said(client, messages, n=3)
        parts = [part async for part in await said(client, messages, n=2, stream=True, stream_options={"include_usage": True})]
        second = several.choices[1].message.model_dump(exclude_none=True)
        await said(client, [*messages, second, {"role": "user", "content": "thanks"}])
    turns = (await played.log()).turns
    for turn in turns.values():
        exact(turn, checkpoint(0))
    own = [turns[several.id + number] for number in ("", "n1", "n2")]
    assert [choice.index for choice in several.choices] == [0, 1, 2] and len({turn.completion.tobytes() for turn in own}) > 1
    decode = room.desk.rollout._tokenizer.decode
    assert [choice.message.content for choice in several.choices] == [decode(turn.completion) for turn in own]
    assert several.usage is not None and several.usage.completion_tokens == sum(len(turn.completion) for turn in own)
    assert several.usage.prompt_tokens == len(own[0].prompt)
    streamed = {0: "", 1: ""}
    for choice in (choice for part in parts for choice in part.choices):
        streamed[choice.index] += choice.delta.content or ""
    assert list(streamed.values()) == [decode(turns[parts[0].id + number].completion) for number in ("", "n1")]
    assert {part.id for part in parts} == {parts[0].id} and parts[-1].usage is not None and not parts[-1].choices
    text = decode(own[1].completion)  # what was cut off is carried on by its text, which has no control tokens
    carried = len(text.strip()) == len(own[1].completion) - (own[1].finish == "stop")
    assert len(turns) == 7 and (list(turns.values())[-1].parent == several.id + "n1" or not carried)
    found = trajectories(turns.values())
    assert sum(int(one.mask.sum()) for one in found) == sum(len(turn.completion) for turn in turns.values())
    async with texts.client(room.urls[0]) as client:
        ids = (await client.completions.create(model="0", prompt=[50, 60, 61], n=2, logprobs=4)).choices
        whole = await client.completions.create(model="0", prompt="what is", max_tokens=5)
        streaming = await client.completions.create(model="0", prompt="<|im_end|>", stream=True, stream_options={"include_usage": True})
        text = [part async for part in streaming]
        lists = [[50, 60], [70, 80, 90]]
        pairs = await client.completions.create(model="0", prompt=lists, n=2, extra_body={"return_token_ids": True})
        streamed = [part async for part in await client.completions.create(**{"model": "0", "prompt": ["what", "why"], "stream": True})]
    drawn = list((await texts.log()).turns.values())
    for turn in drawn:
        exact(turn, checkpoint(0))
    turns = (await texts.log()).turns
    assert [choice.model_extra["prompt_token_ids"] for choice in pairs.choices] == [lists[0], lists[0], lists[1], lists[1]]
    for at, choice in enumerate(pairs.choices):
        turn = turns[pairs.id + (f"n{at}" if at else "")]
        own = [*lists[at // 2], *choice.model_extra["token_ids"]]
        assert (choice.index, turn.tokens.tolist(), choice.text) == (at, own, decode(turn.completion))
    assert pairs.usage.prompt_tokens == 5 and pairs.usage.completion_tokens == sum(
        len(turns[key].completion) for key in turns if pairs.id in key
    )
    assert [decode(turns[streamed[0].id + key].prompt) for key in ("", "n1")] == ["what", "why"]
    assert {part.choices[0].index for part in streamed} == {0, 1}
    by_request = (await texts.log()).turns
    assert len(drawn) == 10 and {tuple(turn.prompt) for turn in drawn[:2]} == {(50, 60, 61)}
    assert decode(by_request[whole.id].prompt) == "what is" and whole.choices[0].text == decode(by_request[whole.id].completion)
    assert "".join(part.choices[0].text for part in text if part.choices) == decode(by_request[text[0].id].completion)
    assert len(by_request[text[0].id].prompt) == len("<|im_end|>"), "a text spells no control token"
    for choice in ids:
        told = choice.logprobs
        assert told is not None and told.tokens is not None and told.text_offset is not None
        assert told.text_offset[-1] + len(told.tokens[-1]) == len("".join(told.tokens))
        for token, log_prob, top in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
            assert top[token] == log_prob and 1 <= len(top) <= 5


SUM = {"type": "object", "properties": {"sum": {"enum": [4, 5]}}, "required": ["sum"], "additionalProperties": False}


@pytest.mark.parametrize("mode", ["enforce", pytest.param("ignore", marks=pytest.mark.extra)])
async def test_a_schema_is_enforced_in_evaluations_or_changes_the_prompt_alone(hall: NewHall, checkpoint: Checkpoints, mode: str) -> None:
    """Streamed as well; a schema that is none is refused by its engine, which goes on."""
    room = await hall(gateway={"constraints": mode})
    long = Sampling(temperature=1.0, max_new_tokens=400)  # white space may stand anywhere in JSON
    evaluated, trained = await room.session(evaluation=True, sampling=long), await room.session()
    question = [{"role": "user", "content": "2+2?"}]
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SUM}}
    async with evaluated.client(room.urls[0], max_retries=0) as client, trained.client(room.urls[0], max_retries=0) as other:
        if mode == "ignore":
            raw = await other.chat.completions.with_raw_response.create(model="0", messages=question, response_format=form)
            assert raw.headers["x-myxo-ignored"] == "response_format"
            [turn] = (await trained.log()).turns.values()
            exact(turn, checkpoint(0))
            assert "this schema" in room.desk.rollout._tokenizer.decode(turn.prompt)
            return
        with pytest.raises(BadRequestError, match="response_format: .*evaluations alone"):
            await said(other, question, response_format=form)
        whole = await said(client, question, response_format=form)
        parts = [part async for part in await said(client, question, response_format=form, stream=True)]
        broken = {"type": "json_schema", "json_schema": {"name": "sum", "schema": {"type": "nothing"}}}
        with pytest.raises(BadRequestError):
            await said(client, question, response_format=broken)
        again = await said(client, question, response_format=form)
    streamed = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    for text in (whole.choices[0].message.content, streamed, again.choices[0].message.content):
        assert json.loads(str(text))["sum"] in (4, 5)


async def test_a_response_continues_a_stored_one_and_a_given_reward_is_wanted(hall: NewHall, checkpoint: Checkpoints) -> None:
    room = await hall()
    played = await room.session(environment="given")
    async with played.client(room.urls[0], max_retries=0) as client:
        ask = functools.partial(client.responses.create, model="0", instructions="be brief")
        first = await ask(input="what is 2+2?")
        second = await ask(input="and 3+3?", previous_response_id=first.id)
        other = await ask(input="and 4+4?", previous_response_id=first.id, store=False)
        events = [event async for event in await ask(input="thanks", previous_response_id=second.id, stream=True)]
        assert events[-1].type in ("response.completed", "response.incomplete")
        third = events[-1].response
        assert third.previous_response_id == second.id
        for unknown in ("resp_nothing", other.id):
            with pytest.raises(NotFoundError) as caught:
                await ask(input="x", previous_response_id=unknown)
            assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")
    named = await room.session()
    async with named.client(room.urls[0], max_retries=0) as client:
        said: list[Any] = [{"role": "user", "content": text} for text in ("a", "b", "c", "d")]
        conversation = await client.conversations.create(items=said[:1])
        ask = functools.partial(client.responses.create, model="0", instructions="be brief", conversation=conversation.id)
        answers = [await ask(input=said[1:2])]
        items = await client.conversations.items.create(conversation.id, items=said[2:3])
        assert [(item.role, item.content[0].text) for item in items.data] == [("user", "c")]
        once = {"Idempotency-Key": "once"}
        answers += [await ask(input=said[3:], extra_headers=once) for _ in range(2)]
        assert answers[1].id == answers[2].id and answers[1].output == answers[2].output, "a repetition continues nothing"
        await ask(input="x", store=False)
        answers.append(await ask(input="e"))
        whole = [said[0], said[1], *answers[0].output, *said[2:], *answers[1].output, {"role": "user", "content": "e"}]
        told = await client.responses.create(model="0", instructions="be brief", input=whole)
        for conversations in (
            client.responses.create(model="0", input="x", conversation="c"),
            client.conversations.items.create("c", items=said),
        ):
            with pytest.raises(NotFoundError) as caught:
                await conversations
            assert caught.value.code == "conversation_not_found"
    by_request = (await named.log()).turns
    assert by_request[answers[-1].id].prompt.tolist() == by_request[told.id].prompt.tolist(), "as a client that sends all of it has it"
    assert by_request[answers[-1].id].conversation and len(by_request) == 5
    turns = (await played.log()).turns
    for turn in turns.values():
        exact(turn, checkpoint(0))
    before = {first.id: (), second.id: (first.id,), other.id: (first.id,), third.id: (first.id, second.id)}
    # a random model may write what is no answer, such as a control token: that is rendered anew
    assert all(turns[name].parent in (None, *earlier) for name, earlier in before.items())
    prompts = [room.desk.rollout._tokenizer.decode(turns[name].prompt) for name in before]
    read = [[text for text in ("2+2", "3+3", "4+4", "thanks") if text in prompt] for prompt in prompts]
    assert read == [["2+2"], ["2+2", "3+3"], ["2+2", "4+4"], ["2+2", "3+3", "thanks"]]
    stored = [[message["role"] for message in json.loads(turns[name].messages)] for name in (first.id, second.id, third.id)]
    assert stored == [["user", "assistant"]] * 3, "each message is stored once"
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {played.key}"}) as http:
        for body, status in (({}, 400), ({"reward": None}, 400), ({"reward": 0.5}, 200), ({"reward": 0.5}, 200)):
            async with http.post(f"{room.urls[0]}/v1/session/end", json=body) as answer:
                assert answer.status == status and (status == 200 or (await answer.json())["error"]["param"] == "reward")


async def test_the_other_formats_carry_their_sessions_on_too(hall: NewHall, checkpoint: Checkpoints) -> None:
    """Anthropic's SDK, then OpenAI's responses: two turns each, the second one streamed, recorded as one trajectory."""
    room = await hall()
    claude, played = await room.session(), await room.session()
    said_by_user: Any = [{"role": "user", "content": "what is 2+2?"}]
    async with AsyncAnthropic(base_url=room.urls[0], api_key=claude.key) as client:
        raw = await client.messages.with_raw_response.create(
            model="0", max_tokens=20, system="be brief", messages=said_by_user, metadata={"user_id": "me"}
        )
        assert raw.headers["x-myxo-ignored"] == "metadata"
        first = await raw.parse()
        answered: Any = [*said_by_user, {"role": "assistant", "content": first.content}, {"role": "user", "content": "and 3+3?"}]
        async with client.messages.stream(model="0", max_tokens=20, system="be brief", messages=answered) as stream:
            second = await stream.get_final_message()
        counted = await client.messages.count_tokens(model="0", system="be brief", messages=said_by_user)
        for wrong, kind in (("nobody", anthropic.AuthenticationError), (played.key + "0", anthropic.AuthenticationError)):
            with pytest.raises(kind):
                await client.with_options(api_key=wrong).messages.create(model="0", max_tokens=2, messages=said_by_user)
        with pytest.raises(anthropic.ConflictError, match="version 0, older than the 7"):
            asked: Any = {"model": "0", "max_tokens": 2, "messages": said_by_user, "extra_body": {"min_version": 7}}
            await client.with_options(max_retries=0).messages.create(**asked)
    turns = list((await claude.log()).turns.values())
    assert [turn.request for turn in turns] == [first.id, second.id]
    assert counted.input_tokens == len(turns[0].prompt) == first.usage.input_tokens + (first.usage.cache_read_input_tokens or 0)
    assert {turn.finish: reason for turn, reason in zip(turns, (first.stop_reason, second.stop_reason), strict=True)}.items() <= {
        ("stop", "end_turn"),
        ("length", "max_tokens"),
    }
    async with played.client(room.urls[0]) as openai_client:
        begun = await openai_client.responses.create(model="0", instructions="be brief", input="what is 2+2?", max_output_tokens=20)
        items: Any = [*said_by_user, *begun.output, {"role": "user", "content": "and 3+3?"}]
        stream_of = await openai_client.responses.create(model="0", instructions="be brief", input=items, max_output_tokens=20, stream=True)
        ended = [event async for event in stream_of][-1].response
    responses = list((await played.log()).turns.values())
    assert [turn.request for turn in responses] == [begun.id, ended.id]
    for pair in (turns, responses):
        found = trajectories(pair)
        # a special token that was drawn is no text: what is rendered of the answer then is something else
        said = pair[0].completion[:-1] if pair[0].finish == "stop" else pair[0].completion
        whole = not set(said.tolist()) & SPECIAL
        assert len(found) == 1 or not whole, "the second turn carries the first one on"
        assert sum(int(one.mask.sum()) for one in found) == sum(len(turn.completion) for turn in pair)
        for turn in pair:
            exact(turn, checkpoint(0))
    tokenizer = room.desk.rollout._tokenizer
    assert "".join(block.text for block in second.content) == tokenizer.decode(turns[1].completion)
    assert ended.output_text == tokenizer.decode(responses[1].completion)


async def test_a_turn_ends_in_the_engine_once_its_session_does(hall: NewHall) -> None:
    """The clients stay and wait: one for an answer, one for a stream."""
    room = await hall(gateway={"gateway_checkpoint_tokens": 2000})
    long = Sampling(temperature=1.0, max_new_tokens=1900, min_new_tokens=1900)
    waiting, streaming = await room.session(sampling=long), await room.session(sampling=long)
    question = [{"role": "user", "content": "count"}]

    async def ended_as(played: Played, stream: bool) -> str:
        async with played.client(room.urls[0], max_retries=0) as client:
            with pytest.raises(Exception, match="has ended: given up") as caught:
                async for _ in await said(client, question, stream=stream):
                    pass
            return str(caught.value)

    asking = [asyncio.create_task(ended_as(waiting, False)), asyncio.create_task(ended_as(streaming, True))]
    await until(lambda: room.desk.client.generating == 2, "both turns in the engine", 240)
    for played in (waiting, streaming):
        await room.sessions.end(played.session.id, SessionEnded(at=time.time(), reason="given up"))
    began = time.monotonic()
    await until(lambda: resting(room.desk.client), "an engine without requests", 20)
    assert not [task for task in asking if task.done() and task.exception()], "a client saw something else than the session's end"
    print(f"the engine rested {time.monotonic() - began:.2f} s after the sessions' end")
    await asyncio.wait_for(asyncio.gather(*asking), 60)
    for played in (waiting, streaming):
        log = await played.log()
        assert not log.turns and [len(turn.completion) for turn in log.pending.values()] == [0]


@pytest.mark.extra
async def test_each_turn_has_a_span_in_the_trace_of_its_group(hall: NewHall) -> None:
    room = await hall()
    with OtlpReceiver() as receiver:
        room.environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = receiver.url
        url = await room.start()
        long = Sampling(temperature=1.0, max_new_tokens=1500, min_new_tokens=1500)
        played, other = await room.session(), await room.session(group="g00000002", rollout=3, attempt=1, sampling=long)
        messages: list[Any] = [{"role": "user", "content": "what is 2+2?"}]
        began = time.time()
        async with played.client(url) as client, other.client(url, max_retries=0) as elsewhere:
            first = await said(client, messages)
            messages += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "and 3+3?"}]
            await said(client, messages)
            gone = asyncio.create_task(said(elsewhere, messages))
            await until(lambda: being_drawn(other), "a turn that is being drawn", 120)
            gone.cancel()
            await until(lambda: asyncio.sleep(0, len(receiver.named("turn")) == 3), "three spans", 240)
        log = await played.log()
    first_span, second_span, lost = sorted(receiver.named("turn"), key=lambda span: span.started)
    for span, turn in zip((first_span, second_span), log.turns.values(), strict=True):
        assert span.service == "gateway" and span.parent and began <= span.started <= span.ended and not span.failed
        assert span.attributes["request"] == turn.request and span.attributes["replica"] == turn.replica == room.desk.service.instance
        told = [span.attributes[name] for name in ("prompt_tokens", "tokens", "finish", "group", "rollout")]
        assert told == [len(turn.prompt), len(turn.completion), turn.finish, "g00000001", 0]
    turn, following = log.turns.values()
    carried_on = np.array_equal(following.prompt[: len(turn.tokens)], turn.tokens)  # not where the model drew a marker
    assert second_span.attributes.get("continues") == (turn.request if carried_on else None)
    assert first_span.trace == second_span.trace and first_span.parent == second_span.parent
    assert lost.failed and "client is gone" in lost.error and lost.trace != first_span.trace
    assert (lost.attributes["group"], lost.attributes["attempt"], lost.attributes["rollout"]) == ("g00000002", 1, 3)


async def being_drawn(played: Played) -> bool:
    return bool((await played.log()).pending)
