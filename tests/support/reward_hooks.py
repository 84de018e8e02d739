"""Functions for the hooks that the reward service calls: good ones, and ones that misbehave."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from shared.hooks import Arguments, DynamicFilterOutput, HookSample


async def unhurried(args: Arguments, sample: HookSample, **_: Any) -> float:
    """The length of the text, after some seconds until there is a file ``hurry`` beside the prompts: a run waits for a test."""
    end = time.monotonic() + 3
    while time.monotonic() < end and not Path(args.prompt_data).with_name("hurry").exists():
        await asyncio.sleep(0.1)
    return float(len(sample.response))


async def length(args: Arguments, sample: HookSample, **_: Any) -> float:
    """The reward is the length of the text; some texts misbehave."""
    await asyncio.sleep(0)
    match sample.response:
        case "sleep":
            await asyncio.sleep(3600)
        case "spin":
            while True:
                time.sleep(0.01)
        case "raise":
            raise RuntimeError("cannot read this")
        case "exit":
            raise SystemExit(3)
        case "die":
            os._exit(3)
        case "nan":
            return float("nan")
        case "text":
            return "much"  # type: ignore[return-value]
        case "none":
            return None  # type: ignore[return-value]
        case "chatter":
            print("words", flush=True)
            os.write(1, b"words from C\n")
            assert sys.stdin.read() == ""
            asked = ("NATS_URL", "MYXO_RUN", "WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "JUDGE_KEY")
            assert [name for name in asked if name in os.environ] == ["MYXO_RUN", "JUDGE_KEY"], sorted(os.environ)
    return float(len(sample.response))


def checksum(args: Arguments, sample: HookSample, **_: Any) -> float:
    """The reward, from 0 to 1, is drawn by the text: two samples of an untrained model hardly ever have the same."""
    return zlib.crc32(sample.response.encode()) / 2**32


def turns_and_length(args: Arguments, sample: HookSample, **_: Any) -> float:
    """How many turns are the model's own, and a thousandth of how long the whole response is."""
    assert "".join(sample.turns) in sample.response or len(sample.turns) > 1  # type: ignore[attr-defined]
    return len(sample.turns) + len(sample.response) / 1000  # type: ignore[attr-defined]


_together: list[asyncio.Event] = []


async def judge(args: Arguments, sample: HookSample, **_: Any) -> float:
    """Waits as one that asks a judge over the network: ``together N`` until N samples wait at once, ``late`` for ever; some misbehave."""
    word, _, number = sample.response.partition(" ")
    match word:
        case "together":
            _together.append(asyncio.Event())
            if len(_together) == int(number):
                for event in _together:
                    event.set()
            await _together[-1].wait()
        case "late":
            await asyncio.sleep(3600)
        case "deaf":
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(3600)
        case "wait":
            await asyncio.sleep(float(number))
        case "compute":
            time.sleep(float(number))
    return float(number or 0)


_alone = 0


def alone(args: Arguments, sample: HookSample, **_: Any) -> float:
    """The most samples that were in hand at once; takes as many seconds as the response says."""
    global _alone
    _alone += 1
    time.sleep(float(sample.response))
    most, _alone = _alone, _alone - 1
    return float(most)


def leaves_a_child(args: Arguments, sample: HookSample, **_: Any) -> float:
    """Hangs in a process that it started, whose id it writes to the label's path."""
    assert sample.label is not None
    child = subprocess.Popen(["sleep", "3600"])
    Path(sample.label).write_text(str(child.pid))
    child.wait()
    raise AssertionError


def seen(args: Arguments, sample: HookSample, **_: Any) -> dict[str, Any]:
    """Named rewards, of what the function saw; a plain function."""
    assert args.reward_key == "match" and args.n_samples_per_prompt == 2
    assert (sample.prompt, sample.metadata, sample.status) == ("40+2=", {"level": 3}, HookSample.Status.COMPLETED)
    assert (sample.tokens, sample.response_length, sample.loss_mask, sample.weight_versions) == ([1, 0, 1], 2, [1, 1], [3, 3])
    assert sample.rollout_log_probs == [0.0, 0.0]
    return {"match": sample.response == sample.label, "length": np.float32(len(sample.response)), "pred": sample.response}


async def ranks(args: Arguments, samples: list[HookSample]) -> list[float]:
    """Rewards of a whole group: each sample's rank by length."""
    order = sorted(len(sample.response) for sample in samples)
    return [float(order.index(len(sample.response))) for sample in samples]


def sample_or_rollout(args: Arguments, given: HookSample | list[HookSample]) -> float | list[float]:
    """As slime calls a function of a run that fans out: a list for a rollout that gave several samples."""
    return [float(len(given))] * len(given) if isinstance(given, list) else 1.0


def keep_long(args: Arguments, group: list[HookSample], **_: Any) -> DynamicFilterOutput:
    """Keeps groups whose rewards are long on average."""
    mean = sum(sample.get_reward_value(args) for sample in group) / len(group)
    return DynamicFilterOutput(mean >= 2, None if mean >= 2 else "short")


def keep_by_numpy(args: Arguments, group: list[HookSample]) -> Any:
    return np.std([sample.get_reward_value(args) for sample in group]) > 0


def remove_shortest(args: Arguments, groups: list[list[HookSample]]) -> None:
    for group in groups:
        min(group, key=lambda sample: len(sample.response)).remove_sample = True


def double(args: Arguments, groups: list[list[HookSample]]) -> None:
    """Changes rewards, which counts, and texts, which does not."""
    for group in groups:
        for sample in group:
            sample.reward = 2 * sample.get_reward_value(args)
            sample.response = ""


def hang_on_sleep(args: Arguments, groups: list[list[HookSample]]) -> None:
    if any(sample.response == "sleep" for group in groups for sample in group):
        time.sleep(3600)


def write_down(args: Arguments, all_groups: list[list[HookSample]], data_source: object) -> None:
    """Appends what it sees to a file in the run's directory."""
    assert data_source is None
    directory = Path(args.dir)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "seen.jsonl").open("a") as file:
        for group in all_groups:
            samples = [[sample.response, sample.get_reward_value(args), sample.remove_sample] for sample in group]
            file.write(json.dumps({"group": group[0].group_index, "samples": samples}) + "\n")
