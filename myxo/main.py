"""``myxo``: parses the command line, runs the command, turns errors into one line and an exit code.

Exit codes: 0 done, 1 failed (an audit's violation, a service that cannot run), 2 bad input, 130 and 143 interrupted.
"""

import argparse
import importlib
import io
import sys
from collections.abc import Container, Sequence

from myxo.display import SafeConsole
from shared import __version__
from shared.runtime import exit_codes, quick_imports, telemetry
from shared.runtime.errors import nearest
from shared.runtime.exit_codes import Parser, complain, ended

# Command → the function in `myxo.commands` that declares its arguments and what runs it, and its short help. Only the module of the command
# that is run is imported: `myxo --help` answers at once.
COMMANDS = {
    "quickstart": ("quickstart:declare", "train a tiny model on this machine's CPU, in a directory of its own"),
    "init": ("init:declare", "write a first config for a model and a file of prompts"),
    "up": ("up:declare_up", "run a config's run on this machine"),
    "train": ("up:declare_train", "run a run on this machine from flags alone, slime's and Megatron's among them"),
    "serve": ("up:declare_serve", "serve a model to clients of the Tinker SDK, who train and sample by loops of their own"),
    "try": ("try_functions:declare", "call your own functions on two prompts, in seconds, and say what is wrong with them"),
    "plan": ("plan:declare", "the memory that a config needs of its GPUs, and what would lower it; exits 1 where it does not fit"),
    "submit": ("up:declare_submit", "put a config's run on an external bus"),
    "doctor": ("doctor:declare", "what is wrong with this machine, and the command that mends it"),
    "eval": ("evaluate:declare", "evaluate a version of a run after the fact"),
    "list": ("status:declare_list", "the runs in a directory: state, steps, reward, and when they were last at work"),
    "export": ("export_run:declare_export", "a checkpoint of a run in Hugging Face's format, also of one that was stopped"),
    "status": ("status:declare_status", "how a run stands: services, steps, queues"),
    "logs": ("logs:declare", "what the services of a run on this machine logged"),
    "audit": ("audit:declare", "replay a run's ledger and check its invariants; exits 1 on a violation"),
    "repair": ("repair:declare", "what a run that a loss of power has torn apart needs to continue; with --yes, does it"),
    "move": ("move:declare", "take a run that is at rest to another disk"),
    "samples": ("samples:declare", "the groups of a run, what became of them, and their samples"),
    "bisect": ("bisect:declare", "where engine and trainer of a run part: the first operation that differs, and likely causes"),
    "watch": ("status:declare_watch", "the progress of a run whose services were started elsewhere, to its end, then its summary"),
    "top": ("top:declare", "who waits for whom in a run, what would help, what its services do, and alarms, live"),
    "env": ("env:declare", "environments: make one, serve it, check that it keeps the protocol"),
    "accounts": ("accounts:declare", "make the accounts of a run on NATS and Redis"),
    "link": ("link:declare", "a hub's NATS, Redis and object store behind one HTTPS port, and that port from another site"),
    "simulate": ("command_arguments:declare_tool", "throughput and staleness of every policy, simulated"),
    "convert": ("command_arguments:declare_tool", "a model from Hugging Face's format to torch_dist, or back"),
    "replay": ("command_arguments:declare_tool", "train the batches again that a run has dumped, without the run"),
    "flags": ("flag_list:declare", "the flags of Megatron's that a run takes, and what became of the others"),
    "console": ("console:declare", "a run in the browser, also when it is over: curves, flow, weights, samples, health"),
    "trace": ("trace:declare", "the timeline of a run for Perfetto: groups, trainer, pushes, services"),
    "summary": ("status:declare_summary", "what a run came to: summary.json, a picture, a table"),
    "compare": ("status:declare_compare", "what differs in the configs and the results of runs, and their rewards on one picture"),
    "completion": ("flag_list:declare_completion", "a script that completes commands, flags and runs in your shell"),
}

# Words that a person may type in the place of a command → what to type
NEAR_WORDS = {
    **dict.fromkeys(("stop", "kill", "cancel", "pause"), "Ctrl-C where `myxo up` runs saves and stops; the same command continues"),
    **dict.fromkeys(("run", "start", "launch", "resume", "continue", "restart"), "`myxo up CONFIG` starts a run, and continues one"),
    **dict.fromkeys(("ls", "ps", "runs"), "`myxo list` has the runs"),
    **dict.fromkeys(("show", "info", "describe"), "`myxo status RUN` says how a run stands, `myxo samples RUN` shows its samples"),
    **dict.fromkeys(("rm", "remove", "delete", "clean"), "`rm -r runs/RUN` removes a run, `myxo up CONFIG --fresh` starts it anew"),
}

_EXTRAS = {"tokenizers": "buffer", "jinja2": "buffer", "aiohttp": "reward"}  # package that a command may lack → the extra that brings it


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code."""
    parsed = parse(sys.argv[1:] if arguments is None else arguments)
    telemetry.silence_logs()
    console = SafeConsole()
    for stream in (sys.stdout, sys.stderr):  # text that the terminal's own encoding lacks must not end a command
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        return ended("myxo", lambda: parsed.run_command(parsed, console))
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        complain(f"{error.name} is not installed: pip install 'myxo[{_EXTRAS[error.name]}]'", "myxo")
        return exit_codes.FAILED


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Returns the parsed command line; ends the process where it is wrong, or asks for help."""
    top = parser(declared=words[:1])
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        top.error(f"no command {words[0]}; {NEAR_WORDS.get(words[0]) or nearest(words[0], list(COMMANDS))}")
    parsed, rest = top.parse_known_args(words)
    if rest and hasattr(parsed, "take_rest"):
        rest = parsed.take_rest(parsed, rest)
    if rest:
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    return parsed


def parser(declared: Container[str]) -> Parser:
    """Returns the parser of all commands, of which the ``declared`` ones have their arguments."""
    about = "RL post-training of language models as independent services on a message bus."
    top = Parser(prog="myxo", description=about, allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"myxo {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for name, (where, short) in COMMANDS.items():
        if where.endswith(":declare_tool"):  # no word is an option here, --help neither: all of them are for the tool
            command = commands.add_parser(name, help=short, add_help=False, prefix_chars="\0")
        else:
            command = commands.add_parser(name, help=short, description=f"{short[0].upper()}{short[1:]}.", allow_abbrev=False)
        if name in declared:
            module, _, function = where.partition(":")
            with quick_imports():
                imported = importlib.import_module(f"myxo.commands.{module}")
            getattr(imported, function)(command)
    return top


if __name__ == "__main__":
    sys.exit(main())
