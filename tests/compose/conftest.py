"""One compose project for all tests here: images built once, the quick start made small, an environment in Node.js scoring it."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.compose.stack import BUILD_SECONDS, ROOT, Stack, stack_files
from tests.support.containers import needs_engine

HERE = Path(__file__).parent
EXAMPLES = ROOT / "examples" / "environments"
NETWORK = "myxo-test-environments"

FLAGS = (
    "--rollout-batch-size 4 --n-samples-per-prompt 4 --sft-steps 20 --sft-batch-size 32 --save-interval 5 --eval-interval 1000 "
    "--ack-wait 10 --rm-type environment --environment-url http://arithmetic-node:8080 "
    "--custom-megatron-before-train-step-hook-path slow_steps.wait"
)
PREPARE = "python examples/arithmetic/prepare.py --if-missing --train 256 --heldout 8 --demonstrations 256 runs/quickstart/data"


TESTED = """
from shared.rewards.reference import Reference
from shared.rewards.verifiers import close_sandboxes, unit_tests
for body in ("a + b", "a * b"):
    code = f"```python\\ndef add(a, b):\\n    return {body}\\n```"
    print(unit_tests(code, Reference('["assert add(1, 2) == 3", "assert add(0, 0) == 0"]')))
close_sandboxes()
"""
"""Has a reward service's container score two responses by tests that run in sandboxes."""


def flags(steps: int) -> str:
    """The run's flags, to train ``steps`` steps in all."""
    return f"{FLAGS} --num-rollout {steps}"


def run_docker(*arguments: str, seconds: float = 300, **variables: str) -> subprocess.CompletedProcess[str]:
    command, environment = ["docker", *arguments], os.environ | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)


def example(name: str, *arguments: str, check: bool = True, **variables: str) -> str:
    """``docker compose ARGUMENTS`` for an example environment that joins the stack's network from outside; what it printed."""
    command = ["compose", "-p", f"myxo-test-{name}", "-f", str(EXAMPLES / name / "compose.yaml"), *arguments]
    done = run_docker(*command, seconds=BUILD_SECONDS, **{"MYXO_ENVIRONMENTS_NETWORK": NETWORK} | variables)
    assert not check or done.returncode == 0, f"{name}: {' '.join(arguments)}: {done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def node_image() -> str:
    """A base image with Node.js: the one that the example names, else one made from Debian's package."""
    named = "node:22-alpine"
    if run_docker("image", "inspect", named).returncode == 0 or run_docker("pull", "-q", named).returncode == 0:
        return named
    built = run_docker("build", "-q", "-t", "myxo-test-node-base", "-f", str(HERE / "node.Dockerfile"), str(HERE), seconds=BUILD_SECONDS)
    assert built.returncode == 0, built.stderr
    return "myxo-test-node-base"


@pytest.fixture(scope="session")
def make_stack() -> Iterator[Callable[..., Stack]]:
    """``make_stack(project, run, **environment)``; every stack is taken away at the end."""
    needs_engine()
    files = stack_files()
    made: list[Stack] = []

    def make(project: str, run: str, *further: Path, **environment: str) -> Stack:
        stack = Stack(project, run, environment, [*files, *further])
        stack.remove()  # what a killed test run left
        made.append(stack)
        return stack

    yield make
    if not os.environ.get("MYXO_KEEP_STACKS"):
        for stack in made:
            stack.remove()


@pytest.fixture(scope="session")
def images(make_stack: Callable[..., Stack]) -> None:
    """All images of the compose file, built."""
    builder = make_stack("myxo-test-build", "build")
    builder.compose("--profile", "*", "build", "--quiet", seconds=BUILD_SECONDS)


@pytest.fixture(scope="session")
def stack(make_stack: Callable[..., Stack], images: None, node_image: str) -> Iterator[Stack]:
    """The services at work on a small run with no end in sight, the Node.js environment beside them."""
    stack = make_stack(
        "myxo-test",
        "compose",
        COMPOSE_PROFILES="router",
        MYXO_ROUTER_URL="http://router:30000",
        MYXO_FLAGS=flags(100_000),
        MYXO_PREPARE=PREPARE,
        MYXO_ENVIRONMENTS_NETWORK=NETWORK,
    )
    try:
        stack.compose("up", "--detach", "--no-build", "--quiet-pull", seconds=600)
        example("node", "up", "--detach", "--build", NODE_IMAGE=node_image)
        yield stack
    finally:
        if not os.environ.get("MYXO_KEEP_STACKS"):
            for name in ("node", "python-fastapi"):
                example(name, "down", "--timeout", "5", "--rmi", "local", check=False)
