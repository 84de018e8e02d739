"""Runs an agent that is a command: data on its standard input, the reward as the last line of its standard output."""

import asyncio
import contextlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from shared.process.child_process import ChildProcess, cause
from shared.process.worker_pool import process_streams
from shared.runtime.safe_files import parse_json
from shared.runtime.safe_text import printable_line

TAIL_BYTES = 64 * 1024
"""The end of the output that is kept: the last line is in it."""

POLL_INTERVAL_S = 0.05

SHOWN = 300
"""Characters of a line that an error quotes."""


class CommandFailed(Exception):
    """The command ended with something else than a reward. ``code``: its exit code; None where it was not started."""

    def __init__(self, reason: str, code: int | None = None) -> None:
        self.code = code
        super().__init__(reason)


async def run_command(command: Sequence[str], environment: Mapping[str, str], data: Mapping[str, object]) -> object:
    """Returns what the command's last line says, and None where it prints nothing. It has a directory of its own as TMPDIR.

    Its whole process group is killed when it ends, and when this is cancelled. Raises CommandFailed.
    """
    scratch = Path(tempfile.mkdtemp(prefix="myxo-agent-"))
    try:
        process = ChildProcess("an agent", command, None, {**environment, "TMPDIR": str(scratch)}, watchdog=True, scratch=scratch)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise CommandFailed(f"cannot be started: {error}") from None
    try:
        output, requests = await process_streams(process)
        reading = asyncio.create_task(_tail(output))
        requests.write(json.dumps(data, ensure_ascii=False).encode() + b"\n")
        with contextlib.suppress(ConnectionError):  # it need not read
            requests.close()
        while (code := process.exit_code()) is None:
            await asyncio.sleep(POLL_INTERVAL_S)
        return _result(await reading, code)
    finally:
        await asyncio.to_thread(process.stop, 0)


async def _tail(output: asyncio.StreamReader) -> bytes:
    kept = b""
    while more := await output.read(TAIL_BYTES):
        kept = (kept + more)[-TAIL_BYTES:]
    return kept


def _result(output: bytes, code: int) -> object:
    lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    said = f": {printable_line(last, SHOWN)}" if last else ""
    if code:
        raise CommandFailed(f"ended with {cause(code)}{said}", code)
    if not last:
        return None
    try:
        return parse_json(last)
    except ValueError:
        raise CommandFailed(f"its last line is no reward in JSON (a number, an object of numbers, or null){said}", code) from None
