"""Compares `remote_rm` with slime's over a real server, and `random` over many draws; `tests.oracle.rewards` calls both."""

import asyncio
import importlib
import json
from types import SimpleNamespace
from typing import Any
from zlib import crc32

from services.reward.remote_rewards import RemoteScorer
from shared.config.reward_section import REMOTE, RewardSection
from shared.hooks.slime import reward_dispatch
from shared.rewards.reference import Reference, label_text
from shared.rewards.verifiers import verify
from shared.schema.messages import Generated
from shared.schema.sample import Sample
from tests.support import reward_cases
from tests.support.http_server import http_server
from tests.support.reward_cases import Case
from tests.support.valid_messages import example

DRAWS = 400

OF_CASES = ("f1", "gpqa", "math")
"""The rewards whose cases are sent to a server."""


def random_differs() -> bool:
    """Tells which rewards both give at random, and how often; returns whether these are others."""
    async_rm = importlib.import_module("slime.rollout.rm_hub").async_rm
    sample = SimpleNamespace(response="", label=None, metadata={"rm_type": "random"}, custom_rm_path=None)
    slimes = [asyncio.run(async_rm(SimpleNamespace(custom_rm_path=None, rm_type=None), sample)) for _ in range(DRAWS)]
    ours = [verify("random", "", Reference(None)) for _ in range(DRAWS)]
    print(f"random: of {DRAWS} draws slime rewards {sum(slimes)}, Myxo {sum(ours)}; values {sorted(set(slimes))}, {sorted(set(ours))}")
    return set(slimes) != set(ours)


def answer(body: dict[str, Any], _: int) -> Any:
    """Returns a number, or a mapping with one, that depends on what is asked alone."""
    seed = crc32(json.dumps(body, sort_keys=True).encode())
    reward = (seed % 7 - 3) / 4
    return {"score": reward, "acc": seed % 2} if seed % 3 == 0 else reward


async def remote_differs(count: int) -> int:
    """Tells for how many cases the request or the reward differ, of the reward service and of the function for hooks; returns that."""
    cases = [case for name in OF_CASES for case in reward_cases.cases(name, count // len(OF_CASES) + 1)][:count]
    async with http_server(answer) as slimes, http_server(answer) as services, http_server(answer) as hooks:
        hub = importlib.import_module("slime.rollout.rm_hub")
        scorer = RemoteScorer(RewardSection(rm_type=REMOTE, rm_url=services.url), lambda sample: sample.prompt_text)
        expected = [await hub.remote_rm(SimpleNamespace(rm_url=slimes.url), _given(case)) for case in cases]
        scores = [(await scorer.score(_nobodys(), [_stored(case)], REMOTE, "score"))[0] for case in cases]
        of_hooks = [await reward_dispatch.remote_rm(SimpleNamespace(rm_url=hooks.url), _given(case)) for case in cases]  # type: ignore[arg-type]
        await scorer.close()
        await hub._get_shared_session().close()
    counted = [value["score"] if isinstance(value, dict) else value for value in expected]
    triples = zip(slimes.asked, services.asked, hooks.asked, strict=True)
    rewards = zip(counted, [score.reward for score in scores], expected, of_hooks, strict=True)
    differ = sum(not (a == b == c) for a, b, c in triples) + sum(a != b or c != d for a, b, c, d in rewards)
    print(f"remote_rm: {len(cases)} cases, requests and rewards of service and hooks; {differ} differ")
    return differ


def _given(case: Case) -> SimpleNamespace:
    response, label, metadata = case
    return SimpleNamespace(prompt="1+1=", response=response, label=label, metadata=metadata)


def _stored(case: Case) -> Sample:
    response, label, metadata = case
    text, is_json = label_text(label)
    return example(Sample, group="g00000000", text=response, prompt_text="1+1=", label=text, label_json=is_json, metadata=metadata)


def _nobodys() -> Generated:
    return Generated.model_construct(group="g00000000")
