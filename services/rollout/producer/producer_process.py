"""The process of a rollout function: ``python -m services.rollout.producer.producer_process``, started by `services.rollout.producer`.

In, once: ``[0, {"config": JSON, "prompts": count}]``, answered with ``[0, {}]`` or ``[0, {"refused": [field, value, expected]}]``. From
then on it asks and the service answers (`ServiceCalls`): ``next`` says when to call the function, ``draw`` gives it prompts, ``hand_in``,
``give_back``, ``fail`` and ``discard`` say what became of a group, ``finished`` ends a call. A function that raises ends the process.
"""

import asyncio
import gc
import inspect
import os
import traceback

from services.rollout.producer.drawn_groups import DrawnGroups
from services.rollout.producer.service_calls import ServiceCalls
from shared.config.run_config import RunConfig
from shared.hooks import Arguments, load, paths
from shared.hooks.returned_evaluation import metric_numbers
from shared.hooks.returned_groups import returned_groups, train_output
from shared.process.frames import FrameStream
from shared.runtime.errors import ConfigError
from shared.runtime.tasks import error_text

FIELD = "rollout.rollout_function_path"


def main() -> None:
    """Calls the function whenever the service says so, until that is gone."""
    channel = FrameStream()
    call_id, setup = channel.receive()
    config = RunConfig.model_validate_json(setup["config"])
    try:
        function = load(FIELD, paths(config, "rollout")[FIELD])
    except ConfigError as error:
        channel.send([call_id, {"refused": [error.field, str(error.value), error.expected]}])
        return
    channel.send([call_id, {}])
    calls = ServiceCalls(channel)
    groups = DrawnGroups(calls, config, setup["prompts"])
    args = Arguments(config)
    while True:
        order = calls.call("next")
        vars(args).update(order["args"])
        groups.in_call = True
        try:
            returned = function(args, order["rollout_id"], groups, evaluation=False)
            output = train_output(asyncio.run(returned) if inspect.iscoroutine(returned) else returned)
            finished = returned_groups(output.samples)
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # it is the user's code
            traceback.print_exc()
            calls.call("failed", error=error_text(error, function))
            os._exit(1)  # with the threads that it may have started: what they have in hand goes back
        groups.in_call = False
        refused = [problem for group in finished if (problem := groups.hand_in(group)) is not None]
        metrics = metric_numbers(output.metrics)
        del returned, output, finished
        gc.collect()  # what the function may still hand in is what is still referenced
        groups.discard_unheld("the rollout function did not hand it in")
        calls.call("finished", rollout_id=order["rollout_id"], refused=refused, metrics=metrics)


if __name__ == "__main__":
    main()
