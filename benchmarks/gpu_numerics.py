"""How far bfloat16 is from float32, in layouts of several GPUs and on one: log-probs, loss and gradient norm.

``python -m benchmarks.gpu_numerics [--gpus 2] [--device cuda|cpu] [--models NAME …] [--json FILE] [--write]`` computes the log-probs of
fresh sequences and one training step of a dense model, of one with latent attention (DeepSeek-V3's architecture), of a mixture of experts,
of one with linear attention (Qwen3-Next's), and of others, each from the same weights, which bfloat16 holds exactly, on the same batches.
Everything is compared with one GPU in float32 (TF32 off):

* one GPU in bfloat16: this is the rounding that the format costs;
* the layout in bfloat16, and in float32;
* transformers in bfloat16, whose code is not ours.

A ratio is the mean difference of log-probs by that of one GPU in bfloat16. The command exits 1 where a layout's is above `LARGEST_RATIO`.
``--backend torch`` trains transformers' models under FSDP2, in the layouts that these have; one GPU is that backend's then as well.
``--device cpu`` takes models of a few thousand weights, over gloo. ``--write`` puts the figures of benchmarks/results into the docs.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.page_table import put_table

LARGEST_RATIO = 1.2
"""Of a layout's mean difference to that of one GPU; rounding falls differently where other kernels add in another order."""

RESULTS = Path(__file__).parent / "results" / "gpu_numerics.json"
PAGE = Path(__file__).parents[1] / "docs" / "layouts.md"

MEDIUM = {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
LENGTHS = {"cuda": (2048, 1531, 700, 257, 64, 5), "cpu": (61, 40, 17, 5)}
"""Tokens of the sequences of a micro-batch, by device; one is scored, and `step_batches` of them make a step."""

ROUTED = {"num_experts_per_tok": 4, "moe_intermediate_size": 512, "norm_topk_prob": True}
MODELS: dict[str, dict[str, Any]] = {
    "dense": MEDIUM | {"model_type": "qwen3", "num_key_value_heads": 4, "head_dim": 64},
    "latent attention": MEDIUM
    | ROUTED
    | {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 16,
        "q_lora_rank": 384,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.8,
    },
    "mixture of experts": MEDIUM
    | ROUTED
    | {"model_type": "qwen3_moe", "num_key_value_heads": 4, "head_dim": 64, "num_experts": 16, "decoder_sparse_step": 1},
    "linear attention": MEDIUM
    | ROUTED
    | {"model_type": "qwen3_next", "num_key_value_heads": 4, "head_dim": 64, "num_experts": 16, "shared_expert_intermediate_size": 512}
    | {"linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "sinks and windows": MEDIUM
    | {"model_type": "gpt_oss", "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 512, "num_local_experts": 16}
    | {"num_experts_per_tok": 4, "sliding_window": 128, "swiglu_limit": 7.0},
    "gemma": MEDIUM
    | {"model_type": "gemma3_text", "num_key_value_heads": 4, "head_dim": 64, "sliding_window": 128, "query_pre_attn_scalar": 64}
    | {"tie_word_embeddings": True, "pad_token_id": None},
}
MODELS["sparse attention"] = MODELS["latent attention"] | {"model_type": "glm_moe_dsa", "n_group": 1, "topk_group": 1}
MODELS["sparse attention"] |= {"index_topk": 512, "index_n_heads": 16, "index_head_dim": 64, "num_key_value_heads": 16}
MODELS["sparse attention"] |= {"num_hidden_layers": 3, "n_routed_experts": 8, "vocab_size": 8192}  # its plain attention is slow
ON_TORCH = ("dense", "latent attention", "mixture of experts", "gemma", "sinks and windows")
SMALLER = {
    "dense": TINY | {"num_key_value_heads": 2, "head_dim": 16},
    "latent attention": TINY
    | {"moe_intermediate_size": 32, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16}
    | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    "mixture of experts": TINY | {"moe_intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8},
    "linear attention": TINY
    | {"moe_intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "shared_expert_intermediate_size": 32}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    | {"num_hidden_layers": 4},
    "sinks and windows": TINY | {"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 8, "sliding_window": 16},
    "gemma": TINY | {"num_hidden_layers": 6, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16},
}
SMALLER["sparse attention"] = SMALLER["latent attention"] | {"index_topk": 8, "index_n_heads": 8, "index_head_dim": 16}
"""What a CPU has instead."""


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2, help="ranks of the layouts; 1 leaves them out")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", choices=("megatron", "torch"), default="megatron", help="what trains")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="those to measure; default: all that the backend shares")
    parser.add_argument("--json", type=Path, help="write the figures there, as they come")
    parser.add_argument("--write", action="store_true", help="put the figures of benchmarks/results into the docs; measures nothing")
    arguments = parser.parse_args()
    if arguments.write:
        put_table(PAGE, "gpu_numerics", numerics_table(json.loads(RESULTS.read_text())))
        return 0
    rows: list[dict[str, Any]] = []
    for row in measured_rows(arguments.device, arguments.gpus, arguments.models, arguments.backend):
        rows.append(row)
        print(numerics_line(row), file=sys.stderr, flush=True)
        if arguments.json is not None:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(numerics_table(rows))
    return 0 if all(within_rounding(row) for row in rows) else 1


def layouts_of(model: str, gpus: int, backend: str = "megatron") -> dict[str, dict[str, Any]]:
    """The layouts of several GPUs that a model is trained in, by their short names."""
    if gpus == 1:
        return {}
    context = {f"CP{gpus}": {"context_parallel_size": gpus}}
    experts = {f"EP{gpus}": {"expert_model_parallel_size": gpus}}
    if backend == "torch":
        shared = {f"TP{gpus}": {"tensor_model_parallel_size": gpus}}
        plain = {f"FSDP{gpus}": dict[str, Any]()}
        plain |= {f"FSDP{gpus}, offloaded": {"fsdp_cpu_offload": True}} if model == "dense" else {}
        return plain | {"dense": shared | context, "mixture of experts": shared | experts, "latent attention": experts}.get(model, {})
    tensor = {f"TP{gpus}": {"tensor_model_parallel_size": gpus, "sequence_parallel": True}}
    known = {"dense": context, "latent attention": context | experts, "mixture of experts": experts}
    known["sinks and windows"] = context | experts
    known["gemma"] = tensor | context
    known["linear attention"] = known["sparse attention"] = tensor | experts | context
    return known[model]


def measured_rows(device: str, gpus: int, models: Sequence[str] | None = None, backend: str = "megatron") -> Iterator[dict[str, Any]]:
    """Trains these models in every layout, and compares each with one GPU in float32."""
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # also of the ranks
    from tests.unit.trainer.megatron.world import World

    one, several = World(1, "spawn"), World(gpus, "spawn")
    lengths, batches = LENGTHS[device], step_batches(gpus)
    try:
        with tempfile.TemporaryDirectory() as directory:
            for model in models or ON_TORCH if backend == "torch" else models or MODELS:
                shape, named = MODELS[model], model if backend == "megatron" else f"{model}, {backend}"
                checkpoint = Path(directory, model)
                write_checkpoint(shape if device == "cuda" else shape | SMALLER[model], checkpoint)

                def run(world: World, config: dict[str, Any], dtype: str, checkpoint: Path = checkpoint) -> dict[str, Any]:
                    return dict(
                        world.run(
                            rank_numerics, checkpoint, {**config, "train_dtype": dtype, "trainer_backend": backend}, lengths, batches
                        )[0]
                    )

                exact, rounded = run(one, {}, "float32"), run(one, {}, "bfloat16")
                own = numerics_row(named, 1, "one GPU", "bfloat16", rounded, exact)
                yield own
                for layout, config in layouts_of(model, gpus, backend).items():
                    for dtype in ("bfloat16", "float32"):
                        found = run(several, config, dtype)
                        row = numerics_row(named, gpus, layout, dtype, found, exact)
                        yield row | ({"ratio": row["mean"] / own["mean"]} if dtype == "bfloat16" else {})
                (theirs,) = one.run(transformers_numerics, checkpoint, lengths)
                row = numerics_row(named, 1, "transformers", "bfloat16", exact | theirs, exact)
                yield row | {"loss": None, "grad_norm": None, "ratio": row["mean"] / own["mean"]}
    finally:
        one.stop()
        several.stop()


def write_checkpoint(shape: dict[str, Any], directory: Path) -> None:
    """Writes random weights that bfloat16 holds exactly, so that nothing but the computation rounds."""
    import torch
    import transformers

    torch.manual_seed(0)
    # hidden states of size 1 then keep about their size, and the logits are spread
    config = transformers.AutoConfig.for_model(**shape, initializer_range=shape["hidden_size"] ** -0.5)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                tensor.add_(torch.randn_like(tensor) * 0.1)
            elif name.endswith("e_score_correction_bias"):
                tensor.normal_(std=0.05)
            elif name.endswith((".bias", "_proj_bias", ".sinks")) or "conv1d" in name:
                tensor.normal_(std=0.5)
            elif name.endswith("A_log"):
                tensor.uniform_(-4.0, 1.0)  # heads that forget within a token, and in a hundred
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    model.save_pretrained(directory)


def drawn(lengths: tuple[int, ...], vocabulary: int, seed: int) -> list[Any]:
    """Random sequences, int64 [length] each."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (length,), generator=generator) for length in lengths]


def step_batches(gpus: int) -> int:
    """Returns the micro-batches of a step: one at least for every rank, also where experts alone are shared."""
    return max(2, gpus)


def rank_numerics(checkpoint: Path, config: dict[str, Any], lengths: tuple[int, ...], step: int) -> dict[str, Any]:
    """What one rank computes: log-probs of trained labels before a step, and loss and gradient norm of a step of so many micro-batches."""
    import torch

    from services.trainer.packing import PackedBatch
    from tests.unit.trainer.megatron import rank_steps
    from tests.unit.trainer.megatron.tiny import pack

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    actor = rank_steps.actor(checkpoint, **config)
    vocabulary = actor.architecture.vocab_size
    scored = pack(drawn(lengths, vocabulary, 0))
    (log_probs,) = actor.log_probs([scored])
    batches = [pack(drawn(lengths, vocabulary, seed)) for seed in range(1, 1 + step)]
    trained = sum(float(batch.loss_mask.sum()) for batch in batches)

    def mean_loss(log_probs: torch.Tensor, _: Any, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -(batch.loss_mask * log_probs).sum() / trained, {}

    result = actor.train_step(batches[actor.data_parallel_rank :: actor.data_parallel_size], mean_loss)
    assert result.skipped is None, result.skipped
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    found = log_probs.cpu()[scored.loss_mask.bool()].tolist()
    return {"log_probs": found, "loss": result.loss, "grad_norm": result.grad_norm, "device": device}


def transformers_numerics(checkpoint: Path, lengths: tuple[int, ...]) -> dict[str, Any]:
    """The same log-probs by transformers in bfloat16, a sequence at a time."""
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).to(device).eval()
    found: list[float] = []
    with torch.no_grad():
        for tokens in drawn(lengths, model.config.vocab_size, 0):
            logits = model(tokens[None].to(device)).logits[0, :-1].float()
            found += logits.log_softmax(-1).gather(1, tokens[1:, None].to(device))[:, 0].tolist()
    return {"log_probs": found}


def numerics_row(model: str, gpus: int, layout: str, dtype: str, found: dict[str, Any], exact: dict[str, Any]) -> dict[str, Any]:
    """Differences of one case to one GPU in float32. ``mean``, ``max``: of log-probs, in nats; ``loss``, ``grad_norm``: relative."""
    apart = [abs(ours - theirs) for ours, theirs in zip(found["log_probs"], exact["log_probs"], strict=True)]
    relative = {name: abs(found[name] / exact[name] - 1) for name in ("loss", "grad_norm")}
    case = {"model": model, "gpus": gpus, "layout": layout, "dtype": dtype}
    return {**case, "mean": sum(apart) / len(apart), "max": max(apart), **relative, "ratio": None, "device": exact["device"]}


def within_rounding(row: dict[str, Any]) -> bool:
    """Whether a layout in bfloat16 is no further from float32 than one GPU is; true of every other row."""
    return row["gpus"] == 1 or row["ratio"] is None or row["ratio"] <= LARGEST_RATIO


def numerics_line(row: dict[str, Any]) -> str:
    """One case in a line of the table."""
    numbers = " | ".join("" if row[name] is None else f"{row[name]:.1e}" for name in ("mean", "max", "loss", "grad_norm"))
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
    return f"| {row['model']} | {row['layout']} | {row['dtype']} | {numbers} | {ratio} |{'' if within_rounding(row) else ' TOO FAR'}"


def numerics_table(rows: list[dict[str, Any]]) -> str:
    """The figures as a table, and the device below it."""
    head = (
        "| model | layout | in | log-prob: mean | max | loss, relative | gradient norm, relative | ratio to one GPU |\n" + "|---" * 8 + "|"
    )
    return "\n".join([head, *map(numerics_line, rows), "", f"Measured on: {', '.join(sorted({row['device'] for row in rows}))}."])


if __name__ == "__main__":
    sys.exit(main())
