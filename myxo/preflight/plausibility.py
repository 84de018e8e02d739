"""Values that can run and are hardly meant: one table of rules. Each is noted at the start and by ``--dry-run``; none is refused."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from myxo.preflight.inspection import Findings, Inspection, Note
from shared.config.run_config import RunConfig
from shared.data.tokenizer import Tokenizer
from shared.runtime.errors import ConfigError

DAY = 86400.0  # seconds
LARGE = 10**9  # parameters from which on a full fine-tune takes small steps
PLACEHOLDER = "placeholder"


@dataclass(frozen=True)
class ValueRule:
    """A rule. ``field``: as ``section.name``. ``odd``: of its value and the inspection. ``why``: what is odd about it, what is usual."""

    field: str
    odd: Callable[[Any, Inspection], object]
    why: str


def _above(most: float) -> Callable[[Any, Inspection], bool]:
    return lambda value, _: value is not None and value > most


def _all_of_large(lr: float, inspection: Inspection) -> bool:
    trainer, size = inspection.config.trainer, inspection.model_size
    part = trainer.lora_rank or trainer.only_train_params_name_list or trainer.freeze_params_name_list
    return 1e-4 < lr <= 1e-3 and size is not None and size.parameters > LARGE and not part


def _policy(inspection: Inspection) -> bool:
    config = inspection.config
    return config.has_steps and config.algorithm.loss_type == "policy_loss" and not config.debug.debug_rollout_only


def _more_than_prompts(batch: int, inspection: Inspection) -> bool:
    return inspection.training is not None and batch > len(inspection.training)


def _warmup(_: Any, inspection: Inspection) -> bool:
    trainer, steps = inspection.config.trainer, inspection.config.rollout.num_rollout * inspection.config.trainer.num_steps_per_rollout
    return _policy(inspection) and trainer.lr_warmup_iters >= steps > 0


def _too_short(most: int, inspection: Inspection) -> bool:
    tokenizer = inspection.tokenizer
    return tokenizer is not None and inspection.config.data.apply_chat_template and most < turn_tokens(tokenizer)


def turn_tokens(tokenizer: Tokenizer) -> int:
    """Returns the tokens that the chat template itself writes into an assistant's turn, its end among them; 0 where that is not known."""
    asked = [{"role": "user", "content": PLACEHOLDER}]
    try:
        begun = tokenizer.render(asked, {})
        ended = tokenizer.render([*asked, {"role": "assistant", "content": PLACEHOLDER}], {"add_generation_prompt": False})
    except ConfigError:
        return 0
    return len(tokenizer.encode(ended[len(begun) :].replace(PLACEHOLDER, "").rstrip())) if ended.startswith(begun) else 0


RULES = (
    ValueRule("trainer.lr", _above(1e-3), "above 1e-3, at which policies break down; 1e-6 is usual, 1e-5 to 1e-4 with adapters"),
    ValueRule("trainer.lr", _all_of_large, "above 1e-4, for all weights of a model beyond a billion parameters; 1e-6 is usual"),
    ValueRule("trainer.critic_lr", _above(1e-3), "above 1e-3; 1e-5 is usual"),
    ValueRule("sft.sft_lr", lambda lr, inspection: inspection.config.sft.sft_data is not None and lr > 1e-3, "above 1e-3; 1e-5 is usual"),
    ValueRule("trainer.lr_warmup_iters", _warmup, "as many optimizer steps as the run has, or more: lr is never reached"),
    ValueRule("trainer.weight_decay", _above(1), "above 1; 0 to 0.1 is usual"),
    ValueRule("trainer.clip_grad", lambda norm, _: 0 < norm < 1e-3, "below 0.001: steps are cut to almost nothing; 1 is usual, 0 is off"),
    ValueRule("algorithm.eps_clip", _above(1), "above 1: ratios are above 0 whatever it is, so that it clips nothing; 0.2 is usual"),
    ValueRule(
        "algorithm.eps_clip_high",
        lambda value, inspection: value is not None and value > 1 and inspection.config.algorithm.advantage_estimator != "cispo",
        "above 1; 0.2 to 0.3 is usual",
    ),
    ValueRule("algorithm.kl_loss_coef", _above(10), "above 10: the KL drowns the reward; 0 to 0.1 is usual"),
    ValueRule("algorithm.kl_coef", _above(10), "above 10: the KL drowns the reward; 0 to 0.1 is usual"),
    ValueRule("algorithm.entropy_coef", lambda value, _: abs(value) > 1, "beyond 1: the entropy drowns the reward; 0 to 0.01 is usual"),
    ValueRule("algorithm.gamma", lambda gamma, _: gamma < 0.9, "below 0.9: tokens long before the reward learn nothing of it; 1 is usual"),
    ValueRule("rollout.rollout_temperature", _above(2), "above 2: answers are noise; 1 is usual"),
    ValueRule("rollout.rollout_batch_size", _more_than_prompts, "more than there are prompts: a batch has some of them twice"),
    ValueRule("rollout.rollout_max_response_len", _too_short, "fewer tokens than the chat template writes into a turn: none can end in it"),
)


def check_values(inspection: Inspection) -> Findings:
    """Notes each value that a rule finds odd, and timeouts above a day."""
    config = inspection.config
    if not config.debug.trains_only:
        yield from map(Note, _timeouts(config))
    for rule in RULES:
        section, _, name = rule.field.partition(".")
        value = getattr(getattr(config, section), name)
        if rule.odd(value, inspection):
            yield Note(f"{rule.field} = {value:g}: {rule.why}")


def _timeouts(config: RunConfig) -> Iterator[str]:
    for section in type(config).model_fields:
        for name, value in getattr(config, section):
            if name.endswith("_timeout") and isinstance(value, int | float) and value > DAY:
                yield f"{section}.{name} = {value:g}: seconds, more than a day: what hangs is found after {value / DAY:.1f} days"
