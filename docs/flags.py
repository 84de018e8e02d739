"""Writes the catalogue of Megatron's flags and the pages of flags: ``python -m docs.flags [--check]``.

The pages are ``docs/megatron-flags.md``, from the catalogue, and ``docs/coming-from-slime.md``, from the tables of slime's flags.

With ``--check`` nothing is written; the exit code is 1, with a diff, where the catalogue is not what the installed Megatron's dataclasses
and `docs.flag_tables` give, or the page is not what the catalogue says.
"""

import argparse
import json
import sys
from pathlib import Path

from docs import megatron_catalogue, slime_page
from docs.catalogue import settle
from shared.config import flag_table
from shared.config.flag_table import UNSET, Flag
from shared.config.run_config import field_sections

CATALOGUE = Path(flag_table.__file__).with_name("megatron_flags.json")
PAGE = Path(__file__).with_name("megatron-flags.md")

TOP = """# Megatron's flags

Written by `python -m docs.flags`; do not edit.

Megatron's own flags are taken as they are, on the command line without a prefix

```bash
myxo up examples/arithmetic/quickstart.toml --moe-router-dtype fp32 --no-rope-fusion --num-layers 2
```

and in a config's `[trainer.megatron]`, with dashes or underscores:

```toml
[trainer.megatron]
moe-router-dtype = "fp32"
apply_rope_fusion = false
num_layers = 2
```

`myxo flags` lists them with what the installed Megatron-Core says of each; `myxo flags rope` looks for a word, also among the config's own
fields. Values are checked where the command is given, without Megatron or torch.

- **A field of the config comes first.** Where a section of the config has a field of Megatron's name (`lr`, `tensor_model_parallel_size`,
  `seed`, `recompute_modules`, …) that is where it belongs, and its flag sets that field.
- **Fields of Megatron's dataclasses** go there as given: TransformerConfig, OptimizerConfig, DistributedDataParallelConfig.
- **Flags of the architecture change nothing.** The model is the one of `hf_checkpoint`; a flag that says otherwise is refused with both
  values. So a script written for another size does not train the wrong model.
- **Nothing is ignored in silence.** An unknown flag is refused with the nearest one, a flag that means nothing here with the reason and
  what to use instead, another value than Myxo's own with the reason for it. A flag that changes no value, only where memory lies or which
  kernels run, is accepted; where it has no effect, the start says so. What only Transformer Engine's layers have is refused without
  `--transformer-impl transformer_engine`: layers are local otherwise, also where it is installed. slime's own flags:
  [coming-from-slime.md](coming-from-slime.md).
- **A switch** is given as `--name`, `--no-name` or `--name false`; a list as words, or as scripts write it, `--moe-layer-freq
  [0]*1+[1]*27`.
- **Frozen with the run** like every field: `myxo up --print-config` shows them, and a resumed run with others is refused.

The catalogue, `shared/config/megatron_flags.json`, is made from the dataclasses of megatron-core {version} and from
`docs/flag_tables.py` by `python -m docs.flags`, too; CI checks that it is current.

A config may build on others, and so take a model's flags from a file of their own:

```toml
base = "../../configs/models/qwen3-4b.toml"   # or a list; relative to this file
```

What a file says stands over its bases, the later of several bases over the earlier, tables key by key. Unknown keys are refused with the
file that they are in, and `myxo up --print-config` shows what comes of it all.
"""


def main() -> int:
    """Writes or checks the page; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m docs.flags", description="Megatron's flags: their catalogue and their page")
    parser.add_argument("--check", action="store_true", help="only compare; exit code 1 where the catalogue or the page is out of date")
    check = parser.parse_args().check
    found = settle(CATALOGUE, megatron_catalogue.text(), check)
    for path, text in ((PAGE, page), (slime_page.PAGE, slime_page.page)):
        found = settle(path, text(), check) or found
    return found


def page() -> str:
    """The page's text."""
    own = field_sections()
    flags = [flag for flag in flag_table.catalogue().values() if flag.name not in own]
    passed = [flag for flag in flags if flag.fixed is UNSET and flag.groups and flag.groups != ("architecture",)]
    compared = [flag for flag in flags if flag.groups == ("architecture",)]
    fixed = [flag for flag in flags if flag.fixed is not UNSET]
    lines = [TOP.replace("{version}", json.loads(CATALOGUE.read_text())["megatron_core"]), "## Passed on", ""]
    lines += ["| flag | value | default | goes to |", "|---|---|---|---|"]
    lines += [f"| {_names(flag)} | {_kind(flag)} | {_value(flag.default)} | {', '.join(flag.groups)} |" for flag in passed]
    lines += ["", "## Compared with the checkpoint", "", "| flag | value |", "|---|---|"]
    lines += [f"| {_names(flag)} | {_kind(flag)} |" for flag in compared]
    lines += ["", "## Taken with one value only", "", "| flag | value | why |", "|---|---|---|"]
    lines += [f"| {_names(flag)} | {_value(flag.fixed)} | {flag.reason} |" for flag in fixed]
    lines += ["", "## Accepted without effect", "", "| flag | value | why |", "|---|---|---|"]
    lines += [f"| {_names(flag)} | {_kind(flag)} | {flag.reason} |" for flag in flags if flag.ignored]
    lines += ["", "## Not taken", "", "| flags | why, or what to use instead |", "|---|---|"]
    reasons: dict[str, list[str]] = {}
    for flag in flags:
        if flag.refused:
            reasons.setdefault(flag.reason, []).append(_names(flag))
    lines += [f"| {', '.join(names)} | {reason} |" for reason, names in reasons.items()]
    return "\n".join(lines) + "\n"


def _names(flag: Flag) -> str:
    return ", ".join(f"`{name}`" for name in flag.command_line)


def _kind(flag: Flag) -> str:
    return ", ".join(f"`{choice}`" for choice in flag.choices) or flag.kind


def _value(value: object) -> str:
    return "none" if value is None or value in ("", []) else f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    sys.exit(main())
