"""The launcher for GPUs on a CPU, with the stand-ins of the other: SGLang's own processes are those that were begun before its import."""

import asyncio
import os
import re
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from services.rollout.engine.early_processes import DETOKENIZER, SCHEDULER
from services.rollout.engine.engine_process import CPU_LAUNCHER, GPU_LAUNCHER, EngineProcess, engine_command
from shared.process.embedded_servers import free_port
from tests.integration.engine.conftest import START_SECONDS, Checkpoints

STAND_INS = """
import sys
if {launcher!r} in sys.orig_argv or "--multiprocessing-fork" in sys.orig_argv:  # not multiprocessing's resource tracker
    import services.rollout.engine.cpu_launcher
"""
"""What each of the engine's interpreters runs before anything else."""


@pytest.mark.extra
def test_sglang_gets_the_processes_that_were_begun_early(checkpoint: Checkpoints, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(STAND_INS.format(launcher=str(GPU_LAUNCHER)))
    command = engine_command(checkpoint(0).path, free_port(), device="cpu")
    argv = [str(GPU_LAUNCHER) if argument == str(CPU_LAUNCHER) else argument for argument in command.argv]
    env = command.env | {"PYTHONPATH": os.pathsep.join([str(tmp_path), command.env["PYTHONPATH"]])}
    engine = EngineProcess(replace(command, argv=argv, env=env), tmp_path / "engine.log")
    try:
        asyncio.run(engine.ready(START_SECONDS))
        log = (tmp_path / "engine.log").read_text()
        started = re.findall(r"Process (\d+), begun [\d.]+ s ago, runs (\S+)", log)
        assert [module for _, module in started] == [SCHEDULER, DETOKENIZER], log[-3000:]
        names = [psutil.Process(int(pid)).cmdline()[0] for pid, _ in started]
        assert "scheduler" in names[0] and "detokenizer" in names[1]
        assert not engine.fault()
        engine.stop(120)  # SIGTERM, which SGLang passes on
        assert engine.members() == []
    finally:
        engine.stop(0)
