"""A run under docker compose: healthy, closed to outsiders, scaled, killed piece by piece, taken down, brought back, finished.

The tests are one story in order, over one stack (`stack` in conftest.py): bringing it up costs more than any of them.
"""

import json
import urllib.request
from collections.abc import Iterator

import pytest

from shared.runtime import exit_codes
from tests.compose.conftest import TESTED, example, flags, run_docker
from tests.compose.stack import Stack

pytestmark = [pytest.mark.docker, pytest.mark.timeout(3000)]

START_SECONDS = 600
STEP_SECONDS = 420
"""For a part to be back at work and the next step made, on a slow and busy machine."""


ONCE = ("accounts", "prepare", "submit")
"""The services that end at once."""


def ready(stack: Stack, service: str) -> int:
    status = stack.status()
    lines = status["services"] if status and status["running"] else []
    return sum(line["service"] == service and line["state"] == "ready" for line in lines)


def goes_on(stack: Stack, what: str, more: int = 1) -> None:
    """The run makes ``more`` steps from now."""
    before = stack.until("the count of steps", lambda: max(stack.steps(), 0) or None, STEP_SECONDS)
    stack.until(f"{more} steps after {what}", lambda: stack.steps() >= before + more, STEP_SECONDS)


def test_all_containers_become_healthy(stack: Stack) -> None:
    stack.until("health of every container", lambda: not stack.unhealthy(), START_SECONDS)
    for name in ONCE:
        (done,) = stack.containers(name)
        assert (done["State"], done["ExitCode"]) == ("exited", 0)


LABELS = "from myxo.preflight.data_checks import ask_verifiers; print(ask_verifiers([('exact', '5'), ('dapo', '12.5')]))"


def test_the_image_of_the_command_line_has_what_its_commands_need_or_names_the_one_that_has(stack: Stack) -> None:
    assert "not tried" not in stack.compose("logs", "--no-color", "submit")
    tried = stack.compose("exec", "-T", "operator", "python", "-c", LABELS)
    assert "('exact', '5'): {'matches': True" in tried and "('dapo', '12.5'): {'matches': False" in tried and "None)" in tried
    assert "usage: myxo simulate" in stack.compose("exec", "-T", "operator", "myxo", "simulate", "--help")
    for command in ("convert", "replay"):
        said = stack.compose("exec", "-T", "operator", "sh", "-c", f"myxo {command} 2>&1", check=False)
        way = said.strip().partition("docker compose ")[2].split()
        assert way[:3] == ["run", "--rm", "--no-deps"], said
        assert "usage: " in stack.compose(*way, "--help")


def test_a_command_for_another_run_says_whose_accounts_are_up(stack: Stack) -> None:
    said = stack.compose("exec", "-T", "operator", "sh", "-c", "myxo audit earlier 2>&1", check=False)
    assert "the accounts that are up are of run compose" in said and "`MYXO_RUN=earlier docker compose up --detach`" in said


def test_the_run_trains_and_the_outsiders_environment_scores_it(stack: Stack) -> None:
    stack.until("a trained step", lambda: stack.steps() >= 1, START_SECONDS)
    status = stack.status()
    assert status is not None
    environment = next(line for line in status["services"] if line["service"] == "environment")
    assert environment["state"] == "ready"


@pytest.mark.parametrize(("name", "host"), [("node", "arithmetic-node"), ("python-fastapi", "arithmetic-python")])
def test_an_example_from_outside_passes_the_check(stack: Stack, name: str, host: str) -> None:
    if name != "node":  # that one scores the run already
        example(name, "up", "--detach", "--build", "--wait")
    said = stack.compose("run", "--rm", "-T", "myxo", "env", "check", f"http://{host}:8080")
    assert "FAILED" not in said


def test_the_console_alone_is_published_and_on_loopback(stack: Stack) -> None:
    published = {
        (container["Service"], port["URL"])
        for container in stack.containers()
        for port in container.get("Publishers") or []
        if port.get("PublishedPort")
    }
    assert published == {("console", "127.0.0.1")}
    said = stack.compose("exec", "-T", "console", "python", "-m", "services.console", "address")
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    with browser.open(said.strip(), timeout=60) as page:
        assert b"Myxo" in page.read()


def test_every_container_is_held_to_what_it_needs(stack: Stack) -> None:
    for container in stack.containers():
        (found,) = json.loads(run_docker("inspect", container["ID"]).stdout)
        host, user = found["HostConfig"], found["Config"]["User"]
        assert user.split(":")[0] not in ("", "root", "0"), f"{container['Service']} runs as {user or 'root'}"
        if container["Service"] == "operator":
            continue  # these tests' own
        assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and "no-new-privileges:true" in host["SecurityOpt"], container[
            "Service"
        ]
        assert host["Memory"] > 0 and host["PidsLimit"] > 0, f"{container['Service']} has no limits"


WRITE = "import pathlib, sys; pathlib.Path(sys.argv[1], 'probe').write_text('x'); print('written')"


@pytest.mark.parametrize(
    ("service", "place", "written"),
    [
        ("trainer", "/myxo/trained", True), ("trainer", "/myxo/runs", False), ("trainer", "/myxo", False),
        ("trainer", "/credentials", False),
        ("rollout", "/myxo/trained", False), ("rollout", "/myxo/runs", False), ("rollout", "/tmp", True),
        ("buffer", "/myxo/runs", True), ("buffer", "/myxo/trained", False), ("reward", "/myxo/runs", False),
        ("operator", "/myxo/trained", False),
    ],
)  # fmt: skip
def test_a_service_writes_where_it_may_and_nowhere_else(service: str, place: str, written: bool, stack: Stack) -> None:
    said = stack.compose("exec", "-T", service, "python", "-c", WRITE, place, check=False)
    assert ("written" in said) == written


def test_checkpoints_lie_where_the_trainer_alone_writes(stack: Stack) -> None:
    def saved() -> bool:
        listed = stack.compose(
            "exec", "-T", "operator", "find", "/myxo/trained/compose/checkpoints", "-name", "checkpoint.json", check=False
        )
        return bool(listed.strip())

    stack.until("a checkpoint on the trainer's volume", saved, STEP_SECONDS)


ANONYMOUS = """
import asyncio, nats, redis, sys
async def knock():
    try:
        await nats.connect("nats://nats:4222", connect_timeout=5, max_reconnect_attempts=0, allow_reconnect=False)
    except nats.errors.Error as error:
        return str(error)
    return "let in"
print("NATS:", asyncio.run(knock()))
try:
    redis.Redis(host="redis").get("x")
    print("Redis: let in")
except redis.exceptions.RedisError as error:
    print("Redis:", error)
"""


def test_an_anonymous_client_gets_nothing(stack: Stack) -> None:
    said = stack.compose("exec", "-T", "buffer", "python", "-c", ANONYMOUS)
    nats, redis = said.strip().splitlines()
    assert "authorization" in nats.lower(), said
    assert "authenticat" in redis.lower(), said


def test_without_its_overlay_the_reward_service_refuses_to_run_code(stack: Stack) -> None:
    said = stack.compose("exec", "-T", "reward", "sh", "-c", 'python -c "$0" 2>&1', TESTED, check=False)
    assert "sandbox.sandbox = 'bwrap': no sandbox could be started" in said and "seccomp=" in said and "score" not in said


FOREIGN = """
import asyncio, nats, pathlib
async def main():
    errors = []
    async def on_error(error): errors.append(str(error))
    url = pathlib.Path("/credentials/nats_url").read_text().strip()
    bus = await nats.connect(url, error_cb=on_error)
    await bus.publish("compose.task.train", b"")
    await bus.publish("compose.ledger.forged", b"")
    await bus.flush()
    for _ in range(100):
        if len(errors) >= 2: break
        await asyncio.sleep(0.1)
    print("\\n".join(errors))
asyncio.run(main())
"""


def test_a_service_may_not_speak_for_another(stack: Stack) -> None:
    said = stack.compose("exec", "-T", "reward", "python", "-c", FOREIGN)
    assert said.count("ermissions") >= 2, said
    logs = stack.compose("logs", "--no-color", "nats")
    assert "reward.compose" in logs and "compose.task.train" in logs, "the server logged no refusal"


def test_an_environments_network_reaches_neither_bus_nor_store_nor_engines(stack: Stack) -> None:
    knock = "require('dns').lookup(process.argv[1], e => console.log(e ? 'unknown' : 'known'))"
    for host, known in (("nats", "unknown"), ("redis", "unknown"), ("rollout", "unknown"), ("trainer", "unknown"), ("reward", "known")):
        asked = example("node", "exec", "-T", "arithmetic-node", "node", "-e", knock, host).strip()
        assert asked == known, f"{host} is {asked} in the environments' network"


WORKERS = """
import json, pathlib, urllib.request
key = pathlib.Path("/credentials/router_key").read_text().strip()
asked = urllib.request.Request("http://127.0.0.1:30000/workers", headers={"Authorization": f"Bearer {key}"})
print(len(json.load(urllib.request.urlopen(asked, timeout=20))["workers"]))
"""


def workers(stack: Stack) -> int:
    """How many engines the router has."""
    return int(stack.compose("exec", "-T", "router", "python", "-c", WORKERS, check=False).strip() or -1)


def started(stack: Stack, service: str) -> str:
    (found,) = json.loads(run_docker("inspect", stack.containers(service)[0]["ID"]).stdout)
    return str(found["State"]["StartedAt"])


def test_replicas_and_the_routers_engines_scale_up_and_down_while_it_runs(stack: Stack) -> None:
    before = [started(stack, name) for name in ONCE]
    stack.compose("scale", "--no-deps", "rollout=3")
    stack.until("three replicas that serve", lambda: ready(stack, "rollout") == 3, START_SECONDS)
    stack.until("three engines behind the router", lambda: workers(stack) == 3, STEP_SECONDS)
    goes_on(stack, "scaling to three replicas")
    stack.compose("scale", "--no-deps", "rollout=1")
    assert len(stack.containers("rollout")) == 1
    assert [started(stack, name) for name in ONCE] == before, "replicas come and go without another `submit`"
    stack.compose("up", "--detach", "--no-build", "--scale", "rollout=2")
    stack.until("two replicas that serve", lambda: ready(stack, "rollout") == 2, START_SECONDS)
    assert "there already, left as it is" in stack.compose("logs", "--no-color", "--tail", "1", "prepare")
    assert "already, with these values: nothing is to do" in stack.compose("logs", "--no-color", "--tail", "2", "submit")
    assert [container["ExitCode"] for container in stack.containers(*ONCE)] == [0] * len(ONCE)
    goes_on(stack, "`up --scale`")
    stack.compose("scale", "--no-deps", "rollout=1")
    goes_on(stack, "scaling back to one replica", more=2)
    stack.until("one engine behind the router", lambda: workers(stack) == 1, STEP_SECONDS)


@pytest.mark.parametrize("victim", ["buffer", "reward", "trainer", "rollout", "nats", "redis"])
def test_a_killed_service_comes_back_with_up(stack: Stack, victim: str) -> None:
    stack.compose("kill", "--signal", "KILL", victim)
    stack.compose("up", "--detach", "--no-build")
    goes_on(stack, f"the death of {victim}", more=2)


def test_down_and_up_again_resumes_and_finishes(stack: Stack) -> None:
    stack.compose("stop", "trainer")  # it comes first in `down`, too: from here on the count of steps stands
    (trainer,) = stack.containers("trainer")
    assert trainer["ExitCode"] == exit_codes.STOPPED, stack.compose("logs", "--no-color", "--no-log-prefix", "--tail", "20", "trainer")
    goal = stack.until("the count of steps", lambda: max(stack.steps(), 0) or None, STEP_SECONDS) + 5
    stack.compose("down", "--timeout", "60")
    stack.keep(MYXO_FLAGS=flags(goal))
    stack.compose("up", "--detach", "--no-build", seconds=600)

    def watch_ended() -> bool:
        return bool((watch := stack.containers("watch")) and watch[0]["State"] == "exited")

    stack.until("the end of the run", watch_ended, START_SECONDS + STEP_SECONDS)
    (watch,) = stack.containers("watch")
    said = stack.compose("logs", "--no-color", "--no-log-prefix", "watch")
    assert watch["ExitCode"] == 0, said
    verdict = json.loads(stack.compose("run", "--rm", "-T", "myxo", "audit", "compose", "--json"))
    assert verdict["violations"] == [], verdict
    assert (verdict["steps"], verdict["finished"]) == (goal, True)


@pytest.fixture(scope="module", autouse=True)
def told(request: pytest.FixtureRequest, stack: Stack) -> Iterator[None]:
    """Where a test failed, what the containers said."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        print(stack.said())
