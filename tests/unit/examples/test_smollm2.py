"""The SmolLM2 example: a GGUF file becomes the same model in Hugging Face's format, and no held-out task is trained."""

import json
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from examples.smollm2.gguf_checkpoint import convert
from examples.smollm2.prepare import TASKS
from shared.config.config_reading import load
from shared.rewards.text_rewards import compute_reasoning_gym_reward

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *bytes_to_unicode().values(), "Ġ1", "Ġ2"]
TEMPLATE = "{% for message in messages %}{{ '<|im_start|>' + message['content'] + '<|im_end|>' }}{% endfor %}"
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """A projection's rows as llama.cpp has them: the two halves of each head in turn."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: LlamaForCausalLM, *, without: str = "") -> None:
    """The model as llama.cpp would write it, but for the weight ``without``."""
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(["Ġ 1", "Ġ 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        if name.startswith("model.layers."):
            _, _, layer, part = name.removesuffix(".weight").split(".", 3)
            named = f"blk.{layer}.{NAMES[part]}"
            weight = interleaved(weight, heads[NAMES[part]]) if NAMES[part] in heads else weight
        else:
            named = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm"}.get(name, "")
        if named and named != without:
            writer.add_tensor(f"{named}.weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).float().eval()


def test_the_converted_model_is_the_same(tmp_path: Path, model: LlamaForCausalLM) -> None:
    write_gguf(tmp_path / "tiny.gguf", model)
    assert convert(tmp_path / "tiny.gguf", tmp_path / "model") == model.num_parameters()
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    assert read.config.architectures == ["LlamaForCausalLM"] and read.config.tie_word_embeddings
    ids = torch.arange(20)[None]
    assert torch.allclose(read(ids).logits, model(ids).logits, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.eos_token) == (len(TOKENS), 2, "<|im_end|>")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "2 , 1"}], tokenize=False)
    assert text == "<|im_start|>2 , 1<|im_end|>" and tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_file_without_all_weights_is_refused(tmp_path: Path, model: LlamaForCausalLM) -> None:
    write_gguf(tmp_path / "tiny.gguf", model, without="blk.1.ffn_up")
    with pytest.raises(ValueError, match=r"tiny.gguf: not the weights of its own config: model.layers.1.mlp.up_proj.weight"):
        convert(tmp_path / "tiny.gguf", tmp_path / "model")


@pytest.mark.extra
def test_tasks_are_scored_and_none_that_is_held_out_is_trained(tmp_path: Path, model: LlamaForCausalLM) -> None:
    write_gguf(tmp_path / "tiny.gguf", model)
    command = [sys.executable, "-W", "ignore", "-m", "examples.smollm2.prepare", str(tmp_path), "--gguf", str(tmp_path / "tiny.gguf")]
    subprocess.run([*command, "--train", "100", "--heldout", "20"], check=True, timeout=600)
    rows = {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in tmp_path.glob("*.jsonl")}
    trained = rows.pop("train")
    assert [len(found) for found in rows.values()] == [20] * len(TASKS) and 90 <= len(trained) <= 100
    held = [row for found in rows.values() for row in found]
    assert not {row["prompt"][0]["content"] for row in trained} & {row["prompt"][0]["content"] for row in held}
    for row in held:
        assert compute_reasoning_gym_reward(row["label"], row["label"], row["metadata"]) == 1.0, row
        assert compute_reasoning_gym_reward("no idea", row["label"], row["metadata"]) < 0.1
    assert (tmp_path / "model" / "config.json").is_file()


def test_the_config_names_the_files_that_are_made() -> None:
    config = load(Path("examples/smollm2/smollm2.toml"))
    held = {one.name: str(one.path[0]) for one in config.eval.eval_prompt_data or []}
    assert {Path(path).name for path in held.values()} == {f"heldout_{task.name}.jsonl" for task in TASKS}
