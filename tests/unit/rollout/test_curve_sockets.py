"""An engine's sockets at TCP ports take messages from those alone who know its secret."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.rollout.engine.private_endpoints import SECRET_VARIABLE, keys_of

ROOT = Path(__file__).resolve().parents[3]

TAKER = """
import zmq
from services.rollout.engine.private_endpoints import close_sockets
close_sockets()
socket = zmq.Context().socket(zmq.PULL)
socket.rcvtimeo = 60_000
print(socket.bind_to_random_port("tcp://127.0.0.1"), flush=True)
for _ in range(2):
    print(socket.recv().decode(), flush=True)
"""

SENDER = """
import sys, zmq
from services.rollout.engine.private_endpoints import close_sockets
close_sockets()
context = zmq.Context()
socket = context.socket(zmq.PUSH)
socket.connect(f"tcp://127.0.0.1:{sys.argv[1]}")
socket.send(sys.argv[2].encode())
socket.close(linger=int(sys.argv[3]))
context.term()  # else the process may end before the message is gone
"""


def with_secret(secret: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), SECRET_VARIABLE: secret}


def send(secret: str, port: str, text: str, linger: int) -> None:
    subprocess.run([sys.executable, "-c", SENDER, port, text, str(linger)], env=with_secret(secret), check=True, timeout=60)


@pytest.mark.parametrize("stranger", ["", "another"])
def test_a_stranger_is_not_heard(stranger: str) -> None:
    """Between two messages of the engine's own one comes without the secret, and one by another: neither arrives."""
    taking = subprocess.Popen([sys.executable, "-c", TAKER], env=with_secret("own"), stdout=subprocess.PIPE, text=True)
    with taking as taker, contextlib.ExitStack() as stack:
        assert taker.stdout is not None
        stack.callback(taker.kill)
        port = taker.stdout.readline().strip()
        send("own", port, "first", 30_000)
        assert taker.stdout.readline().strip() == "first"
        send(stranger, port, "strange", 500)
        send("own", port, "second", 30_000)
        assert taker.stdout.readline().strip() == "second"
        assert taker.wait(30) == 0


def test_keys_are_those_of_the_secret() -> None:
    assert keys_of("a") == keys_of("a") and len(set(map(keys_of, "abc"))) == 3
    assert all(len(key) == 40 for key in keys_of("a"))
