"""A channel of weights between two machines: network namespaces with an address each, as the ends of a cable."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 180
TRAINER, ENGINE = "10.213.77.1", "10.213.77.2"

PREAMBLE = """
import os, sys, time
from pathlib import Path
import torch
from shared.schema.weight_messages import WeightChannelAddress
from shared.transfer.group_channel import GroupReceiver, GroupSender
from shared.transfer.manifest import lay_out
from shared.transfer.weight_channel import TransferDeadline
from tests.support.listening_sockets import listening_sockets

LIMIT, CPU, meeting = 120.0, torch.device("cpu"), Path(sys.argv[1])
manifest = lay_out([(f"tensor-{i}", "float32", (64,)) for i in range(5)], bucket_bytes=1)

def say_where():
    print(*sorted({found.address for found in listening_sockets(os.getpid())}), flush=True)
"""

SOURCE = f"""{PREAMBLE}
channel = GroupSender("channel", "{TRAINER}", 2, CPU)
meeting.with_suffix(".new").write_text(channel.address.model_dump_json())
meeting.with_suffix(".new").rename(meeting)
channel.join(LIMIT)
say_where()
channel.announce(1, manifest, LIMIT)
for index, bucket in enumerate(manifest.buckets):
    flat = channel.buffer(index, bucket.nbytes)
    flat.fill_(index)
    channel.send(index, flat)
channel.finish()
channel.close()
"""

READER = f"""{PREAMBLE}
end = time.monotonic() + LIMIT
while not meeting.exists() and time.monotonic() < end:
    time.sleep(0.05)
reader = GroupReceiver(WeightChannelAddress.model_validate_json(meeting.read_text()), 1, CPU)
deadline = TransferDeadline(LIMIT)
reader.join(deadline)
say_where()
for index, bucket in enumerate(reader.manifest(1, deadline).buckets):
    assert set(reader.take(index, bucket.nbytes, deadline).tolist()) == {{index}}
    reader.release(index)
reader.finish(deadline)
reader.close()
"""


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    """The names of two namespaces, joined by a pair of interfaces."""
    names = (f"myxo-a-{os.getpid()}", f"myxo-b-{os.getpid()}")
    links = (f"ma{os.getpid()}", f"mb{os.getpid()}")
    commands = [["netns", "add", name] for name in names]
    commands += [["link", "add", links[0], "netns", names[0], "type", "veth", "peer", "name", links[1], "netns", names[1]]]
    for name, link, address in zip(names, links, (TRAINER, ENGINE), strict=True):
        commands += [["-n", name, "address", "add", f"{address}/24", "dev", link]]
        commands += [["-n", name, "link", "set", device, "up"] for device in ("lo", link)]
    try:
        for command in commands:
            done = subprocess.run(["ip", *command], capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"no network namespaces here: ip {' '.join(command)}: {done.stderr.strip()}")
        yield names
    except FileNotFoundError:
        pytest.skip("no network namespaces here: there is no command ip")
    finally:
        with contextlib.suppress(FileNotFoundError):
            for name in names:
                subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@pytest.mark.extra
@pytest.mark.timeout(2 * SECONDS)
def test_each_end_listens_at_the_address_by_which_the_other_reaches_it(machines: tuple[str, str], tmp_path: Path) -> None:
    """Not at loopback, where the ranks of a machine listen for each other, and not at all addresses."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ends = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, "-c", script, str(tmp_path / "address")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        for name, script in zip(machines, (SOURCE, READER), strict=True)
    ]
    try:
        said = [end.communicate(timeout=SECONDS) for end in ends]
    finally:
        for end in ends:
            end.kill()
    assert [end.returncode for end in ends] == [0, 0], said
    assert [out.split() for out, _ in said] == [[TRAINER], [ENGINE]]
