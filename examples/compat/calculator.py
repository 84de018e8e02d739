"""A tool that computes, in slime's manner: what the model writes between << and >> is worked out, and it continues behind the result.

--custom-generate-function-path examples.compat.calculator.generate
--custom-rm-path examples.compat.calculator.reward_func
"""

import ast
import operator
import re

from slime.rollout.rm_hub.math_dapo_utils import compute_score
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

TOOL_CONFIG = {"max_turns": 4, "max_tool_calls": 3}

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


class CalculatorTool:
    def run(self, expression):
        try:
            return str(self._value(ast.parse(expression, mode="eval").body))
        except (SyntaxError, ValueError, KeyError, TypeError, RecursionError, MemoryError):
            return "error"

    def _value(self, node):
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](self._value(node.left), self._value(node.right))
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        raise ValueError("expected whole numbers, +, - and *")


tool = CalculatorTool()


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout, "a calculation begins anew"
    sample.rollout_log_probs = None
    sample.response, sample.response_length, sample.loss_mask = "", 0, []

    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    sample.tokens = list(prompt_ids)
    response, response_ids, loss_masks = "", [], sample.loss_mask
    tool_call_count = 0

    longest = args.rollout_max_context_len
    if longest is None:
        longest = args.context_parallel_size * args.max_tokens_per_gpu

    for _ in range(TOOL_CONFIG["max_turns"]):
        left = longest - len(prompt_ids) - len(response_ids)
        if left <= 0:
            sample.status = Sample.Status.TRUNCATED
            break
        params = {**sampling_params, "max_new_tokens": min(sampling_params["max_new_tokens"], left), "stop": [">>", "\n"]}
        output = await post(url, {"input_ids": prompt_ids + response_ids, "sampling_params": params, "return_logprob": True})
        meta = output["meta_info"]
        if meta["finish_reason"]["type"] == "abort" or "output_token_logprobs" not in meta:
            sample.status = Sample.Status.ABORTED
            return sample
        ids = [entry[1] for entry in meta["output_token_logprobs"]]
        sample.append_response_tokens(
            args, tokens=ids, log_probs=[entry[0] for entry in meta["output_token_logprobs"]], trainable=True, meta_info=meta
        )
        text = state.tokenizer.decode(ids)
        response += text
        response_ids += ids
        if meta["finish_reason"]["type"] == "length":
            break
        asked = re.search(r"<<(.*?)>>", text)
        result = f"={tool.run(asked.group(1))} " if asked else " <<expression>> computes. "
        tool_call_count += bool(asked)
        result_ids = state.tokenizer(result, add_special_tokens=False)["input_ids"][: longest - len(prompt_ids) - len(response_ids)]
        response += result
        response_ids += result_ids
        sample.append_response_tokens(args, tokens=result_ids, trainable=False)
        if tool_call_count >= TOOL_CONFIG["max_tool_calls"]:
            break

    sample.tokens = prompt_ids + response_ids
    sample.response_length = len(response_ids)
    sample.response = response
    sample.loss_mask = loss_masks
    sample.payload_text = sample.prompt + response
    sample.tool_call_count = tool_call_count
    if sample.status is Sample.Status.PENDING:
        sample.status = Sample.Status.COMPLETED
    return sample


async def reward_func(args, sample, **kwargs):
    if not isinstance(sample, Sample):
        raise TypeError("expected a Sample")
    result = compute_score(sample.payload_text, sample.label if sample.label is not None else "", strict_box_verify=True)
    if result["score"] < 0:
        result["score"] = min(-0.6, result["score"] + 0.1 * getattr(sample, "tool_call_count", 0))
    if result["pred"] is None:
        result["pred"] = ""
    return result
