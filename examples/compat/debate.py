"""Several solvers and a judge, in slime's manner: one rollout gives a sample for each of them, scored here.

--custom-generate-function-path examples.compat.debate.generate_with_debate
--rm-type math
"""

import asyncio
import random
from copy import deepcopy

from slime.rollout.rm_hub import batched_async_rm
from slime.utils.http_utils import post
from slime.utils.misc import load_function
from slime.utils.types import Sample
from transformers import AutoTokenizer

DEBATE_CONFIG = {"debate_function_path": "examples.compat.debate.run_debate", "solvers": 3, "bonus": 1.5, "penalty": 0.5}


async def ask(args, prompt, role):
    sample = deepcopy(args.sample)
    sample.prompt = prompt
    sample.tokens = args.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    params = deepcopy(args.sampling_params)
    if args.rollout_max_context_len is not None:
        params["max_new_tokens"] = min(params["max_new_tokens"], args.rollout_max_context_len - len(sample.tokens))
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    output = await post(url, {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True})
    generated = output["meta_info"].get("output_token_logprobs", [])
    sample.append_response_tokens(
        args,
        tokens=[entry[1] for entry in generated],
        log_probs=[entry[0] for entry in generated],
        trainable=True,
        meta_info=output["meta_info"],
    )
    sample.response = output["text"]
    sample.role = role
    return sample


async def run_debate(args, sample):
    args = deepcopy(args)
    args.sample = sample
    answers = await asyncio.gather(*(ask(args, sample.prompt, "solver") for _ in range(args.solvers)), return_exceptions=True)
    solvers = [answer for answer in answers if isinstance(answer, Sample)]
    for one, reward in zip(solvers, await batched_async_rm(args, solvers), strict=True):
        one.reward = reward

    numbered = {str(number): one for number, one in enumerate(solvers, 1)}
    listed = "\n".join(f"{number}: {one.response}" for number, one in numbered.items())
    judge = await ask(args, f"{sample.prompt}\n{listed}\nWhich is right? ", "judge")
    chosen = judge.response.strip()[:1]
    judge.reward = numbered[chosen].reward if chosen in numbered else 0
    weight = args.bonus if judge.reward else args.penalty
    for one in (*solvers, judge):
        one.reward = one.reward * weight
        one.rollout_id = sample.index
    return [*solvers, judge]


async def generate_with_debate(args, sample: Sample, sampling_params, evaluation=False) -> list[Sample]:
    args.sampling_params = sampling_params
    args.rollout_max_context_len = args.eval_max_context_len if evaluation else args.rollout_max_context_len
    args.tokenizer = AutoTokenizer.from_pretrained(args.hf_checkpoint, trust_remote_code=True)
    for key, value in DEBATE_CONFIG.items():
        setattr(args, key, value)
    samples = await load_function(args.debate_function_path)(args, sample)
    random.shuffle(samples)
    return samples
