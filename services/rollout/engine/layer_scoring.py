"""``python -m services.rollout.engine.layer_scoring DIRECTORY``: a run's engine scores a sequence and writes its layers.

Started by ``myxo bisect``. ``DIRECTORY`` holds its ``request.json``; the log-probs and one file for each of the engine's ranks come to
``DIRECTORY/engine``.
"""

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from services.rollout.engine.engine_process import EngineProcess
from services.rollout.replica_command import replica_command
from shared.config.rollout_section import flags_over
from shared.config.run_config import RunConfig
from shared.process.child_process import die_with_parent
from shared.runtime.errors import MyxoError
from shared.runtime.safe_files import replace_file
from shared.service.service_base import exit_code

HOOK = "services.rollout.engine.receiver.engine_layers:capture"
TARGETS = ["model", "*.model", "*language_model"]
# SGLang's flags by which its layers run as modules, once each, and compute the sequence as one request
PLAIN: dict[str, Any] = {
    "enable-dp-attention": None,
    "speculative-algorithm": None,
    "disaggregation-mode": None,
    "pp-size": None,
    "disable-radix-cache": True,
    "disable-cuda-graph": True,
    "max-running-requests": 1,
}
LEAST_CAPACITY = 4096  # tokens of keys and values: with all of a GPU's memory for them a small model's other buffers have no room


def capturing(config: RunConfig, request: dict[str, Any], directory: Path) -> RunConfig:
    """Returns the run's config for an engine that writes what its layers compute. ``request``: its ``tokens``, and the ``engine_model``."""
    spec = {"name": "bisect", "target_modules": TARGETS, "hook_factory": HOOK}
    hooks = [{**spec, "config": {"tokens": request["tokens"], "directory": str(directory.absolute())}}]
    capacity = max(LEAST_CAPACITY, 2 * len(request["tokens"]))
    flags = flags_over(config.rollout.sglang, {**PLAIN, "max-total-tokens": capacity, "forward-hooks": json.dumps(hooks)})
    model, rollout = {"hf_checkpoint": Path(request["engine_model"])}, {"sglang": flags, "speculation": None}
    return config.with_fields(rollout=rollout, model=model, trainer={"colocate": False})


async def _score(request: dict[str, Any], directory: Path) -> None:
    config = capturing(RunConfig.model_validate(request["config"]), request, directory)
    service: Any = SimpleNamespace(config=config, name="rollout", instance="rollout-0")
    engine = EngineProcess(replica_command(service, "bisect"), directory / "engine.log")
    try:
        await engine.ready(request["deadline"])
        async with await engine.client() as client:
            body = {
                "input_ids": request["tokens"],
                "sampling_params": {"temperature": 1.0, "max_new_tokens": 1, "ignore_eos": True},
                "return_logprob": True,
                "logprob_start_len": 0,
            }
            answer = await client.transport.post("/generate", body, request["deadline"], "the engine is ended")
            found = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]
        if not list(directory.glob("rank-*.safetensors")):
            raise MyxoError(f"the engine answered and wrote no layers to {directory}: its model has none under the names that are known")
        replace_file(directory / "log_probs.json", json.dumps(found).encode())
    finally:
        engine.stop(0)


def main(arguments: list[str]) -> None:
    """Scores the sequence of the request in a directory."""
    directory = Path(arguments[0])
    asyncio.run(_score(json.loads((directory / "request.json").read_text()), directory / "engine"))


if __name__ == "__main__":
    die_with_parent()
    sys.exit(exit_code("bisect", lambda: main(sys.argv[1:])))
