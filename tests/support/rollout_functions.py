"""Rollout functions in slime's manner, each with a way of its own to take prompts and hand groups in."""

import asyncio
import json
import os
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shared.hooks import Sample
from shared.hooks.returned_output import RolloutFnEvalOutput, RolloutFnTrainOutput

TOKENS = 6
"""The tokens of each response."""


def generate(args: Any, sample: Any, tokens: int = TOKENS) -> Any:
    """Has the engine continue from the sample's tokens, by a call that blocks."""
    parameters = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": sample.tokens, "sampling_params": parameters, "return_logprob": True}
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        output = json.load(response)
    drawn = output["meta_info"]["output_token_logprobs"]
    ids, log_probs = [token for _, token, _ in drawn], [log_prob for log_prob, _, _ in drawn]
    sample.append_response_tokens(args, tokens=ids, log_probs=log_probs, trainable=True, meta_info=output["meta_info"], text=output["text"])
    return sample


def generated(args: Any, groups: list[list[Any]]) -> list[list[Any]]:
    samples = [sample for group in groups for sample in group]
    with ThreadPoolExecutor(len(samples)) as pool:
        list(pool.map(lambda sample: generate(args, sample), samples))
    return groups


def rewarded(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """A rollout's groups, each sample with a reward of its own."""
    assert not evaluation
    groups = generated(args, data_source.get_samples(args.rollout_batch_size))
    for group in groups:
        for sample in group:
            sample.reward = {"score": float(sample.index), "rollout": float(rollout_id)}
    return RolloutFnTrainOutput(samples=groups, metrics={"rollouts": rollout_id + 1})


def older_form(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
    """The groups as a plain list, without rewards or a word of how they ended."""
    groups = generated(args, data_buffer.get_samples(args.rollout_batch_size))
    for sample in groups[0] + groups[1]:
        sample.status = Sample.Status.PENDING
    return groups


def skips(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Generates one sample of the first group, and nothing of the second."""
    first, second = data_source.get_samples(args.rollout_batch_size)
    generate(args, first[0])
    return [first, second]


def particular(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """As many groups as a rollout has, of those with an even number."""
    accepted: list[Any] = []
    everything: list[Any] = []  # as slime's own loop, it keeps what it filters out to the end
    while len(accepted) < args.rollout_batch_size:
        groups = generated(args, data_source.get_samples(args.rollout_batch_size - len(accepted)))
        everything += groups
        accepted += [group for group in groups if group[0].group_index % 2 == 0]
    return accepted


def particular_on_a_loop(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """The same on an event loop, which it does not let run while it asks for prompts, as slime's own loop does not."""

    async def finish(group: list[Any]) -> list[Any]:
        await asyncio.gather(*(asyncio.to_thread(generate, args, sample) for sample in group))
        return group

    async def work() -> list[Any]:
        pending: set[asyncio.Task[list[Any]]] = set()
        accepted: list[Any] = []
        everything: list[Any] = []
        remaining = 0
        while len(accepted) < args.rollout_batch_size:
            while remaining < args.rollout_batch_size:
                groups = data_source.get_samples(1)
                pending |= {asyncio.create_task(finish(group)) for group in groups}
                remaining += len(groups)
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                everything.append(task.result())
                fits = task.result()[0].group_index % 2 == 0
                accepted += [task.result()] if fits else []
                remaining -= not fits
        return accepted

    return asyncio.run(work())


def gives_one_back(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """The first group; of the second, which goes back, one sample has some tokens. One that comes again is generated to its end."""
    first, *others = data_source.get_samples(args.rollout_batch_size)
    for sample in first:
        generate(args, sample)
    for group in others:
        generate(args, group[0], 2)
        group[0].searches = ["kim"]
        group[0].status = Sample.Status.ABORTED
    data_source.add_samples(others)
    return [first]


def fails(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Takes prompts and raises, as often as it is called."""
    data_source.get_samples(1)
    raise RuntimeError("no search server")


def hangs(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Takes prompts and does nothing with them; the next life of its process generates them."""
    groups = data_source.get_samples(args.rollout_batch_size)
    if first_life():
        time.sleep(600)
    return generated(args, groups)


def is_killed(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Is killed with prompts in hand; the next life of its process generates them."""
    groups = data_source.get_samples(args.rollout_batch_size)
    if first_life():
        os.kill(os.getpid(), 9)
    return generated(args, groups)


def first_life() -> bool:
    """Whether no process of this test was here before."""
    marker = Path(os.environ["TMPDIR"]) / "lives"
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def strange(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """A group without log-probs, one of nobody, and one that is as it should be."""
    bare, fine = data_source.get_samples(2)
    generated(args, [bare, fine])
    for sample in bare:
        sample.rollout_log_probs = None
    return [bare, [Sample(group_index=4711, tokens=[1, 2], response_length=1)], fine]


def fanned_out(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Of each rollout two samples, as lists in the group."""
    found = []
    for group in generated(args, data_source.get_samples(1)):
        found.append([[sample, Sample(**{**vars(sample), "metadata": {"part": 2}})] for sample in group])
    return RolloutFnTrainOutput(found)


class Background:
    """A pool of generations that continues between rollouts, on an event loop of its own in a thread."""

    def __init__(self, args: Any, data_source: Any) -> None:
        self.args, self.data_source, self.done = args, data_source, list[Any]()
        threading.Thread(target=lambda: asyncio.run(self.work()), daemon=True).start()

    async def work(self) -> None:
        running: set[asyncio.Task[None]] = set()
        while True:
            while len(running) < 3:
                groups = self.data_source.get_samples(1)
                if not groups:
                    break
                running.add(task := asyncio.create_task(self.finish(groups[0])))
                task.add_done_callback(running.discard)
            await asyncio.sleep(0.05)

    async def finish(self, group: list[Any]) -> None:
        await asyncio.gather(*(asyncio.to_thread(generate, self.args, sample) for sample in group))
        self.done.append(group)


POOL: list[Background] = []


def in_the_background(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """What the pool has finished by then."""
    if not POOL:
        POOL.append(Background(args, data_source))
    pool, found = POOL[0], []
    while len(found) < args.rollout_batch_size:
        if pool.done:
            found.append(pool.done.pop(0))
        time.sleep(0.01)
    return RolloutFnTrainOutput(found, {"queue": len(pool.done)})


def evaluates(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Two samples of each of two prompts for each of the run's sets, a set of its own without samples, and metrics."""
    if not evaluation:
        return rewarded(args, rollout_id, data_source)
    data: dict[str, Any] = {}
    for dataset in args.eval_datasets:
        samples = [Sample(tokens=[5, 6, 7 + index // 2], index=index) for index in range(4)]
        generated(args, [samples])
        rewards = [float(index % 2) for index in range(4)]
        data[dataset.name] = {"rewards": rewards, "truncated": [False, False, False, True], "samples": samples}
    data["own"] = {"rewards": [0.5, 1.0, 1.0]}
    return RolloutFnEvalOutput(data, {"eval/rollout": rollout_id, "eval/pid": os.getpid(), "note": "no number"})


def evaluates_strangely(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """A result that does not fit, after one of another set than the run's, in the older form; then one that raises."""
    if rollout_id == 0:
        return {"other": {"rewards": [1.0]}}
    if rollout_id == 1:
        return RolloutFnEvalOutput({"heldout": {"rewards": [1.0, "good"]}})
    raise RuntimeError("no search server")


def evaluates_in_its_second_life(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Is killed; the next life of its process evaluates, and hangs for later versions."""
    if first_life():
        os.kill(os.getpid(), 9)
    if rollout_id > 0:
        time.sleep(600)
    return {"heldout": {"rewards": [1.0, 0.0]}}


def logs_evaluation(rollout_id: int, args: Any, data: Any, extra_metrics: Any) -> bool:
    """Writes what it is called with beside the test; it logs in Myxo's place, except for the first evaluation."""
    path = Path(os.environ["TMPDIR"]) / "logged"
    first = not path.exists()
    sets = {name: [one["rewards"], len(one.get("samples", []))] for name, one in data.items()}
    with path.open("a") as file:
        file.write(json.dumps([rollout_id, args.rollout_batch_size, sets, sorted(extra_metrics or {})]) + "\n")
    return not first


def keeps_even(args: Any, group: list[Any], **_: Any) -> bool:
    """A dynamic filter."""
    return bool(group[0].group_index % 2 == 0)


def removes_the_first(args: Any, groups: list[list[Any]]) -> None:
    """A sample filter, which gets a whole batch in its order: of the first group nothing is left, of the last one sample is not."""
    assert len(groups) == args.rollout_batch_size and groups == sorted(groups, key=lambda group: group[0].index)
    for sample in [*groups[0], groups[-1][0]]:
        sample.remove_sample = True


def sees_all(args: Any, groups: list[list[Any]], data_source: Any) -> None:
    """An all-samples function, which gets what was filtered out, too."""
    assert callable(data_source)
    seen = [[group[0].group_index, [sample.reward for sample in group]] for group in groups]
    (Path(os.environ["TMPDIR"]) / "seen").write_text(json.dumps(seen))
