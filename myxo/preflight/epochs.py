"""The steps of a run that is told its epochs. Their number follows from the prompts that are used, so all that may be left out are read."""

from myxo.preflight.inspection import Findings, Inspection, Note
from shared.config.rollout_section import RolloutSection
from shared.runtime.errors import ConfigError

FIELD = "rollout.num_epoch"
SFT_FIELD = "sft.sft_num_epoch"


def settled(inspection: Inspection) -> RolloutSection:
    """Returns the run's ``[rollout]`` with the steps that its epochs come to; as it is where ``num_rollout`` is given, which wins, and
    where the prompts cannot be opened, which a check reports.

    Raises ConfigError for prompts that make no batch, and for a source of prompts, whose size is not known.
    """
    rollout, data = inspection.config.rollout, inspection.config.data
    if (epochs := rollout.num_epoch) is None or "num_rollout" in rollout.model_fields_set:
        return rollout
    if data.data_source is not None:
        raise ConfigError(FIELD, epochs, "num_rollout instead: a source of prompts (data_source) does not say how many it has")
    if (prompts := inspection.training) is None:
        return rollout
    if not (steps := prompts.epoch_size // rollout.rollout_batch_size):
        expected = f"enough prompts for a batch: {prompts.epoch_size} are fewer than rollout_batch_size = {rollout.rollout_batch_size}"
        raise ConfigError(FIELD, epochs, expected)
    return rollout.model_copy(update={"num_rollout": epochs * steps, "num_rollout_per_epoch": steps})


def check_epochs(inspection: Inspection) -> Findings:
    """Tells epochs that do not count: the number of steps is given as well."""
    rollout = inspection.config.rollout
    if rollout.num_epoch is not None and "num_rollout" in rollout.model_fields_set and rollout.num_rollout_per_epoch is None:
        yield Note(f"--num-epoch {rollout.num_epoch} changes nothing: --num-rollout {rollout.num_rollout} is given, and counts")


def check_intervals(inspection: Inspection) -> Findings:
    """Notes intervals that are no multiple of the one at which what they need is made."""
    trainer, evaluation, weights = inspection.config.trainer, inspection.config.eval, inspection.config.weights
    for name, interval, made_by, made, what in (
        ("eval_interval", evaluation.eval_interval, "update_weights_interval", weights.update_weights_interval, "version of the weights"),
        ("save_hf_interval", trainer.save_hf_interval, "save_interval", trainer.save_interval, "checkpoint"),
    ):
        if interval is not None and interval % made:
            yield Note(f"{name} = {interval} is no multiple of {made_by} = {made}: what is due in between waits for the next {what}")


def sft_steps(inspection: Inspection) -> dict[str, int]:
    """Returns the field with the steps that the epochs of the run's demonstrations come to; nothing where they are not told, or the
    demonstrations cannot be opened, which a check reports.

    Raises ConfigError for demonstrations that make no batch.
    """
    sft = inspection.config.sft
    if (epochs := sft.sft_num_epoch) is None or inspection.demonstrations is None:
        return {}
    rows = len(inspection.demonstrations)
    if not (steps := rows // sft.sft_batch_size):
        expected = f"enough demonstrations for a batch: {rows} are fewer than sft_batch_size = {sft.sft_batch_size}"
        raise ConfigError(SFT_FIELD, epochs, expected)
    return {"sft_steps": epochs * steps}
