"""Which curves the page *Run* draws, in which order, and what each is of. Pure; docs/metrics.md defines the metrics."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

MOST_SERIES = 12
"""The most series of one panel: of more, nobody tells one from another."""


@dataclass(frozen=True)
class ChartPanel:
    """A chart. ``tags``: metrics, or patterns of them (``rewards/*/mean``); with a minus the negative of one. ``labels``: tag → its name.

    ``by_batch``: whether its x is the number of a batch, which the page *Samples* shows.
    """

    panel: str
    title: str
    unit: str
    about: str
    tags: tuple[str, ...]
    labels: tuple[str, ...] = ()
    by_batch: bool = True


PANELS = (
    ChartPanel("reward", "Reward", "", "mean reward of each batch's samples, as they were scored", ("rollout/raw_reward",)),
    ChartPanel("held_out", "Held-out sets", "mean reward", "by the training steps in the weights that were evaluated", (), by_batch=False),
    ChartPanel("parts", "Rewards by part", "mean", "each named reward, over the samples that have it", ("rewards/*/mean",)),
    ChartPanel("loss", "Loss", "", "what is minimised, and its policy-gradient part", ("train/loss", "train/pg_loss"), ("loss", "pg_loss")),
    ChartPanel(
        "kl",
        "KL",
        "nats",
        "of the policy from the one that began the step, and from the reference where there is one",
        ("train/ppo_kl", "train/kl_loss", "rollout/kl", "rollout/opd_reverse_kl"),
        ("to the step's beginning", "to the reference (loss)", "to the reference (reward)", "to the teacher"),
    ),
    ChartPanel(
        "entropy",
        "Entropy",
        "nats",
        "of the policy where the loss has it; its estimate is the mean of −log p of the tokens that the engine drew",
        ("train/entropy_loss", "-rollout/rollout_log_probs"),
        ("of the policy", "estimate"),
    ),
    ChartPanel("clip", "Clip fraction", "share of tokens", "tokens whose ratio is clipped", ("train/pg_clipfrac", "train/tis_clipfrac")),
    ChartPanel("grad_norm", "Gradient norm", "", "L2 norm before clipping, of the last optimizer step", ("train/grad_norm",)),
    ChartPanel(
        "length",
        "Response length",
        "tokens",
        "of a batch's responses",
        ("rollout/response_len/mean", "rollout/response_len/median", "rollout/response_len/max"),
        ("mean", "median", "longest"),
    ),
    ChartPanel(
        "truncation",
        "Truncation",
        "share of responses",
        "responses that ran into their limit, and those that end in a loop",
        ("rollout/truncated_ratio", "rollout/repetition_frac"),
        ("truncated", "looping"),
    ),
    ChartPanel(
        "difference",
        "Engine–trainer difference",
        "nats",
        "mean absolute difference of the log-probs that engine and trainer give the same token",
        ("train/train_rollout_logprob_abs_diff",),
    ),
    ChartPanel(
        "staleness",
        "Staleness",
        "versions",
        "of a batch's samples: the batch's version less that of the oldest trained token",
        ("rollout/staleness_mean", "rollout/staleness_max"),
        ("mean", "largest"),
    ),
    ChartPanel(
        "equal",
        "Groups that teach nothing",
        "share of groups",
        "groups whose rewards are all equal: they have no advantage",
        ("rollout/zero_std_groups",),
    ),
    ChartPanel(
        "weights",
        "Importance weights",
        "ratio",
        "mean of π/π_old, and of the trainer's policy over the engine's",
        ("train/ois", "train/tis"),
        ("π/π_old", "trainer/engine"),
    ),
    ChartPanel("lr", "Learning rate", "", "of the last optimizer step", ("train/lr",)),
    ChartPanel(
        "speed",
        "Speed of training",
        "tokens/s",
        "with its waiting, and of computing alone",
        ("perf/wall_tok_per_s", "perf/actor_train_tok_per_s"),
        ("waiting included", "computing"),
    ),
    ChartPanel(
        "seconds",
        "Time of a step",
        "s",
        "training, and what the trainer waited between two steps",
        ("perf/step_time", "perf/train_wait_time"),
        ("training", "between two steps"),
    ),
    ChartPanel(
        "critic",
        "Critic",
        "",
        "value loss, and the share of values that were clipped",
        ("critic/value_loss", "critic/value_clipfrac"),
        ("value loss", "clipped"),
    ),
    ChartPanel("passrate", "Pass rate", "probability", "that one of k samples of a prompt passes", ("passrate/*",)),
    ChartPanel("warm_start", "Warm start", "nats a token", "supervised loss, by the warm start's own steps", ("sft/loss",), by_batch=False),
)


@dataclass(frozen=True)
class PanelSeries:
    """One series of a panel: its metric, whether its negative is drawn, and its name in the legend."""

    tag: str
    negative: bool
    label: str


def panel_series(panel: ChartPanel, tags: Iterable[str], held_out: Sequence[str]) -> tuple[list[PanelSeries], int]:
    """Returns the series of a panel, and how many more there are than it draws.

    Args:
        tags: all metrics of the runs. held_out: names of held-out sets.
    """
    known = sorted(tags)
    if panel.panel == "held_out":
        return _first([PanelSeries(f"eval/{name}", False, name) for name in held_out if f"eval/{name}" in known])
    found = []
    for index, pattern in enumerate(panel.tags):
        negative, pattern = pattern.startswith("-"), pattern.removeprefix("-")
        for tag in known if "*" in pattern else [pattern] * (pattern in known):
            if fnmatchcase(tag, pattern):
                label = panel.labels[index] if index < len(panel.labels) else _short(tag, pattern)
                found.append(PanelSeries(tag, negative, label))
    return _first(found)


def _first(found: list[PanelSeries]) -> tuple[list[PanelSeries], int]:
    return found[:MOST_SERIES], max(0, len(found) - MOST_SERIES)


def further(tags: Iterable[str], shown: Iterable[str]) -> list[str]:
    """Returns the metrics that no panel draws, in order."""
    return sorted(set(tags) - set(shown))


def _short(tag: str, pattern: str) -> str:
    """Returns a metric's name without what all that match the pattern have in common."""
    if "*" not in pattern:
        return tag.partition("/")[2]
    before, _, after = pattern.partition("*")
    return tag.removeprefix(before).removesuffix(after)
