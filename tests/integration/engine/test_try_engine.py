"""``myxo try --engine``: a config's own functions against a real SGLang server, which listens on TCP as a user's does."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.rollout.engine.engine_process import SOCKET, EngineProcess
from shared.process.embedded_servers import free_port
from tests.chaos.link_proxy import LinkProxy
from tests.integration.engine.conftest import Checkpoints, fresh_client
from tests.integration.myxo.command import COMMAND_SECONDS, ROOT
from tests.integration.myxo.mistakes import Input
from tests.integration.myxo.test_function_trial import GENERATE

AGENT = """
import aiohttp, json

async def agent(data, base_url, api_key):
    body = {"model": "any", "messages": [{"role": "user", "content": str(data["prompt"])}], "max_tokens": 5}
    async with aiohttp.request("POST", f"{base_url}/chat/completions", json=body, headers={"Authorization": f"Bearer {api_key}"}) as answer:
        said = await answer.json()
    return float(len(said["choices"][0]["message"]["content"]))
"""
SEEN = "open('seen.json', 'a').write(str(output['meta_info']['e2e_latency']) + chr(10))"  # which the canned engine does not measure
OTHER = "sample.rollout_log_probs = [0.5 * each for each in sample.rollout_log_probs]"


@pytest.mark.extra
@pytest.mark.parametrize(
    ("flag", "source", "name", "result", "says"),
    [
        ("--custom-generate-function-path", GENERATE.replace("CHANGE", SEEN), "f", "ok", ("gave samples with",)),
        ("--custom-generate-function-path", GENERATE.replace("CHANGE", OTHER), "f", "FAILED", ("own.py:", "not what the engine gave")),
        ("--agent", AGENT, "agent", "ok", ("1 requests",)),
    ],
)
async def test_functions_are_called_with_a_real_engine(
    flag: str,
    source: str,
    name: str,
    result: str,
    says: tuple[str, ...],
    plain_engine: EngineProcess,
    checkpoint: Checkpoints,
    tmp_path: Path,
) -> None:
    given, port = Input.make(tmp_path, checkpoint(0).path), free_port()
    (tmp_path / "own.py").write_text(source)
    async with fresh_client(plain_engine, checkpoint(0)) as client:  # as one that has served a run
        await client.update_weights_from_disk(str(checkpoint(0).path), 7)
    proxy = LinkProxy(("127.0.0.1", port), str(plain_engine.receiver / SOCKET))
    await proxy.open()
    words = [sys.executable, "-m", "myxo.main", "try", given.write(), "--engine", f"http://127.0.0.1:{port}", flag, f"own:{name}", "--json"]
    options: dict[str, Any] = {
        "cwd": tmp_path,
        "env": {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin"},
        "timeout": COMMAND_SECONDS,
    }
    done = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, **options)
    proxy.close()
    [check] = [check for check in json.loads(done.stdout)["checks"] if check["name"].endswith(f"own:{name}")]
    assert (check["result"], done.returncode) == (result, 2 if result == "FAILED" else 0), (check, done.stderr)
    assert [word for word in says if word not in check["detail"]] == [], check
    assert (tmp_path / "seen.json").exists() == (SEEN in source)
