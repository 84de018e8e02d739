"""``slime.rollout.sglang_rollout``: the loops over prompts, training and held-out ones, and one generation through the engine.

The services do this themselves unless a rollout function is named. As one, by its path here or from a function of the user's that calls it,
the loop holds a whole batch: so it is where filters see all groups of a batch at once, as with slime. It differs from slime's in its end:
groups that are under way then are not aborted but go into the next batch.
"""

import asyncio
import inspect
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from shared.config.reward_section import WEIGHTED
from shared.data.tokenizer import Tokenizer
from shared.hooks import reward_values
from shared.hooks.filters import BUILT_IN, MetricGatherer, call_dynamic_filter, should_drop_dynamic_filter_output
from shared.hooks.hook_sample import HookSample, Status, status_of
from shared.hooks.loading import SingletonMeta, load_function
from shared.hooks.returned_output import RolloutFnEvalOutput, RolloutFnTrainOutput
from shared.hooks.slime import http_requests, model_functions, reward_dispatch
from shared.hooks.slime.prompt_sources import Dataset
from shared.runtime.errors import nearest
from shared.runtime.tasks import called, settled

Generated = HookSample | list[HookSample]  # What one rollout gives: a sample, or several


class GenerateState(metaclass=SingletonMeta):
    """What all generations of a process share: tokenizer, processor, sampling parameters, and a semaphore over the engine's requests.

    Attributes:
        aborted: nothing new is generated: samples come back as they are, ABORTED.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.tokenizer = model_functions.load_tokenizer(args.hf_checkpoint, trust_remote_code=args.trust_remote_code)
        self.processor = model_functions.load_processor(args.hf_checkpoint, trust_remote_code=args.trust_remote_code)
        self.semaphore = asyncio.Semaphore(args.sglang_server_concurrency * http_requests.get_rollout_num_engines(args))
        self.sampling_params = sampling_params(args)
        self.group_sampling_seeds = [args.rollout_seed + index for index in range(args.n_samples_per_prompt)]
        self.dp_counts = [0] * (args.sglang_dp_size or 1)
        self.dp_rank = 0
        self.reset()

    def reset(self) -> None:
        """Forgets what was under way."""
        self.remaining_batch_size = 0
        self.pendings: set[asyncio.Task[list[Any]]] = set()
        self.aborted = False

    @contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """Counts a generation, while the body runs, to the data-parallel rank that has the fewest."""
        self.dp_rank = rank = self.dp_counts.index(min(self.dp_counts))
        self.dp_counts[rank] += 1
        try:
            yield rank
        finally:
            self.dp_counts[rank] -= 1

    def submit_generate_tasks(self, samples: list[list[HookSample]]) -> None:
        """Starts generating groups; their tasks are in ``pendings``."""
        for group in samples:
            self.pendings.add(asyncio.create_task(generate_and_rm_group(self.args, group, self.sampling_params.copy())))
        self.remaining_batch_size += len(samples)


def sampling_params(args: Any) -> dict[str, Any]:
    """Returns the run's sampling parameters in SGLang's names. Stop strings stay in the text, as do their tokens."""
    return {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        **({"custom_params": {"return_top_p_token_ids": True}} if getattr(args, "kept_top_k", 0) else {}),
    }


def get_model_url(args: Any, model_name: str, endpoint: str = "/generate") -> str:
    """Returns the address of a model's router: the policy's where the run has no other models. Raises ValueError for a name that is not
    among ``args.sglang_model_routers``."""
    routers = getattr(args, "sglang_model_routers", None) or {}
    if routers and model_name not in (*routers, "", "default"):
        raise ValueError(f"no model {model_name!r} in args.sglang_model_routers; {nearest(model_name, list(routers))}")
    host, port = routers.get(model_name) or (args.sglang_router_ip, args.sglang_router_port)
    return f"http://{host}:{port}{endpoint}"


async def generate(args: Any, sample: HookSample, sampling_params: dict[str, Any]) -> HookSample:
    """Generates a response, or continues with the one that an ABORTED sample has. Raises ValueError for a sample in another state."""
    if status_of(sample.status) not in (Status.PENDING, Status.ABORTED):
        raise ValueError(f"a sample of status {sample.status} has ended; expected PENDING or ABORTED")
    if not sample.tokens:
        sample.tokens = GenerateState(args).tokenizer.encode(sample.prompt, add_special_tokens=False)
    sampling_params["max_new_tokens"] -= sample.response_length
    if sampling_params["max_new_tokens"] <= 0:
        sample.status = Status.TRUNCATED
        return sample
    body = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
    body |= {"return_routed_experts": True} if args.use_rollout_routing_replay else {}
    routed = sample.session_id and getattr(args, "router_policy", None) == "consistent_hashing"
    headers = {"X-SMG-Routing-Key": str(sample.session_id)} if routed else None
    output = await http_requests.post(get_model_url(args, ""), body, headers=headers)
    logprobs = output["meta_info"].get("output_token_logprobs") or []
    sample.append_response_tokens(
        args,
        tokens=[entry[1] for entry in logprobs],
        log_probs=[entry[0] for entry in logprobs],
        meta_info=output["meta_info"],
        text=output["text"],
    )
    return sample


async def generate_and_rm(args: Any, sample: HookSample, sampling_params: dict[str, Any], evaluation: bool = False) -> Generated:
    """Generates a sample by its own function, the run's, or `generate`, and scores it unless its whole group is scored at once."""
    if args.partial_rollout and args.mask_offpolicy_in_partial_rollout and sample.response_length > 0:
        sample.loss_mask = [0] * sample.response_length
    if status_of(sample.status) in (Status.COMPLETED, Status.TRUNCATED):
        return sample
    state = GenerateState(args)
    async with state.semaphore:
        if state.aborted:
            sample.status = Status.ABORTED
            return sample
        with state.dp_rank_context():
            given = await _by_function(args, sample, sampling_params, evaluation)
    given = await apply_rollout_sample_hooks(args, given, evaluation=evaluation)
    if not args.group_rm:
        await _score(args, given)
    return given


async def apply_rollout_sample_hooks(args: Any, value: Any, **given: Any) -> Any:
    """Returns a sample, or a list of them, however deep, as the functions of ``args.rollout_sample_hook_path`` leave it, one after another.
    Each is called with those of ``rollout_id`` and ``evaluation`` that it names. Raises TypeError for one that returns something else than
    a sample or None, which leaves the sample as it is."""
    if isinstance(value, list):
        return [await apply_rollout_sample_hooks(args, one, **given) for one in value]
    step = {} if given.get("evaluation") else {"rollout_id": (value.group_index or 0) // args.rollout_batch_size}
    for path in args.rollout_sample_hook_path:
        function = load_function(path)
        names = inspect.signature(function).parameters.values()
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in names)
        more = {"rollout_id": None, **step, **given}
        chosen = more if takes_all else {parameter.name: more[parameter.name] for parameter in names if parameter.name in more}
        result = await settled(function(args, value, **chosen))
        if not isinstance(result, HookSample | None):
            raise TypeError(f"rollout.rollout_sample_hook_path = {path}: gave a {type(result).__name__}; expected a sample or None")
        value = value if result is None else result
    return value


async def generate_and_rm_group(args: Any, group: list[HookSample], sampling_params: dict[str, Any], evaluation: bool = False) -> list[Any]:
    """Returns a group's samples, generated and scored; a list in the place of a sample where its rollout gave several."""
    state = GenerateState(args)
    if state.aborted:
        return group
    rollouts = []
    for index, sample in enumerate(group):
        sample.session_id = sample.session_id or str(uuid.uuid4())
        rollouts.append(generate_and_rm(args, sample, sampling_params | _seed(args, index), evaluation=evaluation))
    given: list[Any] = list(await asyncio.gather(*rollouts))
    if args.group_rm and args.rm_type != WEIGHTED and not state.aborted:  # the reward service weighs what a function says of whole groups
        rewards = await reward_dispatch.batched_async_rm(args, given)
        for scored, reward in zip(given, rewards, strict=True):
            scored.reward = reward
    return given


def _seed(args: Any, index: int) -> dict[str, int]:
    """Returns what seeds add to the sampling parameters of a prompt's sample; nothing where engines sample at random."""
    return {"sampling_seed": args.rollout_seed + index} if args.sglang_enable_deterministic_inference else {}


async def _by_function(args: Any, sample: HookSample, sampling_params: dict[str, Any], evaluation: bool) -> Generated:
    path = sample.generate_function_path or args.custom_generate_function_path
    if path is None:
        return await generate(args, sample, sampling_params)
    function = load_function(path)
    more = {"evaluation": evaluation} if "evaluation" in inspect.signature(function).parameters else {}
    given: Generated = await called(function, args, sample, sampling_params, **more)
    return given


async def _score(args: Any, given: Generated) -> None:
    """Scores what has no reward yet, unless something of it was aborted; what only the reward service can score is left to it."""
    samples = given if isinstance(given, list) else [given]
    if any(status_of(sample.status) is Status.ABORTED for sample in samples):
        return
    unscored = [sample for sample in samples if sample.reward is None and not reward_dispatch.scored_later(args, sample)]
    if isinstance(given, list):
        rewards = await reward_dispatch.batched_async_rm(args, unscored) if unscored else []
    else:
        rewards = [await reward_dispatch.async_rm(args, sample) for sample in unscored]
    for sample, reward in zip(unscored, rewards, strict=True):
        sample.reward = reward


__all__ = [
    "GenerateState", "apply_rollout_sample_hooks",
    "eval_rollout", "eval_rollout_single_dataset", "generate", "generate_and_rm", "generate_and_rm_group",
    "generate_rollout", "generate_rollout_async", "get_model_url", "sampling_params",
]  # fmt: skip

Group = list[Any]  # The samples of a group; in the place of a sample a list where its rollout gave several

NO_PROMPTS_S = 0.05  # The pause where the source has no prompts now and nothing is under way


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Returns the groups of a training step, or the results of the run's held-out sets."""
    if evaluation:
        results: RolloutFnEvalOutput = http_requests.run(eval_rollout(args, rollout_id))[0]
        return results
    output: RolloutFnTrainOutput
    output, aborted = http_requests.run(generate_rollout_async(args, rollout_id, data_source.get_samples))
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
                state.pendings.add(asyncio.create_task(asyncio.sleep(0, group)))
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


async def eval_rollout(args: Any, rollout_id: int) -> tuple[RolloutFnEvalOutput, list[Group]]:
    """Returns the results of all of ``args.eval_datasets``, and nothing. Raises ValueError with ``args.group_rm``."""
    if args.group_rm:
        raise ValueError("group_rm: held-out samples are scored one by one")
    results = await asyncio.gather(*(eval_rollout_single_dataset(args, rollout_id, one) for one in args.eval_datasets))
    return RolloutFnEvalOutput({name: one for result in results for name, one in result.items()}), []


OF_SETS = "temperature top_p top_k stop stop_token_ids skip_special_tokens no_stop_trim repetition_penalty min_new_tokens"


async def eval_rollout_single_dataset(args: Any, rollout_id: int, dataset_cfg: Any) -> dict[str, dict[str, Any]]:
    """Returns the results of one set by its name: ``rewards``, ``truncated`` and ``samples``, in the order of its prompts.

    Raises ValueError where a sample's reward is one that the reward service alone can ask for.
    """
    prompts = Dataset(
        dataset_cfg.path,
        GenerateState(args).tokenizer,
        prompt_key=dataset_cfg.input_key,
        label_key=dataset_cfg.label_key,
        tool_key=dataset_cfg.tool_key,
        metadata_key=dataset_cfg.metadata_key,
        apply_chat_template=dataset_cfg.apply_chat_template,
        apply_chat_template_kwargs=dataset_cfg.apply_chat_template_kwargs,
    )
    encode, begin = Tokenizer(Path(args.hf_checkpoint)).encode, args.add_special_tokens and not dataset_cfg.apply_chat_template
    for prompt in prompts.samples:
        prompt.tokens = encode(prompt.prompt, begin).tolist() if isinstance(prompt.prompt, str) else []
    short = [prompt for prompt in prompts.samples if len(prompt.tokens) <= (dataset_cfg.max_prompt_len or sys.maxsize)]
    count = dataset_cfg.n_samples_per_eval_prompt
    fresh = [_held_out(dataset_cfg, prompt, row * count + index) for row, prompt in enumerate(short) for index in range(count)]
    given = await asyncio.gather(*(generate_and_rm(args, one, _held_out_sampling(args, dataset_cfg, one), True) for one in fresh))
    samples = [sample for one in given for sample in _samples(one)]
    truncated = [status_of(sample.status) is Status.TRUNCATED for sample in samples]
    rewards = [_reward(args, dataset_cfg, sample) for sample in samples]
    return {dataset_cfg.name: {"rewards": rewards, "truncated": truncated, "samples": samples}}


def _held_out_sampling(args: Any, dataset: Any, sample: HookSample) -> dict[str, Any]:
    own = {name: getattr(dataset, name) for name in OF_SETS.split()} | {"max_new_tokens": dataset.max_response_len}
    asked = sampling_params(args) | {name: value for name, value in own.items() if value is not None}
    room = (dataset.max_context_len or sys.maxsize) - len(sample.tokens)
    seed = _seed(args, (sample.index or 0) % dataset.n_samples_per_eval_prompt)
    return asked | seed | {"max_new_tokens": min(asked["max_new_tokens"], room)}


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
    key = dataset.reward_key or args.eval_reward_key or args.reward_key or reward_values.REWARD
    return sample.reward.get(key, sample.reward) if isinstance(sample.reward, dict) else sample.reward


def _samples(group: Any) -> list[HookSample]:
    return [sample for one in group for sample in _samples(one)] if isinstance(group, list) else [group]


def _index(group: Group) -> int:
    return _samples(group)[0].index or 0
