"""Which runs can do without the log-probs that the rollout drew tokens with."""

from pathlib import Path
from typing import Any

import pytest

from shared.runtime.errors import ConfigError
from tests.support.run_config import run_config
from tests.support.tables import table

SYNCHRONOUS, AHEAD = {"max_staleness": 0}, {"max_staleness": 1}
OWN_LOSS = {"loss_type": "custom_loss", "custom_loss_function_path": "a:b", "advantage_estimator": "reinforce_plus_plus"}


@table(
    ("algorithm", "rollout", "reader"),
    [
        ({}, SYNCHRONOUS, None),
        ({}, AHEAD, "algorithm.off_policy = decoupled (the default) with rollout.max_staleness = 1 reads them"),
        ({"use_tis": False}, SYNCHRONOUS, None),
        ({"use_tis": False}, AHEAD, None),
        ({"off_policy": "none"}, AHEAD, None),
        ({"off_policy": "decoupled"}, SYNCHRONOUS, "algorithm.off_policy = decoupled reads them"),
        ({"off_policy": "rollout"}, SYNCHRONOUS, "algorithm.off_policy = rollout reads them"),
        ({"use_tis": True}, SYNCHRONOUS, "algorithm.use_tis = true reads them"),
        ({"use_rollout_logprobs": True}, SYNCHRONOUS, "algorithm.use_rollout_logprobs = true reads them"),
        ({"use_rs": True}, SYNCHRONOUS, "algorithm.use_rs = True reads them"),
        ({"rs_veto_threshold": 0.1}, SYNCHRONOUS, "algorithm.rs_veto_threshold = 0.1 reads them"),
        ({"tis_batch_normalize": True}, SYNCHRONOUS, "algorithm.tis_batch_normalize = True reads them"),
        ({"use_opsm": True, "use_tis": False}, AHEAD, None),
        ({"use_m2po": True}, SYNCHRONOUS, "algorithm.use_m2po = True reads them"),
        ({"custom_tis_function_path": "a:b"}, SYNCHRONOUS, "algorithm.custom_tis_function_path = a:b reads them"),
        ({"loss_type": "sft_loss"}, AHEAD, None),
        ({"loss_type": "custom_loss", "custom_loss_function_path": "a:b"}, AHEAD, None),
        ({**OWN_LOSS, "off_policy": "rollout"}, SYNCHRONOUS, None),
        ({**OWN_LOSS, "off_policy": "rollout", "kl_coef": 0.1}, SYNCHRONOUS, "algorithm.off_policy = rollout reads them"),
        ({**OWN_LOSS, "kl_coef": 0.1}, SYNCHRONOUS, None),
        ({}, {**SYNCHRONOUS, "missing_log_probs": "refuse"}, "rollout.missing_log_probs = refuse"),
        ({}, {**SYNCHRONOUS, "missing_log_probs": "recompute"}, None),
    ],
)
def test_who_reads_them(tmp_path: Path, algorithm: dict[str, Any], rollout: dict[str, Any], reader: str | None) -> None:
    batch = {"n_samples_per_prompt": 2, **rollout}
    assert run_config(tmp_path, algorithm=algorithm, rollout=batch).log_probs_reader == reader
    if reader is not None and "missing_log_probs" not in rollout:
        with pytest.raises(ConfigError, match="recompute, but algorithm.* reads them"):
            run_config(tmp_path, algorithm=algorithm, rollout={**batch, "missing_log_probs": "recompute"})


def test_weights_between_two_versions_are_not_those_that_sampled(tmp_path: Path) -> None:
    config = run_config(tmp_path, rollout=SYNCHRONOUS, weights={"update_weights_interval": 2})
    assert config.log_probs_reader == "algorithm.off_policy = decoupled (the default) with weights.update_weights_interval = 2 reads them"
