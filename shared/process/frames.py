"""Carries requests and answers between the service and its worker processes: MessagePack behind its length in four bytes."""

import asyncio
import os
import sys
from typing import Any

from shared.runtime.errors import BadMessage
from shared.schema import codec

LONGEST = 1 << 28  # The most bytes of a frame. Any four characters of text, read as a length, exceed it.
_HEAD = 4


def frame(value: object) -> bytes:
    """Returns the bytes of one request or answer. Raises TypeError for types that MessagePack lacks, BadMessage for a long frame."""
    body = codec.pack(value)
    if len(body) > LONGEST:
        raise BadMessage(f"{len(body)} bytes; a request or an answer has at most {LONGEST}")
    return len(body).to_bytes(_HEAD, "big") + body


async def read(stream: asyncio.StreamReader) -> Any:
    """Returns the next frame. Raises EOFError where there is none, BadMessage for anything else."""
    try:
        head = await stream.readexactly(_HEAD)
        size = int.from_bytes(head, "big")
        if size > LONGEST:
            raise BadMessage(f"{head!r}")
        return codec.unpack(await stream.readexactly(size))
    except asyncio.IncompleteReadError:
        raise EOFError from None


class FrameStream:
    """A worker's end of the pipes. It empties the standard input and redirects the standard output to the standard error, so that a library
    that prints or reads cannot corrupt the frames."""

    def __init__(self) -> None:
        self._process, self._answers = os.getpid(), os.fdopen(os.dup(sys.stdout.fileno()), "wb")
        self._requests = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # what a function prints is in the log at once
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, sys.stdin.fileno())
        os.close(nothing)

    def receive(self) -> Any:
        """Returns the next request, outside of an event loop."""
        return codec.unpack(self._requests.read(int.from_bytes(self._requests.read(_HEAD), "big")))

    async def stream(self) -> asyncio.StreamReader:
        """Returns the requests from here on, for `read`."""
        stream = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), self._requests)
        return stream

    def send(self, answer: object) -> None:
        """Sends one answer. Raises as `frame` does. A process that was forked from this one, by a call, ends: it has nothing to answer."""
        if os.getpid() != self._process:
            os._exit(1)
        self._answers.write(frame(answer))
        self._answers.flush()
