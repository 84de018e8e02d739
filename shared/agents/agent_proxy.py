"""``python -m shared.agents.agent_proxy HOST:PORT AGENT:PORT``: passes connections on to an agent in a network that its callers are not on.

It stands on both networks: it listens on the callers', at ``private:PORT`` the one with the bus, and connects on the agent's. Callers so
reach the agent, and the agent reaches nothing. It reads nothing of what it passes on. A caller whose connection cannot be passed on, since
the agent is not there yet, say, gets HTTP 503 with the header `NOT_SENT`: nothing of its request has reached an agent.
"""

import asyncio
import contextlib
import sys

from shared.runtime.addresses import LOOPBACK, PRIVATE, HttpAddress, own_address, parsed
from shared.runtime.errors import ConfigError
from shared.runtime.tasks import StreamPair, pass_both_ways

NOT_SENT = "Myxo-Not-Sent"  # header of the proxy's own answers
CONNECT_SECONDS = 10.0  # an agent that does not take a connection by then is not there

# How long a caller that gets the proxy's own answer may continue to send: a connection closed before would take the answer with it.
LINGER_SECONDS = 5.0
CONNECTIONS = 4096  # most at once; further ones are refused by the proxy
CHUNK_BYTES = 64 * 1024


class AgentProxy:
    """Passes connections on. ``agent``: where to."""

    def __init__(self, agent: HttpAddress) -> None:
        self._agent, self._open = agent, 0

    async def passed_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes one connection on, until either end closes it."""
        self._open += 1
        try:
            there = await self._connected()
        except (OSError, TimeoutError) as error:
            reason = f"the agent at {self._agent} cannot be reached: {error or 'timed out'}"
            print(reason, file=sys.stderr, flush=True)
            body = reason.encode()
            head = f"HTTP/1.1 503 Service Unavailable\r\n{NOT_SENT}: 1\r\nContent-Type: text/plain; charset=utf-8\r\n"
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
                    writer.write_eof()
                    while await reader.read(CHUNK_BYTES):
                        pass
        else:
            await pass_both_ways((reader, writer), there)
        finally:
            self._open -= 1
            writer.close()

    async def _connected(self) -> StreamPair:
        if self._open > CONNECTIONS:
            raise ConnectionRefusedError(f"{CONNECTIONS} connections are open")
        async with asyncio.timeout(CONNECT_SECONDS):
            return await asyncio.open_connection(*self._agent)


async def serve(listen: HttpAddress, agent: HttpAddress) -> None:
    """Serves until it is cancelled. Raises ConfigError for an address that cannot be listened at."""
    host = own_address() if listen.host == PRIVATE else listen.host
    if listen.host == PRIVATE and host == LOOPBACK:
        raise ConfigError("HOST:PORT", str(listen), "the network of NATS is not there yet, or NATS_URL does not say where it is")
    try:
        server = await asyncio.start_server(AgentProxy(agent).passed_on, host, listen.port)
    except OSError as error:
        raise ConfigError("HOST:PORT", str(listen), f"cannot be listened at: {error.strerror or error}") from None
    print(f"listening at {host}:{server.sockets[0].getsockname()[1]} for the agent at {agent}", flush=True)
    async with server:
        await server.serve_forever()


def main() -> int:
    """Serves until it is stopped. Returns the exit code."""
    try:
        if len(sys.argv) != 3:
            raise ConfigError("arguments", sys.argv[1:], "HOST:PORT to listen at, and AGENT:PORT to pass connections on to")
        asyncio.run(serve(parsed(sys.argv[1], "HOST:PORT"), parsed(sys.argv[2], "AGENT:PORT")))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
