"""One seed in a process of its own: reads a schedule on standard input, writes the result to the file that it is told."""

import asyncio
import json
import os
import sys
from pathlib import Path

from shared.process.child_process import die_with_parent
from tests.chaos.disturbed_run import run_seed
from tests.chaos.fast.fast_variant import FastVariant
from tests.chaos.real.real_variant import RealVariant
from tests.chaos.schedule import Schedule


async def main() -> None:
    """Ends the process by force: a client of NATS that reconnects while it is closed does not let the loop end."""
    given = json.loads(sys.stdin.read())
    variant = (RealVariant if given["real"] else FastVariant)(Path(given["model"]))
    found = await run_seed(Schedule.from_json(given["schedule"]), variant, Path(given["parent"]), keep=given["keep"])
    path = Path(given["result"])
    path.with_suffix(".part").write_text(json.dumps(found.as_json()))
    path.with_suffix(".part").rename(path)
    os._exit(0)


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(main())
