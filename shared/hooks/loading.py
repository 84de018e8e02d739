"""Imports the function at ``package.module:function`` or ``package.module.function``, and lists the functions that each service imports.

`load_function` and `SingletonMeta` are those of ``slime.utils.misc``.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from shared.config.eval_section import EVAL_LOOP
from shared.config.eval_views import functions_of_sets
from shared.config.run_config import RunConfig
from shared.hooks import import_names
from shared.hooks.import_names import import_module
from shared.runtime.errors import ConfigError, MyxoError
from shared.runtime.tasks import error_text, is_async, print_traceback

GENERATE = "rollout.custom_generate_function_path"
ROLLOUT_FUNCTION = "rollout.rollout_function_path"
EVAL_FUNCTION = "eval.eval_function_path"
EVAL_LOG = "monitoring.custom_eval_rollout_log_function_path"
AGENT = "rollout.agent"
SAMPLE_HOOKS = "rollout.rollout_sample_hook_path"
PLAIN = "slime.rollout.sglang_rollout:generate"
"""One generation through the engine: what these functions see where no generate function is named."""

RUN_BY = {
    GENERATE: "rollout",
    SAMPLE_HOOKS: "rollout",
    ROLLOUT_FUNCTION: "rollout",
    AGENT: "rollout",
    EVAL_FUNCTION: "rollout",
    EVAL_LOG: "buffer",
    "reward.custom_rm_path": "reward",
    "rollout.dynamic_sampling_filter_path": "reward",
    "rollout.rollout_sample_filter_path": "reward",
    "rollout.rollout_all_samples_process_path": "reward",
    "rollout.buffer_filter_path": "buffer",
    "data.data_source": "buffer",
    "algorithm.custom_loss_function_path": "trainer",
    "algorithm.custom_advantage_function_path": "trainer",
    "algorithm.custom_tis_function_path": "trainer",
    "algorithm.custom_pg_loss_reducer_function_path": "trainer",
    "algorithm.custom_reward_post_process_path": "trainer",
    "algorithm.custom_convert_samples_to_train_data_path": "trainer",
    "algorithm.rollout_data_postprocess_path": "trainer",
    "monitoring.custom_rollout_log_function_path": "trainer",
    "trainer.custom_megatron_init_path": "trainer",
    "trainer.custom_megatron_before_log_prob_hook_path": "trainer",
    "trainer.custom_megatron_before_train_step_hook_path": "trainer",
}
"""The service that calls the function of each field; where a function of the user's evaluates, the rollout service calls `EVAL_LOG`."""


SHOWN_SAMPLES = {
    "algorithm.custom_reward_post_process_path",
    "algorithm.custom_convert_samples_to_train_data_path",
    "monitoring.custom_rollout_log_function_path",
}
"""Fields of the functions in the trainer that get a batch's samples, with their named rewards."""


class HookFailed(MyxoError):
    """A custom function raised, or returned a value that cannot be used.

    Args:
        field, path: which one. reason: what happened, on one line. disruptive: it held up or ended the process that it ran in.
    """

    def __init__(self, field: str, path: str, reason: str, disruptive: bool = False) -> None:
        self.field, self.path, self.reason, self.disruptive = field, path, reason, disruptive
        super().__init__(f"{field} = {path}: {reason}")


def paths(config: RunConfig, service: str | None = None) -> dict[str, str]:
    """Returns the functions that a run names, by field, or those that ``service`` calls, those of its evaluation sets among them.

    Built-in filters are not included.
    """
    found: dict[str, str] = {}
    moved = {EVAL_LOG: "rollout"} if eval_function(config) is not None else {}
    for field, runs_in in {**RUN_BY, **moved}.items():
        if service in (None, runs_in):
            found |= {place: path for place, path in _named(config, field).items() if re.search("[.:]", path)}
    for runs_in, *names in (("reward", "custom_rm_path"), ("rollout", "custom_generate_function_path", "agent")):
        found |= functions_of_sets(config, *names) if service in (None, runs_in) else {}
    return found


def eval_function(config: RunConfig) -> tuple[str, str] | None:
    """Returns the function of the user's that evaluates, its field and its path; None where Myxo's own loop does, or there is no set.

    As with slime it is the rollout function, unless another is named.
    """
    if not config.eval.named:
        return None
    if config.eval.eval_function_path is not None:
        found = _named(config, EVAL_FUNCTION).get(EVAL_FUNCTION)
        return None if found is None else (EVAL_FUNCTION, found)
    path = config.rollout.rollout_function_path
    return None if path is None else (ROLLOUT_FUNCTION, path)


def _named(config: RunConfig, field: str) -> dict[str, str]:
    """Returns the paths in a field, one or a list, by the field or its place in it."""
    section, _, name = field.partition(".")
    path: str | list[str] | None = getattr(getattr(config, section), name)
    if isinstance(path, list):
        return {f"{field}[{place}]": one for place, one in enumerate(path)}
    return {} if not path or (field == EVAL_FUNCTION and path.replace(":", ".") == EVAL_LOOP) else {field: path}


def shows_samples(config: RunConfig) -> bool:
    """Returns whether the run names a function in the trainer that gets samples."""
    return not SHOWN_SAMPLES.isdisjoint(paths(config, "trainer"))


def generate_paths(config: RunConfig) -> dict[str, str]:
    """Returns the functions that generate samples or change generated ones, the run's and those of evaluation sets, by field."""
    ours = ("custom_generate_function_path", "]")
    return {field: path for field, path in paths(config, "rollout").items() if field.endswith(ours)}


def agent_paths(config: RunConfig) -> dict[str, str]:
    """Returns the agents that are functions, the run's and those of evaluation sets, by field."""
    return {field: path for field, path in paths(config, "rollout").items() if field.endswith(".agent")}


def split_path(path: str) -> tuple[str, str]:
    """Returns module and function of a path; before the function there is a colon, or the last dot, as slime has it."""
    module, colon, name = path.partition(":")
    if not colon:
        module, _, name = path.rpartition(".")
    return module, name


def load_agent(field: str, path: str) -> Callable[..., Any]:
    """Returns the agent at ``path``. Raises ConfigError as `load` does, and for a function that cannot take what agents are called with."""
    function = load(field, path)
    try:
        inspect.signature(function).bind({}, "base_url", "api_key")
    except TypeError as error:
        raise ConfigError(field, path, f"expected a function of (data, base_url, api_key): {error}") from None
    except ValueError:  # one in C, whose parameters are not known
        pass
    return function


def load(field: str, path: str) -> Callable[..., Any]:
    """Returns the function at ``path``. Raises ConfigError for ``field`` that says what is wrong with it and what to do."""
    import_names.install_slime_names()
    function = load_object(field, path, *split_path(path))
    if not callable(function):
        raise ConfigError(field, path, f"expected a function, found a {type(function).__name__}")
    if is_async(function) and RUN_BY.get(field) in ("buffer", "trainer"):
        raise ConfigError(field, path, f"expected a plain function: an async one would never run, as the {RUN_BY[field]} awaits none")
    return function


def load_object(field: str, value: str, module: str, name: str) -> Any:
    """Returns what a module has under a name. Raises ConfigError for ``field``, whose value is ``value``, as `load` does."""
    advice = "install the package or put its directory on PYTHONPATH"
    if module.endswith(".py"):
        advice = f"write {module.removesuffix('.py').replace('/', '.')}:{name}, and put its directory on PYTHONPATH"
    try:
        imported = import_names.import_module(module)
        advice = f"name a function that is in it, or put the directory of the {module} that is meant on PYTHONPATH"
        return getattr(imported, name)
    except (Exception, SystemExit) as error:  # importing runs the module: it can raise anything
        kind = "" if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: "
        words, where = " ".join(str(error).split()), error_text(error).partition(type(error).__name__)[0].rstrip(": ")
        at = f"at {where}; " if where else ""  # in the user's own file
        raise ConfigError(field, value, f"cannot be imported: {kind}{words}; {at}{advice}") from None


@cache
def load_function(path: str) -> Any:
    """Returns what lies at ``package.module.function`` or ``package.module:function``. Raises ImportError or AttributeError."""
    module, name = split_path(path)
    return getattr(import_module(module), name)


class SingletonMeta(type):
    """The class of classes of which a process has one object, made by the first call; later calls return it whatever they are given."""

    _instances: dict[type, Any] = {}

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls not in SingletonMeta._instances:
            SingletonMeta._instances[cls] = super().__call__(*args, **kwargs)
        return SingletonMeta._instances[cls]

    def clear_instances(cls) -> None:
        """Forgets all of them."""
        SingletonMeta._instances.clear()


class EvaluationLog:
    """Calls the function that the run names, if it names one. Raises ConfigError where it cannot be imported."""

    def __init__(self, config: RunConfig) -> None:
        path = paths(config).get(EVAL_LOG)
        self._function: Callable[..., Any] | None = None if path is None else load(EVAL_LOG, path)

    def wrote(self, rollout_id: int, args: Any, data: Mapping[str, Any], metrics: Mapping[str, Any] | None) -> bool:
        """Returns whether the function has logged an evaluation in the place of Myxo. One that fails has not; its words are printed.

        Args:
            data: set → ``rewards``, ``truncated``, ``samples``. metrics: the evaluation function's.
        """
        if self._function is None:
            return False
        try:
            return bool(self._function(rollout_id, args, data, metrics))
        except Exception as error:  # it is the user's code
            print_traceback()
            reason = error_text(error, self._function)
            print(f"{EVAL_LOG} failed, and Myxo logs the evaluation of rollout {rollout_id}: {reason}", flush=True)
            return False


def last_rollout(config: RunConfig, version: int) -> int:
    """Returns the number of the last rollout in weights of ``version``, which slime calls functions with: 0 also before the first."""
    return max(0, config.steps_of_version(version) - 1)
