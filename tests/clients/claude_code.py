"""Claude Code, of the npm package @anthropic-ai/claude-code, by its command line. It always streams."""

import os
import subprocess
import tempfile

from play import AGAIN, ASK, play


def run(where, questions):
    base_url, api_key, model = where
    script = f"""
    # page
    export ANTHROPIC_BASE_URL={base_url.removesuffix("/v1")} ANTHROPIC_API_KEY={api_key} CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
    export ANTHROPIC_MODEL={model} ANTHROPIC_SMALL_FAST_MODEL={model}
    claude --print "$TASK" --output-format stream-json --verbose $MORE
    # /page
    """
    seen = []
    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, "HOME": directory, "MORE": "--allowedTools Bash"}
        for question in questions:
            command = ["sh", "-ec", script]
            done = subprocess.run(
                command,
                cwd=directory,
                env=environment | {"TASK": question},
                capture_output=True,
                text=True,
                timeout=180,
                stdin=subprocess.DEVNULL,
            )
            assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
            seen.append(done.stdout)
            environment["MORE"] = "--allowedTools Bash --continue"
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
