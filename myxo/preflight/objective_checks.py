"""Checks of what is trained and for how long: presets, corrections, teachers, dumps, and the steps of a run that is given its epochs.

`RULES` is the table of values that can run and are hardly meant: each is noted at the start and by ``--dry-run``; none is refused.
The number of an epoch's steps follows from the prompts that are used, so all that may be left out are read.
"""

import fnmatch
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from myxo.preflight.inspection import Findings, Inspection, Note
from shared.config import environment_variables, presets
from shared.config.rollout_section import RolloutSection
from shared.config.run_config import RunConfig
from shared.config.section import Rule
from shared.config.service_sections import DUMPS, STEP
from shared.data.tokenizer import Tokenizer
from shared.hooks.loading import generate_paths, paths
from shared.rewards.names import VERIFIERS
from shared.runtime.errors import ConfigError

DAY = 86400.0  # seconds
LARGE = 10**9  # parameters from which on a full fine-tune takes small steps
PLACEHOLDER = "placeholder"


def _above(most: float) -> Callable[[Inspection, Any], bool]:
    return lambda _, value: value is not None and value > most


def _all_of_large(inspection: Inspection, lr: float) -> bool:
    trainer, size = inspection.config.trainer, inspection.model_size
    part = trainer.lora_rank or trainer.only_train_params_name_list or trainer.freeze_params_name_list
    return 1e-4 < lr <= 1e-3 and size is not None and size.parameters > LARGE and not part


def _more_than_prompts(inspection: Inspection, batch: int) -> bool:
    return inspection.training is not None and batch > len(inspection.training)


def _warmup(inspection: Inspection, updates: int) -> bool:
    config, steps = inspection.config, inspection.config.rollout.num_rollout * inspection.config.trainer.num_steps_per_rollout
    return updates >= steps > 0 and config.algorithm.loss_type == "policy_loss" and not config.debug.debug_rollout_only


def _too_short(inspection: Inspection, most: int) -> bool:
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
    Rule("trainer.lr", _above(1e-3), "above 1e-3, at which policies break down; 1e-6 is usual, 1e-5 to 1e-4 with adapters"),
    Rule("trainer.lr", _all_of_large, "above 1e-4, for all weights of a model beyond a billion parameters; 1e-6 is usual"),
    Rule("trainer.critic_lr", _above(1e-3), "above 1e-3; 1e-5 is usual"),
    Rule("sft.sft_lr", lambda inspection, lr: inspection.config.sft.sft_data is not None and lr > 1e-3, "above 1e-3; 1e-5 is usual"),
    Rule("trainer.lr_warmup_iters", _warmup, "as many optimizer steps as the run has, or more: lr is never reached"),
    Rule("trainer.weight_decay", _above(1), "above 1; 0 to 0.1 is usual"),
    Rule("trainer.clip_grad", lambda _, norm: 0 < norm < 1e-3, "below 0.001: steps are cut to almost nothing; 1 is usual, 0 is off"),
    Rule("algorithm.eps_clip", _above(1), "above 1: ratios are above 0 whatever it is, so that it clips nothing; 0.2 is usual"),
    Rule(
        "algorithm.eps_clip_high",
        lambda inspection, value: value is not None and value > 1 and inspection.config.algorithm.advantage_estimator != "cispo",
        "above 1; 0.2 to 0.3 is usual",
    ),
    Rule(("algorithm.kl_loss_coef", "algorithm.kl_coef"), _above(10), "above 10: the KL drowns the reward; 0 to 0.1 is usual"),
    Rule("algorithm.entropy_coef", lambda _, value: abs(value) > 1, "beyond 1: the entropy drowns the reward; 0 to 0.01 is usual"),
    Rule("algorithm.gamma", lambda _, gamma: gamma < 0.9, "below 0.9: tokens long before the reward learn nothing of it; 1 is usual"),
    Rule("rollout.rollout_temperature", _above(2), "above 2: answers are noise; 1 is usual"),
    Rule("rollout.rollout_batch_size", _more_than_prompts, "more than there are prompts: a batch has some of them twice"),
    Rule("rollout.rollout_max_response_len", _too_short, "fewer tokens than the chat template writes into a turn: none can end in it"),
)


# What fields need to have an effect, whether a run has it, and the fields; those that are at their defaults do not count.
NEEDS: tuple[tuple[str, Callable[[RunConfig], Any], str], ...] = (
    ("a function of your own", paths, "run.custom_args"),
    ("reasoning_gym or data_source", lambda c: c.data.data_source, "curriculum.*"),
    ("prompt_data", lambda c: not c.curriculum.reasoning_gym, "data.rollout_shuffle"),
    ("num_rollout left out", lambda c: c.rollout.num_rollout_per_epoch or "num_rollout" not in c.rollout.model_fields_set, "*.num_epoch"),
    ("agents or such", lambda c: c.may_give_rewards or c.has_agents or paths(c) or c.ingest.ingest_groups != "off", "rollout.min_rollouts"),
    ("an agent", lambda c: c.has_agents, "rollout.agent_*"),
    ("agent_image", lambda c: c.rollout.agent_image, "*.agent_runtime *.agent_network *.agent_memory_bytes *.agent_cpus *.agent_processes"),
    ("custom_generate_function_path or rollout_sample_hook_path", generate_paths, "rollout.generate_workers"),
    ("no rollout_concurrency", lambda c: c.rollout.sglang_server_concurrency == c.rollout.rollout_concurrency, "rollout.sglang_server_*"),
    ("episode_url", lambda c: c.episode.episode_url, "episode.*"),
    ("a verifier", lambda c: c.reward.custom_rm_path or {*VERIFIERS} & {c.reward.rm_type, *c.reward.reward_weights}, "*.answer_pattern"),
    ("rm_url", lambda c: c.reward.rm_url, "reward.rm_timeout reward.rm_tries"),
    ("judge_url", lambda c: c.reward.judge_url, "reward.judge_*"),
    ("several optimizer steps a batch", lambda c: c.trainer.num_steps_per_rollout > 1 or c.algorithm.correction == "rollout", "*.use_opsm"),
    ("held-out prompts", lambda c: c.eval.named, "eval.* reward.eval_* monitoring.custom_eval_*"),
    ("advantage_estimator = ppo", lambda c: c.algorithm.has_critic, "trainer.critic_*"),
    ("tensor_model_parallel_size above 1", lambda c: c.trainer.tensor_model_parallel_size > 1, "trainer.sequence_parallel"),
    ("lr_decay_style = linear or cosine", lambda c: c.trainer.lr_decay_style != "constant" or not c.has_steps, "trainer.min_lr"),
    ("a decay or lr_warmup_fraction", lambda c: c.trainer.lr_decay_style != "constant" or c.trainer.lr_warmup_fraction, "*.lr_decay_iters"),
    ("lora_rank", lambda c: c.trainer.lora_rank or c.tinker.tinker_endpoint, "trainer.lora_alpha trainer.target_modules"),
    ("enable_mtp_training", lambda c: c.trainer.enable_mtp_training, "trainer.mtp_loss_scaling_factor"),
    ("save_hf", lambda c: c.trainer.save_hf, "trainer.save_hf_interval"),
    ("lend_gpus", lambda c: c.trainer.lend_gpus, "trainer.lent_mem_fraction_static"),
    ("sft_data", lambda c: c.sft.sft_data, "sft.*"),
    ("sft_lr_decay_style = linear or cosine", lambda c: c.sft.sft_lr_decay_style != "constant", "sft.sft_min_lr"),
    ("update_weight_transport = s3", lambda c: c.weights.object_store_url, "weights.object_store_*"),
    ("pushes of weights", lambda c: not c.engines_read_snapshots, "weights.check_weight_update_equal weights.skip_unchanged"),
    ("pushes of weights, without colocate", lambda c: not (c.engines_read_snapshots or c.trainer.colocate), "weights.snapshot_interval"),
    ("snapshots", lambda c: c.engines_read_snapshots or (c.weights.snapshot_interval and not c.trainer.colocate), "*.update_weight_mode"),
    ("update_weight_mode = delta", lambda c: c.weights.update_weight_mode == "delta", "weights.*_delta_* weights.*_full_interval"),
    ("use_wandb", lambda c: c.monitoring.use_wandb or c.monitoring.wandb_mode == "disabled", "monitoring.wandb_*"),
    ("keep_rollouts above 0", lambda c: c.monitoring.keep_rollouts, "monitoring.keep_rollouts_*"),
    ("use_pytorch_profiler", lambda c: c.debug.use_pytorch_profiler, "debug.profile_*"),
    ("rollout in profile_target", lambda c: "rollout" in c.debug.profile_target, "debug.profile_engine_steps"),
    ("record_memory_history", lambda c: c.debug.record_memory_history, "debug.memory_*"),
    ("a gateway", lambda c: c.gateways or c.gateway.gateway_replicas == 0, "gateway.*"),
    ("ingest_groups", lambda c: c.ingest.ingest_groups != "off", "ingest.*"),
    ("myxo serve", lambda c: c.tinker.tinker_endpoint, "tinker.*"),
)


def check_needs(inspection: Inspection) -> Findings:
    """Notes fields that are given and have no effect, as the run lacks what they need."""
    config, given = inspection.config, list[str]()
    for section, own in config:
        defaults = {name: field.get_default(call_default_factory=True) for name, field in type(own).model_fields.items()}
        given += [f"{section}.{name}" for name, value in own if value != defaults[name]]
    for needed, has, patterns in NEEDS:
        idle = [name for pattern in patterns.split() for name in fnmatch.filter(given, pattern)]
        if idle and not has(config):
            yield Note(f"{', '.join(idle)}: without effect{' but for functions of your own' * bool(paths(config))}, as this needs {needed}")


def check_values(inspection: Inspection) -> Findings:
    """Notes each value that a rule finds odd, and timeouts above a day."""
    config = inspection.config
    for section in () if config.debug.trains_only else type(config).model_fields:
        for name, value in getattr(config, section):
            if name.endswith("_timeout") and isinstance(value, int | float) and value > DAY:
                yield Note(f"{section}.{name} = {value:g}: seconds, more than a day: what hangs is found after {value / DAY:.1f} days")
    for field, value, why in (found for rule in RULES for found in rule.problems(config, inspection)):
        yield Note(f"{field} = {value!r}: {why}" if isinstance(value, str) else f"{field} = {value:g}: {why}")


def check_presets(inspection: Inspection) -> Findings:
    """Yields a note for each preset."""
    config = inspection.config
    values = {field: value for section in type(config).model_fields for field, value in getattr(config, section)}
    yield from map(Note, presets.notes(config.algorithm.preset, values))


def check_support(inspection: Inspection) -> Findings:
    """Yields a note where samples come from another distribution than the one that is trained."""
    config = inspection.config
    if found := config.support_mismatch:
        wanted = config.trainer.support_replay != "off" and bool(config.rollout.truncates)
        obstacle = next(config.support_obstacles, None) if wanted else None
        why = "" if obstacle is None else f" (no support_replay: {obstacle})"
        yield Note(
            f"{', '.join(found)}: this run trains another distribution than it samples{why}: log-probs and ratios are those of softmax("
            "logits / rollout_temperature) over the whole vocabulary, and train/support_mismatch is 1 in each step's metrics"
        )


def check_variables(inspection: Inspection) -> Findings:
    """Yields a note for each environment variable of slime's that changes nothing here."""
    own = inspection.config.trainer.train_env_vars
    yield from map(Note, environment_variables.unread({**os.environ, **own}, own))


# Functions that may put a teacher's log-probs beside their samples.
TEACHES = (
    "custom_generate_function_path",
    "rollout_function_path",
    "custom_convert_samples_to_train_data_path",
    "rollout_data_postprocess_path",
)


def check_teachers(inspection: Inspection) -> Findings:
    """Yields where there is no teacher, and a key that is not set where the services start."""
    config, algorithm = inspection.config, inspection.config.algorithm
    given = [getattr(section, name, None) for section in (config.rollout, algorithm) for name in TEACHES]
    alone = not algorithm.opd_teachers and not any(given) and config.debug.load_debug_rollout_data is None
    if algorithm.use_opd and algorithm.opd_type == "sglang" and alone:
        expected = "a teacher: opd_teachers, or a function that puts its log-probs beside the samples (custom_generate_function_path)"
        yield ConfigError("algorithm.use_opd", True, expected)
    temperature = config.rollout.rollout_temperature
    if algorithm.opd_teachers and temperature != 1.0:
        yield Note(
            f"opd_teachers are asked for log-probs at rollout_temperature = {temperature:g}, at which the policy's are taken; SGLang gives "
            "those of given tokens at 1, whatever it is asked, and the two differ; opd_type = megatron takes both at rollout_temperature"
        )
    variable = algorithm.opd_teacher_key_variable
    if variable is not None and inspection.starts and not os.environ.get(variable):
        yield ConfigError("algorithm.opd_teacher_key_variable", variable, "a variable that is set where `myxo up` starts")


def check_dumps(inspection: Inspection) -> Findings:
    """Yields the first step without a file; notes what a run leaves out that trains nothing."""
    config, template = inspection.config, inspection.config.debug.load_debug_rollout_data
    if config.debug.debug_rollout_only and config.sft.sft_data is not None:
        yield Note("debug.debug_rollout_only: nothing is trained: the warm start of [sft] is left out")
    if template is None:
        return
    if config.algorithm.has_critic:
        expected = "an estimator without a critic: its values are not in the dumps"
        yield ConfigError("algorithm.advantage_estimator", config.algorithm.advantage_estimator, expected)
    for step in range(config.rollout.num_rollout):
        if not (path := Path(template.replace(STEP, str(step)))).is_file():
            expected = f"a file of each step from 0 to {config.rollout.num_rollout - 1} (rollout.num_rollout); there is no {path}"
            yield ConfigError(DUMPS, template, expected)
            return


FIELD = "rollout.num_epoch"


def settled(inspection: Inspection) -> RolloutSection:
    """Returns the run's ``[rollout]`` with the steps of its epochs; unchanged where ``num_rollout`` is given or no prompts can be opened.

    Raises ConfigError for prompts that make no batch, and for a source of prompts, whose size is not known.
    """
    rollout, data = inspection.config.rollout, inspection.config.data
    if (epochs := rollout.num_epoch) is None or "num_rollout" in rollout.model_fields_set:
        return rollout
    if data.data_source is not None:
        raise ConfigError(FIELD, epochs, "num_rollout instead: a source of prompts (data_source) does not say how many it has")
    if (prompts := inspection.training) is None:
        return rollout
    if not (steps := prompts.epoch_size // rollout.rollout_batch_size):
        expected = f"enough prompts for a batch: {prompts.epoch_size} are fewer than rollout_batch_size = {rollout.rollout_batch_size}"
        raise ConfigError(FIELD, epochs, expected)
    return rollout.model_copy(update={"num_rollout": epochs * steps, "num_rollout_per_epoch": steps})


def check_intervals(inspection: Inspection) -> Findings:
    """Notes intervals that are no multiple of the one at which what they need is made."""
    trainer, evaluation, weights = inspection.config.trainer, inspection.config.eval, inspection.config.weights
    for name, interval, made_by, made, what in (
        ("eval_interval", evaluation.eval_interval, "update_weights_interval", weights.update_weights_interval, "version of the weights"),
        ("save_hf_interval", trainer.save_hf_interval if trainer.save_hf else None, "save_interval", trainer.save_interval, "checkpoint"),
    ):
        if interval is not None and interval % made:
            yield Note(f"{name} = {interval} is no multiple of {made_by} = {made}: what is due in between waits for the next {what}")


def sft_steps(inspection: Inspection) -> dict[str, int]:
    """Returns ``sft_steps`` by the epochs of the demonstrations; nothing where none are given, or these cannot be opened.

    Raises ConfigError for demonstrations that make no batch.
    """
    sft = inspection.config.sft
    if (epochs := sft.sft_num_epoch) is None or inspection.demonstrations is None:
        return {}
    rows = len(inspection.demonstrations)
    if not (steps := rows // sft.sft_batch_size):
        expected = f"enough demonstrations for a batch: {rows} are fewer than sft_batch_size = {sft.sft_batch_size}"
        raise ConfigError("sft.sft_num_epoch", epochs, expected)
    return {"sft_steps": epochs * steps}
