"""Codex CLI, of the npm package @openai/codex, by its command line. It always streams."""

import os
import subprocess
import tempfile

from play import AGAIN, ASK, play


def run(where, questions):
    base_url, api_key, model = where
    script = f"""
    # page
    export MYXO_KEY={api_key}
    codex $RESUME --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --json --model {model} -c model_provider=myxo \\
        -c 'model_providers.myxo={{name="myxo", base_url="{base_url}", env_key="MYXO_KEY", wire_api="responses"}}' "$TASK"
    # /page
    """
    seen = []
    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, "HOME": directory, "RESUME": "exec"}
        for question in questions:
            done = subprocess.run(
                ["sh", "-ec", script], cwd=directory, env=environment | {"TASK": question}, capture_output=True, text=True, timeout=180,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
            seen.append(done.stdout)
            environment["RESUME"] = "exec resume --last"
    return seen


play(
    {
        "stream": lambda *where: run(where, [ASK["stream"]]),
        "tools": lambda *where: run(where, [ASK["tools"]]),
        "parallel": lambda *where: run(where, [ASK["parallel"]]),
        "reasoning": lambda *where: run(where, [ASK["reasoning"]]),
        "turns": lambda *where: run(where, [ASK["turns"], AGAIN]),
    }
)
