"""Decides whether an engine keeps the keys and values of prefixes, for the requests that begin with them. It is pure.

Requests share prefixes under one key alone, which every load of weights renews (`EngineClient.cache_key`), so that what older weights have
computed serves no request that begins under newer ones. One request can slip through: it is sent, waits while weights change, and finds
its prefix under the old key. What it draws is discarded (`generation.without_older_prefix`), which takes that we read the answer. And
``retract`` computes a request's keys and values anew for the sake of exactness, but would find its prompt's in the cache.
"""

from services.rollout.sample_seeds import SampleSeeds
from shared.config.run_config import RunConfig


def keeps_prefixes(config: RunConfig, device: str, *, answers_are_read: bool) -> bool:
    """Returns whether an engine keeps prefixes, where ``[rollout.sglang] disable-radix-cache`` says nothing.

    Args:
        device: the engine's. answers_are_read: by this service; not those of a router's clients and of the user's own functions.
    """
    separable = config.rollout.in_flight_on_push != "retract" and answers_are_read
    reproducible = SampleSeeds.of(config).first is not None  # a prefix that is there or not may change a last bit
    # to look a prefix up costs more than to compute it, for a single turn of a model that a CPU can serve
    worth_it = device == "cuda" or config.has_agents
    return separable and worth_it and not reproducible
