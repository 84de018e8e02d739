"""``python -m shared.runtime.router_server [FLAG...]``: sglang-router, with what this project wants of it.

Its control plane (workers come and go by it) requires the key of ``MYXO_ROUTER_KEY`` or ``MYXO_ROUTER_KEY_FILE``. On its
own command line the key would stand in the process list. Its metrics are on loopback. Other flags are sglang-router's own.
"""

import sys
from collections.abc import Sequence
from typing import Any

from shared.runtime.addresses import ROUTER_KEY, router_key
from shared.runtime.errors import ConfigError

# Flags that may be given otherwise. ``max-payload-size``: bytes.
DEFAULTS = ("--prometheus-host", "127.0.0.1", "--max-payload-size", str(16 * 2**20), "--worker-startup-check-interval", "1")

KEY_FLAG = "--control-plane-api-keys"


def router_arguments(flags: Sequence[str]) -> Any:
    """Returns sglang-router's arguments. Raises ConfigError without a key, or with one among the flags."""
    from sglang_router.launch_router import parse_router_args

    if any(flag.startswith(KEY_FLAG) for flag in flags):
        raise ConfigError(KEY_FLAG, "…", f"the process list would show it; give it as {ROUTER_KEY}_FILE")
    if (key := router_key()) is None:
        raise ConfigError(ROUTER_KEY, None, f"required, or {ROUTER_KEY}_FILE: without a key anybody could add workers")
    arguments = parse_router_args([*DEFAULTS, *flags])
    arguments.control_plane_api_keys = [("myxo", "Myxo", key, "admin")]
    return arguments


def main() -> int:
    """Runs the router until it is stopped. Returns the exit code."""
    from sglang_router.launch_router import launch_router

    try:
        arguments = router_arguments(sys.argv[1:])
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    launch_router(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
