"""Lists the flags of the installed SGLang's parser, as `shared.config.sglang_flags` reads them. It imports SGLang, which takes seconds.

python -m services.rollout.engine.sglang_catalogue               print the catalogue
python -m services.rollout.engine.sglang_catalogue --write       write the one of the SGLang that Myxo is made with
python -m services.rollout.engine.sglang_catalogue --check       exit 1 where that is not what this SGLang's parser says
"""

import argparse
import json
import sys
from typing import Any

from services.rollout.engine.launch_command import engine_site
from shared.config import devices, sglang_flags

KINDS: dict[Any, str] = {int: "int", float: "float", json.loads: "json"}
"""The types to which argparse converts values, by a one-word name; any other is text."""


def text() -> str:
    """Returns the catalogue as JSON, one flag a line."""
    if not devices.gpus():  # the stand-ins with which SGLang can be imported beside CPU torch
        sys.path.insert(0, str(engine_site()))
        from services.rollout.engine import cpu_launcher  # noqa: F401
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    rows = [row for row in map(_row, parser._actions) if row["spellings"] not in ([], ["help"])]
    lines = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in rows)
    return f'{{"sglang": "{sglang_flags.installed()}", "parser": "{sglang_flags.fingerprint()}", "flags": [\n{lines}\n]}}\n'


def _row(action: argparse.Action) -> dict[str, Any]:
    """Returns the fields of `shared.config.sglang_flags.EngineFlag` that differ from its defaults."""
    counts = getattr(action.type, "__name__", "") == "human_readable_int"
    kind = "switch" if action.nargs == 0 else "count" if counts else KINDS.get(action.type, "text")
    row: dict[str, Any] = {"spellings": [word.removeprefix("--") for word in action.option_strings if word.startswith("--")], "kind": kind}
    if action.nargs in ("+", "*"):
        row["several"] = True
    if action.nargs in ("*", "?"):
        row["bare"] = True
    if action.choices is not None:
        row["choices"] = sorted(str(choice) for choice in action.choices if choice is not None)
    return row


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m services.rollout.engine.sglang_catalogue", description=__doc__.split("\n\n")[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help=f"write {sglang_flags.CATALOGUE.name}")
    what.add_argument("--check", action="store_true", help="exit 1 where it is not current")
    given, path, made = parser.parse_args(arguments), sglang_flags.CATALOGUE, text()
    if given.check and path.read_text() != made:
        print(f"{path.name} is not what this SGLang's parser says; run `make docs`", file=sys.stderr)
        return 1
    if given.write:
        path.write_text(made)
    else:
        print(f"{path.name} is current" if given.check else made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
