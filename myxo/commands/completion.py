"""``myxo completion SHELL``: a script by which a shell completes commands, flags, files and runs."""

import argparse

from rich.console import Console

from myxo.main import COMMANDS, parser
from shared.config import flags
from shared.runtime import exit_codes
from shared.runtime.errors import ConfigError

SHELLS = ("bash", "zsh", "fish", "tcsh")
_ABOUT = """Print a script that completes commands, flags, files and runs.

  bash:  myxo completion bash > ~/.local/share/bash-completion/completions/myxo
  zsh:   myxo completion zsh > "${fpath[1]}/_myxo"
  fish:  myxo completion fish > ~/.config/fish/completions/myxo.fish
  tcsh:  myxo completion tcsh > ~/.myxo.tcsh, and `source ~/.myxo.tcsh` in ~/.tcshrc"""

WITH_FLAGS = ("up", "train", "submit", "eval", "doctor")  # commands that take the config's flags, which argparse does not know


def declare(command: argparse.ArgumentParser) -> None:
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
    for name, command in _commands(top).items():
        if name in WITH_FLAGS:
            _add_flags(command)
        for action in command._actions:
            if action.dest in ("run", "dir"):
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
            elif action.dest in ("config", "output", "data", "model"):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    console.file.write(shtab.complete(top, shell))
    return exit_codes.DONE


def _commands(top: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return next(action.choices for action in top._actions if isinstance(action, argparse._SubParsersAction))


def _add_flags(command: argparse.ArgumentParser) -> None:
    known = {option for action in command._actions for option in action.option_strings}
    for line in flags.help_lines():
        option, _, text = line.strip().partition(" ")
        if option.startswith("--") and option not in known:
            command.add_argument(option, help=text.strip().replace("%", "%%"))
