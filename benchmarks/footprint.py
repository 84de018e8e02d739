"""What the compose stack costs: seconds to healthy, memory and image size of each service, seconds to stop.

``python -m benchmarks.footprint [--json FILE] [--write]`` builds the images, runs the quick start's config under `deploy/compose` until
it has trained a few steps, measures, and prints a table. Needs a Docker engine with Compose v2. ``--write`` puts the table of `RESULT` into
docs/deployment.md.
"""

import argparse
import json
import os
import re
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.page_table import put_table
from tests.compose.stack import BUILD_SECONDS, ROOT, Stack, stack_files

RESULT = ROOT / "benchmarks" / "results" / "footprint.json"
PAGE = ROOT / "docs" / "deployment.md"

BASE_IMAGE = "python:3.11-slim-bookworm"
STEPS = 3
TRAIN_SECONDS = 1200
ORDER = ("trainer", "rollout", "reward", "buffer", "nats", "redis")
"""In which the services are stopped: each while those it speaks to are up."""

SERVERS = ("nats", "redis")
"""Their images are their makers'."""

_UNITS = {"B": 1, "kB": 1e3, "KiB": 2**10, "MB": 1e6, "MiB": 2**20, "GB": 1e9, "GiB": 2**30}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"write the figures there; the repository's are in {RESULT}")
    parser.add_argument("--write", action="store_true", help="put the figures of RESULT into the docs; nothing is measured")
    given = parser.parse_args()
    if given.write:
        put_table(PAGE, "footprint", table(json.loads(RESULT.read_text())))
        return
    figures = measure()
    print(table(figures))
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure() -> dict[str, Any]:
    """Runs the stack and measures it."""
    stack = Stack("myxo-footprint", "footprint", {"MYXO_ENVIRONMENTS_NETWORK": "myxo-footprint-environments"}, stack_files())
    stack.remove()
    try:
        print("building the images", flush=True)
        stack.compose("build", "--quiet", seconds=BUILD_SECONDS)
        print("starting the stack", flush=True)
        began = time.monotonic()
        stack.compose("up", "--detach", "--no-build", seconds=600)
        stack.until("health of every container", lambda: not stack.unhealthy(), 600)
        healthy = time.monotonic() - began
        print(f"healthy after {healthy:.1f} s; training {STEPS} steps", flush=True)
        stack.until(f"{STEPS} trained steps", lambda: stack.steps() >= STEPS, TRAIN_SECONDS)
        memory = {service: _memory(stack, service) for service in ORDER}
        images = {service: _image(stack, service) for service in ORDER if service not in SERVERS}
        stops = {service: _stop(stack, service) for service in ORDER}
    finally:
        stack.remove()
    services = {
        service: {"memory_bytes": memory[service], "image_bytes": images.get(service), "stop_seconds": round(stops[service], 2)}
        for service in ORDER
    }
    return {
        "measured": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores shared with other jobs, no GPU",
        "config": f"examples/arithmetic/quickstart.toml, after {STEPS} steps",
        "base_image_bytes": int(_docker("image", "inspect", "--format", "{{.Size}}", BASE_IMAGE)),
        "healthy_seconds": round(healthy, 1),
        "services": services,
    }


def table(figures: dict[str, Any]) -> str:
    """The figures in Markdown."""
    lines = [
        f"All containers were healthy {figures['healthy_seconds']:.0f} s after `docker compose up`, images built ({figures['machine']}; "
        f"{figures['measured']}; {figures['config']}).",
        "",
        "| service | memory, MiB | image, MB | of it above the base image, MB | stops in, s |",
        "|---|---|---|---|---|",
    ]
    base = figures["base_image_bytes"]
    for service, of in figures["services"].items():
        image = of["image_bytes"]
        sizes = "– | –" if image is None else f"{image / 1e6:.0f} | {(image - base) / 1e6:.0f}"
        lines.append(f"| {service} | {of['memory_bytes'] / 2**20:.0f} | {sizes} | {of['stop_seconds']:.1f} |")
    lines += ["", f"The base image here ({BASE_IMAGE}) has {base / 1e6:.0f} MB; memory is what `docker stats` reports for the container."]
    return "\n".join(lines)


def _container(stack: Stack, service: str) -> str:
    return str(stack.containers(service)[0]["Name"])


def _memory(stack: Stack, service: str) -> int:
    """Bytes."""
    said = _docker("stats", "--no-stream", "--format", "{{.MemUsage}}", _container(stack, service)).split("/")[0].strip()
    match = re.fullmatch(r"([\d.]+)\s*(\w+)", said)
    assert match is not None, said
    return int(float(match[1]) * _UNITS[match[2]])


def _image(stack: Stack, service: str) -> int:
    """Bytes, uncompressed, all layers."""
    image = _docker("inspect", "--format", "{{.Image}}", _container(stack, service))
    return int(_docker("image", "inspect", "--format", "{{.Size}}", image))


def _stop(stack: Stack, service: str) -> float:
    """Seconds from SIGTERM to the end. Raises AssertionError where it had to be killed."""
    name, began = _container(stack, service), time.monotonic()
    _docker("stop", "--time", "60", name)
    seconds = time.monotonic() - began
    code = _docker("inspect", "--format", "{{.State.ExitCode}}", name)
    assert code in ("0", "1", "143"), f"{service} ended with {code} after SIGTERM"
    return seconds


def _docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"docker {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


if __name__ == "__main__":
    main()
