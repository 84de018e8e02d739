"""The trial of objective functions gives them what a run would: log-probs and KL only where the objective has them computed."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from services.trainer.objective.custom_objective import ADVANTAGE, LOSS
from services.trainer.objective.trial import ObjectiveCalls
from shared.schema.sample import encode
from tests.support.run_config import run_config
from tests.support.tables import table
from tests.support.train_samples import train_sample

OWN = """
def loss(args, batch, logits, sum_of_sample_mean):
    return 0.0 * logits.sum() + sum(values.sum() for values in batch[FIELD]), {}

def advantages(args, rollout_data):
    rollout_data["advantages"] = [0.0 * values for values in rollout_data[FIELD]]
"""
NAMED = {
    LOSS: {"loss_type": "custom_loss", "custom_loss_function_path": "own_objective:loss"},
    ADVANTAGE: {"custom_advantage_function_path": "own_objective:advantages"},
}


@table(
    ("name", "field", "algorithm", "steps", "gives"),
    [
        (LOSS, "rollout_log_probs", {}, 1, True),
        (LOSS, "log_probs", {}, 1, False),
        (LOSS, "log_probs", {}, 2, True),
        (LOSS, "ref_log_probs", {}, 1, False),
        (LOSS, "ref_log_probs", {"kl_loss_coef": 0.1}, 1, True),
        (ADVANTAGE, "log_probs", {}, 1, False),
        (ADVANTAGE, "kl", {}, 1, False),
        (ADVANTAGE, "kl", {"kl_coef": 0.1, "advantage_estimator": "reinforce_plus_plus"}, 1, True),
    ],
)
def test_a_function_gets_the_fields_of_its_run(
    name: str,
    field: str,
    algorithm: dict[str, Any],
    steps: int,
    gives: bool,
    tmp_path: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "own_objective.py").write_text(OWN.replace("FIELD", repr(field)))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_objective", raising=False)
    config = run_config(
        tmp_path,
        model={"hf_checkpoint": str(tiny_model)},
        algorithm=NAMED[name] | algorithm,
        trainer={"num_steps_per_rollout": steps},
    )
    samples = [train_sample([1, 2], [3, 4, 5], index=index) for index in range(2)]
    request = {"verb": name, "samples": encode(samples, 1 << 20), "rewards": [1.0, 0.0]}
    answer = asyncio.run(ObjectiveCalls(config).answer(request))
    assert ("gave" in answer) == gives, answer
    assert gives or repr(field) in str(answer["error"]), answer
