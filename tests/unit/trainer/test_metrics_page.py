"""The trainer's metrics are declared, no more and no less than the code measures: docs/metrics.md is made of the declarations."""

import re
from pathlib import Path

from docs.metrics_page import declared_metrics
from services.trainer import batch_metrics
from services.trainer.batch_metrics import TOKEN_MEANS, empty_table
from services.trainer.metrics_logger import RewardParts, evaluation_metrics
from services.trainer.step_profiler import STEP_PARTS
from shared.schema.messages import Batch, BatchGroup, EvalFigures, Payload, RewardPart

ROOT = Path(__file__).parents[3]
DECLARED = declared_metrics()


def declared(prefix: str) -> set[str]:
    return {spec.name.removeprefix(f"{prefix}/") for spec in DECLARED[f"{prefix}/"]}


def test_every_rollout_metric_is_declared() -> None:
    group = BatchGroup(group="g", payload=Payload(keys=["k"], bytes=1, tokens=(3, 4)), rewards=[1.0, 1.0])
    found = batch_metrics.rollout_metrics(Batch(step=0, version=0, groups=[group]), empty_table(2) + 1, [0.0, 0.0])
    names = {re.sub("_of/.*", "_of/<tokens>", re.sub("count_.*", "count_<reward>", name)) for name in found}
    assert declared("rollout") == names | set(TOKEN_MEANS)
    assert declared("passrate") == {re.sub(r"@\d+", "@<k>", name) for name in batch_metrics.passrate([[1.0, 0.0]])}


def test_every_metric_of_the_losses_is_declared() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "services" / "trainer" / "objective").glob("*.py"))
    assigned, listed = r'metrics\["(\w+)"\] = ', r'"(\w+)": (?:tokens\.(?:mean|fraction)|\w+\.detach|\(?same)'
    made = set(re.findall(assigned, sources)) | set(re.findall(listed, sources))
    critic = {name for name in made if name.startswith("value_")}
    balance = {"load_balancing_loss", "seq_load_balancing_loss", "global_load_balancing_loss", "z_loss"}
    assert len(made) > 12
    drafts = {"mtp_loss", "mtp_accuracy"}
    made |= {
        f"mismatch_{name}" for name in ("p99", "max", "beyond", "at_<n>", "of_<n>", "expert", "expert_mean")
    }  # by `mismatch.summarised`
    assert declared("train") == (made - critic) | {"grad_norm", "lr", "support_mismatch"} | balance | drafts
    assert declared("critic") == critic | {"loss", "grad_norm", "lr", "step_time"} | balance


def test_declared_speeds_are_measured() -> None:
    sources = (ROOT / "services" / "trainer" / "metrics_logger.py").read_text()
    measured = set(re.findall(r'"((?:step_time|wall_tok|actor_train|train_wait|wait_time|update_weights)\w*)"', sources))
    parts = {f"train_{part}_time" for part in STEP_PARTS}
    phases = {f"update_weights_{phase}_time" for phase in ("pause", "transfer", "check", "activate")}
    stats = empty_table(1)
    stats[:, batch_metrics.StatColumn.LATENCY :] = 1
    assert declared("perf") == measured | parts | phases | set(batch_metrics.engine_metrics(stats)), (
        "what the trainer stands still for is named by what that was"
    )


def test_named_rewards_are_declared() -> None:
    found = RewardParts().metrics({"<part>": RewardPart(samples=2, mean=0.5, std=0.5, min=0.0, max=1.0)})
    assert declared("rewards") == {name.replace("_part_", "<part>") for name in found}


def test_names_of_rewards_are_made_legal_and_bounded() -> None:
    parts, one = RewardParts(), RewardPart(samples=1, mean=1.0, std=0.0, min=1.0, max=1.0)
    assert set(parts.metrics({"is it short?\n": one})) == {f"is_it_short__/{what}" for what in ("mean", "std", "min", "max")}
    assert len(parts.metrics({str(number): one for number in range(100)})) == 4 * 63, "with the one before 64"
    assert len(parts.metrics({"5": one, "99": one})) == 4


def test_conversations_are_declared() -> None:
    stats = empty_table(2)
    stats[:, batch_metrics.StatColumn.ROUNDS] = 1
    assert declared("multi_turn") == set(batch_metrics.multi_turn(stats, 8))


def test_figures_of_evaluations_are_declared() -> None:
    rates, lengths = {"pass@2": 1.0, "pass^2": 1.0}, dict.fromkeys(("mean", "median", "min", "max", "p90", "p99"), 1.0)
    counted = {"samples": 2, "prompts": 1, "failed": 0, "oldest": 1, "newest": 1}
    figures = EvalFigures(dataset="<name>", version=1, live=1, mean_reward=1.0, rates=rates, lengths=lengths, **counted)
    assert declared("eval") == {re.sub("([@^])2", r"\1<k>", name) for name in evaluation_metrics(figures)}
