"""Runs agents that are functions in a process of its own, many rollouts at a time.

``python -m services.rollout.agents.agent_worker``; it speaks as `shared.process.call_server` says. Its setup: ``{"config": JSON}``; the
run's agents are imported then. A request: ``{"verb": "play", "field": name, "path": path, "of": roles, "data": map, "base_url": text,
"api_key": text}``; an answer: ``{"reward": number, numbers by name, or None}``, where there are roles a map of them, or ``{"error": text,
"blocked": flag}``.
"""

import asyncio
import contextlib
import functools
import importlib
import os
import ssl
import traceback
from collections.abc import Callable
from typing import Any

from services.rollout.agents.agent_program import by_role
from services.rollout.generate_worker import BLOCKED_SHARE, called
from shared.config.run_config import RunConfig
from shared.hooks import reward_values
from shared.hooks.loading import agent_paths, load_agent
from shared.process.call_server import serve_calls
from shared.process.running_call import is_blocked
from shared.runtime.tasks import error_text


class AgentCalls:
    """Answers calls. Raises ConfigError where an agent of the run's cannot be imported, or takes something else than agents do."""

    def __init__(self, config: RunConfig) -> None:
        self.waits = ["play"]
        self.block_s: float | None = BLOCKED_SHARE * config.rollout.agent_timeout
        for field, path in agent_paths(config).items():
            load_agent(field, path)

    async def answer(self, request: dict[str, Any]) -> dict[str, object]:
        """Returns the reward of one rollout, or why there is none."""
        this = asyncio.current_task()
        assert this is not None
        agent = None
        try:
            agent = load_agent(request["field"], request["path"])
            result = await called(functools.partial(agent, request["data"], request["base_url"], request["api_key"]))
            rewards = {
                role: None if given is None else reward_values.plain(given) for role, given in by_role(result, request["of"]).items()
            }
            return {"reward": rewards.get("") if "" in rewards else rewards}
        except asyncio.CancelledError:
            if this.cancelling():
                raise
            return {"error": "cancelled itself"}
        except BaseException as error:  # it fails its rollout, not this process
            traceback.print_exc()
            return {"error": error_text(error, agent), "blocked": is_blocked(error)}


def share_certificates() -> None:
    """Has the clients of this process read the machine's certificates once.

    The libraries on which OpenAI's and Anthropic's clients stand read them for each client, also where it never speaks TLS: 17 ms of CPU,
    more than all else that a short agent does.
    """
    for library in ("httpx", "httpx2"):
        with contextlib.suppress(ImportError, AttributeError):  # where it is not, or has them elsewhere, agents are slower
            transports: Any = importlib.import_module(f"{library}._transports.default")
            transports.create_ssl_context = _shared_contexts(transports.create_ssl_context)


def _shared_contexts(made: Callable[..., ssl.SSLContext]) -> Callable[..., ssl.SSLContext]:
    """Returns a function that makes contexts as ``made`` does, but the default one once for each setting of the environment."""

    @functools.cache
    def shared(trust_env: bool, *_named_by_environment: str | None) -> ssl.SSLContext:
        return made(trust_env=trust_env)

    def create_ssl_context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        if verify is True and cert is None:
            return shared(trust_env, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
        return made(verify=verify, cert=cert, trust_env=trust_env)

    return create_ssl_context


def main() -> None:
    """Answers requests until the service is gone."""
    share_certificates()
    serve_calls(lambda setup: AgentCalls(RunConfig.model_validate_json(setup["config"])))


if __name__ == "__main__":
    main()
