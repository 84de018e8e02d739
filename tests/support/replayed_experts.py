"""Log-probs of Hugging Face's MoE models through given experts: what a trainer that replays them must find."""

from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor


def log_probs_through(hf_dir: Path, tokens: Tensor, labels: Tensor, experts: Tensor) -> Tensor:
    """The log-probs of one sequence's labels, float32 [T], by Hugging Face's Qwen3-MoE or Qwen3-Next in float32, whose layers compute
    the given experts, weighted as its routers would. experts: integers [T, layers, experts a token]; -1: the router's own choice."""
    model = transformers.AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32)
    for number, layer in enumerate(model.model.layers):
        given = experts[:, number].long()

        def forward(hidden, mlp=layer.mlp, given=given):
            flat, matrices = hidden.view(-1, hidden.size(-1)), mlp.experts
            logits = F.linear(flat, mlp.gate.weight)
            chosen = torch.where(given >= 0, given, logits.topk(given.size(-1)).indices)
            weights = logits.gather(1, chosen).softmax(-1)
            output = torch.zeros_like(flat)
            for token in range(len(flat)):
                for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
                    gate, up = F.linear(flat[token], matrices.gate_up_proj[expert]).chunk(2)
                    output[token] += weight * F.linear(F.silu(gate) * up, matrices.down_proj[expert])
            if hasattr(mlp, "shared_expert"):
                output += torch.sigmoid(mlp.shared_expert_gate(flat)) * mlp.shared_expert(flat)
            return output.view_as(hidden)

        layer.mlp.forward = forward
    with torch.no_grad():
        logits = model(tokens[None]).logits[0]
    return logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
