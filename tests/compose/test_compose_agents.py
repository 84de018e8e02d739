"""An agent in a container of its own, over a deployment that speaks TLS: it trains a run, and reaches the gateway and nothing else.

The tests are one story in order, over one stack: bringing it up costs more than any of them.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.compose.conftest import PREPARE, ROOT, TESTED, run_docker
from tests.compose.stack import BUILD_SECONDS, COMPOSE, LONG_LIVED, Stack
from tests.support.images import base_image

pytestmark = [pytest.mark.docker, pytest.mark.timeout(3000)]

START_SECONDS = 900
"""For the whole run: its services' start and its steps."""

STEPS = 20
"""So that some are to come while doors are tried."""
FLAGS = (
    f"--num-rollout {STEPS} --rollout-batch-size 2 --n-samples-per-prompt 2 --sft-steps 20 --sft-batch-size 32 --eval-interval 1000 "
    "--save-interval 1 --ack-wait 10 --agent shared.agents.http_agent:play "
    """--agent-options '{"url":"http://agent-proxy:8600/play"}'"""
)
RUN, NETWORK, AGENT = "secret", "myxo-test-agents", "myxo-test-agent"


@pytest.fixture(scope="module")
def agents(make_stack: Callable[..., Stack], images: None) -> Iterator[Stack]:
    """The services at work with an agent beside them that plays; a step is trained, and some are to come."""
    stack = make_stack(
        "myxo-test-agents",
        RUN,
        COMPOSE / "compose.tls.yaml",
        COMPOSE / "compose.sandbox.yaml",
        COMPOSE_PROFILES="agents",
        OPERATOR_CA="/credentials/ca.pem",
        MYXO_PREPARE=PREPARE,
        MYXO_FLAGS=FLAGS,
        MYXO_AGENTS_NETWORK=NETWORK,
        MYXO_ENVIRONMENTS_NETWORK="myxo-test-agents-environments",
    )
    try:
        stack.compose("up", "--detach", "--no-build", "--quiet-pull", seconds=600)
        agent("up", "--detach", "--build", seconds=BUILD_SECONDS)
        stack.until("a trained step", lambda: stack.steps() >= 1, START_SECONDS)
        yield stack
    finally:
        if not os.environ.get("MYXO_KEEP_STACKS"):
            agent("down", "--timeout", "2", "--rmi", "local", check=False)
            stack.remove()


def agent(*arguments: str, seconds: float = 300, check: bool = True) -> str:
    """``docker compose ARGUMENTS`` for the agent's own deployment; what it printed."""
    file = ROOT / "examples" / "agents" / "container" / "compose.yaml"
    environment = {"MYXO_AGENTS_NETWORK": NETWORK, "PYTHON_IMAGE": base_image("PYTHON_IMAGE")}
    done = run_docker("compose", "-p", AGENT, "-f", str(file), *arguments, seconds=seconds, **environment)
    assert not check or done.returncode == 0, f"{' '.join(arguments)}: {done.stderr}"
    return done.stdout


def in_agent(source: str, *words: str) -> Any:
    """Runs Python in the agent's container; the JSON that it printed."""
    return json.loads(agent("exec", "-T", "agent", "python", "-c", source, *words))


KNOCK = """
import concurrent.futures, json, socket, sys
def knock(place):
    try:
        socket.create_connection(tuple(place), 4).close()
    except OSError as error:
        return type(error).__name__
    return "open"
places = json.loads(sys.argv[1])
with concurrent.futures.ThreadPoolExecutor(64) as pool:
    print(json.dumps(list(pool.map(knock, places))))
"""


def open_places(places: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Which of the places the agent's container can connect to."""
    return [place for place, found in zip(places, in_agent(KNOCK, json.dumps(places)), strict=True) if found == "open"]


def addresses(container: str) -> dict[str, str]:
    """A container's address in each of its networks, by the network's name."""
    (found,) = json.loads(run_docker("inspect", container).stdout)
    return {name: network["IPAddress"] for name, network in found["NetworkSettings"]["Networks"].items() if network["IPAddress"]}


def listening(container: str) -> set[int]:
    """The TCP ports that a container's processes listen at."""
    tables = run_docker("exec", container, "cat", "/proc/net/tcp").stdout.splitlines()[1:]
    return {int(line.split()[1].split(":")[1], 16) for line in tables if line.split()[3] == "0A"}


def running(container: str) -> bool:
    """Whether a container has not ended."""
    return container in run_docker("ps", "--no-trunc", "--quiet").stdout


SERVED = [("gateway", 8000)]

LEAVING_SECONDS = 120.0
"""For a service that ends to be gone after it has closed its ports."""


def test_addresses_open_the_gateways_api_alone(agents: Stack) -> None:
    """Every port at which any container of the stack listens, at each address that it has."""
    places, served = set[tuple[str, int]](), set[tuple[str, int]]()
    for container in sorted(agents.containers(), key=lambda one: one["Service"] != "trainer"):  # which leaves first
        if container["State"] != "running":
            continue
        own, ports, end = addresses(container["ID"]), listening(container["ID"]), time.monotonic() + LEAVING_SECONDS
        while not ports and container["Service"] not in ("operator", "watch") and running(container["ID"]):  # it may be about to leave
            assert time.monotonic() < end, f"{container['Service']} listens nowhere: the test looks in the wrong place"
            time.sleep(0.5)
            ports = listening(container["ID"])
        places |= {(address, port) for address in own.values() for port in ports}
        if container["Service"] == "gateway":
            served = {(own[NETWORK], 8000)}
    assert set(open_places(sorted(places))) == served
    from_the_bus = json.loads(agents.compose("exec", "-T", "operator", "python", "-c", KNOCK, json.dumps(sorted(places))))
    assert from_the_bus.count("open") > len(LONG_LIVED), "the operator reaches them: they are there to be reached"


def test_names_open_the_gateways_api_alone(agents: Stack) -> None:
    """Neither names of other services, nor other ports of the gateway: its metrics, its draws."""
    ports = {"nats": (4222, 8222), "redis": (6379,), "gateway": (8000, 9464), "agent-proxy": (8600, 9464)}
    names = ("buffer", "reward", "rollout", "trainer", "operator", "myxo", "router", "host.docker.internal", "gateway.docker.internal")
    places = [(name, port) for name, given in ports.items() for port in given]
    places += [(name, port) for name in names for port in (80, 8000, 9464, 30000)]
    assert open_places(places) == SERVED


LOOK_UP = """
import json, socket, sys
def address(name):
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None
print(json.dumps([address(name) for name in json.loads(sys.argv[1])]))
"""


def test_neither_the_host_nor_the_world_is_there(agents: Stack) -> None:
    """No address of the host, at which all that it serves would answer; nor the one where clouds keep credentials."""
    own, *others = (
        config["Gateway"].split("/")[0]
        for bridge in json.loads(run_docker("network", "inspect", NETWORK, f"{agents.project}_bus", "bridge").stdout)
        for config in bridge["IPAM"]["Config"]
    )
    with pytest.raises(OSError, match="Cannot assign requested address"):
        socket.create_server((own, 0))
    with contextlib.ExitStack() as listening:
        hosts = [listening.enter_context(socket.create_server((address, 0))).getsockname() for address in others]
        places = [*hosts, *((own, port) for port in (22, 53, 80, 2375)), ("169.254.169.254", 80), ("fd00:ec2::254", 80), ("192.0.2.1", 80)]
        assert len(hosts) == 2 and open_places(places) == []
    routes = "import json; print(json.dumps([line.split()[1] for line in open('/proc/net/route').readlines()[1:]]))"
    assert "00000000" not in in_agent(routes), "a default route"
    assert in_agent(SIXES) == ["lo"]
    for service in ("gateway", "agent-proxy"):  # what is on both networks is no router between them
        assert agents.compose("exec", "-T", service, "cat", "/proc/sys/net/ipv4/ip_forward").strip() == "0"
    names = ("example.org", "metadata.google.internal", f"{agents.project}-nats-1", f"{agents.project}-rollout-1", "buffer")
    assert in_agent(LOOK_UP, json.dumps(names)) == [None] * len(names)


SIXES = "import json; print(json.dumps([line.split()[-1] for line in open('/proc/net/if_inet6')]))"
"""The interfaces with an address of IPv6."""

ASK = """
import json, sys, urllib.error, urllib.request
def status(method, path, key):
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"} if key else {}
    body = b'{"messages": [{"role": "user", "content": "x"}]}' if method == "POST" else None
    try:
        asked = urllib.request.Request("http://gateway:8000" + path, body, headers, method=method)
        with urllib.request.urlopen(asked, timeout=20) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
print(json.dumps([status(*asked) for asked in json.loads(sys.argv[1])]))
"""


def test_the_gateway_gives_nothing_without_a_sessions_key(agents: Stack) -> None:
    guesses = ["", "sk-myxo-none-0000", "sk-myxo-", "x" * 5000]
    routes = [("POST", "/v1/chat/completions"), ("POST", "/v1/messages"), ("POST", "/v1/responses"), ("POST", "/inference/v1/generate")]
    routes += [("GET", "/v1/models"), ("GET", "/v1/session"), ("POST", "/v1/session/end")]
    asked = [(method, path, key) for method, path in routes for key in guesses]
    assert set(in_agent(ASK, json.dumps(asked))) == {401}
    closed = [("GET", path, "") for path in ("/metrics", "/healthz", "/docs", "/openapi.json", "/", "/internal/generate", "/groups")]
    assert set(in_agent(ASK, json.dumps(closed))) <= {404, 405}


CALLED = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print([libc.syscall(number, 0, 0, 0, 0) and ctypes.get_errno() for number in (321, 250, 425, 298)])
"""  # bpf, keyctl, io_uring_setup, perf_event_open


PLAIN = """
import redis, socket
try:
    redis.Redis(host="redis", socket_timeout=10).ping()
    print("Redis: let in")
except (redis.exceptions.RedisError, OSError) as error:
    print("Redis:", error or type(error).__name__)
link = socket.create_connection(("nats", 4222), 10)
print("NATS:", "tls_required" in link.recv(4096).decode() and '"tls_required":true')
"""


def test_nats_and_redis_speak_tls_alone(agents: Stack) -> None:
    said = agents.compose("exec", "-T", "operator", "python", "-c", PLAIN)
    assert "let in" not in said
    assert '"tls_required":true' in said
    logs = agents.compose("logs", "--no-color", "buffer")
    assert "recovered" in logs, logs


def test_an_agent_in_a_container_trains_a_run(agents: Stack) -> None:
    def watch_ended() -> bool:
        return bool((watch := agents.containers("watch")) and watch[0]["State"] == "exited")

    agents.until("the end of the run", watch_ended, START_SECONDS)
    (watch,) = agents.containers("watch")
    assert watch["ExitCode"] == 0, agents.said()
    verdict = json.loads(agents.compose("run", "--rm", "-T", "myxo", "audit", RUN, "--json"))
    assert (verdict["violations"], verdict["steps"], verdict["finished"]) == ([], STEPS, True)
    assert "POST /play" in agent("logs", "--no-color", "agent")


def test_the_reward_service_runs_code_in_sandboxes_and_is_held_to_little_more(agents: Stack) -> None:
    said = agents.compose("exec", "-T", "reward", "python", "-c", TESTED)
    assert said.split("\n")[:2] == ["{'score': 1.0, 'passed': 1.0}", "{'score': 0.0, 'passed': 0.5}"]
    assert agents.compose("exec", "-T", "reward", "python", "-c", CALLED).strip() == "[1, 1, 1, 1]"


@pytest.fixture(scope="module", autouse=True)
def told(request: pytest.FixtureRequest, agents: Stack) -> Iterator[None]:
    """Where a test failed, what the containers said."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        print(agents.said(), agent("logs", "--no-color", check=False))
