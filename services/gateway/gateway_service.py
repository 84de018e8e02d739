"""The gateway service: it serves the API to the clients of sessions, and holds nothing that would die with it."""

import asyncio
import functools
import os
import re
import resource
from pathlib import Path

from services.gateway.chat_tokens import ChatTokens
from services.gateway.ingest import GroupIntake, add_ingest_routes
from services.gateway.replicas import GenerationClient, Replicas
from services.gateway.routes import ALL, Api
from services.gateway.tinker import tinker_service
from services.gateway.turn_pictures import TurnPictures
from services.gateway.turns import Turns, UnrecordedSessions
from shared.config.eval_views import reward_key
from shared.config.service_sections import ingest_key
from shared.data.media import MediaReader
from shared.runtime import addresses, http_endpoints
from shared.runtime.addresses import GATEWAY_VARIABLE, HttpAddress
from shared.runtime.errors import ConfigError
from shared.runtime.telemetry import declare_metrics
from shared.service.service_base import Service
from shared.sessions.session_store import SessionStore

declare_metrics("""
    gateway_requests_in_hand | requests | that are being answered
    gateway_generations | requests | that engines generate for
    gateway_sessions_resident | sessions | whose keys and values replicas are to keep, [by their memory](gateway.md#sessions-and-memory)
    gateway_turns_waiting | turns | that wait for a place at a replica, or until their session has room there
    gateway_generations_most | requests | that engines may generate for at once, [by their memory](gateway.md#which-replica-generates)
""")

# The environment variable with the URL by which agents reach this gateway, where it is not the address: they may be on another network
URL_VARIABLE = "MYXO_GATEWAY_URL"
STOP_SECONDS = 5.0  # The time in which clients are still answered when the gateway stops: that they ask again
COUNT_SECONDS = 1.0  # The interval at which the gauges are set


async def serve(service: Service) -> None:
    """Serves until asked to stop. Raises ConfigError for a model without a tokenizer, an address that cannot be listened at, a URL that is
    none, or no key for groups from outside."""
    config, section = service.config, service.config.gateway
    if config.tinker.tinker_endpoint:
        return await tinker_service.serve(service, _address(service))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each client's connection is one
    variables, control = config.data.apply_chat_template_kwargs, section.gateway_control_tokens
    sessions, most_each = SessionStore(service.store, service.run), section.gateway_replica_requests
    replicas = Replicas(service.registry, sessions, most_each, config.rollout.eval_replicas > 0)
    client = GenerationClient(sessions)
    model = Path(config.model.hf_checkpoint).name
    holder = f"{service.instance}.{service.incarnation}"  # each life is another: what its predecessor generated is taken over, not held
    keys = config.data.multimodal_keys
    reader = None if keys is None else MediaReader.of(config.model.hf_checkpoint, config.data)
    kind = "image" if reader is None else reader.kind
    chat = await asyncio.to_thread(ChatTokens, Path(config.model.hf_checkpoint), variables, control, kind=kind)
    if reader is not None and not chat.picture_texts:
        raise ConfigError("data.multimodal_keys", keys, f"a chat template that writes {reader.rule.noun}s in the midst of a text")
    pictures = TurnPictures(sessions, reader, config.data)
    turns = Turns(sessions, replicas, client, chat, model, holder, section, service.traces, pictures)
    names = frozenset({model, str(config.model.hf_checkpoint), service.run, config.rollout.policy_name, *section.gateway_models})
    frozen = dict[str, Turns]()
    for name in config.rollout.models:
        own = await asyncio.to_thread(ChatTokens, Path(config.of_engines(name).model.hf_checkpoint), {}, control)
        places = Replicas(service.registry, sessions, most_each, model=name)
        unrecorded = UnrecordedSessions(service.store, service.run)
        blind = TurnPictures(unrecorded, None, config.data)
        frozen[name] = Turns(unrecorded, places, client, own, name, holder, section, service.traces, blind)
    api = Api(sessions, turns, replicas, service.metrics, model, names, section.gateway_requests, frozen=frozen)
    api.reward_key = functools.partial(reward_key, config)
    service.log.info("gateway_renders", family=chat.family, template=chat.has_template, tools=chat.shows_tools, streams=chat.streams_text)
    app = api.app()
    if config.ingest.ingest_groups != "off":
        add_ingest_routes(app, GroupIntake(service, chat.tokenizer), ingest_key(), config.ingest.ingest_bytes)
    try:
        async with http_endpoints.serving(app, _address(service), grace_s=STOP_SECONDS) as address:
            service.engine, service.state = gateway_url(address), "ready"
            await service.announce()
            served = [turns, *frozen.values()]
            kept = [work for one in served for work in (one.replicas.keep(), one.watch.keep())]
            async with service.background(*kept, _count(service, api)):
                await service.stopping.wait()
                for one in served:
                    one.watch.stop()
    finally:
        await client.close()


def _address(service: Service) -> HttpAddress:
    """Returns where this gateway listens: where the environment says, else, as instance ``gateway-2``, two ports after the first."""
    section, given = service.config.gateway, os.environ.get(GATEWAY_VARIABLE)
    if given:
        return addresses.parsed(given, GATEWAY_VARIABLE)
    number = re.search(r"-(\d+)$", service.instance)
    first = HttpAddress(section.gateway_host, section.gateway_port)
    return first.next(int(number[1]), "gateway.gateway_port") if number and section.gateway_port else first


def gateway_url(address: str) -> str:
    """Returns the URL for agents: the environment's, else that of the address."""
    given = os.environ.get(URL_VARIABLE) or f"http://{address}"
    if not re.fullmatch(r"https?://[^/?#\s]+/?", given):
        raise ConfigError(URL_VARIABLE, given, "http://host:port or https://host, without a path")
    return given.removesuffix("/")


async def _count(service: Service, api: Api) -> None:
    while True:
        service.metrics.set("gateway_requests_in_hand", api.counts[ALL])
        service.metrics.set("gateway_generations", api.replicas.running)
        service.metrics.set("gateway_sessions_resident", api.replicas.residents)
        service.metrics.set("gateway_turns_waiting", api.replicas.waiting)
        service.metrics.set("gateway_generations_most", api.replicas.most_generations)
        await asyncio.sleep(COUNT_SECONDS)
