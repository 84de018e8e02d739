"""How slime is launched: its own flags, and the flags of its published launch scripts, with paths for what the scripts leave open."""

import json
from pathlib import Path

_HERE = Path(__file__).parent

SCRIPTS: dict[str, list[str]] = {
    name: [word for line in lines for word in line.split()]
    for name, lines in json.loads((_HERE / "slime_scripts.json").read_text()).items()
}
"""Script → the words of its command line behind ``train.py``."""

FLAGS = (_HERE.parents[1] / "docs" / "slime_flags.txt").read_text().split()
"""The flags that slime adds to Megatron's and SGLang's, and those of Megatron's whose defaults it changes."""
