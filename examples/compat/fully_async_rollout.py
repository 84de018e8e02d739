"""A rollout function in slime's manner: a pool of groups is generated in the background, across training steps.

``--rollout-function-path examples.compat.fully_async_rollout.generate_rollout``, and where the run evaluates
``--eval-function-path slime.rollout.sglang_rollout.generate_rollout``, since a pool does not. Nothing in this file is Myxo's: it imports
slime's names only, and runs under either.
"""

import asyncio
import queue
import threading
import time

from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group
from slime.utils.async_utils import run
from slime.utils.types import Sample

POOL = 6
"""Groups that are generated at once."""


class BackgroundPool:
    """Keeps `POOL` groups in generation, on an event loop in a thread of its own."""

    def __init__(self, args, data_source):
        self.args, self.data_source = args, data_source
        self.state = GenerateState(args)
        self.finished = queue.Queue()
        self.returned = 0
        threading.Thread(target=lambda: asyncio.run(self.work()), name="pool", daemon=True).start()

    async def work(self):
        running = set()
        while True:
            while len(running) + self.finished.qsize() < POOL:
                groups = self.data_source.get_samples(1)
                if not groups:
                    break
                task = asyncio.create_task(self.generate(groups[0]))
                running.add(task)
                task.add_done_callback(running.discard)
            await asyncio.sleep(0.05)

    async def generate(self, group):
        made = await generate_and_rm_group(self.args, group, self.state.sampling_params.copy(), evaluation=False)
        if any(sample.status == Sample.Status.ABORTED for sample in made):
            self.returned += 1
            self.data_source.add_samples([made])
        else:
            self.finished.put(made)


pool = None


async def collect(args):
    """The next batch of the pool's groups, in whatever order they end."""
    groups = []
    while len(groups) < args.rollout_batch_size:
        try:
            groups.append(pool.finished.get_nowait())
        except queue.Empty:
            await asyncio.sleep(0.02)
    return groups


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    """slime's entry point: one batch of groups for the training step ``rollout_id``."""
    global pool
    if evaluation:
        raise ValueError("held-out prompts are generated without a pool")
    if pool is None:
        pool = BackgroundPool(args, data_source)
    begun = time.time()
    groups = run(collect(args))
    groups.sort(key=lambda group: group[0].index)
    metrics = {"pool/waited_s": time.time() - begun, "pool/queue": pool.finished.qsize(), "pool/returned": pool.returned}
    return RolloutFnTrainOutput(samples=groups, metrics=metrics)


async def score(args, sample, **kwargs):
    """A sum's reward: 1 where the response is the label."""
    return float(sample.response.strip().split("\n")[0] == sample.label)
