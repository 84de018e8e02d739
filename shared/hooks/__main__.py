"""``python -m shared.hooks``: imports every function of the run config on standard input (JSON), as its services do.

Exits 0, or 2 with ``[field, value, expected]`` as the last line of standard output. In a process apart: importing runs the user's code, may
take memory that the launcher would keep, and sees what is importable from a service.
"""

import json
import sys

from shared.config.run_config import RunConfig
from shared.hooks.loading import agent_paths, load, load_agent, paths
from shared.runtime.errors import ConfigError


def main() -> int:
    """Runs the command line and returns the exit code."""
    config = RunConfig.model_validate_json(sys.stdin.read())
    try:
        agents = agent_paths(config)
        for field, path in paths(config).items():
            (load_agent if field in agents else load)(field, path)
    except ConfigError as error:
        print(json.dumps([error.field, error.value, error.expected]))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
