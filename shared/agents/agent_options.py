"""What agents read: their options in a config, the calls of tools that a model wrote; and of those that are commands also what they say."""

import asyncio
import contextlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

from pydantic import BaseModel, ValidationError

from shared.process.child_process import ChildProcess, cause
from shared.process.worker_pool import process_streams
from shared.runtime.errors import ConfigError
from shared.runtime.safe_files import parse_json
from shared.runtime.safe_text import printable_line

Options = TypeVar("Options", bound=BaseModel)


def options_of(data: Mapping[str, Any], kind: type[Options]) -> Options:
    """Returns the ``agent_options`` in an agent's data. Raises ConfigError that names the first field that is wrong."""
    given = data.get("options", {})
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(("rollout.agent_options", *map(str, problem["loc"])))
        raise ConfigError(field, problem["input"], problem["msg"]) from None


def arguments_of(text: str) -> dict[str, Any]:
    """Returns the arguments of a call, JSON of an object. Raises ValueError, in words for the model."""
    try:
        given = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the arguments are no JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError("the arguments must be a JSON object")
    return given


def shortened(text: str, most: int) -> str:
    """Returns a text; of one of more than ``most`` characters the beginning and the end, and how many are left out."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters …\n{text[-half:]}"


def environment_of(base_url: str, api_key: str) -> dict[str, str]:
    """Returns the variables by which OpenAI's and Anthropic's clients find the gateway. Anthropic's appends ``/v1`` itself."""
    root = base_url.removesuffix("/v1")
    return {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "ANTHROPIC_BASE_URL": root, "ANTHROPIC_API_KEY": api_key}


TAIL_BYTES = 64 * 1024  # the end of the output that is kept: the last line is in it
POLL_INTERVAL_S = 0.05
SHOWN = 300  # characters of a line that an error quotes


class CommandFailed(Exception):
    """The command ended with something else than a reward. ``code``: its exit code; None where it was not started."""

    def __init__(self, reason: str, code: int | None = None) -> None:
        self.code = code
        super().__init__(reason)


async def run_command(
    command: Sequence[str], environment: Mapping[str, str], data: Mapping[str, object], errors: IO[bytes] | None = None
) -> object:
    """Returns what the command's last line says, and None where it prints nothing. It has a directory of its own as TMPDIR. Its whole
    process group is killed when it ends, and when this is cancelled. ``errors``: as `ChildProcess` has it. Raises CommandFailed."""
    scratch = Path(tempfile.mkdtemp(prefix="myxo-agent-"))
    try:
        own = {**environment, "TMPDIR": str(scratch)}
        process = ChildProcess("an agent", command, None, own, watchdog=True, scratch=scratch, errors=errors)
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
