"""What an engine sampled is what the trainer computes for it: bit by bit where the run asks for it, and over the tokens that were kept."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.rollout.engine.engine_process import EngineProcess
from services.rollout.engine.generation import GenerationRequest
from services.rollout.in_flight import Partial
from services.trainer.actor import Actor
from services.trainer.packing import pack
from services.trainer.parallel import runtime
from shared.schema.messages import Sampling
from shared.schema.sample import Sample, SampleLimits, decode, encode
from tests.integration.engine.conftest import Checkpoint, Checkpoints, fresh_client, running_engine
from tests.support.service_process import ROOT
from tests.unit.trainer.megatron import rank_steps
from tests.unit.trainer.megatron.tiny import make_checkpoint, sequences


def figures(directory: Path, kind: str, *words: str) -> list[dict[str, Any]]:
    """What the benchmark says, for a model of odd widths whose engine decodes several sequences at once."""
    make_checkpoint(kind, directory / "model")
    command = [sys.executable, "-m", "benchmarks.alignment", "--model", str(directory / "model"), "--steps", "1", "--tokens", "70"]
    done = subprocess.run([*command, "--out", str(directory / "found.json"), *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows: list[dict[str, Any]] = json.loads((directory / "found.json").read_text())["rows"]
    return rows


@pytest.mark.extra(each=True)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind, backend", [("qwen3", "megatron"), ("qwen2", "torch")])
def test_nothing_differs(tmp_path: Path, kind: str, backend: str) -> None:
    words = ("--backend", backend, "--cases", "off", "bitwise")
    plain, bitwise = figures(tmp_path, kind, *words)
    assert bitwise["tokens"] == plain["tokens"] == 8 * 70
    assert plain["differing"] > 0  # or this test could not fail
    assert (bitwise["differing"], bitwise["max"], bitwise["k3"]) == (0, 0.0, 0.0)


NEW_TOKENS, VOCAB, MOST_KEPT = 60, 100, 90
LIMITS = SampleLimits(VOCAB, log_probs_reader="this test reads them", kept=True)


@pytest.fixture(scope="module")
def actor(checkpoint: Checkpoints) -> Iterator[Actor]:
    yield rank_steps.actor(checkpoint(0).path, temperature=0.7)
    runtime.stop()


@pytest.fixture(scope="module")
def min_p_engine(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine whose requests have a min_p unless they say otherwise, as runs give it."""
    flags = {"preferred-sampling-params": '{"min_p": 0.05}', "sampling-mask-max-tokens": MOST_KEPT, "dtype": "float32"}
    with running_engine(checkpoint(0).path, tmp_path_factory.mktemp("engine"), flags) as process:
        yield process


async def generated(engine: EngineProcess, checkpoint: Checkpoint, settings: dict[str, Any], kept: int) -> list[Sample]:
    """Samples in two pieces: the second continues from the first's tokens."""
    async with fresh_client(engine, checkpoint) as client:
        prompts = [prompt.int().numpy() for prompt in sequences(6, seed=5, longest=20)]
        partials = [Partial() for _ in prompts]
        for count in (NEW_TOKENS // 3, NEW_TOKENS - NEW_TOKENS // 3):
            sampling = Sampling(temperature=0.7, max_new_tokens=NEW_TOKENS, **settings)
            requests = [
                GenerationRequest(np.concatenate([prompt, partial.tokens]), count, ignore_eos=True, kept=kept)
                for prompt, partial in zip(prompts, partials, strict=True)
            ]
            for partial, generation in zip(partials, await client.generate_group(requests, sampling), strict=True):
                partial.extend(generation, NEW_TOKENS)
        mask, segments = np.ones(NEW_TOKENS, np.uint8), [(0, NEW_TOKENS, 0)]
        return [
            Sample("g", index, prompt, partial.tokens, partial.log_probs, mask, segments, "length", "", kept=partial.kept)
            for index, (prompt, partial) in enumerate(zip(prompts, partials, strict=True))
        ]


def largest_ratio_gap(actor: Actor, samples: list[Sample], replays_kept: bool) -> float:
    """max |ratio - 1| of the samples' tokens, after their way through the store."""
    read = decode(encode(samples, 4000), LIMITS if replays_kept else SampleLimits(VOCAB))
    packed = pack(read, [1.0] * len(read))
    packed = packed if replays_kept else replace(packed, kept=None)
    [found] = actor.log_probs([packed])
    ratio = (found - packed.fields["rollout_log_probs"]).exp()[packed.loss_mask > 0]
    return float((ratio - 1).abs().max())


SETTINGS = {"top_p": {"top_p": 0.9}, "top_k": {"top_k": 20}, "all": {"top_p": 0.95, "top_k": 30}}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["top_p", *(pytest.param(name, marks=pytest.mark.extra) for name in ("min_p", "top_k", "all"))])
def test_the_ratio_at_equal_weights_is_that_of_a_run_without_truncation(
    name: str,
    actor: Actor,
    engine: EngineProcess,
    checkpoint: Checkpoints,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    sampling: EngineProcess = request.getfixturevalue("min_p_engine") if name in ("min_p", "all") else engine
    samples = asyncio.run(generated(sampling, checkpoint(0), SETTINGS.get(name, {}), MOST_KEPT))
    plain = largest_ratio_gap(actor, asyncio.run(generated(engine, checkpoint(0), {}, 0)), False)
    replayed, unrestricted = largest_ratio_gap(actor, samples, True), largest_ratio_gap(actor, samples, False)
    counts = np.concatenate([sample.kept.counts for sample in samples if sample.kept is not None])
    print(name, plain, replayed, unrestricted, counts.mean(), counts.max())
    record_property("ratio_gaps", {"plain": plain, "replayed": replayed, "unrestricted": unrestricted})
    assert plain < 1e-4 and replayed < 1e-4
    assert unrestricted > 0.02
    assert 1 <= counts.min() <= counts.mean() <= counts.max() <= MOST_KEPT < VOCAB
    assert name == "top_k" or counts.min() < counts.max()
