"""A checkpoint in Hugging Face's format from a GGUF file, by the readers of transformers. Quantised weights are written in bfloat16."""

from pathlib import Path


def convert(source: Path, folder: Path) -> int:
    """Writes model and tokenizer of a GGUF file into a folder. Returns the number of parameters.

    Raises ValueError for an architecture that transformers does not read from GGUF, and for a file that lacks weights of its model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    place, name = str(source.parent), source.name
    config = AutoConfig.from_pretrained(place, gguf_file=name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    lacking = model.load_state_dict(load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)["tensors"], strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if missing := sorted({*lacking.missing_keys, *lacking.unexpected_keys} - tied):
        raise ValueError(f"{source}: not the weights of its own config: {', '.join(missing[:5])}")
    model.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)  # the reader leaves it at the first special token
    tokenizer.clean_up_tokenization_spaces = False
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return int(model.num_parameters())
