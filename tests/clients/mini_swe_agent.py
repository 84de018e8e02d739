"""The package mini-swe-agent, by its command line, as an agent that is a command is started."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from play import ASK, play

MINI = str(Path(sys.executable).parent / "mini")


def run(where, feature, more=""):
    base_url, api_key, model = where
    script = f"""
    # page
    export OPENAI_BASE_URL={base_url} OPENAI_API_KEY={api_key} MSWEA_COST_TRACKING=ignore_errors MSWEA_CONFIGURED=true
    {MINI} --model openai/{model} --yolo --exit-immediately --task "$TASK" --output trajectory.json {more}
    # /page
    cat trajectory.json
    """
    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, "TASK": ASK[feature], "HOME": directory}
        done = subprocess.run(["sh", "-ec", script], cwd=directory, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    return [done.stdout]


play(
    {
        "tools": lambda *where: run(where, "tools"),
        "parallel": lambda *where: run(where, "parallel"),
        "required": lambda *where: run(where, "required", "-c mini.yaml -c model.model_kwargs.tool_choice=required"),
        "reasoning": lambda *where: run(where, "reasoning"),
    }
)
