"""``python -m services.trainer.objective.trial``: calls the user's functions of the objective on a few samples, without a model.

It speaks as `shared.process.call_server` says. Its setup: ``{"config": JSON}``; a request: ``{"verb": field, "samples": [blob, …],
"rewards": [number, …]}``; an answer: ``{"gave": text}``, or ``{"error": text}``.
"""

from typing import Any

import torch
from torch import Tensor

from services.trainer.batches import TEACHER
from services.trainer.loss_inputs import SHOWN
from services.trainer.objective.advantage import needs
from services.trainer.objective.custom_objective import ADVANTAGE, LOSS, REDUCER, REWARDS, TIS, CustomFunctions, CustomLoss, Responses
from services.trainer.objective.reduce import MaskedTokens
from services.trainer.packing import pack
from shared.config.run_config import RunConfig
from shared.hooks import HookFailed
from shared.hooks.sample_conversion import from_stored
from shared.model.families import architecture_of
from shared.process.call_server import Calls, serve_calls
from shared.runtime.tasks import error_text
from shared.schema.sample import Sample, Score, decode


class ObjectiveCalls(Calls):
    """Calls the functions of a config's objective. Raises ConfigError for one that cannot be imported."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self._custom = config, CustomFunctions.of(config)

    async def answer(self, request: dict[str, Any]) -> dict[str, object]:
        """Returns what a field's function gave, in words, or why that cannot be trained."""
        name = request["verb"]
        try:
            return {"gave": self._tried(name, decode(request["samples"]), request["rewards"])}
        except HookFailed as error:
            return {"error": str(error)}
        except Exception as error:  # in what is made of it: the backward pass
            return {"error": f"{name} = {self._custom.paths[name]}: {error_text(error, self._custom.functions[name])}"}

    def _tried(self, name: str, samples: list[Sample], rewards: list[float]) -> str:
        custom, batch = self._custom, pack(samples, [1 / max(1, int(sample.mask.sum())) for sample in samples])
        old = torch.nan_to_num(batch.fields["rollout_log_probs"])
        pg, tokens = (-old).requires_grad_(), MaskedTokens(old, batch)
        wanted = needs(self._config.algorithm, self._config.trainer.num_steps_per_rollout)
        computed = {"proximal_log_probs": wanted.proximal, "ref_log_probs": wanted.reference, TEACHER: wanted.teacher_gap, "kl": wanted.kl}
        batch = batch.with_fields(**{field: old * (field != "kl") for field, has in computed.items() if has})  # as a run, no others
        if name == REWARDS:
            scored = [
                from_stored(sample, Score(reward=reward), self._config.reward.reward_key)
                for sample, reward in zip(samples, rewards, strict=True)
            ]
            _, trained = custom.post_processed(scored)
            return f"gave {', '.join(f'{value:g}' for value in trained)}"
        if name == ADVANTAGE:
            responses = Responses(batch)
            shown = {name: responses.lists(batch.fields[field]) for name, field in SHOWN.items() if field in batch.fields}
            masks = [mask > 0 for mask in responses.loss_masks]
            found = custom.advantages(masks, {"rewards": rewards, "raw_reward": rewards, **shown})
            return f"gave advantages for {', '.join(str(len(values)) for values in found.advantages)} tokens"
        if name == TIS:
            return self._backward(name, tokens.mean(custom.weighted(pg, old, old, tokens)[0]), pg)
        if name == REDUCER:
            return self._backward(name, custom.reduced(pg, tokens, self._config.algorithm.calculate_per_token_loss), pg)
        assert name == LOSS
        logits = torch.randn(len(batch.tokens), architecture_of(self._config).vocab_size, requires_grad=True)
        return self._backward(name, CustomLoss(custom)(logits, batch.with_fields(advantages=batch.loss_mask.clone()))[0], logits)

    def _backward(self, name: str, loss: Tensor, leaf: Tensor) -> str:
        loss.backward()
        if not torch.isfinite(loss) or leaf.grad is None or not torch.isfinite(leaf.grad).all():
            raise self._custom.refused(name, f"gave a loss of {loss.item():g}, or a gradient that is not finite; expected finite numbers")
        return f"gave a loss of {loss.item():g}, its gradient is finite"


if __name__ == "__main__":
    serve_calls(lambda setup: ObjectiveCalls(RunConfig.model_validate_json(setup["config"])))
