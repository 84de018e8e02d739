"""The base images under test: those that the compose file names by digest where they can be had, else this engine's own of the same tag."""

import re
import subprocess
from functools import cache
from pathlib import Path

COMPOSE_FILE = Path(__file__).resolve().parents[2] / "deploy" / "compose" / "compose.yaml"

PULL_SECONDS = 300


@cache
def base_image(variable: str) -> str:
    """Returns the image that a variable of the compose file (``NATS_IMAGE``) stands for by default."""
    (pinned,) = re.findall(rf"\$\{{{variable}:-([^}}]+)\}}", COMPOSE_FILE.read_text())
    tag, _, digest = pinned.partition("@")
    assert digest.startswith("sha256:"), f"{variable} is not named by digest: {pinned}"
    for command in (["inspect", tag], ["inspect", pinned], ["pull", "-q", pinned]):
        call = ["docker", "pull", "-q", pinned] if command[0] == "pull" else ["docker", "image", *command]
        if subprocess.run(call, capture_output=True, timeout=PULL_SECONDS, check=False).returncode == 0:
            return command[-1]
    raise AssertionError(f"neither {pinned} nor a local {tag} can be had")
