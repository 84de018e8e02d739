"""``myxo link``: a hub's NATS, Redis and object store behind one HTTPS address, and that address as local ports at another site.

Each connection of a client is one WebSocket, whose binary frames hold what the connection carries; the servers check accounts as always.
All other paths are the object store's, with the host that its signatures name.
"""

import argparse
import asyncio
import contextlib
import ssl
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import aiohttp
from aiohttp import web
from rich.console import Console
from yarl import URL

from myxo.commands.accounts import address
from shared.runtime import exit_codes
from shared.runtime.addresses import CA_VARIABLE, HttpAddress, authorities, trusted
from shared.runtime.errors import ConfigError
from shared.runtime.tasks import until_one_ends

PATH, PIECE_BYTES, HEARTBEAT_S, CONNECT_S = "/myxo-link", 1 << 16, 10.0, 10.0
MOST_CONNECTIONS = 4096  # of all replicas at once; further ones are refused with 503
_HOP = {"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer", "expect"}  # headers of one connection alone
_BROKEN = (OSError, aiohttp.ClientError, TimeoutError)


def declare(command: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    side = command.add_mutually_exclusive_group(required=True)
    side.add_argument("--serve", metavar="HOST:PORT", help="at the hub: the HTTPS address")
    side.add_argument("--hub", metavar="https://HOST[:PORT]", help="at a site: the hub's HTTPS address")
    command.add_argument(
        "--nats", metavar="HOST:PORT", default="127.0.0.1:4222", help="where NATS is; at a site: is to be (127.0.0.1:4222)"
    )
    command.add_argument("--redis", metavar="HOST:PORT", default="127.0.0.1:6379", help="the same for Redis (127.0.0.1:6379)")
    command.add_argument("--objects", metavar="HOST:PORT", help="at the hub: the object store, if it has no HTTPS address of its own")
    command.add_argument("--certificate", metavar="FILE", type=Path, help="at the hub: the certificate, PEM")
    command.add_argument("--key", metavar="FILE", type=Path, help="at the hub: its private key, PEM")
    command.set_defaults(run_command=link)


def link(parsed: argparse.Namespace, console: Console) -> int:
    """Serves until it is stopped. Raises ConfigError."""
    servers = {"nats": address("--nats", parsed.nats), "redis": address("--redis", parsed.redis)}
    hub_only = {"--objects": parsed.objects, "--certificate": parsed.certificate, "--key": parsed.key}
    if parsed.hub is not None:
        parts = URL(parsed.hub)
        if parts.scheme != "https" or not parts.host or parts.user or parts.path not in ("", "/") or parts.query_string:
            raise ConfigError("--hub", parsed.hub, "expected https://HOST[:PORT], without credentials or a path")
        for name, value in hub_only.items():
            if value is not None:
                raise ConfigError(name, str(value), "expected with --serve alone")
        work = _attach(parts.origin(), servers, trusted(authorities()), console)
    else:
        for name in ("--certificate", "--key"):
            if hub_only[name] is None:
                raise ConfigError(name, None, "expected a PEM file with --serve")
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(parsed.certificate, parsed.key)
        except OSError as error:
            raise ConfigError("--certificate", str(parsed.certificate), f"{error}; expected a PEM certificate with its --key") from error
        objects = address("--objects", parsed.objects) if parsed.objects else None
        work = _serve(address("--serve", parsed.serve), servers, objects, context, console)
    try:
        asyncio.run(work)
    except OSError as error:
        raise ConfigError("--serve" if parsed.hub is None else "--nats, --redis", str(error), "expected addresses to listen at") from error
    return exit_codes.DONE


async def _serve(
    at: HttpAddress, servers: Mapping[str, HttpAddress], objects: HttpAddress | None, context: ssl.SSLContext, console: Console
) -> None:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=60.0)
    async with aiohttp.ClientSession(auto_decompress=False, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        application = web.Application()
        application.router.add_get(PATH + "/{server}", partial(_tunnel, servers, set()))
        if objects is not None:
            application.router.add_route("*", "/{path:.*}", partial(_forward, session, objects))
        runner = web.AppRunner(application, access_log=None, auto_decompress=False)
        await runner.setup()
        try:
            await web.TCPSite(runner, at.host, at.port, ssl_context=context).start()
            console.print(f"https://{at}: NATS at {servers['nats']}, Redis at {servers['redis']}, objects at {objects or 'no address'}")
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()


async def _tunnel(servers: Mapping[str, HttpAddress], open_: set[object], request: web.Request) -> web.StreamResponse:
    if (server := servers.get(request.match_info["server"])) is None:
        raise web.HTTPNotFound
    if len(open_) >= MOST_CONNECTIONS:
        raise web.HTTPServiceUnavailable
    frames = web.WebSocketResponse(heartbeat=HEARTBEAT_S, compress=False, max_msg_size=4 * PIECE_BYTES)
    if not frames.can_prepare(request):
        raise web.HTTPUpgradeRequired
    open_.add(frames)
    try:
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(server.host, server.port)
        except _BROKEN as error:
            raise web.HTTPBadGateway from error
        await frames.prepare(request)
        await _pump(frames, reader, writer)
    finally:
        open_.discard(frames)
    return frames


async def _forward(session: aiohttp.ClientSession, objects: HttpAddress, request: web.Request) -> web.StreamResponse:
    headers = [(name, value) for name, value in request.headers.items() if name.lower() not in _HOP]
    url = URL(f"http://{objects}{request.raw_path}", encoded=True)
    answer: web.StreamResponse | None = None
    try:
        body = request.content if request.can_read_body else None
        async with session.request(request.method, url, headers=headers, data=body, allow_redirects=False) as found:
            kept = [(name, value) for name, value in found.headers.items() if name.lower() not in _HOP]
            answer = web.StreamResponse(status=found.status, headers=dict(kept))
            await answer.prepare(request)
            async for piece in found.content.iter_chunked(PIECE_BYTES):
                await answer.write(piece)
            await answer.write_eof()
            return answer
    except _BROKEN as error:
        if answer is not None and request.transport is not None:  # begun: what is cut off must not look whole
            request.transport.abort()
            return answer
        raise web.HTTPBadGateway from error


async def _attach(hub: URL, servers: Mapping[str, HttpAddress], context: ssl.SSLContext, console: Console) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        connect = partial(session.ws_connect, ssl=context, heartbeat=HEARTBEAT_S, max_msg_size=4 * PIECE_BYTES)
        try:
            async with asyncio.timeout(CONNECT_S), connect(hub / PATH[1:] / "nats"):
                console.print(f"{hub} answers")
        except aiohttp.ClientConnectorCertificateError as error:
            raise ConfigError(CA_VARIABLE, authorities(), f"the file of the authority that signed {hub}'s certificate ({error})") from error
        except aiohttp.WSServerHandshakeError as error:
            if error.status != web.HTTPBadGateway.status_code:
                raise ConfigError("--hub", str(hub), f"expected where `myxo link --serve` answers ({error.status})") from error
            console.print(f"{hub} answers, NATS behind it does not")
        except _BROKEN as error:
            console.print(f"{hub} does not answer yet ({error or type(error).__name__})")

        async def accept(name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                async with asyncio.timeout(CONNECT_S):
                    frames = await connect(hub / PATH[1:] / name)
                await _pump(frames, reader, writer)
            except _BROKEN:  # the client sees its connection end, and tries again
                writer.transport.abort()

        async with contextlib.AsyncExitStack() as stack:
            for name, at in servers.items():
                await stack.enter_async_context(await asyncio.start_server(partial(accept, name), at.host, at.port, limit=PIECE_BYTES))
            console.print(f"listening: NATS at {servers['nats']}, Redis at {servers['redis']}")
            await asyncio.Event().wait()


async def _pump(
    frames: web.WebSocketResponse | aiohttp.ClientWebSocketResponse, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Passes bytes both ways until either side ends or breaks, then ends the other."""

    async def outward() -> None:
        with contextlib.suppress(*_BROKEN):
            while piece := await reader.read(PIECE_BYTES):
                await frames.send_bytes(piece)

    async def inward() -> None:
        with contextlib.suppress(*_BROKEN):
            async for message in frames:
                if message.type is not aiohttp.WSMsgType.BINARY:
                    return
                writer.write(message.data)
                await writer.drain()

    try:
        await until_one_ends(outward(), inward())
    finally:
        writer.close()
        await frames.close()
