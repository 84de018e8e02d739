"""``myxo flags``: Megatron's flags as a run takes them, and with a pattern the config's own fields and the refused flags too.

``myxo completion SHELL``: a script by which a shell completes commands, flags, files and runs.
"""

import argparse
import ast
import importlib.util
import itertools
from functools import cache
from pathlib import Path

from rich.console import Console

from myxo.commands.command_arguments import add_json
from myxo.commands.up import take_flags
from myxo.main import COMMANDS, parser
from shared.config import flag_table, flags, presets
from shared.config.flag_table import UNSET, Flag
from shared.runtime import exit_codes
from shared.runtime.errors import ConfigError
from shared.runtime.safe_text import json_text

# The files in which Megatron explains its fields, in the string behind each.
SOURCES = (
    "core/model_parallel_config.py",
    "core/transformer/transformer_config.py",
    "core/optimizer/optimizer_config.py",
    "core/distributed/distributed_data_parallel_config.py",
)


def declare(command: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    command.add_argument("pattern", metavar="PATTERN", nargs="?", help="part of a flag's name: look among the config's own flags, too")
    add_json(command, "one JSON object a flag, in a list")
    command.set_defaults(run_command=lambda parsed, console: flag_list(parsed.pattern, console, parsed.json))


def flag_list(pattern: str | None, console: Console, as_json: bool = False) -> int:
    """Prints one line a flag: spellings, kind, default, meaning. Returns the exit code.

    ``pattern``: part of a name, with dashes or underscores; None: every flag of Megatron's that is taken. Raises ConfigError where no
    flag's name holds the pattern.
    """
    lines = lines_of(pattern)
    if not lines:
        raise ConfigError("PATTERN", pattern, "no flag's name holds it; `myxo flags` lists Megatron's, `myxo up --help` the config's own")
    console.file.write(json_text(list(map(_plain, lines))) + "\n" if as_json else "\n".join(lines) + "\n")
    return exit_codes.DONE


def _plain(line: str) -> dict[str, object]:
    spellings, _, text = line.strip().partition("  ")
    return {"flags": [word for word in spellings.replace(",", " ").split() if word.startswith("-")], "text": text.strip()}


def lines_of(pattern: str | None) -> list[str]:
    """Returns the lines, the config's own fields first."""
    catalogue = flag_table.catalogue().values()
    if pattern is None:
        return [_line(flag) for flag in catalogue if not flag.refused]
    sought = pattern.lower().lstrip("-").replace("_", "-")
    own = [line for line in flags.help_lines() if line.startswith("  --") and sought in line.split()[0]]
    given = {line.split()[0] for line in own}
    if "--preset" in given:
        own += [f"  --preset {name:25} {presets.flags_of(name)}" for name in presets.PRESETS]
    matching = [flag for flag in catalogue if any(sought in spelling for spelling in flag.command_line)]
    return [*own, *(_line(flag) for flag in matching if flag.command_line[0] not in given)]


def _line(flag: Flag) -> str:
    name = f"  {', '.join(flag.command_line):34}"
    if flag.refused:
        return f"{name} not taken: {flag.reason}"
    kind = "|".join(flag.choices) if flag.choices else flag.kind
    default = "none" if flag.default is None else str(flag.default).lower() if isinstance(flag.default, bool) else str(flag.default)
    if flag.fixed is not UNSET:
        return f"{name} {kind}, always {default}: {flag.reason}"
    meaning = next(filter(None, map(meanings().get, (flag.name, *flag.spellings))), "")
    if flag.groups == ("architecture",):
        return f"{name} {kind}, compared with the checkpoint's" + (f": {meaning}" if meaning else "")
    return f"{name} {kind}, default {default}" + (f": {meaning}" if meaning else "")


@cache
def meanings() -> dict[str, str]:
    """Returns the first sentence of Megatron-Core's own text on each field; nothing where it is not installed."""
    found: dict[str, str] = {}
    spec = importlib.util.find_spec("megatron")
    for directory in (spec.submodule_search_locations or []) if spec is not None else []:
        for source in SOURCES:
            path = Path(directory) / source
            if path.is_file():
                found |= _documented(ast.parse(path.read_text())) | found
    return found


def _documented(tree: ast.Module) -> dict[str, str]:
    found: dict[str, str] = {}
    for body in (node.body for node in tree.body if isinstance(node, ast.ClassDef)):
        for field, text in itertools.pairwise(body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                    found[name] = " ".join(words.strip().split("\n\n")[0].split()).split(". ")[0].removesuffix(".")
    return found


SHELLS = ("bash", "zsh", "fish", "tcsh")
_ABOUT = """Print a script that completes commands, flags, files and runs.

  bash:  myxo completion bash > ~/.local/share/bash-completion/completions/myxo
  zsh:   myxo completion zsh > "${fpath[1]}/_myxo"
  fish:  myxo completion fish > ~/.config/fish/completions/myxo.fish
  tcsh:  myxo completion tcsh > ~/.myxo.tcsh, and `source ~/.myxo.tcsh` in ~/.tcshrc"""


def declare_completion(command: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    command.description, command.formatter_class = _ABOUT, argparse.RawDescriptionHelpFormatter
    command.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    command.set_defaults(run_command=lambda parsed, console: completion(parsed.shell, console))


def completion(shell: str, console: Console) -> int:
    """Prints the script. Raises ConfigError where the package that makes it is not installed."""
    try:
        import shtab
    except ModuleNotFoundError:
        raise ConfigError("completion", shell, "the package shtab: pip install shtab") from None
    top = parser(declared=COMMANDS)
    for command in next(action.choices for action in top._actions if isinstance(action, argparse._SubParsersAction)).values():
        if command.get_default("take_rest") is take_flags:  # it takes the config's flags, which argparse does not know
            _add_flags(command)
        for action in command._actions:
            if action.dest in ("run", "dir"):
                action.complete = shtab.DIRECTORY
            elif action.dest in ("config", "output", "data", "model"):
                action.complete = shtab.FILE
    console.file.write(shtab.complete(top, shell))
    return exit_codes.DONE


def _add_flags(command: argparse.ArgumentParser) -> None:
    known = {option for action in command._actions for option in action.option_strings}
    for line in flags.help_lines():
        option, _, text = line.strip().partition(" ")
        if option.startswith("--") and option not in known:
            command.add_argument(option, help=text.strip().replace("%", "%%"))
