"""Generations that run in an engine while something else is measured, in a process of their own; some of them are streamed and timed.

``python -m benchmarks.token_stream SOCKET --requests N --streamed M --tokens T`` keeps N requests running until its input ends. Then it
prints, as JSON, ``times``: of each streamed request the monotonic seconds at which its tokens came, and ``ended``: how many requests ended
for which reason. It prints an empty line as soon as every request of the first N has been begun and the streamed ones have tokens.
"""

import argparse
import asyncio
import collections
import json
import random
import sys
import time
from itertools import pairwise

PROMPT_TOKENS = 64


class TokenStreams:
    """The requests of one run. ``times``, ``ended``: see the module."""

    def __init__(self, socket: str, tokens: int, vocabulary: int) -> None:
        self._socket, self._tokens, self._vocabulary = socket, tokens, vocabulary
        self.times: list[list[float]] = []
        self.ended: collections.Counter[str] = collections.Counter()
        self.running = asyncio.Event()

    async def keep(self, requests: int, streamed: int) -> None:
        """Keeps so many requests running, until cancelled."""
        import aiohttp

        connector, timeout = aiohttp.UnixConnector(self._socket, limit=0), aiohttp.ClientTimeout(600)
        async with aiohttp.ClientSession("http://engine", connector=connector, timeout=timeout, read_bufsize=2**24) as session:
            await asyncio.gather(*(self._keep_one(session, streamed=number < streamed) for number in range(requests)))

    async def _keep_one(self, session: object, *, streamed: bool) -> None:
        while True:
            length = random.randint(self._tokens * 2 // 3, self._tokens)
            body = {
                "input_ids": [random.randrange(self._vocabulary) for _ in range(PROMPT_TOKENS)],
                "sampling_params": {"max_new_tokens": length, "temperature": 1.0, "ignore_eos": True},
                "stream": streamed,
            }
            async with session.post("/generate", json=body) as answer:  # type: ignore[attr-defined]
                last = await self._streamed(answer) if streamed else await answer.read()
            self.ended[str(json.loads(last)["meta_info"]["finish_reason"]["type"])] += 1

    async def _streamed(self, answer: object) -> bytes:
        times: list[float] = []
        self.times.append(times)
        last = b"{}"
        async for line in answer.content:  # type: ignore[attr-defined]
            if line.startswith(b"data: {"):
                times.append(time.monotonic())
                last = line[6:]
                if len(times) > 50:
                    self.running.set()
        return last


def gaps_of(times: list[list[float]], windows: list[tuple[float, float]]) -> list[float]:
    """Returns of each window, from one monotonic second to another, the longest time between two tokens of a request that overlaps it."""
    found = [
        [later - earlier for one in times for earlier, later in pairwise(one) if later > begin and earlier < end] for begin, end in windows
    ]
    return [max(gaps) for gaps in found if gaps]


async def run(arguments: argparse.Namespace) -> TokenStreams:
    """Runs until the input ends."""
    streams = TokenStreams(arguments.socket, arguments.tokens, arguments.vocabulary)
    keeping = asyncio.ensure_future(streams.keep(arguments.requests, arguments.streamed))
    running = asyncio.ensure_future(streams.running.wait())
    await asyncio.wait({keeping, running}, return_when=asyncio.FIRST_COMPLETED)
    if keeping.done():
        keeping.result()
    print(flush=True)
    reading = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
    await asyncio.wait({keeping, reading}, return_when=asyncio.FIRST_COMPLETED)
    if keeping.done():
        keeping.result()
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    return streams


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("socket")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--streamed", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--vocabulary", type=int, default=1000)
    streams = asyncio.run(run(parser.parse_args()))
    print(json.dumps({"times": streams.times, "ended": streams.ended}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
