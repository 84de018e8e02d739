"""``slime.rollout.sglang_rollout``: the loops over prompts, training and held-out ones, around what `sample_generation` does with each.

The services do this themselves unless a rollout function is named. As one, by its path here or from a function of the user's that calls it,
the loop holds a whole batch: so it is where filters see all groups of a batch at once, as with slime. It differs from slime's in its end:
groups that are under way then are not aborted but go into the next batch.
"""

import asyncio
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from shared.hooks.filters import BUILT_IN, MetricGatherer, call_dynamic_filter, should_drop_dynamic_filter_output
from shared.hooks.hook_sample import HookSample, Status, status_of
from shared.hooks.slime import background_loop
from shared.hooks.slime.function_loading import load_function
from shared.hooks.slime.prompt_dataset import Dataset
from shared.hooks.slime.rollout_output import RolloutFnEvalOutput, RolloutFnTrainOutput
from shared.hooks.slime.sample_generation import (
    GenerateState,
    generate,
    generate_and_rm,
    generate_and_rm_group,
    get_model_url,
    sampling_params,
)

__all__ = [
    "GenerateState", "eval_rollout", "eval_rollout_single_dataset", "generate", "generate_and_rm", "generate_and_rm_group",
    "generate_rollout", "generate_rollout_async", "get_model_url", "sampling_params",
]  # fmt: skip

Group = list[Any]
"""The samples of a group; in the place of a sample a list where its rollout gave several."""

NO_PROMPTS_S = 0.05
"""The pause where the source has no prompts now and nothing is under way."""


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Returns the groups of a training step, or the results of the run's held-out sets."""
    if evaluation:
        results: RolloutFnEvalOutput = background_loop.run(eval_rollout(args, rollout_id))[0]
        return results
    output: RolloutFnTrainOutput
    output, aborted = background_loop.run(generate_rollout_async(args, rollout_id, data_source.get_samples))
    if aborted:
        data_source.add_samples(aborted)
    return output


async def generate_rollout_async(
    args: Any, rollout_id: int, data_source: Callable[[int], list[Group]]
) -> tuple[RolloutFnTrainOutput, list[Group]]:
    """Returns the groups of a training step, and those that were aborted.

    Args:
        data_source: gives up to so many groups of prompts.

    The dynamic filter sees each group as it ends, the sample filter the whole batch, the all-samples function every group that has ended.
    """
    state, gatherer, target = GenerateState(args), MetricGatherer(), args.rollout_batch_size
    path = args.dynamic_sampling_filter_path
    dynamic = None if path is None else BUILT_IN.get(path) or load_function(path)
    kept: list[Group] = []
    ended: list[Group] = []
    aborted: list[Group] = []
    while len(kept) < target:
        await _topped_up(state, data_source, target - len(kept), args.over_sampling_batch_size or target)
        done, state.pendings = await asyncio.wait(state.pendings, return_when=asyncio.FIRST_COMPLETED)
        groups = [task.result() for task in done]
        for position, group in enumerate(groups):
            state.remaining_batch_size = len(state.pendings) + len(kept) + len(groups) - position
            if any(status_of(sample.status) is Status.ABORTED for sample in _samples(group)):
                aborted.append(group)
                continue
            ended.append(group)
            output = call_dynamic_filter(dynamic, args, group)
            if should_drop_dynamic_filter_output(output, remaining_batch_size=state.remaining_batch_size, target_data_size=target):
                gatherer.on_dynamic_filter_drop(reason=output.reason)
            elif len(kept) < target:
                kept.append(group)
            else:  # one more than the batch takes: it is the next one's
                state.pendings.add(asyncio.create_task(_again(group)))
    kept.sort(key=_index)
    if args.rollout_sample_filter_path is not None:
        load_function(args.rollout_sample_filter_path)(args, kept)
    if args.rollout_all_samples_process_path is not None:
        load_function(args.rollout_all_samples_process_path)(args, sorted(ended, key=_index), data_source)
    return RolloutFnTrainOutput(kept, gatherer.collect()), aborted


async def _topped_up(state: GenerateState, data_source: Callable[[int], list[Group]], missing: int, at_once: int) -> None:
    """Has at least as many groups under way as are missing, as far as there are prompts, and one in any case."""
    while len(state.pendings) < missing:
        found = data_source(max(at_once, missing) - len(state.pendings))
        state.submit_generate_tasks(found)
        if not found and state.pendings:
            return
        if not found:
            await asyncio.sleep(NO_PROMPTS_S)


async def _again(group: Group) -> Group:
    return group


async def eval_rollout(args: Any, rollout_id: int) -> tuple[RolloutFnEvalOutput, list[Group]]:
    """Returns the results of all of ``args.eval_datasets``, and nothing. Raises ValueError with ``args.group_rm``."""
    if args.group_rm:
        raise ValueError("group_rm: held-out samples are scored one by one")
    results = await asyncio.gather(*(eval_rollout_single_dataset(args, rollout_id, one) for one in args.eval_datasets))
    return RolloutFnEvalOutput({name: one for result in results for name, one in result.items()}), []


async def eval_rollout_single_dataset(args: Any, rollout_id: int, dataset_cfg: Any) -> dict[str, dict[str, Any]]:
    """Returns the results of one set by its name: ``rewards``, ``truncated`` and ``samples``, in the order of its prompts.

    Raises ValueError where a sample's reward is one that the reward service alone can ask for.
    """
    tokenizer = GenerateState(args).tokenizer
    prompts = Dataset(
        dataset_cfg.path,
        tokenizer,
        max_length=args.eval_max_prompt_len,
        prompt_key=dataset_cfg.input_key,
        label_key=dataset_cfg.label_key,
        tool_key=dataset_cfg.tool_key,
        metadata_key=dataset_cfg.metadata_key,
        apply_chat_template=dataset_cfg.apply_chat_template,
        apply_chat_template_kwargs=dataset_cfg.apply_chat_template_kwargs,
    )
    count, parameters = dataset_cfg.n_samples_per_eval_prompt, _parameters(args, dataset_cfg)
    fresh = [_held_out(dataset_cfg, prompt, row * count + index) for row, prompt in enumerate(prompts.samples) for index in range(count)]
    given = await asyncio.gather(*(generate_and_rm(args, sample, {**parameters}, evaluation=True) for sample in fresh))
    samples = [sample for one in given for sample in _samples(one)]
    truncated = [status_of(sample.status) is Status.TRUNCATED for sample in samples]
    rewards = [_reward(args, dataset_cfg, sample) for sample in samples]
    return {dataset_cfg.name: {"rewards": rewards, "truncated": truncated, "samples": samples}}


def _parameters(args: Any, dataset: Any) -> dict[str, Any]:
    """Returns a set's sampling parameters in SGLang's names."""
    run = sampling_params(args)
    own = {
        "temperature": dataset.temperature,
        "top_p": dataset.top_p,
        "top_k": dataset.top_k,
        "max_new_tokens": dataset.max_response_len,
        "stop": dataset.stop,
        "stop_token_ids": dataset.stop_token_ids,
        "skip_special_tokens": dataset.skip_special_tokens,
        "no_stop_trim": dataset.no_stop_trim,
        "repetition_penalty": dataset.repetition_penalty,
        "min_new_tokens": dataset.min_new_tokens,
    }
    return {**run, **{name: value for name, value in own.items() if value is not None}}


def _held_out(dataset: Any, prompt: HookSample, index: int) -> HookSample:
    sample = deepcopy(prompt)
    sample.index, sample.metadata = index, dataset.inject_metadata(sample.metadata)
    sample.custom_rm_path, sample.generate_function_path = dataset.custom_rm_path, dataset.custom_generate_function_path
    return sample


def _reward(args: Any, dataset: Any, sample: HookSample) -> Any:
    if sample.reward is None:
        raise ValueError(
            f"set {dataset.name}: {args.rm_type} is a reward that the reward service alone can ask; leave its sets to Myxo's loop"
        )
    key = dataset.reward_key or args.eval_reward_key or args.reward_key
    return sample.reward[key] if key and isinstance(sample.reward, dict) else sample.reward


def _samples(group: Any) -> list[HookSample]:
    return [sample for one in group for sample in _samples(one)] if isinstance(group, list) else [group]


def _index(group: Group) -> int:
    return _samples(group)[0].index or 0
