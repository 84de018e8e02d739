"""The pages for a run of one's own as they stand, and ``myxo try --engine`` against a real SGLang server."""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.rollout.engine.engine_process import SOCKET, EngineProcess
from shared.process.embedded_servers import free_port
from tests.chaos.link_proxy import LinkProxy
from tests.integration.engine.bench import NewBench
from tests.integration.engine.conftest import Checkpoints, fresh_client
from tests.integration.myxo.command import COMMAND_SECONDS, ROOT
from tests.integration.myxo.mistakes import Input
from tests.integration.myxo.test_function_trial import GENERATE

PAGES = ("my-data", "my-model", "my-reward", "my-agent", "coming-from-others")
PAGE = "\n".join((ROOT / "docs" / f"{name}.md").read_text() for name in PAGES)
FILES: dict[str, str] = dict(re.findall(r"^`([\w./-]+)`:\n\n```\w+\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
COMMANDS = [line for block in re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE) for line in block.splitlines()]
TRIED = [line for line in COMMANDS if line.startswith("myxo try ")]
CHECKS, RUNS = ([line for line in COMMANDS if line not in TRIED and line.endswith(" --dry-run") == dry] for dry in (True, False))


@pytest.fixture
def page(tmp_path: Path, tiny_model: Path) -> Path:
    """A directory with the page's files, and a model where it wants one."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "my-model").symlink_to(tiny_model)
    return tmp_path


def myxo(directory: Path, line: str, module: str = "myxo.main") -> str:
    """What a command of the page prints, run in ``directory`` as a user would; it must succeed."""
    program, *words = line.split()
    assert program == "myxo"
    given = {key: value for key, value in os.environ.items() if key not in ("NATS_URL", "REDIS_URL", "MYXO_RUN", "MYXO_INSTANCE")}
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=directory,
        env={**given, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
    )
    told = ("The console has moved", "myxo: rollout.rollout_batch_size = 2: more than")  # other runs hold its port; a page's data is short
    lines = [line for line in done.stderr.splitlines() if not line.startswith(told)]
    assert (done.returncode, lines) == (0, []), line
    return done.stdout


def test_the_page_has_all_four_and_each_is_short() -> None:
    own = {"data/train.jsonl", "first-run.toml", "evaluated.toml", "my-model.toml", "my_reward.py", "my_agent.py"}
    assert set(FILES) - own == {"from-verl.toml", "data/verl.jsonl", "verl_reward.py", "from-trl.toml", "trl_reward.py"}
    assert (len(CHECKS), len(RUNS), len(TRIED)) == (5, 1, 2)
    for name in own:
        text = FILES[name]
        lines = [line for line in text.splitlines() if line and not line.startswith(("[", "import ", "from "))]
        assert len(lines) <= 12, name


@pytest.mark.parametrize("line", CHECKS)
def test_its_configs_pass_the_check(page: Path, line: str) -> None:
    printed = myxo(page, line.replace("--dry-run", "--print-config"))
    assert re.search(rf'"{page}/data/(train|verl).jsonl', printed)
    for name, flag in re.findall(r"--(custom-[a-z-]+) (\S+)", line):
        assert f'{name.replace("-", "_")} = "{flag}"' in printed


@pytest.mark.parametrize("line", TRIED)
def test_its_functions_pass_the_trial(page: Path, line: str) -> None:
    printed = myxo(page, line)
    assert printed.startswith("ok") and "FAILED" not in printed, printed


@pytest.mark.parametrize(
    ("name", "label"), [("verl_reward.py", {"style": "rule", "ground_truth": "5"}), ("trl_reward.py", "5"), ("my_reward.py", "5")]
)
def test_rewards_brought_from_elsewhere_score(name: str, label: object) -> None:
    functions: dict[str, Any] = {}
    exec(FILES[name], functions)
    args = SimpleNamespace(rollout_max_response_len=16)
    samples = [SimpleNamespace(prompt="2+3=", response=text, response_length=8, label=label, metadata={}) for text in ("is 5", "is 4")]
    right, wrong = (functions["score"](args, sample) for sample in samples)
    assert (right["right"], wrong["right"]) == (1.0, 0.0) if isinstance(right, dict) else (right, wrong) == (1.0, 0.0)


@pytest.mark.parametrize("line", RUNS)
def test_its_reward_scores_a_run(page: Path, line: str) -> None:
    """Rollout and trainer are stand-ins: eight tokens a response, which is the label or wrong. Data, buffer and reward are real."""
    printed = myxo(page, line, "tests.integration.myxo.standin_myxo")
    summary = json.loads((page / "runs" / "first-run" / "summary.json").read_text())
    assert (summary["steps"], summary["finished"], summary["audit"]) == (4, True, "ok"), printed
    right = summary["reward_first"] - 0.1 * (1 - 8 / 16)
    assert 0 <= right <= 1 and right * 8 == pytest.approx(round(right * 8)), "eight samples, right or not, half as long as they may be"
    assert summary["groups"]["dead"] == {}


async def test_its_agent_talks_to_an_engine(new_bench: NewBench, page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(page), str(ROOT)]))  # for the process that the function runs in
    desk = await new_bench(rollout={"custom_generate_function_path": "my_agent:generate"})
    await desk.task(n=2)
    group, samples = await desk.generated()
    assert len(samples) == 2
    for one in samples:
        before, words, after = one.text.partition(" So the answer is ")
        assert before and words and after
        assert 0 < int(one.mask.sum()) == len(one.response) - len(words), "the agent's own words are not trained"
    assert [meta.tokens for meta in group.samples] == [len(one.response) for one in samples]


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
