"""What a run of a config that has passed its checks comes to, in ten lines: the end of ``myxo up --dry-run``."""

from collections.abc import Iterator, Sequence

from myxo.preflight.inspection import Inspection
from myxo.preflight.machine_checks import memory_bytes
from myxo.preflight.run_plan import RunPlan
from shared.config import devices
from shared.environment.conformance import Check
from shared.model.memory_plan import total_parameters
from shared.model.parallel_layout import ParallelLayout
from shared.runtime.host import host_memory

GB = 1e9


def lines(inspection: Inspection, tried: Sequence[Check]) -> Iterator[tuple[str, str]]:
    """Yields the lines, each with its head. ``tried``: the results of the user's own functions."""
    config, shape = inspection.config, inspection.architecture
    trainer, rollout, steps = config.trainer, config.rollout, config.rollout.num_rollout
    sft = f", after {config.sft.sft_steps} of sft" if config.sft.sft_data else ""
    yield "run", f"{config.run.name}, in {config.run.root}: {steps} steps{sft}"
    size = "" if shape is None else f", {total_parameters(shape) / 1e9:.3g} billion parameters"
    yield "model", f"{config.model.hf_checkpoint}{size}, trained in {trainer.train_dtype}"
    yield "layout", "; ".join(_layout(inspection))
    yield "memory", "; ".join(_memory(inspection))
    sets = [f"{view.name}: {len(prompts):,}" for view, prompts in inspection.heldout]
    prompts = config.data.data_source or ("none" if inspection.training is None else f"{len(inspection.training):,} prompts")
    yield "data", f"{prompts}{'; held out ' if sets else ''}{', '.join(sets)}"
    samples, prompt = rollout.rollout_batch_size * rollout.n_samples_per_prompt, inspection.longest_prompts.get("data.prompt_data", 0)
    length = rollout.rollout_max_response_len
    most = f"at most {samples * (prompt + length):,} tokens ({prompt} + {length} a sample)"
    groups = f"{rollout.rollout_batch_size} prompts x {rollout.n_samples_per_prompt} = {samples:,} samples"
    yield "a step", f"{groups}, {most}, optimizer steps: {trainer.num_steps_per_rollout}"
    yield "reward", config.reward.custom_rm_path or config.reward.rm_type or "of each prompt's own"
    yield "functions", f"called: {len(tried)}, each as it should be" if tried else "not called: `myxo try CONFIG` calls them"
    auto = {"train_device": trainer.train_device, "rollout_device": rollout.rollout_device}
    guesses = [f"{name} is {devices.resolve(device)}" for name, device in auto.items() if device == "auto"]
    yield "guessed", "; ".join([*guesses, *inspection.guesses]) or "nothing"
    yield "problems", f"none; notes above: {len(inspection.notes)}" if inspection.notes else "none"


def _layout(inspection: Inspection) -> Iterator[str]:
    config = inspection.config
    if not config.debug.debug_rollout_only:
        layout, ranks = ParallelLayout.of(config.trainer), config.trainer.ranks("actor")
        own = f"tensor {layout.tensor}, pipeline {layout.pipeline}, context {layout.context}, expert {layout.expert}"
        critic = f", critic {config.trainer.ranks('critic')}" if config.algorithm.has_critic else ""
        yield f"trainer of {ranks} ranks ({own}){critic} on {devices.resolve(config.trainer.train_device)}"
    if not config.debug.trains_only:
        rollout, where = config.rollout, ", colocated" if config.trainer.colocate else ""
        engines = f"{rollout.rollout_replicas} engines of {rollout.rollout_num_gpus_per_engine} GPUs"
        device = "servers of somebody else's" if rollout.external_engines else devices.resolve(rollout.rollout_device)
        if rollout.engine_groups:
            engines = " and ".join(f"{group.replicas} engines of {group.num_gpus_per_engine} GPUs" for group in rollout.engines())
        lent = devices.lent_instances(config)
        more = f", and {len(lent)} of the trainer's GPUs while it waits (lend_gpus)" * bool(lent)
        yield (f"{engines}{where}" if device == "cuda" else f"{rollout.rollout_replicas} engines on {device}") + more
        for name in rollout.models:
            found = [own.rollout for own in (config.of_engines(name, place) for place in range(len(rollout.engines(name))))]
            shapes = " and ".join(f"{own.rollout_replicas} of {own.rollout_num_gpus_per_engine} GPUs" for own in found)
            on = devices.resolve(found[0].rollout_device)
            yield f"{name}, frozen: {shapes if on == 'cuda' else sum(own.rollout_replicas for own in found)} on {on}"


def _memory(inspection: Inspection) -> Iterator[str]:
    config, gpu_bytes = inspection.config, inspection.gpu_bytes
    where = map(devices.resolve, (config.trainer.train_device, config.rollout.rollout_device))
    if "cuda" in where and gpu_bytes and inspection.planned:
        for need in RunPlan(config, inspection.planned, gpu_bytes, inspection.critic).needs:
            yield f"{need.of} {need.total / GB:.1f} of {need.available / GB:.1f} GB"
    elif inspection.model_size is not None:
        yield f"at least {memory_bytes(config, inspection.model_size) / GB:.1f} of this machine's {host_memory()[0] / GB:.1f} GB"
    else:
        yield "not known"
