"""``myxo up``, ``myxo train`` and ``myxo submit``: a run from a config file, or from flags alone as slime's ``python train.py`` has it.
``myxo serve``: training as an API for clients of the Tinker SDK, by servers, engines, a trainer and an endpoint here.

Where a run has saved before, its services continue by themselves: the trainer in `services.trainer.loop.Trainer.run`, the buffer in
`services.buffer.buffer_service`.
"""

import argparse
import asyncio
import contextlib
import hashlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import structlog
from rich.console import Console

from myxo.commands.export_run import begun_from
from myxo.display.progress_display import Display
from myxo.launch.exit_report import next_commands
from myxo.launch.launcher import TICK_SECONDS, Launch, refuse_others
from myxo.launch.node_launch import NodeLaunch, is_first_node, settle_node_rank
from myxo.launch.service_plan import SERVICE_MODULES
from myxo.launch.supervisor import AT_WORK, StopReason, Supervisor
from myxo.preflight import Source, checked, checked_config
from myxo.preflight.inspection import Inspection
from myxo.preflight.machine_checks import memory_bytes
from myxo.preflight.run_plan import GB, plan_of
from myxo.run.run_access import GivenServers, check_servers, given_servers, make_run, on_bus
from myxo.run.run_directory import SNAPSHOT, RunDirectory, checkpoints
from shared import __version__, hooks
from shared.bus import runs
from shared.bus.bus_errors import BUS_ERRORS
from shared.bus.connection import Bus, redacted
from shared.config import config_reading, devices, flags, slime_defaults
from shared.config.config_layers import Layers, lay_custom_config, over
from shared.config.flags import CommandLine
from shared.config.run_config import RunConfig, changes
from shared.config.service_sections import DUMPS
from shared.environment.conformance import Check
from shared.model.memory_plan import total_parameters
from shared.model.parallel_layout import ParallelLayout
from shared.process.child_process import with_parent
from shared.runtime import addresses, exit_codes, telemetry
from shared.runtime.errors import ConfigError, MyxoError, raise_problems
from shared.runtime.host import host_memory
from shared.runtime.safe_text import printable_line, say
from shared.schema.ledger import ValuesChanged
from shared.view.live_services import newest_gauges

REPLAY_MODULE = "services.trainer.batch_replay"
SIGNALS = (signal.SIGINT, signal.SIGTERM)  # signals at which the trainer saves and ends


@contextlib.contextmanager
def claimed(config: RunConfig, directory: RunDirectory, fresh: bool, given: GivenServers | None = None) -> Iterator[None]:
    """Locks the run's directory, emptied where the run is to be ``fresh``, once the ``given`` servers answer and nothing is at work."""
    places = [directory, RunDirectory(config.trained)] if fresh else []
    if fresh and (shared := config.weights.update_weight_disk_dir) is not None:
        versions = [path.name for path in (shared / config.run.name).glob("*") if SNAPSHOT.fullmatch(path.name)]
        places.append(RunDirectory(shared / config.run.name, versions))
    for place in places:
        place.refuse_input_in_state(config)
    if given is not None:
        asyncio.run(check_servers(given, config.run.name))
    directory.make(config)
    with directory.held():
        if fresh and given is not None and given.nats_url is not None:
            on_bus(given.nats_url, config.run.name, lambda bus: refuse_others(bus, config, None))
        for place in places:
            place.clear()
        yield


@contextlib.contextmanager
def logged(config: RunConfig, directory: RunDirectory, instance: str) -> Iterator[None]:
    """Writes the launcher's log lines to the log of an instance."""
    directory.logs.mkdir(parents=True, exist_ok=True)
    with directory.open_log(instance) as log:
        telemetry.configure_logs(config.run.name, LAUNCHER, instance, stream=log)
        try:
            yield
        finally:
            telemetry.silence_logs()


def train_on_dumps(config: RunConfig, directory: RunDirectory, console: Console, *, fresh: bool, again: str) -> int:
    """Trains the dumps from the newest checkpoint on, to the last step; each step's metrics are a line of JSON on standard output.

    SIGINT and SIGTERM have it save and end, ``again`` continues. Returns the exit code. Raises ConfigError for input that it removes.
    """
    with claimed(config, directory, fresh), logged(config, directory, LAUNCHER):
        before = runs.frozen(directory.root)
        if before is not None and (changed := changes(before.shown(), config.shown(), "recorded")):
            record = ValuesChanged(step=max(checkpoints(config), default=0), changed=tuple(changed), at=time.time())
            structlog.get_logger().info("values_changed", step=record.step, changed=record.changed)  # there is no ledger
            console.print(f"Run {config.run.name} {record.words()}.", soft_wrap=True)
        path = runs.freeze(directory.root, config)
        command = [sys.executable, "-m", REPLAY_MODULE, "--train-only", str(path)]
        process = subprocess.Popen(with_parent(command), start_new_session=True)
        got: list[int] = []

        def hand_on(signum: int, _: object) -> None:
            got.append(signum)
            process.send_signal(signum)

        previous = [signal.signal(signum, hand_on) for signum in SIGNALS]
        try:
            code = process.wait()
        finally:
            for signum, handler in zip(SIGNALS, previous, strict=True):
                signal.signal(signum, handler)
    if code != exit_codes.DONE:
        return code if code >= 0 else 128 - code
    if got:
        name = signal.Signals(got[0]).name
        console.print(f"Stopped by {name}: {next_commands(config, again)}", soft_wrap=True)
        return 128 + got[0]
    what = "demonstrations" if config.debug.load_debug_rollout_data is None else "dumps"
    console.print(f"Run {config.run.name} has trained its {what}; what it made lies in {config.trained}.", soft_wrap=True)
    return exit_codes.DONE


LAUNCHER = "launcher"  # instance under which the launcher's own log lines stand
_UP = """Run a config's run on this machine until it is finished, with live progress.

Starts an embedded NATS server and Valkey (unless NATS_URL and REDIS_URL name others), the buffer, reward and rollout services and the
trainer, restarts whatever dies, and ends with the audit and the summary. Ctrl-C stops everything in order; the same command continues
from the last checkpoint."""

_SUBMIT = """Put a config's run on the NATS server of NATS_URL, its payloads to lie in the Redis of REDIS_URL, and exit. The services are
started elsewhere: each needs only NATS_URL and MYXO_RUN, and REDIS_URL where accounts have passwords."""


def declare_up(command: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``myxo up``."""
    _declare(command, _UP, _run)
    add_dry_run(command)
    command.add_argument("--from", dest="begin", metavar="RUN[@STEP]", help="begin with the weights of RUN's newest checkpoint, or STEP's")
    several = "which of the trainer's nodes this machine is, where it has several (actor_num_nodes); 0: the first"
    command.add_argument("--node-rank", type=int, metavar="N", help=several)


def _run(parsed: argparse.Namespace, console: Console) -> int:
    source, asked = Source.of(parsed.config, parsed.flags), dry_run(parsed)
    if parsed.begin is not None:
        output = Console(stderr=True) if parsed.print_config else console
        source = begun_from(source, parsed.begin, output, fresh=parsed.fresh, tried=asked is not None)
    return up(source, console, fresh=parsed.fresh, dry_run=asked, node_rank=parsed.node_rank)


def declare_submit(command: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``myxo submit``."""
    _declare(command, _SUBMIT, lambda parsed, console: submit(parsed.config, parsed.flags, console))


def _declare(command: argparse.ArgumentParser, description: str, run: Callable[[argparse.Namespace, Console], int]) -> None:
    with_flags(command, description, "CONFIG [options]", run)
    command.epilog = "flags, over the config's values:\n" + "\n".join(flags.help_lines())
    command.add_argument("config", metavar="CONFIG", type=Path, help="the run's TOML file")


class DryRun(NamedTuple):
    """What is done in the place of a run. ``prints_config``: as TOML, alone. ``tries``: functions of the user's are called."""

    prints_config: bool
    tries: bool


def add_dry_run(command: argparse.ArgumentParser) -> None:
    """Adds --fresh, and --dry-run, --print-config and --no-try."""
    command.add_argument("--fresh", action="store_true", help="remove what the run has done so far and start it anew")
    checks = "check everything, call functions of your own on two prompts, and print what the run comes to; start nothing"
    command.add_argument("--dry-run", action="store_true", help=checks)
    command.add_argument("--no-try", action="store_true", help="with these: do not call functions of your own (`myxo try` does)")
    command.add_argument("--print-config", action="store_true", help="as --dry-run, but print the resolved config, as TOML")


def dry_run(parsed: argparse.Namespace) -> DryRun | None:
    """Returns what a command line asks for in the place of a run; None: the run."""
    if parsed.no_try and not (parsed.dry_run or parsed.print_config):
        say("myxo: --no-try changes nothing without --dry-run or --print-config")
    return DryRun(parsed.print_config, not parsed.no_try) if parsed.dry_run or parsed.print_config else None


def _run_dry(inspection: Inspection, asked: DryRun, console: Console) -> int:
    """Raises Problems where a function of the user's fails."""
    assert inspection.frozen is not None  # it passed
    results = []
    if asked.tries and hooks.paths(inspection.config):
        from myxo.preflight.function_trial import tried  # aiohttp comes with the extras of the services

        results = asyncio.run(tried(inspection, lambda _: None))
    split = [(result, *result.name.partition(" = ")[::2]) for result in results]
    raise_problems([ConfigError(field, path, result.detail) for result, field, path in split if result.result == "FAILED"])
    for warning in [f"{result.name}: {result.detail}" for result in results if result.result == "warning"]:
        inspection.notes.append(warning)
        say(f"myxo: {printable_line(warning, exit_codes.LONGEST_ERROR)}")
    if asked.prints_config:
        console.file.write(config_reading.dump(inspection.frozen.shown()))
        return exit_codes.DONE
    for head, text in _verdict(inspection, results):
        console.print(f"{head:10}{text}", markup=False, highlight=False, soft_wrap=True)
    return exit_codes.DONE


def _verdict(inspection: Inspection, tried: Sequence[Check]) -> Iterator[tuple[str, str]]:
    """Yields what a run that has passed its checks comes to, in ten lines with their heads. ``tried``: results of the user's functions."""
    config, shape = inspection.config, inspection.architecture
    trainer, rollout, steps = config.trainer, config.rollout, config.rollout.num_rollout
    sft = f", after {config.sft.sft_steps} of sft" if config.sft.sft_data else ""
    yield "run", f"{config.run.name}, in {config.run.root}: {steps} steps{sft}"
    size = "" if shape is None else f", {total_parameters(shape) / 1e9:.3g} billion parameters"
    yield "model", f"{config.model.hf_checkpoint}{size}, trained in {trainer.train_dtype}"
    yield "layout", "; ".join(_layout(inspection))
    yield "memory", "; ".join(_memory(inspection))
    sets = [f"{view.name}: {len(prompts):,}" for view, prompts in inspection.heldout]
    prompts = config.data.data_source or ("none" if inspection.training is None else f"{len(inspection.training):,} prompts")
    yield "data", f"{prompts}{'; held out ' if sets else ''}{', '.join(sets)}"
    samples, prompt = rollout.rollout_batch_size * rollout.n_samples_per_prompt, inspection.longest_prompts.get("data.prompt_data", 0)
    length = rollout.rollout_max_response_len
    most = f"at most {samples * (prompt + length):,} tokens ({prompt} + {length} a sample)"
    groups = f"{rollout.rollout_batch_size} prompts x {rollout.n_samples_per_prompt} = {samples:,} samples"
    yield "a step", f"{groups}, {most}, optimizer steps: {trainer.num_steps_per_rollout}"
    yield "reward", config.reward.custom_rm_path or config.reward.rm_type or "of each prompt's own"
    yield "functions", f"called: {len(tried)}, each as it should be" if tried else "not called: `myxo try CONFIG` calls them"
    auto = {"train_device": trainer.train_device, "rollout_device": rollout.rollout_device}
    guesses = [f"{name} is {devices.resolve(device)}" for name, device in auto.items() if device == "auto"]
    yield "guessed", "; ".join([*guesses, *inspection.guesses]) or "nothing"
    yield "problems", f"none; notes above: {len(inspection.notes)}" if inspection.notes else "none"


def _layout(inspection: Inspection) -> Iterator[str]:
    config = inspection.config
    if not config.debug.debug_rollout_only:
        layout, ranks = ParallelLayout.of(config.trainer), config.trainer.ranks("actor")
        own = f"tensor {layout.tensor}, pipeline {layout.pipeline}, context {layout.context}, expert {layout.expert}"
        critic = f", critic {config.trainer.ranks('critic')}" if config.algorithm.has_critic else ""
        yield f"trainer of {ranks} ranks ({own}){critic} on {devices.resolve(config.trainer.train_device)}"
    if not config.debug.trains_only:
        rollout, where = config.rollout, ", colocated" if config.trainer.colocate else ""
        engines = f"{rollout.rollout_replicas} engines of {rollout.rollout_num_gpus_per_engine} GPUs"
        device = "servers of somebody else's" if rollout.external_engines else devices.resolve(rollout.rollout_device)
        if rollout.engine_groups:
            engines = " and ".join(f"{group.replicas} engines of {group.num_gpus_per_engine} GPUs" for group in rollout.engines())
        lent = devices.lent_instances(config)
        more = f", and {len(lent)} of the trainer's GPUs while it waits (lend_gpus)" * bool(lent)
        yield (f"{engines}{where}" if device == "cuda" else f"{rollout.rollout_replicas} engines on {device}") + more
        for name in rollout.models:
            found = [own.rollout for own in (config.of_engines(name, place) for place in range(len(rollout.engines(name))))]
            shapes = " and ".join(f"{own.rollout_replicas} of {own.rollout_num_gpus_per_engine} GPUs" for own in found)
            on = devices.resolve(found[0].rollout_device)
            yield f"{name}, frozen: {shapes if on == 'cuda' else sum(own.rollout_replicas for own in found)} on {on}"


def _memory(inspection: Inspection) -> Iterator[str]:
    if (plan := plan_of(inspection)) is not None and "cuda" in (
        devices.resolve(plan.config.trainer.train_device),
        devices.resolve(plan.config.rollout.rollout_device),
    ):
        yield from (f"{need.of} {need.total / GB:.1f} of {need.available / GB:.1f} GB" for need in plan.needs)
    elif inspection.model_size is not None:
        needed = memory_bytes(inspection.config, inspection.model_size)
        yield f"at least {needed / GB:.1f} of this machine's {host_memory()[0] / GB:.1f} GB"
    else:
        yield "not known"


def take_flags(parsed: argparse.Namespace, rest: list[str]) -> list[str]:
    """Takes the config's flags, which argparse does not know; nothing is left over."""
    parsed.flags = rest
    return []


def leading(words: list[str]) -> tuple[Path | None, list[str]]:
    """Returns the optional path before a command's flags, and these: argparse would take the value of a flag for it."""
    return (Path(words[0]), words[1:]) if words and not words[0].startswith("-") else (None, words)


def with_flags(command: argparse.ArgumentParser, about: str, usage: str, run: Callable[[argparse.Namespace, Console], int]) -> None:
    """Declares a command that takes flags over a config's values behind its own words, the ``usage``, and what runs it."""
    command.description, command.usage = about, f"{command.prog} {usage} [flags]"
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.set_defaults(run_command=run, flags=[], take_rest=take_flags)


def up(source: Source, console: Console, *, fresh: bool = False, dry_run: DryRun | None = None, node_rank: int | None = None) -> int:
    """Runs the config's run on this machine until it is finished or stopped. Returns the exit code.

    ``source``: where the config comes from. ``fresh``: forget what the run has done. ``dry_run``: what is done in its place.
    ``node_rank``: which of the trainer's nodes this machine is; on all but the first, its part of the trainer is all that starts. Raises
    ConfigError for bad input, MyxoError for what keeps the run from starting.
    """
    inspection = checked(source, starts=lambda config: is_first_node(config, node_rank), fresh=fresh)
    if dry_run is not None:
        return _run_dry(inspection, dry_run, console)
    config = inspection.frozen
    assert config is not None  # it passed
    directory = RunDirectory(config.run.root)
    if config.debug.trains_only:
        return train_on_dumps(config, directory, console, fresh=fresh, again=continuing(config, source))
    given = given_servers()
    if (rank := settle_node_rank(config, given, node_rank)) > 0:
        asyncio.run(check_servers(given, config.run.name))
        directory.make(config)  # nodes may share it: it is the first node's to hold
        with logged(config, directory, f"node-{rank}"):
            return asyncio.run(NodeLaunch(config, directory, given, rank, console).run())
    with claimed(config, directory, fresh, given), logged(config, directory, LAUNCHER):
        return asyncio.run(Launch(config, directory, given, console, fresh=fresh, again=continuing(config, source)).run())


def continuing(config: RunConfig, source: Source, command: str = "up") -> str:
    """Returns the ``command`` that continues a run: of one from flags alone, by the config in its directory."""
    if source.path is not None:
        there = "" if Path(os.environ.get("PWD", ".")).resolve() == Path.cwd() else f"cd {shlex.quote(str(Path.cwd()))} && "
        return there + shlex.join(["myxo", command, str(source.path), *source.given.words])
    return shlex.join(["myxo", "train", "--run-name", config.run.name, "--dir", str(config.run.dir.absolute())])


def submit(path: Path, arguments: list[str], console: Console) -> int:
    """Makes the run on the bus of ``NATS_URL`` for services that are started elsewhere; leaves it as it is where the same values made it.
    Raises ConfigError."""
    source, given, asked = Source.of(path, arguments), given_servers(), ""
    with contextlib.suppress(MyxoError, *BUS_ERRORS):  # which the checks below report
        reading = config_reading.read(path, source.given.overrides)
        if reading.config is not None and not (reading.problems or source.given.problems):
            values = f"{__version__} {redacted(given.redis_url or '')} {reading.config.model_dump_json()}"
            run, asked = reading.config.run.name, hashlib.sha256(values.encode()).hexdigest()
            if given.nats_url is not None and on_bus(given.nats_url, run, lambda bus: runs.is_made(bus, run, asked)):
                console.print(f"Run {run} is on {redacted(given.nats_url)} already, with these values: nothing is to do.", soft_wrap=True)
                return exit_codes.DONE
    config = checked_config(source)
    if config.debug.trains_only:
        raise ConfigError(DUMPS, config.debug.load_debug_rollout_data, "`myxo up`: training on dumps alone takes no bus")
    run = config.run.name
    if given.nats_url is None:
        raise ConfigError("NATS_URL", None, "required in the environment: nats://[user:password@]host:port of the bus, or NATS_URL_FILE")
    if (redis_url := given.redis_url) is None:
        raise ConfigError("REDIS_URL", None, "required in the environment: redis://[user:password@]host:port, or REDIS_URL_FILE")
    asyncio.run(check_servers(given, run))
    on_bus(given.nats_url, run, lambda bus: make_run(bus, config, redis_url, asked))
    own = "its own NATS_URL and REDIS_URL (or the files of NATS_URL_FILE and REDIS_URL_FILE)"
    what = own if addresses.has_credentials(redis_url) else "NATS_URL"
    lent = [f"MYXO_INSTANCE={instance} python -m services.rollout (lend_gpus)" for instance in devices.lent_instances(config)]
    services = ", ".join([*(f"python -m {module}" for module in SERVICE_MODULES.values()), *lent])
    started = f"Start its services, each with {what} and MYXO_RUN={run}: {services}"
    console.print(f"Run {run} is on {redacted(given.nats_url)}. {started}", soft_wrap=True)
    return exit_codes.DONE


_TRAIN = """Run a run on this machine until it is finished, from flags alone: those of slime's train.py, Megatron's and Myxo's own.

Without CONFIG, the flags are the whole config. slime's defaults hold where they differ from Myxo's in what is trained, the run's directory
lies in --save, and the run's name is that of --run-name, that of the newest run in --load, or made of the model's name and the time. The
name of a run that is there already, without a model, continues with it. With CONFIG it is `myxo up CONFIG [flags]`.

--print-config prints the TOML file that the flags stand for."""

# The sections that have fields without a default, so that each of these is asked for by its name.
_REQUIRED: dict[str, dict[str, Any]] = {"model": {}, "data": {}, "rollout": {}}
LONGEST_MODEL_NAME = 40  # characters of the model's name in a run's


def declare_train(command: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    with_flags(command, _TRAIN, "[CONFIG] [options]", _train)
    command.epilog = "flags:\n" + "\n".join(flags.help_lines())
    command.add_argument("--run-name", metavar="NAME", help="the run's name; default: the model's and the time")
    add_dry_run(command)


def _train(parsed: argparse.Namespace, console: Console) -> int:
    path, words = leading(parsed.flags)
    if parsed.run_name is not None:
        words = [*words, "--name", parsed.run_name]
    return up(train_source(path, words, fresh=parsed.fresh), console, fresh=parsed.fresh, dry_run=dry_run(parsed))


def train_source(path: Path | None, words: list[str], *, fresh: bool = False, now: datetime | None = None) -> Source:
    """Returns where a run's config comes from. ``now``: the time in its name, where that is made."""
    given = flags.read(words)
    if path is None:
        _settle_place(given, fresh)
        if "hf_checkpoint" in given.overrides.get("model", {}) or "name" not in given.overrides["run"]:
            given.as_slime, layers = True, Layers(given.overrides)
            lay_custom_config(layers)  # what it sets counts as flags do
            given.problems, given.notes = given.problems + layers.problems, given.notes + layers.notes
            given.typed |= {field: f"{file}: {field.partition('.')[2]}" for field, file in layers.origins.items()}
            given.notes += slime_defaults.settle_defaults(given.overrides)
            defaults = slime_defaults.defaults(given.overrides)
            given.notes.append(slime_defaults.note(defaults, given.overrides))
            given.overrides = over(defaults, over(_REQUIRED, given.overrides))
            model = Path(str(given.overrides.get("model", {}).get("hf_checkpoint", "run"))).name.partition("@")[0]
            plain = re.sub(r"[^a-z0-9_-]+", "-", model.lower()).strip("-_")[:LONGEST_MODEL_NAME] or "run"
            given.overrides["run"].setdefault("name", f"{plain}-{now or datetime.now():%Y%m%d-%H%M%S}")
        else:
            given.overrides = over(_frozen(given), given.overrides)
    return Source(path, given)


def _settle_place(given: CommandLine, fresh: bool) -> None:
    """Gives the run slime's place: its directory lies in ``--save``; a run that lies in ``--load`` already continues there."""
    run, trainer = given.overrides.setdefault("run", {}), given.overrides.get("trainer", {})
    load, save = trainer.get("load"), trainer.get("save")
    if load is not None and "name" not in run and not fresh:
        frozen = [path for path in Path(load).glob(f"*/{runs.FROZEN}") if runs.frozen(path.parent) is not None]
        if frozen:  # the one whose config was frozen last
            newest = max(frozen, key=lambda path: path.stat().st_mtime).parent
            run |= {"name": newest.name, "dir": str(newest.parent)}
            given.notes.append(f"--load {load}: the run {newest.name} continues")
    if save is not None:
        run.setdefault("dir", save)


def _frozen(given: CommandLine) -> dict[str, Any]:
    run = given.overrides["run"]
    directory = Path(run.get("dir", "runs"))
    if (config := runs.frozen(directory / run["name"])) is None:
        raise ConfigError("run.name", run["name"], f"a run that lies in {directory}; a new one needs --hf-checkpoint and the other flags")
    asked = given.overrides.get("rollout", {})
    counted = {"num_rollout", "num_rollout_per_epoch"} if "num_epoch" in asked and "num_rollout" not in asked else set()
    return config.model_dump(mode="json", exclude={"rollout": counted})


_SERVE = """Serve a model to clients of the Tinker SDK: they train adapters of it (or, without lora_rank, all of it) and sample from what
they trained, by a loop of their own.

Starts an embedded NATS server and Valkey (unless NATS_URL and REDIS_URL name others), engines, the trainer and the endpoint, and restarts
whatever dies: clients' commands are in a log, and their futures resolve. Ctrl-C stops everything in order; the same command continues."""

# What a config need not say where commands come from outside
SERVE_DEFAULTS: dict[str, dict[str, Any]] = {
    "rollout": {"num_rollout": 0, "rollout_batch_size": 1, "rollout_max_response_len": 1},
    "tinker": {"tinker_endpoint": True},
}
LOOK_SECONDS = 1.0


class Serving(Launch):
    """A launch that serves until it is stopped."""

    async def _until_end(self, bus: Bus, supervisor: Supervisor, polling: asyncio.Task[None], shown: Display) -> StopReason | None:
        shown.close()
        look_at, reported = 0.0, ""
        while not self._signals:
            now = time.monotonic()
            self._tick_servers(bus, now)
            supervisor.note_ready(self._statuses)
            if now >= look_at:
                look_at = now + LOOK_SECONDS
                self._waits.see(self._situation(bus, supervisor.statuses(now), self._disk.text), time.time())
            done = self._progress.seen(0, newest_gauges(self._statuses, "trainer"))  # what dies without answers to clients is given up
            if (reason := supervisor.tick(now, done, hold=bool(self._disk.text))) is not None:
                return reason
            if polling.done():
                polling.result()
            at_work = [status for status in self._statuses if status.state in AT_WORK]
            url = next((status.engine for status in at_work if status.service == "gateway"), "")
            if url and {"gateway", "rollout", "trainer"} <= {status.service for status in at_work} and url != reported:
                reported = url
                self._say(f"Serving {self._config.tinker.tinker_model_name or self._config.model.hf_checkpoint}: TINKER_BASE_URL={url}")
            await asyncio.sleep(TICK_SECONDS)
        return None

    def _interrupted(self) -> int:
        first = self._signals[0]
        self._say(f"Stopped by {first.name}; `{self._again}` continues, with all that clients have trained.")
        return 128 + first


def declare_serve(command: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``myxo serve``."""
    with_flags(command, _SERVE, "CONFIG [--fresh]", _serve)
    command.add_argument("config", metavar="CONFIG", type=Path, help="a TOML file: run, model, trainer, rollout, tinker")
    command.add_argument("--fresh", action="store_true", help="remove what clients have done so far")


def _serve(parsed: argparse.Namespace, console: Console) -> int:
    source = Source.of(parsed.config, parsed.flags)
    file = Layers()
    file.read(parsed.config)
    lost = [field for field in (f"rollout.{name}" for name in SERVE_DEFAULTS["rollout"]) if field in file.origins]
    source.given.notes += [f"{field} changes nothing: clients say what is trained and sampled" for field in lost]
    source.given.overrides = over(SERVE_DEFAULTS, source.given.overrides)
    config, given = checked_config(source, starts=True, fresh=parsed.fresh), given_servers()
    directory, again = RunDirectory(config.run.root), continuing(config, source, "serve")
    with claimed(config, directory, parsed.fresh, given), logged(config, directory, LAUNCHER):
        return asyncio.run(Serving(config, directory, given, console, fresh=parsed.fresh, again=again).run())
