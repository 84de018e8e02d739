"""Declarations of what the trainer's processes measure besides samples and losses: steps, pushes, evaluations, the warm start."""

from shared.runtime.telemetry import MetricSpec, declare_metrics

declare_metrics(
    MetricSpec("train/grad_norm", "", "L2 norm of the last optimizer step's gradient, before clipping"),
    MetricSpec("train/lr", "", "learning rate of the last optimizer step"),
    MetricSpec(
        "train/support_mismatch",
        "",
        "1: samples come from another distribution than the one that is trained, and log-probs are of the latter",
        when="with `rollout_top_p` below 1, `rollout_top_k`, or flags of SGLang's to that end",
    ),
    MetricSpec("critic/loss", "reward²", "what is minimised: the value loss"),
    MetricSpec("critic/grad_norm", "", "L2 norm of the last optimizer step's gradient, before clipping"),
    MetricSpec("critic/lr", "", "learning rate of the last optimizer step"),
    MetricSpec("critic/step_time", "s", "the critic's optimizer steps, with reading what they need"),
    MetricSpec("sft/loss", "nats a token", "mean over the trained tokens of the step's batch"),
    MetricSpec("sft/lr", "", "learning rate of the step"),
)

declare_metrics(
    MetricSpec(
        "train/load_balancing_loss",
        "",
        "how unevenly experts are used in a micro-batch: a mean over layers, 1 where all are used alike",
        when="with `moe_router_load_balancing_type` `aux_loss` and a coefficient",
    ),
    MetricSpec("train/seq_load_balancing_loss", "", "the same in a sequence", when="with `seq_aux_loss`"),
    MetricSpec("train/global_load_balancing_loss", "", "the same in the optimizer step so far", when="with `global_aux_loss`"),
    MetricSpec("train/z_loss", "nats²", "mean over tokens and layers of the routers' squared logsumexp", when="with `moe_z_loss_coeff`"),
    MetricSpec(
        "critic/load_balancing_loss",
        "",
        "how unevenly experts are used in a micro-batch: a mean over layers, 1 where all are used alike",
        when="with `moe_router_load_balancing_type` `aux_loss` and a coefficient",
    ),
    MetricSpec("critic/seq_load_balancing_loss", "", "the same in a sequence", when="with `seq_aux_loss`"),
    MetricSpec("critic/global_load_balancing_loss", "", "the same in the optimizer step so far", when="with `global_aux_loss`"),
    MetricSpec("critic/z_loss", "nats²", "mean over tokens and layers of the routers' squared logsumexp", when="with `moe_z_loss_coeff`"),
)

declare_metrics(
    MetricSpec("rewards/<part>/mean", "reward", "mean"),
    MetricSpec("rewards/<part>/std", "reward", "standard deviation"),
    MetricSpec("rewards/<part>/min", "reward", "the smallest"),
    MetricSpec("rewards/<part>/max", "reward", "the largest"),
)

declare_metrics(
    MetricSpec("eval/<name>", "reward", "mean reward of the samples of that set"),
    MetricSpec("eval/<name>-pass@<k>", "probability", "that one of k samples of a prompt passes"),
    MetricSpec("eval/<name>-pass^<k>", "probability", "that all of k samples of a prompt pass"),
    MetricSpec("eval/<name>-truncated_ratio", "share", "samples that ended at their length"),
    MetricSpec("eval/<name>/response_len/mean", "tokens", "mean length of the responses"),
    MetricSpec("eval/<name>/response_len/median", "tokens", "their median"),
    MetricSpec("eval/<name>/response_len/min", "tokens", "the shortest"),
    MetricSpec("eval/<name>/response_len/max", "tokens", "the longest"),
    MetricSpec("eval/<name>/response_len/p90", "tokens", "a tenth of them is longer"),
    MetricSpec("eval/<name>/response_len/p99", "tokens", "a hundredth of them is longer"),
    MetricSpec("eval/<name>/version", "version", "that the figures are of"),
    MetricSpec("eval/<name>/newest_version", "version", "the newest that drew some of their tokens"),
    MetricSpec("eval/<name>/lag", "versions", "by how many they were behind the live version when they were known"),
    MetricSpec("eval/<name>/samples", "samples", "that the figures are of"),
    MetricSpec("eval/<name>/failed", "prompts", "prompts without rewards"),
    MetricSpec("eval/<name>/late", "prompts", "those that had not come back at `eval_timeout`"),
    MetricSpec("eval/<name>/seconds", "s", "how long it took"),
)

declare_metrics(
    MetricSpec("perf/step_time", "s", "from the batch's arrival to the end of its last optimizer step"),
    MetricSpec("perf/actor_train_time", "s", "its optimizer steps alone, without reading samples and without log-probs"),
    MetricSpec("perf/train_wait_time", "s", "between two steps: waiting for a batch, pushing, saving"),
    MetricSpec("perf/train_save_time", "s", "of it, writing checkpoints"),
    MetricSpec("perf/train_push_time", "s", "of it, beginning pushes of weights (or, on shared GPUs, all of them)"),
    MetricSpec("perf/wait_time_ratio", "share", "train_wait_time / (train_wait_time + step_time)"),
    MetricSpec(
        "perf/actor_train_computed_tokens",
        "tokens",
        "of the batch's tokens, those that one pass computes: what [sequences begin with alike](trainer.md#shared-beginnings) counts once. "
        "`rollout/tokens` counts all",
    ),
    MetricSpec(
        "perf/actor_train_tok_per_s",
        "tokens/s",
        "tokens of prompts and responses / actor_train_time, of all ranks together: the speed of computing",
    ),
    MetricSpec(
        "perf/wall_tok_per_s",
        "tokens/s",
        "the same tokens / (train_wait_time + step_time): the speed of the run, waiting included. Times that time, summed over the steps, "
        "it is the tokens that were trained",
        when="from a trainer's second step on",
    ),
    MetricSpec(
        "perf/actor_train_tflops",
        "TFLOP/s",
        "operations of the batch's forward and backward passes, of computed tokens / actor_train_time, of each rank",
    ),
    MetricSpec(
        "perf/actor_train_mfu",
        "share",
        "that over the device's peak for dense bfloat16",
        when="where the peak is known and training is not in float32",
    ),
    MetricSpec("perf/update_weights_time", "s", "a push of weights, from the offer to the last commit; its step is the version"),
    MetricSpec(
        "perf/update_weights_wire_time",
        "s",
        "of it, from the first bucket's export until the last engine had loaded and checked everything",
    ),
    MetricSpec("perf/update_weights_pause_time", "s", "from the request until the slowest engine was paused, beside the transfer"),
    MetricSpec("perf/update_weights_transfer_time", "s", "from the first bucket's export until the last engine had loaded everything"),
    MetricSpec("perf/update_weights_check_time", "s", "comparing the engines' digests with the trainer's"),
    MetricSpec("perf/update_weights_activate_time", "s", "the commit, until every engine had gone on"),
    MetricSpec("perf/update_weights_stall", "s", "of it, what the trainer waited for; the rest ran beside a training step"),
    MetricSpec("perf/update_weights_bytes", "bytes", "what it carried"),
    MetricSpec("perf/update_weights_gb_per_s", "GB/s", "update_weights_bytes / update_weights_wire_time"),
)

declare_metrics(
    MetricSpec("step", "steps", "that are trained; the critic's own in its process"),
    MetricSpec("version", "version", "that the trainer pushed last"),
    MetricSpec("loss", "", "`train/loss` of the newest step"),
    MetricSpec("grad_norm", "", "`train/grad_norm` of the newest step, `critic/grad_norm` in the critic's process"),
    MetricSpec("reward", "reward", "mean reward of the newest batch, as it was scored"),
    MetricSpec("staleness_mean", "versions", "`rollout/staleness_mean` of the newest step"),
    MetricSpec("staleness_max", "versions", "`rollout/staleness_max` of the newest step"),
    MetricSpec("masked_tokens", "tokens", "`rollout/masked_tokens` of the newest step"),
    MetricSpec("removed_samples", "samples", "`rollout/removed_samples` of the newest step"),
    MetricSpec("wait_time_ratio", "share", "`perf/wait_time_ratio` of the newest step"),
    MetricSpec("train_tokens_per_s", "tokens/s", "`perf/wall_tok_per_s` of the newest step: waiting included; the panel's *training*"),
    MetricSpec("train_compute_tokens_per_s", "tokens/s", "`perf/actor_train_tok_per_s` of the newest step; the panel's *computing*"),
    MetricSpec("push_seconds", "s", "`perf/update_weights_time` of the newest push"),
    MetricSpec("push_stall_seconds", "s", "`perf/update_weights_stall` of the newest push"),
    MetricSpec("push_gb_per_s", "GB/s", "`perf/update_weights_gb_per_s` of the newest push"),
    MetricSpec("value_loss", "reward²", "`critic/value_loss` of the newest step", when="in the critic's process"),
    MetricSpec("value_clipfrac", "share", "`critic/value_clipfrac` of the newest step", when="in the critic's process"),
    MetricSpec("sft_step", "steps", "how far the warm start is", when="from its first step on"),
    MetricSpec("sft_steps", "steps", "of the whole warm start", when="from its first step on"),
    MetricSpec("sft_loss", "nats a token", "its newest loss", when="from its first step on"),
    MetricSpec("sft_seconds_left", "s", "its rest at its pace so far", when="from its second step on"),
)
