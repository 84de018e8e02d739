"""``slime.rollout.sglang_rollout``: one generation through the engine, and what user's functions share while they generate."""

import asyncio
import inspect
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shared.hooks.hook_sample import HookSample, Status, status_of
from shared.hooks.slime import http_requests, model_processors, reward_dispatch
from shared.hooks.slime.function_loading import SingletonMeta, load_function

Generated = HookSample | list[HookSample]
"""What one rollout gives: a sample, or several."""


class GenerateState(metaclass=SingletonMeta):
    """What all generations of a process share: tokenizer, processor, sampling parameters, and a semaphore over the engine's requests.

    Attributes:
        aborted: nothing new is generated: samples come back as they are, ABORTED.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.tokenizer = model_processors.load_tokenizer(args.hf_checkpoint, trust_remote_code=args.trust_remote_code)
        self.processor = model_processors.load_processor(args.hf_checkpoint, trust_remote_code=args.trust_remote_code)
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
    }


def get_model_url(args: Any, model_name: str, endpoint: str = "/generate") -> str:
    """Returns the address of a model's router: the policy's for a name that is not among ``args.sglang_model_routers``."""
    routers = getattr(args, "sglang_model_routers", None) or {}
    host, port = routers.get(model_name, (args.sglang_router_ip, args.sglang_router_port))
    return f"http://{host}:{port}{endpoint}"


async def generate(args: Any, sample: HookSample, sampling_params: dict[str, Any]) -> HookSample:
    """Generates a response, or goes on with the one that an ABORTED sample has. Raises ValueError for a sample in another state."""
    if status_of(sample.status) not in (Status.PENDING, Status.ABORTED):
        raise ValueError(f"a sample of status {sample.status} has ended; expected PENDING or ABORTED")
    if not sample.tokens:
        sample.tokens = GenerateState(args).tokenizer.encode(sample.prompt, add_special_tokens=False)
    sampling_params["max_new_tokens"] -= sample.response_length
    if sampling_params["max_new_tokens"] <= 0:
        sample.status = Status.TRUNCATED
        return sample
    body = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
    routed = sample.session_id and getattr(args, "router_policy", None) == "consistent_hashing"
    headers = {"X-SMG-Routing-Key": str(sample.session_id)} if routed else None
    output = await http_requests.post(get_model_url(args, ""), body, headers=headers)
    drawn = output["meta_info"].get("output_token_logprobs") or []
    sample.append_response_tokens(
        args,
        tokens=[entry[1] for entry in drawn],
        log_probs=[entry[0] for entry in drawn],
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
    if not args.group_rm:
        await _score(args, given)
    return given


async def generate_and_rm_group(args: Any, group: list[HookSample], sampling_params: dict[str, Any], evaluation: bool = False) -> list[Any]:
    """Returns a group's samples, generated and scored; a list in the place of a sample where its rollout gave several."""
    state = GenerateState(args)
    if state.aborted:
        return group
    rollouts = []
    for index, sample in enumerate(group):
        sample.session_id = sample.session_id or str(uuid.uuid4())
        seed = {"sampling_seed": state.group_sampling_seeds[index]} if args.sglang_enable_deterministic_inference else {}
        rollouts.append(generate_and_rm(args, sample, {**sampling_params, **seed}, evaluation=evaluation))
    given: list[Any] = list(await asyncio.gather(*rollouts))
    if args.group_rm and not state.aborted:
        rewards = await reward_dispatch.batched_async_rm(args, given)
        for scored, reward in zip(given, rewards, strict=True):
            scored.reward = reward
    return given


async def _by_function(args: Any, sample: HookSample, sampling_params: dict[str, Any], evaluation: bool) -> Generated:
    path = sample.generate_function_path or args.custom_generate_function_path
    if path is None:
        return await generate(args, sample, sampling_params)
    function = load_function(path)
    more = {"evaluation": evaluation} if "evaluation" in inspect.signature(function).parameters else {}
    given: Generated = await function(args, sample, sampling_params, **more)
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
