"""`[rollout]` and `[episode]`: generation, and how far it may run ahead of training."""

import contextlib
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator

from shared.config.section import FROM_TEXT, HOOK, MUTABLE, RECORDED, ConfigTable, Rule, Section, Table, Words, hook
from shared.config.sglang_flags import plain_name
from shared.config.speculation import Speculation, speculates
from shared.environment import environment_url as address
from shared.hub import hub_names
from shared.runtime.host import Runtime
from shared.schema.message import MAX_SAMPLES, ROLE
from shared.schema.sample import OverlongPolicy

STEPS = "training steps (one rollout batch each), or num_epoch in its place; 0: nothing but the warm start and an evaluation"
"""What `num_rollout` is."""

StopStrings = list[Annotated[str, StringConstraints(min_length=1)]]  # By an empty one an engine ends at its first token

DETERMINISTIC = "enable-deterministic-inference"

AGENTS, GENERATOR = ("agent", "agent_command"), "custom_generate_function_path"
GENERATORS = (GENERATOR, *AGENTS)
"""The fields that put something of the user's in the place of Myxo's own generation; a set of held-out prompts may have its own."""


Command = Annotated[
    list[str],
    BeforeValidator(lambda given: shlex.split(given) if isinstance(given, str) else given),
    Words(lambda words: words[0] if len(words) == 1 else shlex.join(words)),  # one word: a command whose own arguments begin with dashes
]
"""A command line: a list, or text that is split as a shell would."""


def _each_once(names: list[str]) -> list[str]:
    if len(set(names)) < len(names):
        raise ValueError("a name stands there twice")
    return names


Hooks = Annotated[list[Annotated[str, StringConstraints(pattern=HOOK)]], Words(list, adds=True)]
"""Paths of functions that are called one after another: a list, or a flag for each."""


def _engine_url(given: str) -> str:
    """Returns ``http://host:port`` of an address; slime's have no scheme. Raises ValueError."""
    parts = urlsplit(given if "://" in given else f"http://{given}")
    host, further = parts.hostname or "", parts.path.strip("/") or parts.query or parts.fragment or re.search(r"[@\s]", parts.netloc)
    if parts.scheme not in ("http", "https") or not host or not parts.port or further:
        raise ValueError("http://host:port of an SGLang server, without a path or a password")
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port}"


Roles = Annotated[list[Annotated[str, StringConstraints(pattern=ROLE)]], AfterValidator(_each_once)]
"""The names of those that play a rollout together."""


_RESHAPING = {"min_p": 0, "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "min_new_tokens": 0, "logit_bias": None,
              "regex": None, "ebnf": None, "json_schema": None, "structural_tag": None}  # fmt: skip
"""SGLang's sampling parameters that requests do not name and that change what is sampled → the value that changes nothing."""


def _preferred(given: Any) -> list[str]:
    """Returns which of SGLang's ``preferred-sampling-params`` change what is sampled; none of what is no JSON, which is reported."""
    with contextlib.suppress(ValueError):
        values = given if isinstance(given, dict) else json.loads(str(given))
        values = values if isinstance(values, dict) else {}
        return [f"{name} = {values[name]}" for name, neutral in _RESHAPING.items() if values.get(name, neutral) not in (None, neutral)]
    return []


GPUS_OF_MACHINE = 8  # GPUs of a machine where a run does not say how many: slime's number, too

WorkerType = Literal["regular", "prefill", "decode", "encoder", "placeholder"]
"""The kinds of groups of engines in slime's words; a placeholder has GPUs and no engines."""

APART: tuple[WorkerType, ...] = ("prefill", "decode")
TRANSFER = "disaggregation-transfer-backend"

MODEL_NAME = r"^[A-Za-z][A-Za-z0-9_.-]{0,47}$"  # The pattern of a model's name: requests, instances and functions know it by that


class EngineGroup(ConfigTable):
    """Engines of one shape. ``num_gpus``: of all of them, ``replicas`` x ``num_gpus_per_engine``; a CPU's engines count the same."""

    worker_type: WorkerType = "regular"
    num_gpus: int = Field(default=0, ge=0)
    replicas: int = Field(default=0, ge=0)
    num_gpus_per_engine: int = Field(default=1, gt=0)
    sglang: Table = {}

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        size = 1 if self.worker_type == "placeholder" else self.num_gpus_per_engine
        if not (self.num_gpus or self.replicas):
            raise ValueError("expected num_gpus or replicas, at least 1")
        if self.num_gpus % size or (self.replicas and self.num_gpus not in (0, self.replicas * size)):
            wanted = f"{self.replicas} x {size}" if self.replicas else f"a multiple of num_gpus_per_engine = {size}"
            raise ValueError(f"num_gpus = {self.num_gpus}, expected {wanted}")
        self.num_gpus, self.replicas = self.num_gpus or self.replicas * size, self.replicas or self.num_gpus // size
        return self


class FrozenModel(ConfigTable):
    """A model that generates for functions, rewards and agents and is never trained."""

    hf_checkpoint: Annotated[Path, AfterValidator(hub_names.checked_model)] | None = None
    device: Literal["auto", "cpu", "cuda"] | None = None
    replicas: int = Field(default=1, gt=0)
    num_gpus_per_engine: int = Field(default=1, gt=0)
    sglang: Table = {}
    groups: list[EngineGroup] = []

    @model_validator(mode="after")
    def _has_one_shape_or_groups(self) -> Self:
        if self.groups and (self.replicas, self.num_gpus_per_engine) != (1, 1):
            raise ValueError("groups say how many engines there are and of which shape; leave replicas and num_gpus_per_engine out")
        return self


def flag_size(flags: Mapping[str, Any], name: str, default: int = 1) -> int:
    """Returns the number of one of SGLang's flags, by its plain name; 1 for what is none, which its own check refuses."""
    try:
        return max(1, int(str(flags.get(name, default))))
    except ValueError:
        return 1


class RolloutSection(Section):
    """Generation, and how far it may run ahead of training."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule("rollout_top_k", lambda _, given: given == 0, "at least 1, or -1 for all tokens"),
        Rule(
            ("over_sampling_batch_size", "rollout_window"),
            lambda rollout, given: given is not None and given < rollout.rollout_batch_size,
            "{1} groups do not fill a batch; rollout_batch_size = {0.rollout_batch_size}",
        ),
        Rule("rollout_num_gpus", lambda rollout, given: iter(() if given in (None, rollout.all_gpus) else (rollout.gpus_in_words,))),
        Rule(
            "rollout_replicas",
            lambda rollout, given: rollout.engine_groups and given != sum(group.replicas for group in rollout.engines("")),
            "{1}, but engine_groups say how many engines there are; leave it out",
        ),
        Rule(
            ("engine_groups", "models", "rollout_replicas"),
            lambda rollout, given: rollout.external_engines and given and given != len(rollout.external_engines),
            "{1}, but external_engines say which engines there are, and none is started beside them; leave it out",
        ),
        Rule("engine_groups", lambda _, given: given and _unlike(given)),
        Rule("models", lambda rollout, given: _misfits_of_models(rollout, given)),
        Rule(
            "eval_replicas",
            lambda rollout, given: given and given >= rollout.rollout_replicas,
            "fewer than rollout_replicas = {0.rollout_replicas}, of which they are a part: the others train",
        ),
        Rule(
            "rollout_max_prompt_len",
            lambda rollout, given: None not in (given, rollout.rollout_max_context_len) and given >= rollout.rollout_max_context_len,
            "below rollout_max_context_len = {0.rollout_max_context_len}: a response has a token at least",
        ),
        Rule(
            "rollout_window",
            lambda rollout, given: given is not None and rollout.rollout_order != "windowed_fifo",
            "belongs to rollout_order = windowed_fifo, not to {0.rollout_order}",
        ),
        Rule(
            "alignment",
            lambda rollout, given: given != "off" and (rollout.external_engines or rollout.engine_flags[DETERMINISTIC] in (None, False)),
            "off with external_engines, or where sglang turns enable-deterministic-inference off",
        ),
        Rule(
            "sglang",
            lambda rollout, _: (
                not (rollout.external_engines or rollout.engine_flags.get("disable-radix-cache") is False)
                and rollout.engine_flags.get("enable-hierarchical-cache")
                and (rollout.seeded or rollout.in_flight_on_push == "retract")
            ),
            "disable-radix-cache = false beside enable-hierarchical-cache: engines keep no prefixes with in_flight_on_push = retract, nor "
            "with deterministic inference, unless it says so",
        ),
        Rule(
            "rollout_precision",
            lambda rollout, given: given != "checkpoint" and rollout.external_engines,
            "checkpoint with external_engines: they serve the checkpoint that they were started with; name that in hf_checkpoint",
        ),
        Rule(
            "speculation",
            lambda rollout, given: given not in (None, "off") and rollout.external_engines,
            "none with external_engines: they speculate as whoever runs them has started them",
        ),
        Rule(
            "speculation",
            lambda rollout, given: given == "off" and any(map(speculates, rollout.group_flags)),
            "another than off, or no speculative-algorithm in sglang, of the run or of a group of engines",
        ),
        Rule(
            ("agent", "agent_command"),
            lambda rollout, given: given and (rollout.custom_generate_function_path or rollout.rollout_function_path),
            "only one of agent, agent_command, custom_generate_function_path and rollout_function_path can generate",
        ),
        Rule(
            "rollout_sample_hook_path",
            lambda rollout, given: given and (rollout.agent or rollout.agent_command),
            "samples of agents are those of their sessions, which no function changes; leave it out",
        ),
        Rule("agent_command", lambda rollout, given: given and rollout.agent, "only one of agent and agent_command can generate"),
        Rule(("agent_command", "agent_service"), lambda _, given: given and not given[0], "a program, then its arguments"),
        Rule("agent_network", lambda _, given: given in ("host", "none"), "a network of its own, with the gateways on it: not the host's"),
        Rule(
            "min_rollouts",
            lambda rollout, given: given is not None and given > rollout.n_samples_per_prompt,
            "a group has n_samples_per_prompt = {0.n_samples_per_prompt} rollouts",
        ),
        Rule(
            "surplus_rollouts",
            lambda rollout, given: given + rollout.n_samples_per_prompt > MAX_SAMPLES,
            "with n_samples_per_prompt = {0.n_samples_per_prompt} at most " + f"{MAX_SAMPLES} rollouts",
        ),
        Rule(
            "num_rollout",
            lambda rollout, _: "num_rollout" not in rollout.model_fields_set and rollout.num_epoch is None,
            f"required: {STEPS}",
        ),
    )

    num_rollout: int = Field(default=0, ge=0, description=STEPS, **MUTABLE)
    num_epoch: int | None = Field(
        default=None,
        gt=0,
        description="passes over the prompts, where num_rollout is not given: num_epoch x (prompts // rollout_batch_size) steps; with "
        "save_interval and eval_interval, each one's end is saved and evaluated, too",
        **MUTABLE,
    )
    num_rollout_per_epoch: int | None = Field(default=None, gt=0, description="steps of an epoch; num_epoch sets it", **MUTABLE)
    rollout_batch_size: int = Field(gt=0, le=65536, description="prompts (groups) a step")
    n_samples_per_prompt: int = Field(default=1, gt=0, le=MAX_SAMPLES, description="samples a group")
    min_rollouts: int | None = Field(
        default=None,
        gt=0,
        description="rollouts that a group must have left to be trained, where functions or agents fail for the others; default: half of "
        "n_samples_per_prompt, at least 2",
    )
    surplus_rollouts: int = Field(
        default=0,
        ge=0,
        description="rollouts that a group of functions, agents or episodes begins beyond n_samples_per_prompt: those that end first are "
        "its own, and the others are aborted; it favours short ones",
    )
    max_staleness: int = Field(default=1, ge=0, description="bound on version trained - oldest trained token's version; 0 = synchronous")
    staleness_policy: Literal["drop", "requeue", "continue", "mask"] = Field(
        default="drop",
        description="groups over the bound: drop them for new prompts, generate them anew, continue with them under the new version, "
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
    rollout_function_path: str | None = hook("that draws prompts and returns a rollout's groups, in the place of Myxo's own loop")
    dynamic_sampling_filter_path: str | None = Field(
        default=None,
        pattern=rf"^nonzero_std$|{HOOK}",
        description="keeps or drops a scored group: nonzero_std (rewards that are not all equal) or the path of a function",
    )
    rollout_sample_filter_path: str | None = hook("that takes samples of a scored group out of the loss")
    rollout_all_samples_process_path: str | None = hook("that sees every scored group, kept or not")
    buffer_filter_path: str | None = hook("that chooses a batch's groups among those that are ready")
    custom_generate_function_path: str | None = Field(
        default=None, pattern=HOOK, description="package.module:async function that generates one sample, or several out of one rollout"
    )
    rollout_sample_hook_path: Hooks = Field(
        default=[],
        description="package.module:function(args, sample, *, rollout_id, evaluation), one or several: each sees every generated sample "
        "before it is scored, and may return another in its place; the flag can be given several times",
    )
    missing_log_probs: Literal["refuse", "recompute"] | None = Field(
        default=None,
        description="samples of functions that keep no rollout_log_probs: refuse them, or compute the trainer's own in their place; "
        "default: recompute where both are the same (max_staleness = 0, update_weights_interval = 1) or off_policy = none, and no use_tis",
    )
    agent: str | None = hook(
        "called with (data, base_url, api_key): an agent that plays one rollout over the gateway; it returns the reward, or None"
    )
    agent_command: Command = Field(
        default=[],
        description="command line, as text or a list, of an agent in place of a function: data on its standard input; base URL and key in "
        "OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY; the reward is the last line that it prints",
    )
    agent_roles: Roles = Field(
        default=[],
        description="names of those that play a rollout together, each with a key and a reward of its own, compared within its role",
    )
    agent_image: str | None = Field(
        default=None,
        pattern=r"^[^-\s]\S*$",
        description="image of the containers in which agent_command runs, each rollout in one of its own; default: none, it runs as the "
        "rollout service does",
    )
    agent_runtime: Runtime = Field(
        default="docker", description="command line that runs these containers, where rollout services run", **MUTABLE
    )
    agent_network: str = Field(
        default="myxo-agents",
        pattern=r"^[A-Za-z0-9][\w.-]*$",
        description="network that these containers are on, and no other: one on which they reach gateways",
        **MUTABLE,
    )
    agent_memory_bytes: int = Field(
        default=1 << 30, ge=16 << 20, description="bytes of memory of each of these containers, with what lies in its /tmp", **MUTABLE
    )
    agent_cpus: float = Field(default=1.0, gt=0, description="processors of each of these containers", **MUTABLE)
    agent_processes: int = Field(default=256, ge=4, description="processes and threads of each of these containers at once", **MUTABLE)
    agent_options: Table = Field(default={}, description="what an agent is told besides its task, as options of its data")
    agent_service: Command = Field(
        default=[],
        description="command line of a server that agents speak to, such as one at agent_options.url: `myxo up` starts it beside the run, "
        "and anew where it dies",
        **MUTABLE,
    )
    agent_timeout: float = Field(default=600, gt=0, description="seconds for one rollout of an agent", **MUTABLE)
    agent_tries: int = Field(
        default=3, gt=0, description="sessions that a rollout may take: an agent that fails begins anew in a fresh one", **MUTABLE
    )
    agent_workers: int | None = Field(
        default=None,
        gt=0,
        description="processes for agent in a rollout service, each with many rollouts; default: half of the cores among all replicas",
        **MUTABLE,
    )
    agent_concurrency: int | None = Field(
        default=None,
        gt=0,
        description="agents that a rollout service runs at once; default: those of all groups that it has in hand, of agent_command 64",
        **MUTABLE,
    )
    generate_workers: int = Field(
        default=2, gt=0, description="processes for custom_generate_function_path in a rollout service, each with many rollouts", **MUTABLE
    )
    rollout_temperature: float = Field(
        default=1.0, ge=0, description="sampling temperature; the trainer divides logits by it too", **RECORDED
    )
    rollout_top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus sampling")
    rollout_top_k: int = Field(default=-1, ge=-1, description="top-k sampling; -1 = off")
    rollout_max_context_len: int | None = Field(
        default=None,
        gt=1,
        description="tokens of prompt and response; an agent's turns each have what the task's prompt leaves of it; rollout_max_prompt_len "
        "is one less by default",
    )
    rollout_max_prompt_len: int | None = Field(default=None, gt=0, description="tokens of a prompt; longer ones: see overlong_prompts")
    rollout_max_response_len: int = Field(default=1024, gt=0, description="tokens generated at most")
    overlong_samples: OverlongPolicy = Field(
        default="mask",
        description="a sample of more tokens than max_tokens_per_gpu x context_parallel_size, as an agent may make: truncate trains the "
        "beginning of its response, mask nothing of it (its reward counts in the group), drop gives its group up, alone trains it "
        "whole, in a micro-batch of its own, as slime does",
    )
    rollout_skip_special_tokens: bool | None = Field(
        default=None,
        description="leave special tokens out of responses' text; default: yes, but for functions of one's own, as slime has it",
    )
    rollout_stop: StopStrings = Field(default=[], max_length=32, description="stop strings; SGLang takes 32")
    rollout_stop_token_ids: list[int] = Field(default=[], description="stop token ids")
    rollout_replicas: int = Field(
        default=1,
        gt=0,
        description="rollout services that `myxo up` starts; default: on a CPU 1, else as many as fill the GPUs that the trainer leaves, "
        "colocated those that it has",
        **MUTABLE,
    )
    eval_replicas: int = Field(
        default=0, ge=0, description="of rollout_replicas, how many take held-out prompts alone, and the others none", **MUTABLE
    )
    external_engines: Annotated[list[Annotated[str, AfterValidator(_engine_url)]], AfterValidator(_each_once)] = Field(
        default=[],
        description="http://host:port of SGLang servers that somebody else runs; `myxo up` starts a rollout service for each and no engine",
        **MUTABLE,
    )
    external_engine_key_variable: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="the environment variable of rollout services that holds the API key of external_engines",
        **MUTABLE,
    )
    rollout_device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="where the engine runs")
    rollout_num_gpus: int | None = Field(
        default=None,
        gt=0,
        description="GPUs of all engines: rollout_replicas x rollout_num_gpus_per_engine; default: what they make it",
        **MUTABLE,
    )
    rollout_num_gpus_per_engine: int = Field(default=1, gt=0, description="GPUs of an engine on all its nodes: tensor parallel x pp-size")
    gpus_per_node: int | None = Field(
        default=None,
        gt=0,
        description="GPUs of a machine, by which an engine's nodes are counted where sglang.nnodes is not given: "
        f"rollout_num_gpus_per_engine // gpus_per_node, at least 1; default: {GPUS_OF_MACHINE}",
    )
    rollout_concurrency: int | None = Field(
        default=None,
        gt=0,
        description="samples that a replica generates at once: one that ends makes room for one of the next group; default: a batch's, at "
        "least 256, then more while that makes the engine faster, fewer where it lacks memory",
        **MUTABLE,
    )
    sglang_server_concurrency: int | None = Field(default=None, gt=0, description="slime's name of rollout_concurrency", **MUTABLE)
    engine_groups: list[EngineGroup] = Field(
        default=[],
        description="tables [[rollout.engine_groups]]: the policy's engines where these are of unlike shape, each group with num_gpus or "
        "replicas, num_gpus_per_engine, and sglang, flags over the run's (docs/several-models.md)",
        **MUTABLE,
    )
    models: dict[str, Annotated[FrozenModel, FROM_TEXT]] = Field(
        default={},
        description="tables [rollout.models.NAME]: models that are never trained and serve functions, rewards and agents by their names "
        "(docs/several-models.md)",
        **MUTABLE,
    )
    policy_name: str = Field(default="policy", pattern=MODEL_NAME, description="name of the model that is trained, beside the others'")
    prefill_num_servers: int | None = Field(
        default=None,
        gt=0,
        description="of the policy's engines, how many only prefill, for the others, which decode; becomes engine_groups",
    )
    sglang_config: Path | None = Field(
        default=None, description="slime's YAML file of models and groups of engines; becomes models and engine_groups"
    )
    in_flight_on_push: Literal["in_place", "retract", "abort"] = Field(
        default="in_place",
        description="what running generations do across a weight push: keep their KV, recompute it, or stop and resume; "
        "with pp-size > 1 always abort",
    )
    speculation: Speculation | None = Field(
        default=None,
        description="speculative decoding: off, mtp (layers of the checkpoint that draft), draft (speculative-draft-model-path in sglang), "
        "ngram, or auto: the best of these that the checkpoint has, while it is faster than none; default: as sglang has it",
        **MUTABLE,
    )
    alignment: Literal["off", "close", "bitwise"] = Field(
        default="off",
        description="how far engines and trainer compute alike: close (deterministic kernels on both sides, sampling by seeds), or bitwise "
        "(the same bits: dense models in float32 on CPUs)",
    )
    rollout_precision: Literal["checkpoint", "fp8", "int4"] = Field(
        default="checkpoint",
        description="engines' weights: as hf_checkpoint has them, or of a plain one blocks of 8-bit floats or groups of 4-bit integers: "
        "the trainer keeps the plain weights and quantizes each push",
    )
    engine_start_timeout: float = Field(
        default=600,
        gt=0,
        description="seconds for an engine to answer its first request; work waits 600 s for one to serve, or as long as this if more",
        **MUTABLE,
    )
    generate_timeout: float = Field(default=14400, gt=0, description="seconds for one sample's generation, or function's call", **MUTABLE)
    sglang: Table = Field(default={}, description="SGLang's own flags without their dashes, passed through verbatim")

    @property
    def patience(self) -> float:
        """Returns the seconds for which work waits for an engine that serves the weights it is for: ten minutes, more where engines start
        more slowly, and at most `generate_timeout`."""
        return min(self.generate_timeout, max(600, self.engine_start_timeout))

    @property
    def fewest_rollouts(self) -> int:
        """Returns the number of rollouts that a group has at least: some may have failed."""
        n = self.n_samples_per_prompt
        return min(n, max(2, -(-n // 2)) if self.min_rollouts is None else self.min_rollouts)

    def _complete(self) -> None:
        given = set(self.model_fields_set)
        if self.external_engines:
            self.rollout_num_gpus, self.rollout_device = None, "cpu"  # they take no GPU of the run's machines
            self.model_fields_set.intersection_update(given)  # what is taken for them was not given
            if "rollout_replicas" not in given:
                self.rollout_replicas = len(self.external_engines)
        if self.engine_groups and "rollout_replicas" not in given:
            self.rollout_replicas = max(1, sum(group.replicas for group in self.engines("")))
        if self.rollout_num_gpus is not None and "rollout_replicas" not in given and not self.engine_groups:
            frozen = sum(group.num_gpus for name in self.models for group in self.groups_of(name))
            self.rollout_replicas = max(1, (self.rollout_num_gpus - frozen) // self.rollout_num_gpus_per_engine)
        if self.sglang_server_concurrency is not None and "rollout_concurrency" not in given:
            self.rollout_concurrency = self.sglang_server_concurrency
        if self.rollout_max_context_len is not None and "rollout_max_prompt_len" not in given:
            self.rollout_max_prompt_len = self.rollout_max_context_len - 1

    def groups_of(self, model: str = "") -> list[EngineGroup]:
        """Returns the groups of a model's engines, with the flags that each has over the run's. ``model``: empty for the policy."""
        own = self.models.get(model)
        if own is not None:
            groups = own.groups or [EngineGroup(replicas=own.replicas, num_gpus_per_engine=own.num_gpus_per_engine)]
            return [group.model_copy(update={"sglang": flags_over(own.sglang, group.sglang)}) for group in groups]
        return self.engine_groups or [EngineGroup(replicas=self.rollout_replicas, num_gpus_per_engine=self.rollout_num_gpus_per_engine)]

    def engines(self, model: str = "") -> list[EngineGroup]:
        """Returns those of `groups_of` that have engines."""
        return [group for group in self.groups_of(model) if group.worker_type != "placeholder"]

    @property
    def group_flags(self) -> list[dict[str, Any]]:
        """Returns SGLang's own flags of each group of the policy's engines, by their names as SGLang spells them."""
        groups = [flags_over(self.sglang, group.sglang) for group in self.engines()]
        return [{plain_name(name): value for name, value in flags.items()} for flags in groups]

    @property
    def all_groups(self) -> list[tuple[str, EngineGroup]]:
        """Returns each group with its model's name, the policy's first."""
        return [(name, group) for name in ("", *self.models) for group in self.groups_of(name)]

    @property
    def all_gpus(self) -> int:
        """Returns the GPUs of all models' engines, and those that are only reserved."""
        return sum(group.num_gpus for _, group in self.all_groups)

    @property
    def gpus_in_words(self) -> str:
        """Returns what `all_gpus` is the sum of."""
        if not (self.models or self.engine_groups):
            return f"rollout_replicas x rollout_num_gpus_per_engine = {self.rollout_replicas} x {self.rollout_num_gpus_per_engine}"
        parts = (f"{name or self.policy_name} {group.num_gpus} ({group.worker_type})" for name, group in self.all_groups)
        return f"{self.all_gpus}, the GPUs of all groups: {' + '.join(parts)}"

    def with_checkpoints(self, change: Callable[[str, Path], Path]) -> Self:
        """Returns the section with ``change`` called for the checkpoint of each frozen model that has one, with the field it stands in."""
        models = {
            name: model
            if (path := model.hf_checkpoint) is None
            else model.model_copy(update={"hf_checkpoint": change(f"rollout.models.{name}.hf_checkpoint", path)})
            for name, model in self.models.items()
        }
        return self.model_copy(update={"models": models}) if models else self

    @property
    def engine_flags(self) -> dict[str, Any]:
        """Returns SGLang's own flags by their names as SGLang spells them."""
        return self.alignment_flags | {plain_name(name): value for name, value in self.sglang.items()}

    @property
    def alignment_flags(self) -> dict[str, Any]:
        """Returns the flags of SGLang's that `alignment` stands for."""
        return {} if self.alignment == "off" else {DETERMINISTIC: True}

    @property
    def seeded(self) -> bool:
        """Returns whether engines generate by seeds; requests without a seed of their own would then all have the same one."""
        return any(self.engine_flags.get(name) not in (None, False) for name in (DETERMINISTIC, "rl-on-policy-target"))

    @property
    def worker_type(self) -> WorkerType:
        """Returns the kind of these engines: of a config of one group's (`RunConfig.of_engines`)."""
        return self.engine_groups[0].worker_type if len(self.engine_groups) == 1 else "regular"

    @property
    def nodes_per_engine(self) -> int:
        """Returns the number of nodes that one engine is on: SGLang's ``nnodes``, which follows from its GPUs as with slime."""
        if self.external_engines:
            return 1
        derived = max(1, self.rollout_num_gpus_per_engine // (self.gpus_per_node or GPUS_OF_MACHINE))
        return flag_size(self.engine_flags, "nnodes", default=derived)

    @property
    def stages_per_engine(self) -> int:
        """Returns the number of pipeline stages of one engine: SGLang's ``pp-size``."""
        return 1 if self.external_engines else flag_size(self.engine_flags, "pp-size")

    @property
    def tensor_parallel(self) -> int:
        """Returns the number of GPUs that hold the tensors of a stage of an engine together."""
        return max(1, self.rollout_num_gpus_per_engine // self.stages_per_engine)

    @property
    def pause_on_push(self) -> Literal["in_place", "retract", "abort"]:
        """Returns what running generations of these engines do across a push: those with stages cannot pause otherwise than by abort."""
        return "abort" if self.stages_per_engine > 1 else self.in_flight_on_push

    @property
    def own_speculation(self) -> list[str]:
        """Returns the field that has engines speculate, whatever SGLang's flags are; none where it does not."""
        return [] if self.speculation in (None, "off") else [f"rollout.speculation = {self.speculation}"]

    @property
    def truncates(self) -> list[str]:
        """Returns the settings by which engines keep a part of the vocabulary at each place, and sample from that."""
        found = [f"rollout_top_p = {self.rollout_top_p:g}"] if self.rollout_top_p < 1 else []
        found += [f"rollout_top_k = {self.rollout_top_k}"] if self.rollout_top_k > 0 else []
        return found + [name for name in self.sampled_otherwise if ": min_p = " in name]

    @property
    def most_kept(self) -> int:
        """Returns how many kept tokens of a place an engine returns at most; it ends a request that has more."""
        return min((int(flags.get("sampling-mask-max-tokens", 4096)) for flags in self.group_flags), default=4096)

    @property
    def sampled_otherwise(self) -> list[str]:
        """Returns the settings, beside `rollout_top_p` and `rollout_top_k`, by which engines sample from another distribution than
        softmax(logits / rollout_temperature)."""
        found: list[str] = []
        for key, value in (flag for flags in self.group_flags for flag in flags.items()):
            field = f"rollout.{'sglang' if self.engine_flags.get(key) == value else 'engine_groups.sglang'}.{key}"
            match key:
                case "preferred-sampling-params":
                    found += [f"{field}: {name}" for name in _preferred(value)]
                case "speculative-accept-threshold-single" | "speculative-accept-threshold-acc" if str(value) not in ("1", "1.0"):
                    found.append(f"{field} = {value}")
                case "enable-strict-thinking" if value:
                    found.append(field)
        return list(dict.fromkeys(found))

    @property
    def makers(self) -> list[str]:
        """Returns the fields by which something of the user's makes the samples."""
        return [name for name in (*GENERATORS, "rollout_function_path") if getattr(self, name)]


def transfer_backend(rollout: RolloutSection, device: str) -> str:
    """Returns by what prefill engines on ``device`` send keys and values: as the run says; else nixl, which takes whatever way the machines
    have, mooncake where InfiniBand devices are named, and on a CPU mooncake over TCP."""
    flags = rollout.engine_flags
    by_itself = "mooncake" if flags.get("disaggregation-ib-device") else "nixl"
    return str(flags.get(TRANSFER) or (by_itself if device == "cuda" else "mooncake_tcp"))


def flags_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Returns SGLang's flags with others over them, however each is spelled."""
    given = {plain_name(name) for name in above}
    return {**{name: value for name, value in below.items() if plain_name(name) not in given}, **above}


def _unlike(groups: list[EngineGroup]) -> str:
    """Returns what is wrong with the kinds of one model's groups; empty where nothing is."""
    kinds = {group.worker_type for group in groups} - {"placeholder"}
    if not kinds:
        return "a group with engines: placeholders only reserve GPUs"
    if "regular" in kinds and len(kinds) > 1:
        return f"regular groups alone, or prefill and decode ones: {', '.join(sorted(kinds))} do not go together in one model"
    counts = {kind: sum(group.replicas for group in groups if group.worker_type == kind) for kind in APART}
    if any(counts.values()) and not all(counts.values()):
        return f"at least one engine of both kinds: there are {counts['prefill']} of prefill and {counts['decode']} of decode"
    return ""


def _misfits_of_models(rollout: RolloutSection, models: dict[str, FrozenModel]) -> Iterator[str]:
    for name, model in models.items():
        if not re.match(MODEL_NAME, name):
            yield f"{name!r}: a name of letters, digits, '-', '_' and '.', which begins with a letter"
        if name == rollout.policy_name:
            yield f"{name!r} is policy_name, the model that is trained: give this one another name"
        if model.groups and (wrong := _unlike(model.groups)):
            yield f"{name}: {wrong}"


class EpisodeSection(Section):
    """Rollouts of several turns, between the model and an environment."""

    rules: ClassVar[tuple[Rule, ...]] = (Rule("episode_url", lambda _, given: address.problem(given)),)

    episode_url: str | None = Field(
        default=None,
        description="an environment that steps, http://host:port or nats:NAME: each rollout is one of its episodes, and its rewards count",
        **MUTABLE,
    )
    episode_reward: Literal["sum", "last"] = Field(default="sum", description="an episode's reward: the sum of its steps', or the last one")
    episode_turns: int = Field(default=16, gt=0, description="turns of an episode at most")
    episode_turn_tokens: int | None = Field(
        default=None, gt=0, description="tokens of one turn at most; default: what rollout_max_response_len leaves"
    )
    episode_timeout: float = Field(default=30, gt=0, description="seconds for each answer to reset and step", **MUTABLE)
    episode_control_tokens: Literal["text", "as_written"] = Field(
        default="text",
        description="what control tokens are that the environment's messages and tools spell, through the chat template: text, encoded as "
        "such, or control tokens (as_written)",
    )
