"""The compose stack with images that were built with nothing but PyPI, where torch is the build for CUDA. Takes 20 GB of disk."""

import json
import subprocess
from collections.abc import Callable

import pytest

from tests.compose.conftest import run_docker
from tests.compose.stack import BUILD_SECONDS, Stack

pytestmark = [pytest.mark.extra, pytest.mark.timeout(6000)]

PYTHON = "myxo-test-ordinary-python"
IMAGES = "myxo-test-ordinary"
SERVICES = ("buffer", "reward", "cli", "trainer", "rollout")
BASE = "FROM python:3.11-slim-bookworm\nENV PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= PIP_INDEX_URL= PIP_EXTRA_INDEX_URL=\n"
QUICKSTART_SECONDS = 2400


def test_images_from_pypi_run_the_quick_start_to_its_end(make_stack: Callable[..., Stack]) -> None:
    base = ["docker", "build", "-q", "-t", PYTHON, "-"]
    subprocess.run(base, input=BASE, text=True, check=True, timeout=BUILD_SECONDS)
    stack = make_stack(
        "myxo-test-ordinary",
        "quickstart",
        PYTHON_IMAGE=PYTHON,
        MYXO_IMAGES=IMAGES,
        TORCH_INDEX="",
        MYXO_ENVIRONMENTS_NETWORK="myxo-test-ordinary-environments",
    )
    try:
        stack.compose("build", "--quiet", seconds=BUILD_SECONDS)
        for service in ("trainer", "rollout"):
            command = ["run", "--rm", "--no-deps", "-T", service, "python", "-c", "import torch; print(torch.version.cuda)"]
            assert stack.compose(*command).strip() != "None", f"{service} has no torch for CUDA"
        stack.compose("up", "--detach", "--no-build", "--quiet-pull", seconds=600)

        def watch_ended() -> bool:
            return bool((watch := stack.containers("watch")) and watch[0]["State"] == "exited")

        stack.until("the end of the quick start", watch_ended, QUICKSTART_SECONDS)
        (watch,) = stack.containers("watch")
        assert watch["ExitCode"] == 0, stack.said()
        summary = json.loads(stack.compose("exec", "-T", "operator", "cat", "runs/quickstart/summary.json"))
        assert (summary["steps"], summary["finished"], summary["audit"]) == (60, True, "ok")
        assert summary["accuracy_after"] > summary["accuracy_before"]
    finally:
        stack.remove()
        run_docker("rmi", *(f"{IMAGES}-{service}" for service in SERVICES), PYTHON)
