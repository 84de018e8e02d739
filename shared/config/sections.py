"""The sections of a run's config (`shared.config.run_config`), each field with its default, bounds and meaning."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, PlainSerializer, PlainValidator

from shared.bus.subjects import RUN_ID
from shared.config.learning_rate import DecayStyle
from shared.config.section import HOOK, LARGEST_SEED, MUTABLE, Rule, Section, hook
from shared.data import data_files
from shared.data.data_files import DataFile
from shared.environment import environment_url
from shared.hub import hub_names
from shared.runtime.errors import nearest
from shared.schema.limits import MAX_SAMPLES
from shared.schema.overlong import OverlongPolicy

_AsText = PlainSerializer(lambda files: files and [str(file) for file in files], return_type=list[str] | None)

WeightedFiles = Annotated[list[DataFile] | None, PlainValidator(data_files.weighted), _AsText]
Files = Annotated[list[DataFile] | None, PlainValidator(data_files.unweighted), _AsText]

VERIFIERS = ("math", "exact")
"""Environments that come with the reward service."""

REMOTE = "remote_rm"
"""The environment of ``rm_url``."""

CUSTOM = "custom_rm"
"""The environment of ``custom_rm_path``."""


VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class RunSection(Section):
    """Name and place of the run."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "name",
            lambda _, given: not RUN_ID.match(given),
            "use 1 to 63 lower-case letters, digits, '-' and '_', starting with a letter or digit",
        ),
    )

    name: str = Field(description="the run's id: lower-case letters, digits, '-' and '_'")
    dir: Path = Field(default=Path("runs"), description="where runs keep their files; this run's lie in DIR/NAME")
    buffer_replicas: int = Field(default=1, gt=0, description="buffers that `myxo up` starts: one works, the others stand by", **MUTABLE)

    @property
    def root(self) -> Path:
        """Returns the run's own directory."""
        return self.dir / self.name


class ModelSection(Section):
    """The policy."""

    hf_checkpoint: Annotated[Path, AfterValidator(hub_names.checked_model)] = Field(
        description="the initial policy: a directory with config.json, safetensors and tokenizer.json, or a name on the Hugging Face hub, "
        "ORG/NAME or ORG/NAME@REVISION"
    )


class DataSection(Section):
    """Prompts and how they are read."""

    prompt_data: WeightedFiles = Field(
        default=None,
        description="JSONL or Parquet files of prompts: PATH, PATH@[start:stop] for a part of its rows, PATH@[start:stop]*WEIGHT to draw "
        "from it more or less often; hf:ORG/NAME:SPLIT in the place of PATH is a split of a data set on the Hugging Face hub; needed "
        "unless data_source is given",
    )
    data_source: str | None = hook("that makes a source of prompts")
    input_key: str = Field(default="prompt", description="key of the prompt: text, or a list of chat messages")
    label_key: str | None = Field(default="label", description="key of the reference answer")
    metadata_key: str = Field(default="metadata", description="key of an object handed on to the environment")
    tool_key: str = Field(default="tools", description="key of a list of tools, handed to the chat template; a prompt may have none")
    apply_chat_template: bool = Field(default=False, description="render the prompt through the model's chat template")
    apply_chat_template_kwargs: dict[str, Any] = Field(default={}, description="extra variables for the chat template")
    overlong_prompts: Literal["refuse", "filter"] = Field(
        default="refuse", description="prompts over rollout_max_prompt_len: refuse the run, or leave them out and count them"
    )
    bad_prompts: Literal["refuse", "skip"] = Field(
        default="refuse", description="lines that are no prompt: refuse the run, or leave them out and count them"
    )
    rollout_shuffle: bool = Field(default=False, description="shuffle each epoch with rollout_seed + epoch")
    rollout_seed: int = Field(default=42, ge=0, le=LARGEST_SEED, description="seed of the prompt order and of the engines")

    def _misfits(self) -> Iterator[str]:
        if self.prompt_data is None and self.data_source is None:
            yield f"data.prompt_data: required: {type(self).model_fields['prompt_data'].description}"


class RolloutSection(Section):
    """Generation, and how far it may run ahead of training."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule("rollout_top_k", lambda _, given: given == 0, "at least 1, or -1 for all tokens"),
        Rule(
            ("over_sampling_batch_size", "rollout_window"),
            lambda rollout, given: given is not None and given < rollout.rollout_batch_size,
            "{1} groups do not fill a batch; rollout_batch_size = {0.rollout_batch_size}",
        ),
        Rule(
            "rollout_window",
            lambda rollout, given: given is not None and rollout.rollout_order != "windowed_fifo",
            "belongs to rollout_order = windowed_fifo, not to {0.rollout_order}",
        ),
    )

    num_rollout: int = Field(gt=0, description="training steps (one rollout batch each)", **MUTABLE)
    rollout_batch_size: int = Field(gt=0, le=65536, description="prompts (groups) a step")
    n_samples_per_prompt: int = Field(default=1, gt=0, le=MAX_SAMPLES, description="samples a group")
    max_staleness: int = Field(default=1, ge=0, description="bound on version trained - oldest trained token's version; 0 = synchronous")
    staleness_policy: Literal["drop", "requeue", "continue", "mask"] = Field(
        default="drop",
        description="groups over the bound: drop them for new prompts, generate them anew, go on with them under the new version, "
        "or train them without their stale tokens",
    )
    rollout_order: Literal["completion", "windowed_fifo", "fifo"] = Field(
        default="completion", description="which groups a batch takes: those that ended first, or those admitted first"
    )
    rollout_window: int | None = Field(default=None, gt=0, description="groups that windowed_fifo looks ahead; default: two batches")
    over_sampling_batch_size: int | None = Field(
        default=None, gt=0, description="groups that are under way for a batch, at least rollout_batch_size; default: as many as it"
    )
    max_dead_in_a_row: int | None = Field(
        default=None, ge=0, description="dead groups in a row that end the run; 0: none do; default: four batches, at least 32", **MUTABLE
    )
    dynamic_sampling_filter_path: str | None = Field(
        default=None,
        pattern=rf"^nonzero_std$|{HOOK}",
        description="keeps or drops a scored group: nonzero_std (rewards that are not all equal) or package.module:function",
    )
    rollout_sample_filter_path: str | None = hook("that takes samples of a scored group out of the loss")
    rollout_all_samples_process_path: str | None = hook("that sees every scored group, kept or not")
    buffer_filter_path: str | None = hook("that chooses a batch's groups among those that are ready")
    custom_generate_function_path: str | None = Field(
        default=None, pattern=HOOK, description="package.module:async function that generates one sample, or several out of one rollout"
    )
    rollout_temperature: float = Field(default=1.0, ge=0, description="sampling temperature; the trainer divides logits by it too")
    rollout_top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus sampling")
    rollout_top_k: int = Field(default=-1, ge=-1, description="top-k sampling; -1 = off")
    rollout_max_prompt_len: int | None = Field(default=None, gt=0, description="tokens of a prompt; longer ones: see overlong_prompts")
    rollout_max_response_len: int = Field(default=1024, gt=0, description="tokens generated at most")
    overlong_samples: OverlongPolicy = Field(
        default="mask",
        description="a sample of more tokens than max_tokens_per_gpu x context_parallel_size, as an agent may make: truncate trains the "
        "beginning of its response, mask nothing of it (its reward counts in the group), drop gives its group up",
    )
    rollout_stop: list[str] = Field(default=[], description="stop strings")
    rollout_stop_token_ids: list[int] = Field(default=[], description="stop token ids")
    rollout_replicas: int = Field(default=1, gt=0, description="rollout services that `myxo up` starts", **MUTABLE)
    rollout_device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="where the engine runs")
    rollout_num_gpus_per_engine: int = Field(default=1, gt=0, le=8, description="GPUs of an engine (its tensor parallel size)")
    rollout_concurrency: int = Field(default=64, gt=0, description="groups a replica generates at once", **MUTABLE)
    in_flight_on_push: Literal["in_place", "retract", "abort"] = Field(
        default="in_place", description="what running generations do across a weight push: keep their KV, recompute it, or stop and resume"
    )
    engine_start_timeout: float = Field(default=600, gt=0, description="seconds for an engine to answer its first request", **MUTABLE)
    generate_timeout: float = Field(default=600, gt=0, description="seconds for one group's generation", **MUTABLE)
    sglang: dict[str, Any] = Field(default={}, description="SGLang's own flags without their dashes, passed through verbatim")


class RewardSection(Section):
    """Scoring."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "group_rm",
            lambda reward, given: given and reward.custom_rm_path is None,
            "needs custom_rm_path, the function that takes a whole group",
        ),
    )

    rm_type: str = Field(
        default="math",
        description="what scores: math (math-verify), exact (match), remote_rm (the environment at rm_url) or a name of environments; "
        "a prompt's metadata.rm_type overrides it",
    )
    custom_rm_path: str | None = hook("that scores a sample, in place of rm_type and of every other environment")
    group_rm: bool = Field(default=False, description="custom_rm_path takes a whole group at once")
    reward_key: str | None = Field(default=None, description="which of several named rewards counts; default: the environment's reward")
    rm_url: str | None = Field(default=None, description="the environment of remote_rm: http://host:port or nats:NAME", **MUTABLE)
    environments: dict[str, str] = Field(default={}, description="more environments: name = http://host:port or nats:NAME", **MUTABLE)
    environment_concurrency: int = Field(
        default=16,
        gt=0,
        description="groups in the hands of an external environment, or of an async custom_rm_path, at once, for each reward service",
        **MUTABLE,
    )
    reward_timeout: float = Field(default=30, gt=0, description="seconds for scoring one group", **MUTABLE)
    reward_workers: int = Field(default=1, gt=0, description="processes of each verifier and of hooks in a reward service", **MUTABLE)
    worker_environment: list[str] = Field(
        default=[],
        description="environment variables that hooks of the reward service get besides PATH, HOME, LANG, TMPDIR and the like: "
        "the key of a judge, say",
        **MUTABLE,
    )
    reward_replicas: int = Field(default=1, gt=0, description="reward services that `myxo up` starts", **MUTABLE)

    def _misfits(self) -> Iterator[str]:
        taken = (*VERIFIERS, REMOTE, CUSTOM)
        for name, url in self.environments.items():
            if not environment_url.NAME.match(name):
                yield f"reward.environments: the name {name!r}: use 1 to 63 letters, digits, '-' and '_'"
            if name in taken:
                yield f"reward.environments: the name {name!r} is taken; {', '.join(taken[:-1])} and {CUSTOM} are there already"
            yield from _url_problems(f"reward.environments.{name}", url)
        for name in self.worker_environment:
            if not VARIABLE.match(name) or name.startswith(("NATS_URL", "REDIS_URL")):
                yield f"reward.worker_environment: {name!r}: use names of environment variables, without the credentials of NATS and Redis"
        if self.rm_url is not None:
            yield from _url_problems("reward.rm_url", self.rm_url)
        elif self.rm_type == REMOTE and self.custom_rm_path is None:
            yield f"reward.rm_url: required with rm_type = {REMOTE}: {environment_url.EXPECTED}"
        if self.custom_rm_path is None and self.rm_type not in (REMOTE, *self.environment_names()):
            yield f"reward.rm_type: no such verifier or environment; {nearest(self.rm_type, self.environment_names())}"

    @property
    def external(self) -> dict[str, str]:
        """Returns the environments outside of Myxo, name → URL; none if ``custom_rm_path`` replaces all of them."""
        if self.custom_rm_path is not None:
            return {}
        return {**({} if self.rm_url is None else {REMOTE: self.rm_url}), **self.environments}

    def environment_names(self) -> list[str]:
        """Returns every environment that a prompt of this run may name, built in or not; each has its own queue."""
        return sorted({*VERIFIERS, *self.external}) if self.custom_rm_path is None else [CUSTOM]

    def environment_of(self, named: str | None) -> str:
        """Returns the environment that scores a prompt. ``named``: the one that the prompt names, if any."""
        if self.custom_rm_path is not None:
            return CUSTOM
        return self.rm_type if named is None else named


class EvalSection(Section):
    """Held-out prompts, generated and scored as a task class of their own."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "eval_interval",
            lambda held_out, given: given is not None and held_out.eval_prompt_data is None,
            "needs eval_prompt_data, the prompts to evaluate on",
        ),
    )

    eval_prompt_data: Files = Field(
        default=None, description="JSONL or Parquet files of held-out prompts, or parts PATH@[start:stop] of them; keys as in [data]"
    )
    eval_name: str = Field(
        default="heldout", max_length=64, pattern=r"^[A-Za-z0-9_-]+$", description="name of the dataset in metrics and group ids"
    )
    eval_interval: int | None = Field(default=None, gt=0, description="steps between evaluations, besides first and last", **MUTABLE)
    skip_eval_before_train: bool = Field(default=False, description="do not evaluate the initial weights")
    n_samples_per_eval_prompt: int = Field(default=1, gt=0, le=MAX_SAMPLES, description="samples a held-out prompt")
    eval_temperature: float | None = Field(default=None, ge=0, description="sampling temperature; default: the rollout's")
    eval_max_response_len: int | None = Field(default=None, gt=0, description="tokens; default: the rollout's")


class SftSection(Section):
    """Supervised warm start before the first rollout."""

    sft_data: Files = Field(default=None, description="files of demonstrations, named as in eval_prompt_data; none = no warm start")
    sft_prompt_key: str = Field(default="prompt", description="key of the prompt, as in [data]")
    sft_response_key: str = Field(default="response", description="key of the demonstrated response (text)")
    sft_messages_key: str = Field(
        default="messages", description="key of a chat, in place of prompt and response: the assistant's turns are trained"
    )
    sft_steps: int = Field(default=100, gt=0, description="optimizer steps")
    sft_batch_size: int = Field(default=64, gt=0, description="demonstrations a step")
    sft_lr: float = Field(default=1e-5, gt=0, description="peak learning rate")
    sft_warmup_iters: int = Field(default=0, ge=0, description="steps of linear warm-up")
    sft_lr_decay_style: DecayStyle = Field(default="constant", description="decay over sft_steps")


class WeightsSection(Section):
    """Pushing weights from the trainer to the engines."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "join_from",
            lambda weights, given: given == "trainer" and weights.update_weight_transport == "disk",
            "nobody pushes with update_weight_transport = disk; use auto, peer or disk",
        ),
        Rule(
            "snapshot_interval",
            lambda weights, given: not given and (weights.update_weight_transport, weights.join_from) == ("nccl", "disk"),
            "join_from = disk needs snapshots; give how many versions lie between two",
        ),
    )

    update_weights_interval: int = Field(default=1, gt=0, description="training steps between pushes")
    update_weight_buffer_size: int = Field(default=536870912, gt=0, description="bytes of a bucket")
    update_weight_dtype: Literal["float32", "bfloat16"] | None = Field(
        default=None, description="type of the tensors on the wire; default: as the trainer has them"
    )
    check_weight_update_equal: bool = Field(
        default=False, description="after every push, send everything again and compare it with what the engines hold", **MUTABLE
    )
    skip_unchanged: bool = Field(default=False, description="do not send frozen parameters to a replica that has them", **MUTABLE)
    push_timeout: float = Field(default=120, gt=0, description="seconds for one push to all replicas", **MUTABLE)
    update_weight_transport: Literal["nccl", "disk"] = Field(
        default="nccl",
        description="how versions reach the engines: pushed over process groups (gloo on CPUs), or read by every engine from disk",
    )
    update_weight_mode: Literal["full", "delta"] = Field(
        default="full", description="snapshots on disk: whole checkpoints, or what changed since the one before", **MUTABLE
    )
    update_weight_disk_dir: Path | None = Field(
        default=None,
        description="where snapshots lie, below the run's name, for trainer and engines alike; default: weights in the run's directory",
    )
    update_weight_delta_encoding: Literal["xor", "overwrite"] = Field(
        default="xor", description="a delta's tensors: old xor new, or positions and values of the elements that changed", **MUTABLE
    )
    update_weight_full_interval: int = Field(default=10, gt=0, description="with delta: every so many snapshots one is whole", **MUTABLE)
    snapshot_interval: int = Field(
        default=20, ge=0, description="with nccl: versions between snapshots, which joiners read; 0 = none", **MUTABLE
    )
    keep_snapshots: int = Field(default=2, gt=0, description="snapshots kept, with all that they are made of", **MUTABLE)
    join_from: Literal["auto", "peer", "disk", "trainer"] = Field(
        default="auto",
        description="where a replica that comes late takes its weights: a serving replica, the newest snapshot, the trainer's next push; "
        "auto: the first of them that has the live version",
        **MUTABLE,
    )


class MonitoringSection(Section):
    """Measurements, and their destinations besides TensorBoard and Prometheus."""

    log_passrate: bool = Field(default=False, description="passrate/pass@k of each batch, for k = 1, 2, 4, ...", **MUTABLE)
    passrate_threshold: float = Field(default=1.0, description="a sample passes with a reward of at least this", **MUTABLE)
    use_wandb: bool = Field(default=False, description="write to W&B, too; needs the extra wandb", **MUTABLE)
    wandb_project: str = Field(default="myxo", min_length=1, description="W&B project", **MUTABLE)
    wandb_group: str | None = Field(default=None, description="W&B group; default: the run's name", **MUTABLE)
    wandb_team: str | None = Field(default=None, description="W&B team; default: your own", **MUTABLE)
    wandb_mode: Literal["online", "offline"] = Field(
        default="online", description="send at once, by WANDB_API_KEY in the trainer's environment, or write files to sync", **MUTABLE
    )
    wandb_dir: Path | None = Field(default=None, description="where W&B's files lie; default: the run's directory", **MUTABLE)
    wandb_host: str | None = Field(default=None, description="URL of a W&B server of your own", **MUTABLE)
    http_host: str = Field(
        default="127.0.0.1", min_length=1, description="where services serve /healthz and /metrics; MYXO_HTTP, host:port, wins", **MUTABLE
    )
    logprob_alarm: float = Field(
        default=0.1, gt=0, description="mean difference of engine's and trainer's log-probs at equal versions that is warned of", **MUTABLE
    )
    keep_rollouts: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="share of the training groups whose prompts and responses the buffer writes to rollouts/ in the run's directory, "
        "besides all held-out ones; 0 = nothing is kept",
        **MUTABLE,
    )
    keep_rollouts_bytes: int = Field(default=2**31, ge=2**20, description="of rollouts/; beyond it the oldest files are removed", **MUTABLE)
    keep_rollouts_tokens: bool = Field(
        default=False, description="keep token ids, masks and log-probs there, too: about 20 bytes a token more", **MUTABLE
    )
    save_debug_rollout_data: str | None = Field(
        default=None, description="path with {rollout_id}: each batch as `myxo replay` trains it again", **MUTABLE
    )
    save_debug_train_data: str | None = Field(
        default=None, description="path with {rollout_id} and {rank}: every tensor that a rank's steps read, as safetensors", **MUTABLE
    )


class BusSection(Section):
    """Delivery policy of the run's queues."""

    ack_wait: float = Field(default=30, gt=0, description="seconds before unextended work goes to somebody else")
    max_deliver: int = Field(default=3, gt=0, description="deliveries before a message is declared dead")
    max_ack_pending: int = Field(default=8192, gt=0, description="messages in workers' hands at once")
    max_queued: int = Field(default=1_000_000, gt=0, description="messages a queue holds before publishers wait")
    max_queued_bytes: int = Field(
        default=128 << 20, ge=4 << 20, description="bytes a queue holds before publishers wait, work in workers' hands included", **MUTABLE
    )
    max_ledger_bytes: int = Field(default=512 << 20, ge=4 << 20, description="bytes of the ledger, beyond which the run waits", **MUTABLE)
    full_timeout: float = Field(
        default=3600, gt=0, description="seconds that a service waits for room in a full stream or store before it ends", **MUTABLE
    )
    replicas: int = Field(default=1, ge=1, le=5, description="copies of each stream in a NATS cluster")
    lease_duration: float = Field(default=5.0, ge=0.5, description="seconds after which a silent buffer's place is taken by another")
    registry_ttl: float = Field(default=10.0, ge=1, description="seconds after which a silent service is taken for gone")


class StoreSection(Section):
    """Payload storage."""

    blob_bytes: int = Field(default=262144, gt=0, description="a group's samples are split over blobs of about this size")
    appendfsync: Literal["always", "everysec", "no"] = Field(default="everysec", description="durability of the embedded Valkey's log")
    max_bytes: int | None = Field(
        default=None,
        ge=8 << 20,
        description="memory of the embedded Valkey, beyond which writers wait; default: a quarter of the machine's, or of the container's",
        **MUTABLE,
    )


def _url_problems(field: str, url: str) -> Iterator[str]:
    try:
        environment_url.parse(url)
    except ValueError as error:
        yield f"{field}: {error}"
