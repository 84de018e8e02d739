"""How far the log-probs of engine and trainer lie apart in a model with experts, with the engine's choice of experts and without it.

``python -m benchmarks.routing_replay [--device cuda] [--shape cut] [--json FILE] [--log FILE]`` makes a random Qwen3-MoE, draws responses
to random prompts at temperature 1 from an engine that tells its experts, and takes the log-probs of their tokens anew by the trainer,
through the experts of its own routers (``own``) and through those of the engine (``replayed``).

Columns. ``mean``, ``p99``, ``max``: of the absolute difference of a drawn token's log-probs, in nats. ``mean_same``, ``mean_other``: the
mean over tokens whose own experts are the engine's in all layers, and over the others. ``other_tokens``: share of tokens, prompts as well,
that have another set of experts than the engine's in some layer. ``other_choices``: share of tokens and layers. ``engine_again``: the same
figures between the engine and itself, the drawn sequences given to it as prompts. On a GPU it takes these from its prefix cache, with the
experts of the first pass: that they are kept is what is seen then.
"""

import argparse
import asyncio
import json
import platform
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from services.rollout.engine.engine_process import FlagValue
    from shared.schema.sample import ExpertChoices, Sample

RESULTS = Path(__file__).parent / "results" / "routing_replay.json"
SIZES = {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.05,
}
SMALL = {"vocab_size": 512, "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16, "num_experts": 8}
SHAPES = {"cut": SIZES, "tiny": SIZES | SMALL | {"num_attention_heads": 4, "num_experts_per_tok": 2}}
"""By name; the second is for trying this out on a CPU."""

GPU_FLAGS: "dict[str, FlagValue]" = {
    "attention-backend": "triton",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "mem-fraction-static": 0.3,
    "cuda-graph-max-bs-decode": 64,
    "disable-prefill-cuda-graph": True,
}
MICRO_BATCH_TOKENS = 8192
DTYPES = ("bfloat16", "float32")
"""Of the trainer; the engine's is bfloat16."""


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of engine and trainer")
    parser.add_argument("--shape", choices=SHAPES, default="cut", help="of the model")
    parser.add_argument("--responses", type=int, default=256, help="how many")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=256, help="of each response")
    parser.add_argument("--start-seconds", type=float, default=300, help="for the engine")
    parser.add_argument("--log", type=Path, default=Path("engine.log"), help="the engine's")
    parser.add_argument("--json", type=Path, help=f"write the figures there; the repository's are in {RESULTS.name}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        write_model(model, SHAPES[options.shape])
        samples, choices, again, told = asyncio.run(drawn(model, options))
        report: dict[str, Any] = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "shape": options.shape,
            **SHAPES[options.shape],
            **told,
            "rows": [{"trainer": None, "experts": "engine_again", **again}],
        }
        for dtype in DTYPES:
            for row in measured(model, samples, choices, dtype, options.device):
                report["rows"].append(row)
                print(json.dumps(row), flush=True)
                if options.json is not None:  # what there is, should the next part fail
                    options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def write_model(directory: Path, sizes: dict[str, Any]) -> None:
    """A random checkpoint in bfloat16, with a tokenizer that knows a few characters: the engine wants one."""
    import torch
    import transformers

    from tests.support.tiny_model import character_tokenizer

    torch.manual_seed(1)
    config = transformers.Qwen3MoeConfig(**sizes, decoder_sparse_step=1, norm_topk_prob=True, tie_word_embeddings=False)
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(directory)
    character_tokenizer().save_pretrained(directory)


async def drawn(model: Path, options: argparse.Namespace) -> "tuple[list[Sample], ExpertChoices, dict[str, float], dict[str, Any]]":
    """Responses with log-probs and experts of the engine; what it says of the same sequences when they are prompts; about the run."""
    from services.rollout.engine.engine_client import EngineClient
    from services.rollout.engine.engine_process import EngineProcess, engine_command
    from services.rollout.engine.generation import GenerationRequest
    from services.rollout.in_flight import Partial
    from shared.model.families import read_architecture
    from shared.process.embedded_servers import free_port
    from shared.schema.messages import Sampling
    from shared.schema.sample import ExpertChoices, Sample

    choices = ExpertChoices.of(read_architecture(model))
    assert choices is not None
    count, vocabulary = options.tokens, json.loads((model / "config.json").read_text())["vocab_size"]
    prompts = np.random.default_rng(5).integers(4, vocabulary, (options.responses, options.prompt_tokens)).astype(np.int32)
    flags: dict[str, FlagValue] = {"enable-return-routed-experts": True, "dtype": "bfloat16", "max-running-requests": 64}
    command = engine_command(
        model, free_port(), device=options.device, random_seed=1, flags=flags | (GPU_FLAGS if options.device == "cuda" else {})
    )
    engine = EngineProcess(command, options.log)
    samples, agreeing = [], []
    try:
        started = await engine.ready(options.start_seconds)
        async with await EngineClient.connect(engine.receiver) as client:
            sampling = Sampling(temperature=1.0, max_new_tokens=count)
            requests = [GenerationRequest(prompt, count, ignore_eos=True, routed_from=0) for prompt in prompts]
            began = time.monotonic()
            generations = await client.generate_group(requests, sampling)
            seconds = time.monotonic() - began
            for index, (prompt, generation) in enumerate(zip(prompts, generations, strict=True)):
                partial = Partial(choices=choices)
                partial.extend(generation, count)
                sample = Sample(
                    "g", index, prompt, partial.tokens, partial.log_probs, np.ones(count, np.uint8), [(0, count, 0)], "length", ""
                )
                sample.routed_experts = partial.routed
                if problem := partial.unrouted or choices.problem(partial.routed, sample.length - 1):
                    raise RuntimeError(problem)
                samples.append(sample)
            whole = [np.concatenate([sample.prompt, sample.response]) for sample in samples[:64]]
            once_more = [GenerationRequest(tokens, 1, ignore_eos=True, routed_from=0) for tokens in whole]
            for sample, generation in zip(samples, await client.generate_group(once_more, sampling), strict=False):
                partial = Partial(choices=choices)
                partial.extend(generation, 1)
                assert partial.routed is not None and sample.routed_experts is not None
                agreeing.append(same(partial.routed[: sample.length - 1], sample.routed_experts))
    finally:
        engine.stop(0)
    told = {"engine_start_seconds": round(started, 1), "drawn_tokens": count * len(samples), "draw_seconds": round(seconds, 2)}
    return samples, choices, shares(np.concatenate(agreeing)), told | versions(options.device)


def versions(device: str) -> dict[str, str]:
    """What the figures were measured with."""
    from importlib.metadata import version

    import torch

    where = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {"device": where, **{name: version(name) for name in ("torch", "sglang", "megatron-core")}}


def same(ours: NDArray[np.integer], theirs: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Whether tokens go through the same set of experts: bool [tokens, layers] of [tokens, layers, experts a token]."""
    return (np.sort(ours, -1) == np.sort(theirs, -1)).all(-1)


def shares(agreeing: NDArray[np.bool_]) -> dict[str, float]:
    """The shares of tokens, and of tokens and layers, that go through other experts."""
    return {"other_tokens": float(1 - agreeing.all(-1).mean()), "other_choices": float(1 - agreeing.mean())}


def measured(model: Path, samples: "list[Sample]", choices: "ExpertChoices", dtype: str, device: str) -> list[dict[str, Any]]:
    """The differences of one trainer, through its own experts and through the engine's.

    Raises RuntimeError: where the engine's are replayed, a token went through others.
    """
    import torch

    from services.trainer.actor import Actor
    from services.trainer.backend import TrainerSettings
    from services.trainer.packing import pack
    from services.trainer.parallel import runtime
    from shared.config.trainer_section import TrainerSection

    section = TrainerSection(train_dtype=dtype, train_device=device)
    actor = Actor.create(TrainerSettings(section), model)
    each = max(1, MICRO_BATCH_TOKENS // samples[0].length)
    packs = [samples[start : start + each] for start in range(0, len(samples), each)]
    own_agrees: NDArray[np.bool_] | None = None
    rows = []
    try:
        for name, given in (("own", None), ("replayed", choices)):
            differences, agreeing = [], []
            for part in packs:
                batch = pack(part, [1.0] * len(part), given)
                (found,), (routing,) = actor.log_probs_and_routing([batch])
                trained = batch.loss_mask > 0
                differences.append((found.cpu() - batch.fields["rollout_log_probs"])[trained].abs().double().numpy())
                told = pack(part, [1.0] * len(part), choices).experts
                assert told is not None
                chosen = torch.stack([routing[layer + 1] for layer in choices.layers], 1).numpy()
                known = (told.numpy() >= 0).all((1, 2))  # the engine does not compute a sequence's last token
                agrees = np.ones((len(known), len(choices.layers)), np.bool_)
                agrees[known] = same(chosen[known], told.numpy()[known])
                agreeing.append((agrees, known, trained.numpy()))
            difference = np.concatenate(differences)
            everywhere = np.concatenate([agrees[known] for agrees, known, _ in agreeing])
            if given is not None and not everywhere.all():
                raise RuntimeError("the replayed experts were not used")
            if own_agrees is None:
                own_agrees = np.concatenate([agrees[trained].all(-1) for agrees, _, trained in agreeing])
            rows.append({
                "trainer": dtype,
                "experts": name,
                "mean": float(difference.mean()),
                "p99": float(np.quantile(difference, 0.99)),
                "max": float(difference.max()),
                "mean_same": float(difference[own_agrees].mean()),
                "mean_other": float(difference[~own_agrees].mean()) if not own_agrees.all() else None,
                **shares(everywhere),
            })  # fmt: skip
    finally:
        actor.close()
        runtime.stop()
    return rows


if __name__ == "__main__":
    sys.exit(main())
