"""An agent that is a command (``python -m tests.support.command_agent``): it plays as `tests.support.agents.one_turn`, or does what the
metadata's ``bad`` says, for the rollouts that it names."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.support import agents


def main() -> int:
    data = json.load(sys.stdin)
    kind, of = data["metadata"].get("bad", ("", []))
    kind = kind if data["rollout"] in of else ""
    assert os.environ["OPENAI_API_KEY"] == os.environ["ANTHROPIC_API_KEY"]
    assert os.environ["ANTHROPIC_BASE_URL"] == os.environ["OPENAI_BASE_URL"]
    reward = asyncio.run(agents.one_turn(data, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]))
    if kind == "hangs":
        sleeping = subprocess.Popen(["sleep", str(agents.LONG_S)])
        (Path(os.environ[agents.DIRECTORY]) / "child").write_text(str(sleeping.pid))
        sleeping.wait()
    while kind == "until_told" and not (Path(os.environ[agents.DIRECTORY]) / "go-on").exists():
        time.sleep(0.05)
    if kind == "daemon":  # which holds the output open
        subprocess.Popen(["setsid", "--fork", "sh", "-c", f"echo $$ > {os.environ[agents.DIRECTORY]}/child; exec sleep {agents.LONG_S}"])
        while not (Path(os.environ[agents.DIRECTORY]) / "child").exists():
            time.sleep(0.01)
    if kind == "leaves":
        print("no licence")
        return 3
    if kind == "talks":
        print("thinking …\n" * 100_000)
    print({"words": "well done", "nothing": "null"}.get(kind) or json.dumps({"reward": reward, "format": 0.5}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
