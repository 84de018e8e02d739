"""Scores groups in a process of its own, which the service kills when a call blocks it.

``python -m services.reward.worker``; it speaks as `services.reward.worker_pool.WorkerPool` says. In, once: ``{"verifiers": [name, …]}``,
or ``{"config": JSON}`` for the user's own functions; out: ``{"waits": [verb, …]}`` with the verbs whose functions are async, or
``{"refused": [field, value, expected]}`` where a function cannot be imported. Then in: what `VerifierCalls.answer` or
`services.reward.custom_functions.Functions.answer` takes; out: ``{"scores": [score, …]}``, for functions with ``"filtered"``, or
``{"error": text}``.
"""

import asyncio
import resource
import time
from dataclasses import asdict
from typing import Any, Protocol

from services.reward import frames, rewards
from services.reward.frames import FrameStream
from services.reward.time_limit import OutOfTime, within
from services.reward.verifiers import load, pattern_answer, read_label, verify
from shared.rewards.names import base, wrong
from shared.rewards.reference import Reference
from shared.runtime.errors import ConfigError

FIRST_STEPS_SECONDS = 0.001
"""The time that a call has the event loop for itself before the next one is taken up. An async function that computes without ever waiting
then ends before the next call's deadline begins."""


MEMORY_BYTES = 4 << 30
"""The most memory of a verifier's process. A tower of powers should end as an error in it, and not with the end of its neighbours."""


NAMED = {"dapo": "score"}
"""The reward that counts of verifiers that give several, where the run names none."""

LONGEST_PROBLEM = 200
"""The most characters of why a response or a label was not read: a library's error may repeat it whole."""


class Calls(Protocol):
    """What a worker answers calls with. ``waits``: the verbs of calls that give way to others."""

    waits: list[str]

    async def answer(self, request: dict[str, Any]) -> dict[str, object]: ...


class VerifierCalls:
    """Answers calls by verifiers, one after the other. A response that they cannot verify, or not in time, gets 0 and costs no other.

    Args:
        names: the verifiers that will be asked for.
    """

    def __init__(self, names: list[str]) -> None:
        load(names)  # now: sympy takes seconds, which no call's deadline should include
        self.waits: list[str] = []
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard), hard))

    async def answer(self, request: dict[str, Any]) -> dict[str, object]:
        """Returns a score for each response. Each may take its share of what is left of the call's ``seconds``.

        Args:
            request: ``{"verifier": name, "responses": [text, …], "references": [map, …], "pattern": text or None, "key": name or None,
                "seconds": number}``: a reference for each response, or one for all of them; the pattern takes the answer out of a response;
                the key names the reward that counts.
        """
        name, responses, end = request["verifier"], request["responses"], time.monotonic() + request["seconds"]
        pattern = request.get("pattern")
        references = [Reference(**fields) for fields in request["references"]]
        try:
            within(request["seconds"], lambda: [read_label(name, reference) for reference in references])
        except (Exception, OutOfTime) as error:
            return {"error": f"verifier {name}: {_problem(error, 'the label was not read', request['seconds'])}"}
        scores: list[dict[str, object]] = []
        for index, text in enumerate(responses):
            seconds = (end - time.monotonic()) / (len(responses) - index)
            reference = references[index % len(references)]
            try:
                value = within(seconds, lambda text=text, reference=reference: verify(name, pattern_answer(text, pattern), reference))
                scores.append(asdict(rewards.read(value, request.get("key") or NAMED.get(base(name)))))
            except (Exception, OutOfTime) as error:
                problem = _problem(error, f"a response of {len(text)} characters was not verified", seconds)
                scores.append({"reward": wrong(name), "unread": f"verifier {name}: {problem}"})
        return {"scores": scores}


def _problem(error: BaseException, undone: str, seconds: float) -> str:
    return f"{undone} within {seconds:.1f} s" if isinstance(error, OutOfTime) else f"{type(error).__name__}: {error}"[:LONGEST_PROBLEM]


def main() -> None:
    """Answers requests until the service is gone."""
    channel = FrameStream()
    call_id, setup = channel.receive()
    channel.send([call_id, None])
    try:
        calls = _calls(setup)
    except ConfigError as error:
        channel.send([call_id, {"refused": [error.field, str(error.value), error.expected]}])
        return
    channel.send([call_id, {"waits": calls.waits}])
    try:
        asyncio.run(_serve(channel, calls))  # one loop for all calls: functions may keep connections
    except* EOFError:
        pass


def _calls(setup: dict[str, Any]) -> Calls:
    if "verifiers" in setup:
        return VerifierCalls(setup["verifiers"])
    from services.reward.custom_functions import Functions  # imports the whole config, which verifiers do without
    from shared.config.run_config import RunConfig

    return Functions(RunConfig.model_validate_json(setup["config"]))


async def _serve(channel: FrameStream, calls: Calls) -> None:
    """Serves calls. Raises EOFError when the service is gone; an exception of a call ends the process."""
    requests, tasks = await channel.stream(), dict[int, asyncio.Task[None]]()
    async with asyncio.TaskGroup() as running:
        while True:
            call_id, request = await frames.read(requests)
            if request is None:  # the call is late, so it is cancelled
                if call_id in tasks:
                    tasks[call_id].cancel()
                channel.send([call_id, {"error": "cancelled"}])
                continue
            channel.send([call_id, None])
            tasks[call_id] = running.create_task(_call(channel, calls, call_id, request))
            tasks[call_id].add_done_callback(lambda _, call_id=call_id: tasks.pop(call_id))  # type: ignore[misc]
            if request.get("verb") in calls.waits:
                await asyncio.sleep(FIRST_STEPS_SECONDS)


async def _call(channel: FrameStream, calls: Calls, call_id: int, request: dict[str, Any]) -> None:
    try:
        answer = await calls.answer(request)
    except asyncio.CancelledError:  # late, or the function's own doing
        answer = {"error": "the call was cancelled"}
    channel.send([call_id, answer])


if __name__ == "__main__":
    main()
