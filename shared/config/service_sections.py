"""The run's place, its services and their limits, and its halves alone: [run], [bus], [store], [gateway], [ingest], [console],
[monitoring], [sandbox], [tinker] and [debug]."""

import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from shared.bus.subjects import RUN_ID
from shared.config.section import MUTABLE, RECORDED, Rule, Section, Table, hook, read_where
from shared.runtime.errors import ConfigError
from shared.sandbox.program import SandboxKind, SandboxLimits, SandboxSettings


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
    dir: Path = Field(
        default=Path("runs"), description="where runs keep their files; this run's lie in DIR/NAME (`myxo move` takes them away)", **MUTABLE
    )
    dir_mode: str = Field(
        default="700",
        pattern=r"^0?7[057]{2}$",
        description="permissions of this run's directory, octal: prompts, responses, weights and credentials are its owner's alone; 750 "
        "lets its group in, 755 everybody",
        **MUTABLE,
    )
    buffer_replicas: int = Field(default=1, gt=0, description="buffers that `myxo up` starts: one works, the others stand by", **MUTABLE)

    custom_config_path: Path | None = Field(
        default=None,
        description="YAML file of values that stand over all but the roles' own: fields of any section, the rest goes into custom_args",
        **MUTABLE,
    )
    custom_args: Table = Field(default={}, description="attributes that your own functions find in args, besides the config's fields")

    @property
    def root(self) -> Path:
        """Returns the run's own directory."""
        return self.dir / self.name

    @property
    def argument(self) -> str:
        """Returns what a command takes for this run: its name where it lies in the shell's ``runs`` or not here, else its directory."""
        elsewhere = self.dir.resolve() != Path(os.environ.get("PWD", "."), "runs").resolve() and self.root.is_dir()
        return shlex.quote(str(self.root.absolute()) if elsewhere else self.name)


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
    sync_interval: float = Field(
        default=1.0,
        ge=0,
        le=3600,
        description="seconds between two syncs of the embedded NATS's files to disk: what a loss of power may take; 0: with each write",
        **MUTABLE,
    )
    replicas: int = Field(default=1, ge=1, le=5, description="copies of each stream in a NATS cluster")
    lease_duration: float = Field(default=5.0, ge=0.5, description="seconds after which a silent buffer's place is taken by another")
    registry_ttl: float = Field(default=10.0, ge=1, description="seconds after which a silent service is taken for gone")
    frozen_timeout: float = Field(
        default=60,
        ge=0,
        description="seconds without heartbeat (registry_ttl at least) or server's answer until `myxo up` restarts a process; 0: never",
        **MUTABLE,
    )


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


class GatewaySection(Section):
    """Gateways: addresses and limits."""

    gateway_replicas: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="gateways that `myxo up` starts; default: with an agent, or a SLIME_AGENT_ variable, one for each 8 cores, "
        "8 at most; one where gateway_port is given, or groups come from outside; else none",
        **MUTABLE,
    )
    gateway_host: str = Field(default="127.0.0.1", min_length=1, description="where gateways serve their API", **MUTABLE)
    gateway_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="of the first gateway, each other one port further on; 0: any free ones, which they keep",
        **MUTABLE,
    )
    gateway_models: list[str] = Field(
        default=[], description="names that requests may give the model besides its own and the run's; *: any", **MUTABLE
    )
    gateway_requests: int = Field(
        default=2048, gt=0, description="requests that a gateway has in hand at once; beyond them it answers 429", **MUTABLE
    )
    gateway_replica_requests: int = Field(
        default=256,
        gt=0,
        description="draws that a gateway has at a replica at once, at most; fewer while the engine lacks memory",
        **MUTABLE,
    )
    gateway_turn_timeout: float = Field(default=600, gt=0, description="seconds for one turn, waiting for a replica included", **MUTABLE)
    gateway_wait: float = Field(
        default=30,
        ge=0,
        description="of these, seconds that a turn waits for a replica with room and weights before it gets 429 or 503",
        **MUTABLE,
    )
    gateway_control_tokens: Literal["text", "as_written"] = Field(
        default="text",
        description="what control tokens are that clients' messages and tools spell: text, encoded as such, or control tokens (as_written)",
    )
    constraints: Literal["refuse", "ignore", "enforce"] = Field(
        default="ignore",
        description="fields of requests that would constrain what is sampled (tool_choice, response_format, parallel_tool_calls): refused "
        "with 400; ignored, with a note in the prompt and their names in X-Myxo-Ignored; or enforced by a grammar, in evaluations alone",
        **MUTABLE,
    )
    gateway_checkpoint_tokens: int = Field(
        default=1024,
        gt=0,
        description="a turn is recorded each so many tokens: what another gateway continues from if this one dies",
        **MUTABLE,
    )


class IngestSection(Section):
    """Groups that others have generated, by `POST /groups` at the gateway."""

    ingest_groups: Literal["off", "beside", "alone"] = Field(
        default="off",
        description="whether groups come in from outside: off; beside those that rollout services generate; alone: these leave "
        "training prompts to the producers outside, and generate held-out ones",
        **MUTABLE,
    )
    ingest_concurrency: int = Field(
        default=8, gt=0, description="groups that a gateway has in hand at once; beyond them it answers 429", **MUTABLE
    )
    ingest_bytes: int = Field(
        default=16 << 20, ge=1 << 10, description="of the largest group's body; while a gateway reads it, its other clients wait", **MUTABLE
    )
    ingest_wait: float = Field(
        default=10, gt=0, description="seconds that a group waits until the run admits one, before it is answered 429", **MUTABLE
    )


class TinkerSection(Section):
    """The training endpoint of `myxo serve`, for clients of the Tinker SDK."""

    tinker_endpoint: bool = Field(default=False, description="train by commands from outside alone; `myxo serve` sets it")
    tinker_tenants: Path | None = Field(
        default=None,
        description="JSON file of tenants, name → key (begins with tml-) and quotas tokens, models, bytes; default: one, default, with the "
        "key of MYXO_TINKER_KEY and without quotas",
        **MUTABLE,
    )
    tinker_model_name: str | None = Field(
        default=None, min_length=1, description="the model's name to clients; default: model.hf_checkpoint as it is given"
    )
    tinker_body_bytes: int = Field(default=32 << 20, ge=1 << 10, description="bytes of a request's body, unpacked", **MUTABLE)
    tinker_checkpoint_steps: int = Field(
        default=10, gt=0, description="optimizer steps of a client between two checkpoints of it: what a death costs to do again", **MUTABLE
    )
    tinker_samples: int = Field(default=256, gt=0, description="sequences that are sampled at once; more wait", **MUTABLE)
    tinker_adapters: int = Field(default=8, gt=0, le=64, description="adapters that an engine serves at once; others take turns", **MUTABLE)


KEY_VARIABLE = "MYXO_INGEST_KEY"  # The environment variable that holds it
SHORTEST_KEY = 16  # Characters


def ingest_key(environment: Mapping[str, str] = os.environ) -> str:
    """Returns the key. Raises ConfigError where there is none, or one that can be guessed."""
    key = environment.get(KEY_VARIABLE, "")
    if len(key) < SHORTEST_KEY:
        expected = f"required with ingest.ingest_groups where gateways start: the producers' key, {SHORTEST_KEY} characters or more"
        raise ConfigError(KEY_VARIABLE, "*" * len(key), expected)
    return key


class ConsoleSection(Section):
    """The console that `myxo up` starts beside a run."""

    console: bool = Field(default=True, description="serve the console: the run in a browser, read-only", **MUTABLE)
    console_host: str = Field(
        default="127.0.0.1", min_length=1, description="where it listens; its token crosses the network in clear", **MUTABLE
    )
    console_port: int = Field(
        default=8770, ge=0, le=65535, description="of the console; the next free one where it is taken; 0: any", **MUTABLE
    )
    console_hosts: list[str] = Field(
        default=[], description="further names by which browsers ask for it, such as that of a proxy before it", **MUTABLE
    )


class MonitoringSection(Section):
    """Measurements, and their destinations besides TensorBoard and Prometheus."""

    log_multi_turn: bool = Field(
        default=False, description="multi_turn/*: response lengths with and without tokens of tools, and rounds of each batch", **MUTABLE
    )
    log_passrate: bool = Field(default=False, description="passrate/pass@k of each batch, for k = 1, 2, 4, ...", **MUTABLE)
    passrate_threshold: float = Field(default=1.0, description="a sample passes with a reward of at least this", **RECORDED)
    custom_rollout_log_function_path: str | None = hook("that logs a batch's samples; if it returns true, Myxo does not")
    custom_eval_rollout_log_function_path: str | None = hook("that logs an evaluation; if it returns true, Myxo does not")
    use_wandb: bool = Field(default=False, description="write to W&B, too; needs the extra wandb", **MUTABLE)
    wandb_project: str = Field(default="myxo", min_length=1, description="W&B project", **MUTABLE)
    wandb_group: str | None = Field(default=None, description="W&B group; default: the run's name", **MUTABLE)
    wandb_team: str | None = Field(default=None, description="W&B team; default: your own", **MUTABLE)
    wandb_mode: Literal["online", "offline", "disabled"] = Field(
        default="online",
        description="send at once, by WANDB_API_KEY in the trainer's environment, write files to sync, or turn use_wandb off",
        **MUTABLE,
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

    def _complete(self) -> None:
        if self.wandb_mode == "disabled":
            self.use_wandb = False


_NEVER = ("/proc", "/sys", "/dev", "/run")


class SandboxSection(Section):
    """Where code runs that a model wrote, and within which limits; each holds for one program with all that it starts."""

    sandbox: SandboxKind = Field(
        default="bwrap",
        description="bwrap: isolated by bubblewrap; docker or podman: in a container of sandbox_image; where that cannot be, nothing runs. "
        "none: as the service itself, with its files and its network, which is for code that you trust",
    )
    sandbox_image: str | None = Field(
        default=None, pattern=r"^[^-\s]\S*$", description="image of these containers: one with python3, which is there already"
    )
    sandbox_wall_time: float = Field(default=10, gt=0, description="seconds by the clock", **MUTABLE)
    sandbox_cpu_time: float = Field(default=3, gt=0, description="seconds of processor time, of all processes together", **MUTABLE)
    sandbox_memory_bytes: int = Field(
        default=512 << 20,
        ge=32 << 20,
        description="bytes of memory, of all processes together, with what lies in the work folder",
        **MUTABLE,
    )
    sandbox_processes: int = Field(default=64, ge=1, description="processes and threads at once", **MUTABLE)
    sandbox_output_bytes: int = Field(
        default=1 << 20,
        ge=1024,
        le=64 << 20,
        description="bytes of standard output and standard error, each; more is cut off and ends it",
        **MUTABLE,
    )
    sandbox_disk_bytes: int = Field(
        default=64 << 20, ge=1 << 20, description="bytes of the work folder and of /tmp, each; both are in memory"
    )
    sandbox_packages: bool = Field(default=False, description="the packages of the service's own environment can be imported: numpy, say")
    sandbox_paths: list[Path] = Field(default=[], description="files and folders that can be read inside, under the same path")

    def _misfits(self) -> Iterator[str]:
        contained = self.sandbox in ("docker", "podman")
        if contained != (self.sandbox_image is not None):
            expected = "required: an image with python3" if contained else "belongs to sandbox = docker or podman"
            yield f"sandbox.sandbox_image: {expected}, with sandbox = {self.sandbox}"
        for path in self.sandbox_paths:
            if contained and "," in str(path):
                yield f"sandbox.sandbox_paths: {path}: {self.sandbox} takes no path with a comma"
            if str(path) == "/" or str(path).startswith(_NEVER):
                yield f"sandbox.sandbox_paths: {path}: would show what a sandbox hides; name the folder that is needed"

    def settings(self) -> SandboxSettings:
        """Returns what sandboxes are made of."""
        limits = SandboxLimits(
            wall_s=self.sandbox_wall_time,
            cpu_s=self.sandbox_cpu_time,
            memory_bytes=self.sandbox_memory_bytes,
            processes=self.sandbox_processes,
            output_bytes=self.sandbox_output_bytes,
            disk_bytes=self.sandbox_disk_bytes,
        )
        return SandboxSettings(
            self.sandbox, self.sandbox_image or "", limits, packages=self.sandbox_packages, paths=tuple(self.sandbox_paths)
        )


DUMPS = "debug.load_debug_rollout_data"  # The field that errors about dumps name

STEP, RANK = "{rollout_id}", "{rank}"  # What stands for the step and the rank in the paths of dumps, as slime has it

ProfileTarget = Literal["train_overall", "train_actor", "train_log_probs", "rollout"]


class DebugSection(Section):
    """Halves of a run alone, dumps of what passes between them, profiles of both."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "debug_rollout_only",
            lambda debug, given: given and debug.trains_only,
            "false where batches are read from files (load_debug_rollout_data): then there is nothing to generate",
        ),
        Rule(
            "profile_step_end",
            lambda debug, given: debug.use_pytorch_profiler and given <= debug.profile_step_start,
            "a step after profile_step_start = {0.profile_step_start}",
        ),
        Rule(
            "memory_snapshot_num_steps",
            lambda debug, given: debug.record_memory_history and debug.memory_recorder == "memray" and given is None,
            "the number of steps that memray records",
        ),
        *read_where(lambda d: d.load_debug_rollout_data, "belongs to load_debug_rollout_data", "load_debug_rollout_data_subsample"),
    )

    debug_rollout_only: bool = Field(
        default=False,
        description="generate and score without a trainer: engines keep serving hf_checkpoint, and the trainer's service only counts the "
        "batches, and dumps them",
    )
    ignore_memory_plan: bool = Field(
        default=False, description="start also where a GPU is too small by `myxo plan`, which then is only told", **MUTABLE
    )
    debug_train_only: bool = Field(default=False, description="train without engines and rewards, on load_debug_rollout_data")
    load_debug_rollout_data: str | None = Field(
        default=None,
        min_length=1,
        description="path, with {rollout_id} for the step, of dumped batches, Myxo's or slime's, to train in the place of generated ones; "
        "implies debug_train_only",
    )
    load_debug_rollout_data_subsample: float | None = Field(
        default=None, gt=0, le=1, description="share of each dump's samples that is trained: its first and its last ones, half of each"
    )
    save_debug_rollout_data: str | None = Field(
        default=None,
        description="path with {rollout_id}: each batch, as load_debug_rollout_data reads it; named *.pt in slime's own format",
        **MUTABLE,
    )
    save_debug_train_data: str | None = Field(
        default=None, description="path with {rollout_id} and {rank}: every tensor that a rank's steps read, as safetensors", **MUTABLE
    )
    dump_details: Path | None = Field(
        default=None,
        description="directory for both dumps of every step that have no path of their own: rollout_data/{rollout_id}.pt, train_data/",
        **MUTABLE,
    )

    use_pytorch_profiler: bool = Field(
        default=False, description="trace chosen steps with PyTorch's profiler; traces lie in profile/ of the run's directory", **MUTABLE
    )
    profile_step_start: int = Field(default=10, ge=0, description="the first step that is traced, from 0", **MUTABLE)
    profile_step_end: int = Field(default=12, gt=0, description="the step before which tracing ends", **MUTABLE)
    profile_target: list[ProfileTarget] = Field(
        default=["train_overall"],
        min_length=1,
        description="what is traced: train_overall (all that the trainer does, waits included), train_actor (its optimizer steps), "
        "train_log_probs (its passes before them), rollout (the engines)",
        **MUTABLE,
    )
    profile_engine_steps: int = Field(default=50, gt=0, description="forward passes of each engine that are traced", **MUTABLE)
    record_memory_history: bool = Field(
        default=False,
        description="record the trainer's allocations, and write them when memory runs out or memory_snapshot_num_steps are done",
        **MUTABLE,
    )
    memory_recorder: Literal["torch", "memray"] = Field(
        default="torch",
        description="what records them: PyTorch those on CUDA, memray (a package of its own) those in host memory",
        **MUTABLE,
    )
    memory_snapshot_num_steps: int | None = Field(
        default=None, gt=0, description="steps of this process after which they are written", **MUTABLE
    )
    memory_snapshot_path: str | None = Field(
        default=None,
        pattern=r"^[^/]+$",
        description="end of the files' names, after the rank; default: snapshot.pickle, snapshot.memray",
        **MUTABLE,
    )
    memory_snapshot_dir: Path | None = Field(
        default=None, description="where they are written; default: profile/ in the run's directory", **MUTABLE
    )

    @property
    def trains_only(self) -> bool:
        """Returns whether the run has neither engines nor rewards."""
        return self.debug_train_only or self.load_debug_rollout_data is not None

    @property
    def rollout_dump(self) -> str | None:
        """Returns the template of the batches' files."""
        details = self.dump_details
        return self.save_debug_rollout_data or (None if details is None else f"{details}/rollout_data/{STEP}.pt")

    @property
    def train_dump(self) -> str | None:
        """Returns the template of the tensors' files; each rank writes one of its own."""
        details = self.dump_details
        given = self.save_debug_train_data or (None if details is None else f"{details}/train_data/{STEP}_{RANK}.safetensors")
        if given is None or RANK in given:
            return given
        path = Path(given)
        return str(path.with_name(f"{path.stem}_{RANK}{path.suffix}"))

    def _misfits(self) -> Iterator[str]:
        if self.rollout_dump is not None and self.rollout_dump == self.train_dump:
            yield "debug.save_debug_train_data: the same path as save_debug_rollout_data"
        if self.rollout_dump is not None and self.rollout_dump == self.load_debug_rollout_data:
            yield "debug.load_debug_rollout_data: the same path as save_debug_rollout_data, which would replace what is read"
