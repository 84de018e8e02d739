"""docs/metrics.md names what the code measures, no more and no less."""

import re
from pathlib import Path

from services.trainer import batch_metrics
from services.trainer.batch_metrics import TOKEN_MEANS, empty_table
from services.trainer.metrics_logger import RewardParts
from shared.schema.messages import Batch, BatchGroup, Payload, RewardPart

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "metrics.md").read_text()
DOCUMENTED = set(re.findall(r"^\| `([a-z]+/[^`]+)`", PAGE, re.MULTILINE))


def documented(prefix: str) -> set[str]:
    return {name.removeprefix(f"{prefix}/") for name in DOCUMENTED if name.startswith(f"{prefix}/")}


def test_every_rollout_metric_has_its_line() -> None:
    group = BatchGroup(group="g", payload=Payload(keys=["k"], bytes=1, tokens=(3, 4)), rewards=[1.0, 1.0])
    found = batch_metrics.rollout_metrics(Batch(step=0, version=0, groups=[group]), empty_table(2), [0.0, 0.0])
    names = {re.sub("count_.*", "count_<reward>", name) for name in found}
    assert documented("rollout") == names | set(TOKEN_MEANS)
    assert documented("passrate") == {re.sub(r"@\d+", "@<k>", name) for name in batch_metrics.passrate([[1.0, 0.0]])}


def test_every_metric_of_the_losses_has_its_line() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "services" / "trainer" / "objective").glob("*.py"))
    assigned, listed = r'metrics\["(\w+)"\] = ', r'"(\w+)": (?:tokens\.(?:mean|fraction)|\w+\.detach|\(?same)'
    made = set(re.findall(assigned, sources)) | set(re.findall(listed, sources))
    critic = {name for name in made if name.startswith("value_")}
    assert len(made) > 12
    assert documented("train") == (made - critic) | {"grad_norm", "lr"}
    assert documented("critic") == critic | {"loss", "grad_norm", "lr", "step_time"}


def test_speeds_on_the_page_are_measured() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "services" / "trainer" / "metrics_logger").glob("*.py"))
    measured = set(re.findall(r'"((?:step_time|wall_tok|actor_train|train_wait|wait_time|update_weights)\w*)"', sources))
    assert documented("perf") == measured | {"train_save_time"}, "what the trainer stands still for is named by what that was"


def test_named_rewards_have_their_lines() -> None:
    found = RewardParts().metrics({"<part>": RewardPart(samples=2, mean=0.5, std=0.5, min=0.0, max=1.0)})
    assert documented("rewards") == {name.replace("_part_", "<part>") for name in found}


def test_names_of_rewards_are_made_legal_and_bounded() -> None:
    parts, one = RewardParts(), RewardPart(samples=1, mean=1.0, std=0.0, min=1.0, max=1.0)
    assert set(parts.metrics({"is it short?\n": one})) == {f"is_it_short__/{what}" for what in ("mean", "std", "min", "max")}
    assert len(parts.metrics({str(number): one for number in range(100)})) == 4 * 63, "with the one before 64"
    assert len(parts.metrics({"5": one, "99": one})) == 4


def test_conversations_have_their_lines() -> None:
    """A line names the metric of the mean, and the endings of the others."""
    stats, named = empty_table(2), set[str]()
    stats[:, batch_metrics.StatColumn.ROUNDS] = 1
    for cell in re.findall(r"^\| (`multi_turn/[^|]*`) \|", PAGE, re.MULTILINE):
        first, *endings = re.findall("`([^`]+)`", cell)
        named |= {first, *(first.removesuffix("_mean") + ending for ending in endings)}
    assert {name.removeprefix("multi_turn/") for name in named} == set(batch_metrics.multi_turn(stats, 8))
