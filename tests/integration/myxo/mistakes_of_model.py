"""Mistakes about the model, its layout, its lengths and the engine, as newcomers make them."""

import importlib.util
import json
import shutil
from typing import Any

from shared.config import devices, sglang_flags
from shared.transfer import tensor_file
from shared.transfer.tensor_file import TensorFiles
from tests.integration.myxo.mistakes import Input, Mistake
from tests.support.run_config import PROMPTS, write_jsonl

LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 1503300328\n"


def tied(given: Input, *, same: bool = False, output: bool = True) -> None:
    """A config that ties the output layer, and a file that holds one all the same. ``output``: with one."""
    file = TensorFiles([given.weights])
    tensors = {name: (*entry, file[name].copy()) for name, entry in file.tensors.items() if output or name != "lm_head.weight"}
    if same:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensor_file.write(given.weights, tensors)
    given.model_config(tie_word_embeddings=output)


def truncated(given: Input) -> None:
    given.weights.write_bytes(given.weights.read_bytes()[:-1000])


def sharded(given: Input, *, lost: str = "", swapped: bool = False) -> None:
    """Two shards with their index. ``lost``: a shard that is taken away. ``swapped``: the index names the wrong ones."""
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    file = TensorFiles([given.weights])
    tensors = {name: (*entry, file[name].copy()) for name, entry in file.tensors.items()}
    where = {name: names[name.startswith(("lm_head", "model.norm"))] for name in tensors}
    for shard in names:
        tensor_file.write(given.model / shard, {name: tensors[name] for name in tensors if where[name] == shard})
    index = {name: names[shard == names[0]] if swapped else shard for name, shard in where.items()}
    (given.model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    given.weights.unlink()
    if lost:
        (given.model / lost).unlink()


def broken_config(given: Input) -> None:
    (given.model / "config.json").write_text("{")
    (given.model / "generation_config.json").unlink(missing_ok=True)  # the tokenizer then reads config.json, too


def more_tokens(given: Input) -> None:
    """A tokenizer.json with tokens that the embedding has no rows for: another model's."""
    path = given.model / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"] |= {f"<extra_{number}>": 1000 + number for number in range(50)}
    path.write_text(json.dumps(content))


def long_prompt(given: Input, tokens: int = 900) -> None:
    write_jsonl(given.directory / "prompts.jsonl", [*PROMPTS, {"prompt": "1" * tokens, "label": "2"}])


def long_heldout(given: Input) -> None:
    write_jsonl(given.directory / "heldout.jsonl", [{"prompt": "1" * 1500, "label": "2"}])


def long_demonstration(given: Input) -> None:
    rows = [{"prompt": "1+1=", "response": "2"}, {"prompt": "1" * 100, "response": "2" * 50}]
    given.sections["sft"] = {"sft_data": str(write_jsonl(given.directory / "sft.jsonl", rows))}


def other_model(given: Input, **changes: Any) -> None:
    """A second checkpoint beside the policy's, ``other``, whose config.json says something else."""
    shutil.copytree(given.model, given.directory / "other")
    path = given.directory / "other" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def critic_load(given: Input) -> None:
    other_model(given)
    (given.directory / "other" / "model.safetensors").write_text(LFS_POINTER)
    given.sections["trainer"] = {"critic_load": str(given.directory / "other")}


def ranks(count: int, **fields: Any) -> dict[str, dict[str, Any]]:
    """The trainer's section; batches divide over as many ranks."""
    return {"trainer": {"actor_num_gpus_per_node": count, **fields}, "rollout": {"rollout_batch_size": 12, "n_samples_per_prompt": 2}}


def sglang(**flags: Any) -> dict[str, dict[str, Any]]:
    return {"rollout.sglang": {key.replace("_", "-"): value for key, value in flags.items()}}


NOWHERE = ("--hf-checkpoint", "nowhere")

MISTAKES = [
    # the files of the weights
    Mistake("weights that git-lfs did not fetch", ("model.safetensors", "git-LFS pointer", "git lfs pull"),
            change=lambda given: given.weights.write_text(LFS_POINTER)),
    Mistake("a download that was cut short", ("model.safetensors", "by its header", "cut short"), change=truncated),
    Mistake("an empty file of weights", ("model.safetensors", "empty file", "download it again"),
            change=lambda given: given.weights.write_bytes(b"")),
    Mistake("a page that says where to log in, saved as weights", ("model.safetensors", "not a whole safetensors file"),
            change=lambda given: given.weights.write_text("<!DOCTYPE html><html>Access to this model is restricted</html>")),
    Mistake("only config and tokenizer", ("model.hf_checkpoint", "*.safetensors", "it has none"),
            change=lambda given: given.weights.unlink()),
    Mistake("weights of another format", ("*.safetensors", "pytorch_model.bin is of another format"),
            change=lambda given: given.weights.rename(given.model / "pytorch_model.bin")),
    Mistake("a shard that was not downloaded", ("model-00002-of-00002.safetensors", "no such file", "index.json names it"),
            change=lambda given: sharded(given, lost="model-00002-of-00002.safetensors")),
    Mistake("an index of other shards", ("model.safetensors.index.json", "lacks", "model.embed_tokens.weight"),
            change=lambda given: sharded(given, swapped=True)),
    # config.json and tokenizer
    Mistake("the config.json of a model with more layers", ("all tensors of the model", "model.layers.2."),
            change=lambda given: given.model_config(num_hidden_layers=4)),
    Mistake("the config.json of a model of another width", ("model.embed_tokens.weight", "by the sizes in config.json"),
            change=lambda given: given.model_config(hidden_size=128)),
    Mistake("a tied output layer that is another in the file",
            ("lm_head.weight", "another matrix", "tie_word_embeddings to false", "remove"), change=tied),
    Mistake("an output layer that the file lacks", ("missing: lm_head.weight", "tie_word_embeddings = true"),
            change=lambda given: tied(given, output=False)),
    Mistake("a family that cannot be trained", ("model_type", "gemma3", "qwen3", "llama", "deepseek_v3"),
            change=lambda given: given.model_config(model_type="gemma3", architectures=["Gemma3ForCausalLM"])),
    Mistake("quantized weights", ("quantization_config", "myxo convert"),
            change=lambda given: given.model_config(quantization_config={"quant_method": "awq", "bits": 4})),
    Mistake("a rope scaling for longer contexts", ("rope_type", "yarn", "llama3"),
            change=lambda given: given.model_config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0})),
    Mistake("a config.json that is none", ("model.hf_checkpoint", "config.json", "JSON"),
            change=broken_config),
    Mistake("the tokenizer of a larger model", ("tokenizer", "vocab_size in config.json"), change=more_tokens),
    Mistake("a stop token of another vocabulary", ("rollout.rollout_stop_token_ids = 151645", "the model's vocabulary"),
            flags=("--rollout-stop-token-ids", "151645")),
    Mistake("a critic whose weights were not fetched", ("trainer.critic_load", "other/model.safetensors", "git-LFS pointer"),
            flags=("--advantage-estimator", "ppo"), change=critic_load),
    # a script written for another size
    Mistake("the architecture flags of a model of another size", ("num_layers = 36", "2, as the checkpoint has", "hidden_size = 2560"),
            flags=("--num-layers", "36", "--hidden-size", "2560"), lines=2),
    Mistake("the rotary base of another model", ("rotary_base", "1000000", "as the checkpoint has"), flags=("--rotary-base", "1000000")),
    Mistake("the experts of another model", ("num_experts = 128", "the checkpoint's qwen3 has none"), flags=("--num-experts", "128")),
    # layouts
    Mistake("more tensor-parallel ranks than key/value heads", ("tensor_model_parallel_size = 4", "2 key/value heads"),
            sections=ranks(4, tensor_model_parallel_size=4)),
    Mistake("tensor parallelism over too few ranks", ("tensor_model_parallel_size", "2 does not divide the 1 trainer ranks"),
            flags=("--tensor-model-parallel-size", "2")),
    Mistake("more pipeline stages than layers", ("pipeline_model_parallel_size = 4", "2 layers"),
            sections=ranks(4, pipeline_model_parallel_size=4)),
    Mistake("virtual stages of no pipeline", ("virtual_pipeline_model_parallel_size = '2'", "pipeline_model_parallel_size above 1"),
            flags=("--virtual-pipeline-model-parallel-size", "2")),
    Mistake("expert parallelism of a dense model", ("expert_model_parallel_size = 2", "qwen3 has no experts"),
            sections=ranks(2, expert_model_parallel_size=2)),
    Mistake("an engine over GPUs that cannot share its heads", ("rollout.rollout_num_gpus_per_engine = 8", "4 attention heads"),
            flags=("--rollout-num-gpus-per-engine", "8")),
    Mistake("a colocated engine larger than a machine", ("rollout.rollout_num_gpus_per_engine = 2", "machines of 1 ranks have room for 0"),
            flags=("--colocate", "--actor-num-nodes", "2", "--rollout-num-gpus-per-engine", "2", "--rollout-replicas", "1")),
    # lengths
    Mistake("responses longer than the context", ("rollout.rollout_max_response_len = 8192", "at most 1018", "config.json"),
            flags=("--rollout-max-response-len", "8192")),
    Mistake("a prompt that leaves no room for its response", ("rollout.rollout_max_response_len = 200", "at most 122", "l:10: 900 tokens"),
            flags=("--rollout-max-response-len", "200"), change=long_prompt),
    Mistake("a prompt longer than the context",
            ("data.prompt_data", "prompts.jsonl:10: a prompt of 1500 tokens", "rollout_max_prompt_len", "overlong_prompts = filter"),
            change=lambda given: long_prompt(given, 1500)),
    Mistake("held-out responses longer than the context", ("eval.eval_max_response_len = 4096", "at most 1018"),
            flags=("--eval-max-response-len", "4096")),
    Mistake("a held-out prompt longer than the context", ("eval.eval_prompt_data", "a prompt of 1500 tokens"), change=long_heldout),
    Mistake("samples larger than a micro-batch", ("trainer.max_tokens_per_gpu = 128", "at least 504", "its response have up to"),
            flags=("--max-tokens-per-gpu", "128", "--rollout-max-response-len", "500")),
    Mistake("samples of a function of one's own larger than a micro-batch",
            ("trainer.max_tokens_per_gpu = 128", "or rollout_max_response_len of at most 124"),
            flags=("--max-tokens-per-gpu", "128", "--rollout-max-response-len", "500",
                   "--custom-generate-function-path", "tests.support.generate_hooks:recorded")),
    Mistake("samples larger than what context-parallel ranks hold", ("at least 252", "which 2 context-parallel ranks hold together"),
            flags=("--max-tokens-per-gpu", "251", "--rollout-max-response-len", "500"), sections=ranks(2, context_parallel_size=2)),
    Mistake("responses larger than the engine's cache", ("rollout_max_response_len = 500", "--sglang-max-total-tokens"),
            flags=("--rollout-max-response-len", "500", "--sglang-max-total-tokens", "256")),
    Mistake("a context longer than the model's", ("rollout.sglang.context-length", "at most 1024"),
            flags=("--sglang-context-length", "32768")),
    Mistake("a demonstration larger than a micro-batch", ("sft.sft_data:response", "sft.jsonl:2", "151 tokens", "max_tokens_per_gpu"),
            flags=("--max-tokens-per-gpu", "128"), change=long_demonstration),
    # shapes of flags alone
    Mistake("heads that the ranks do not divide, of a model that is not there",
            ("no such directory", "a divisor of the model's 6 attention heads"), sections=ranks(4, tensor_model_parallel_size=4), lines=2,
            flags=(*NOWHERE, "--num-layers", "4", "--hidden-size", "48", "--num-attention-heads", "6", "--ffn-hidden-size", "96",
                   "--num-query-groups", "2")),
    Mistake("experts and layers that the ranks do not divide, of a model that is not there",
            ("no such directory", "a divisor of its 6 experts", "a divisor of its 5 layers"), lines=3,
            sections=ranks(8, pipeline_model_parallel_size=2, expert_model_parallel_size=4),
            flags=(*NOWHERE, "--num-layers", "5", "--hidden-size", "64", "--num-attention-heads", "4", "--num-experts", "6",
                   "--moe-router-topk", "2")),
    Mistake("flags that no model can have", ("a divisor of num_attention_heads, 8", "at most num_experts, 4", "it has 3"), lines=4,
            flags=(*NOWHERE, "--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "8", "--num-query-groups", "3",
                   "--num-experts", "4", "--moe-router-topk", "6", "--moe-layer-freq", "[0,1,1]")),
    # SGLang's flags
    Mistake("a misspelt flag of SGLang's", ("rollout.sglang.mem-fraction-statc", "did you mean mem-fraction-static?"),
            flags=("--sglang-mem-fraction-statc", "0.7")),
    Mistake("a flag of SGLang's without its value", ("rollout.sglang.mem-fraction-static", "a value: a number between 0 and 1"),
            flags=("--sglang-mem-fraction-static",)),
    Mistake("memory in per cent", ("rollout.sglang.mem-fraction-static = '80'", "between 0 and 1"),
            flags=("--sglang-mem-fraction-static", "80")),
    Mistake("a GPU's attention on a CPU", ("rollout.sglang.attention-backend = 'fa3'", "torch_native", "rollout_device is cpu"),
            flags=("--rollout-device", "cpu", "--sglang-attention-backend", "fa3")),
    Mistake("the engine's port", ("rollout.sglang.port = 30000", "an engine listens on a private socket"), sections=sglang(port=30000)),
    Mistake("the engine's model by SGLang's name", ("rollout.sglang.model-path", "set model.hf_checkpoint"),
            flags=("--sglang-model-path", "Qwen/Qwen3-4B")),
    # training
    Mistake("a warm-up longer than the run", ("trainer.lr_warmup_iters = 100", "4 optimizer steps"),
            flags=("--lr-warmup-iters", "100", "--lr-decay-style", "cosine")),
    Mistake("a floor above the learning rate", ("trainer.min_lr = 0.001", "between 0 and lr"),
            flags=("--min-lr", "1e-3", "--lr-decay-style", "linear")),
    Mistake("recomputation that is half said", ("trainer.recompute_num_layers = '1'", "recompute_granularity = full"),
            flags=("--recompute-num-layers", "1")),
    Mistake("adapters on a matrix of another family", ("trainer.target_modules = 'query_key_value'", "a matrix of qwen3", "q_proj"),
            flags=("--lora-rank", "8", "--target-modules", "query_key_value")),
    Mistake("frozen parameters by Hugging Face's names", ("trainer.freeze_params_name_list = 'embed_tokens'", "embedding.word_embeddings"),
            flags=("--freeze-params-name-list", "embed_tokens")),
    Mistake("a module that no layer has", ("trainer.recompute_modules", "'core_attention' is no module", "did you mean core_attn?"),
            flags=("--recompute-granularity", "selective", "--recompute-modules", "core_attention")),
    Mistake("a seed below zero", ("trainer.seed = '-1'", "greater than or equal to 0"), flags=("--seed", "-1")),
    Mistake("evaluations of nothing", ("eval.eval_interval", "needs sets of held-out prompts"),
            flags=("--eval-interval", "5", "--eval-prompt-data", "none")),
    Mistake("no token to choose from", ("rollout.rollout_top_k", "-1 for all"), flags=("--rollout-top-k", "0")),
    Mistake("GRPO over single samples", ("rollout.n_samples_per_prompt", "use at least 2"), flags=("--n-samples-per-prompt", "1")),
    Mistake("a teacher that nobody is", ("algorithm.use_opd", "a teacher: opd_teachers"), flags=("--preset", "opd")),
    Mistake("a loss of one's own without a function", ("algorithm.custom_loss_function_path", "loss_type is custom_loss"),
            flags=("--loss-type", "custom_loss")),
    Mistake("a global batch of another size", ("trainer.global_batch_size", "256", "4 samples"), flags=("--global-batch-size", "256")),
    Mistake("three mistakes, each told once", ("rollout_max_response_len = 8192", "num_layers = 36", "mem-fraction-statc"), lines=3,
            flags=("--rollout-max-response-len", "8192", "--num-layers", "36", "--sglang-mem-fraction-statc", "0.7")),
]  # fmt: skip

if not devices.gpus():
    wanted = ("trainer.train_device = 'cuda'", "rollout.rollout_device = 'cuda'", "shows no GPU")
    MISTAKES.append(Mistake("GPUs on a machine without", wanted, flags=("--train-device", "cuda", "--rollout-device", "cuda"), lines=2))
if importlib.util.find_spec("transformer_engine") is None:
    wanted = ("transformer_impl = 'transformer_engine'", "not installed")
    MISTAKES.append(Mistake("Transformer Engine where it is not installed", wanted, flags=("--transformer-impl", "transformer_engine")))
if importlib.util.find_spec("wandb") is None:
    MISTAKES.append(Mistake("W&B where it is not installed", ("monitoring.use_wandb", "myxo[wandb]"), flags=("--use-wandb",)))
if importlib.util.find_spec("deep_ep") is None:
    wanted = ("rollout.sglang.moe-a2a-backend = 'deepep'", "install the package deep_ep")
    MISTAKES.append(Mistake("DeepEP where it is not installed", wanted, flags=("--sglang-moe-a2a-backend", "deepep")))
if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
    wanted = ("trainer.megatron.gradient_accumulation_fusion", "apex, built with --cuda_ext")
    MISTAKES.append(Mistake("apex where it is not installed", wanted, flags=("--gradient-accumulation-fusion",)))
assert sglang_flags.installed(), "the rows about SGLang's flags need it"
