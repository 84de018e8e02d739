"""Plays an environment that one of the servers of `examples/environments/verifiers` serves, as a rollout service does: by POST /play."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import play

HERE = Path(__file__).parent
SERVERS = HERE.parents[1] / "examples" / "environments" / "verifiers"
FEATURES = ("chat", "tools", "parallel", "reasoning", "required")


def played(server: str, own: Sequence[str], serving: Sequence[str] = (), features: Sequence[str] = FEATURES[:-1]) -> None:
    """Serves an environment while its features are played. ``own``: the arguments that name it; ``serving``: those of ``serve``."""
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    command = [sys.executable, str(SERVERS / server)]
    rows = subprocess.run([*command, "tasks", *own], env=environment, check=True, capture_output=True, text=True).stdout
    tasks = [json.loads(line) for line in rows.splitlines()]
    process = subprocess.Popen([*command, "serve", *own, *serving, "--port", "0"], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        url = next(found[0] for line in process.stdout if (found := re.search(r"http://\S+/play", line)))

        def feature(name):
            def run(base_url, api_key, model):
                data = {"model": model, "messages": tasks[FEATURES.index(name)]["prompt"], **tasks[FEATURES.index(name)]}
                body = json.dumps({"data": data, "base_url": base_url, "api_key": api_key}).encode()
                request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
                try:
                    answer = urllib.request.urlopen(request, timeout=300).read()
                except urllib.error.HTTPError as error:
                    raise RuntimeError(error.read().decode()) from None
                reward = json.loads(answer)["reward"]
                assert reward["right"] == 1.0, reward
                calls = ["add(1, 2)", "add(3, 4)"][: int(reward.get("added", reward.get("add_calls")))]
                return [play.SUM, *calls]

            return run

        play.play({name: feature(name) for name in features})
    finally:
        process.terminate()
        process.wait(30)
