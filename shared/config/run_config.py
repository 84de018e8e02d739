"""The run's config: pydantic sections, and what contradicts each other over them. `shared.config.config_reading` reads one.

Field names are the flags' names (slime's, and Megatron's where the trainer has them) with underscores; each is unique over all
sections, so that every field is also a flag (`shared.config.flags`). The resolved config is frozen in the bus when the run is created;
services read it from there.
"""

import functools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ValidationError

from shared.config.algorithm import AlgorithmSection
from shared.config.data_sections import REASONING_GYM_SOURCE, CurriculumSection, DataSection, ModelSection, SftSection
from shared.config.eval_section import EvalSection
from shared.config.reward_section import CUSTOM, JUDGE, TOURNAMENT, RewardSection
from shared.config.rollout_section import AGENTS, APART, GENERATOR, GENERATORS, MODEL_NAME, EpisodeSection, RolloutSection, flags_over
from shared.config.section import Rule, Section
from shared.config.service_sections import (
    STEP,
    BusSection,
    ConsoleSection,
    DebugSection,
    GatewaySection,
    IngestSection,
    MonitoringSection,
    RunSection,
    SandboxSection,
    StoreSection,
    TinkerSection,
)
from shared.config.speculation import ALGORITHM
from shared.config.trainer_section import TrainerSection, WeightsSection
from shared.data import data_files
from shared.hub import hub_names
from shared.rewards.names import GIVEN, REASONING_GYM
from shared.runtime.errors import nearest
from shared.runtime.safe_text import without_credentials
from shared.schema.sample import NO_LIMIT

MODEL_FIELDS = ("hf_checkpoint", "critic_load")  # Fields that hold the path of a model, or its name on the hub

CORES_OF_GATEWAY, MOST_GATEWAYS = 8, 8
"""How many cores of the machine there are for each gateway, and the most gateways, where the run does not say how many."""


_BALANCES = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate")
_REPLAYS = ("trainer.use_rollout_routing_replay", "trainer.use_routing_replay")


def _unknown_models(servers: Mapping[str, str], models: list[str]) -> Iterator[str]:
    for name, given in servers.items():
        if re.match(MODEL_NAME, given) and given not in models:
            known = nearest(given, models) if models else "there is none"
            yield f"{name}: {given!r} is neither http://host:port nor a model of [rollout.models]; {known}"


class RunConfig(Section):
    """The whole config of a run, section by section."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("rollout.external_engine_key_variable", "weights.update_weight_engine_dir", "weights.external_group_backend"),
            lambda run, given: given not in (None, "auto") and not run.rollout.external_engines,
            "belongs to rollout.external_engines, and there are none; leave it out",
        ),
        Rule(
            "rollout.missing_log_probs",
            lambda run, given: given == "recompute" and run.log_probs_reader,
            "recompute, but {2}; the trainer's own stand in with max_staleness = 0 and update_weights_interval = 1, or off_policy = none",
        ),
        Rule(
            "gateway.gateway_replicas",
            lambda run, _: run.has_agents and not run.gateways,
            "0, and agents ask the model through a gateway; use at least 1",
        ),
        Rule(
            "rollout.agent_roles",
            lambda run, given: given and not (run.rollout.agent or run.rollout.agent_command),
            "no agent plays the rollouts; use agent or agent_command",
        ),
        Rule(
            "rollout.agent_service",
            lambda run, given: given and not run.has_agents,
            "no agent of this run speaks to it; with agent = shared.agents.http_agent:play one does",
        ),
        Rule(
            "rollout.rollout_sample_hook_path",
            lambda run, given: given and run.episode.episode_url,
            "samples of episodes are those of their turns, which no function changes; leave it out",
        ),
        Rule(
            "rollout.surplus_rollouts",
            lambda run, given: given and not (set(run.rollout.makers) & set(GENERATORS) or run.episode.episode_url),
            "{1}, but rollouts are aborted one by one only where agents, episodes or custom_generate_function_path make them; use "
            "over_sampling_batch_size for more groups",
        ),
        Rule(
            "episode.episode_url",
            lambda run, given: iter(run.rollout.makers if given is not None else ()),
            "rollouts are made in one way: leave {2} out",
        ),
        Rule(
            _REPLAYS,
            lambda run, given: given and str(run.trainer.megatron.get("moe_router_fusion")).lower() == "true",
            "true, but trainer.megatron.moe_router_fusion chooses in a kernel that takes no choice; leave it out",
        ),
        Rule(
            _REPLAYS[0],
            lambda run, given: given and run.has_agents,
            "true, but the sessions of agents do not report the experts; use use_routing_replay",
        ),
        Rule(
            _REPLAYS[0],
            lambda run, given: given and run.ingest.ingest_groups != "off",
            "true, but groups from outside do not report the experts; use use_routing_replay",
        ),
        Rule(  # a prefix that comes back from the host lies in other slots, where the experts of other tokens stand
            _REPLAYS[0],
            lambda run, given: given and run.rollout.engine_flags.get("enable-hierarchical-cache"),
            "true, but prefixes that rollout.sglang.enable-hierarchical-cache brings back have lost their experts",
        ),
        Rule(
            _REPLAYS[0],
            lambda run, given: given and run.rollout.engine_flags.get("enable-return-routed-experts") is False,
            "true, but rollout.sglang.enable-return-routed-experts is false; leave it out",
        ),
        Rule("trainer.support_replay", lambda run, given: run.support_obstacles if given == "on" else (), "on, but {2}; use auto or off"),
        Rule(
            "data.multimodal_keys",
            lambda run, given: run.picture_obstacles if given is not None else (),
            "none: pictures are not shown where {2}",
        ),
        Rule(
            "trainer.trainer_backend",
            lambda run, given: run.tinker.tinker_endpoint and given != "megatron",
            "megatron where commands come from outside (myxo serve)",
        ),
        Rule(
            ("trainer.pipeline_model_parallel_size", "trainer.actor_num_nodes"),
            lambda run, given: run.tinker.tinker_endpoint and given > 1,
            "1 where commands come from outside (myxo serve)",
        ),
        Rule(
            (
                *("trainer.colocate", "rollout.external_engines", "rollout.models", "rollout.num_rollout", "sft.sft_data"),
                *("trainer.custom_megatron_init_path", "trainer.custom_megatron_before_log_prob_hook_path"),
                "trainer.custom_megatron_before_train_step_hook_path",
            ),
            lambda run, given: run.tinker.tinker_endpoint and given,
            "left out where commands come from outside (myxo serve)",
        ),
        Rule(
            "trainer.megatron",
            lambda run, given: run.tinker.tinker_endpoint and ", ".join(n for n in _BALANCES if str(given.get(n) or 0) not in ("0", "0.0")),
            "without {2} where commands come from outside (myxo serve)",
        ),
        Rule("trainer.lend_gpus", lambda run, given: run.lending_obstacles if given else (), "true, but {2}; leave one of them out"),
        Rule(
            "algorithm.opd_teacher_load",
            lambda run, given: given is not None and run.trainer.rounded_by,
            "none with {2}, as the trainer would round the teacher, too; a server of opd_teachers does not",
        ),
        Rule("algorithm.opd_teachers", lambda run, given: _unknown_models(given, list(run.rollout.models))),
        Rule("reward.judge_url", lambda run, given: _unknown_models({JUDGE: given or ""}, list(run.rollout.models))),
        Rule(
            "ingest.ingest_groups",
            lambda run, given: given != "off" and run.algorithm.opd_teachers,
            "{1}, but groups from outside lack the log-probs of opd_teachers; leave it off",
        ),
        Rule(
            "ingest.ingest_groups",
            lambda run, given: given == "alone" and run.rollout.rollout_function_path is not None,
            "alone, but rollout_function_path generates training groups as well; use beside, or leave that out",
        ),
        Rule(
            ("debug.save_debug_rollout_data", "debug.save_debug_train_data"),
            lambda run, given: given and STEP not in given and (run.rollout.num_rollout != 1 or run.rollout.num_epoch is not None),
            f"a path with {STEP.replace('{', '{{').replace('}', '}}')}, or each step's file would replace the one before",
        ),
    )

    run: RunSection
    model: ModelSection
    data: DataSection = DataSection()
    curriculum: CurriculumSection = CurriculumSection()
    rollout: RolloutSection
    episode: EpisodeSection = EpisodeSection()
    reward: RewardSection = RewardSection()
    sandbox: SandboxSection = SandboxSection()
    eval: EvalSection = EvalSection()
    trainer: TrainerSection = TrainerSection()
    sft: SftSection = SftSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    weights: WeightsSection = WeightsSection()
    monitoring: MonitoringSection = MonitoringSection()
    debug: DebugSection = DebugSection()
    bus: BusSection = BusSection()
    store: StoreSection = StoreSection()
    gateway: GatewaySection = GatewaySection()
    ingest: IngestSection = IngestSection()
    tinker: TinkerSection = TinkerSection()
    console: ConsoleSection = ConsoleSection()

    def _complete(self) -> None:
        if self.episode.episode_url is not None and "rm_type" not in self.reward.model_fields_set:
            self.reward.rm_type = GIVEN
        if self.curriculum.reasoning_gym and self.data.data_source is None:
            self.data.data_source = REASONING_GYM_SOURCE
            if "rm_type" not in self.reward.model_fields_set:
                self.reward.rm_type = REASONING_GYM
        trainer, samples = self.trainer, self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt
        size = trainer.global_batch_size
        if size is not None and "num_steps_per_rollout" not in trainer.model_fields_set and samples % size == 0:
            trainer.num_steps_per_rollout = samples // size

    def sample_seed(self, index: int) -> int | None:
        """Returns the seed of a group's sample, which counts from 0; None where engines sample at random."""
        return self.data.rollout_seed + index if self.rollout.seeded else None

    @property
    def may_give_rewards(self) -> bool:
        """Returns whether rollouts may come with their rewards: something of the user's makes them, or an environment plays with them."""
        return bool(self.rollout.makers) or self.episode.episode_url is not None

    @property
    def support_mismatch(self) -> list[str]:
        """Returns the settings by which the policy gradient is of another distribution than samples come from; none where there is none."""
        replayed = self.rollout.truncates if self.kept_top_k else []
        found = dict.fromkeys([*self.rollout.truncates, *self.rollout.sampled_otherwise])
        trains = self.has_steps and not self.debug.debug_rollout_only and self.algorithm.loss_type != "sft_loss"
        return [name for name in found if name not in replayed] if trains else []

    @property
    def _drafts(self) -> set[str]:
        """Returns what has engines verify drafts."""
        algorithms = {f"rollout.sglang.{ALGORITHM} = {value}" for flags in self.rollout.group_flags if (value := flags.get(ALGORITHM))}
        return {*self.rollout.own_speculation, *algorithms}

    @property
    def kept_top_k(self) -> int:
        """Returns the ``top_k`` of requests that have none, where training replays the tokens that samplers keep; 0: it does not. Without
        one an engine returns none, and equal logits at its edge may keep more."""
        wanted = self.trainer.support_replay != "off" and self.has_steps and self.algorithm.loss_type != "sft_loss"
        return 0 if not wanted or any(self.support_obstacles) else max(1, self.rollout.most_kept // 2)

    @property
    def support_obstacles(self) -> Iterator[str]:
        """Yields why training does not replay the tokens that samplers keep, unless `trainer.support_replay` is off."""
        rollout, algorithm = self.rollout, self.algorithm
        makers = ", ".join(name for name in rollout.makers if name.endswith("_function_path"))
        groups, most, auto = rollout.engines(), rollout.most_kept, self.trainer.support_replay == "auto"
        drafts, backends = self._drafts, {flags.get("sampling-backend") for flags in rollout.group_flags}
        teachers = algorithm.opd_top_k or (algorithm.use_opd and algorithm.opd_type == "sglang")
        obstacles = {
            "every token of the vocabulary is kept: rollout_top_p, rollout_top_k and min_p are off": not rollout.truncates,
            "groups from outside do not report the kept tokens": self.ingest.ingest_groups != "off",
            f"{makers} may not store the kept tokens; where it does, take on": auto and makers,
            f"{', '.join(sorted(drafts))} verifies drafts without reporting the kept tokens": drafts,
            "rollout.sglang.sampling-backend = ascend reports no kept tokens": "ascend" in backends,
            "engines that do prefill or decode alone do not report the kept tokens": {group.worker_type for group in groups} != {"regular"},
            "rollout_top_k = 1 keeps the sampled token alone, whose log-prob is 0 under all weights": rollout.rollout_top_k == 1,
            f"rollout_top_k is more than rollout.sglang.sampling-mask-max-tokens = {most}": rollout.rollout_top_k > most,
            "the log-probs of opd_teachers are over the whole vocabulary": teachers,
        }
        yield from (obstacle for obstacle, stands in obstacles.items() if stands)

    @property
    def lending_obstacles(self) -> Iterator[str]:
        """Yields what of the run does not go with engines on GPUs that the trainer lends: they come and go with each batch."""
        trainer, rollout, weights = self.trainer, self.rollout, self.weights
        size, ranks = rollout.rollout_num_gpus_per_engine, trainer.ranks("actor")
        several = {"trainer.actor_num_nodes": trainer.actor_num_nodes, "rollout.sglang.nnodes": rollout.nodes_per_engine}
        obstacles = {
            "trainer.colocate has the run's only engines on these GPUs": trainer.colocate,
            "rollout.external_engines are somebody else's": rollout.external_engines,
            "rollout.engine_groups has engines of unlike shapes": rollout.engine_groups,
            "rollout.models has engines that are not trained": rollout.models,
            "tinker.tinker_endpoint takes commands from outside": self.tinker.tinker_endpoint,
            "algorithm.advantage_estimator = ppo has a critic, which computes while the actor waits": self.algorithm.has_critic,
            "weights.update_weight_transport is not nccl: no push reaches the engines": weights.update_weight_transport != "nccl",
            "gateways (agents, ingest_groups, gateway_replicas, gateway_port) keep conversations at an engine": self.gateways,
            "episode.episode_url plays rollouts, which do not move": self.episode.episode_url,
            "rollout.rollout_function_path makes rollouts, which do not move": rollout.rollout_function_path,
            f"an engine of {size} GPUs (rollout_num_gpus_per_engine) does not fit on the trainer's {ranks}": size > ranks,
            f"train_device = {trainer.train_device} and rollout_device = {rollout.rollout_device} differ": "auto"
            not in (trainer.train_device, rollout.rollout_device)
            and trainer.train_device != rollout.rollout_device,
            **{f"{field} = {count}, and one machine lends": count > 1 for field, count in several.items()},
        }
        yield from (obstacle for obstacle, holds in obstacles.items() if holds)

    @property
    def picture_obstacles(self) -> Iterator[str]:
        """Yields what of the run does not know pictures."""
        rollout, debug = self.rollout, self.debug
        trains = self.has_steps and not debug.debug_rollout_only
        makers = [f"rollout.{name}" for name in rollout.makers if name not in AGENTS]  # of agents the gateway takes them
        makers += [f"{GENERATOR} of the set {one.name}" for one in self.eval.sets if getattr(one, GENERATOR)]
        makers += ["rollout.rollout_sample_hook_path"] * bool(rollout.rollout_sample_hook_path)  # slime's `generate` makes them then
        named = "save_debug_rollout_data", "save_debug_train_data", "dump_details", "load_debug_rollout_data"
        dumps = [name for name in named if getattr(debug, name)]
        obstacles = {
            "trainer.trainer_backend = megatron trains text alone; use torch": trains and self.trainer.trainer_backend != "torch",
            "routing is replayed (trainer.use_routing_replay)": self.trainer.use_routing_replay or self.trainer.use_rollout_routing_replay,
            f"{', '.join(makers)} makes rollouts of its own": makers,
            "episode.episode_url plays rollouts": self.episode.episode_url,
            "data.data_source makes the prompts": self.data.data_source,
            "eval.eval_function_path evaluates": self.eval.eval_function_path,
            "ingest.ingest_groups takes groups from outside": self.ingest.ingest_groups != "off",
            "servers score the tokens of samples (algorithm.opd_type = sglang)": self.algorithm.use_opd
            and self.algorithm.opd_type == "sglang",
            f"debug.{', '.join(dumps)} stores or reads batches": dumps,
            "rollout.external_engines are not Myxo's own": rollout.external_engines,
            f"{', '.join(sorted(self._drafts))} verifies drafts": self._drafts,
            "engines do prefill or decode alone": {group.worker_type for group in rollout.engines()} != {"regular"},
        }
        yield from (obstacle for obstacle, stands in obstacles.items() if stands)

    @property
    def pushes(self) -> bool:
        """Returns whether engines get weights of a trainer, of training steps or of a training endpoint's clients."""
        return (self.has_steps or self.tinker.tinker_endpoint) and not self.debug.debug_rollout_only

    @property
    def has_steps(self) -> bool:
        """Returns whether there is anything to train but the warm start."""
        return bool(self.rollout.num_rollout or self.rollout.num_epoch)

    def _misfits(self) -> Iterator[str]:
        yield from self._work()
        yield from self._sizes()
        yield from self._shared_gpus()
        yield from self._engines_over_nodes()
        sizes = {"rollout.n_samples_per_prompt": (self.reward.rm_type, self.rollout.n_samples_per_prompt if self.has_steps else 2)}
        scored = {field: item for field, item in self.eval.named.items() if item.custom_rm_path is None}  # as the run's rewards are
        for field, item in scored.items():
            sizes[field] = item.rm_type or self.reward.rm_type, item.n_samples_per_eval_prompt or self.eval.n_samples_per_eval_prompt
            try:
                RewardSection.model_validate(self.reward.model_dump() | {"rm_type": sizes[field][0]})
            except ValidationError as error:
                reason = error.errors()[0].get("ctx", {}).get("error")
                yield from (f"{field}.{problem.removeprefix('reward.')}" for problem in getattr(reason, "problems", []))
        if (apart := self.rollout.eval_replicas) and not (self.has_steps and self.eval.named):
            yield f"rollout.eval_replicas: {apart}, but the run does not both train and evaluate (eval_prompt_data); leave it at 0"
        for field, (named, n) in sizes.items():
            if self.reward.environment_of(named) == TOURNAMENT and n < 2:
                yield f"{field}: {n} sample a prompt; rm_type = {TOURNAMENT} compares two at least; a set may have an rm_type of its own"

    def _work(self) -> Iterator[str]:
        """Yields what the run lacks for what it is to do."""
        if self.weights.update_weight_transport == "s3" and self.rollout.external_engines:
            yield "weights.update_weight_transport: s3, but external engines read versions from a file system; use disk"
        if not self.has_steps:
            if not any((self.eval.named, self.sft.sft_data is not None, self.tinker.tinker_endpoint)):
                yield "rollout.num_rollout: 0, with neither prompts to evaluate on (eval_prompt_data) nor demonstrations (sft_data)"
            return
        if self.curriculum.reasoning_gym and (self.data.prompt_data is not None or self.data.data_source != REASONING_GYM_SOURCE):
            yield "curriculum.reasoning_gym: prompts come from one place: leave prompt_data and data_source out"
        if self.rollout.rollout_temperature == 0 and not self.debug.debug_rollout_only:
            yield "rollout.rollout_temperature: more than 0: greedy decoding is no policy that could be trained"
        if self.data.prompt_data is None and self.data.data_source is None:
            yield f"data.prompt_data: required: {type(self.data).model_fields['prompt_data'].description}"
        if self.debug.debug_train_only and not self.debug.load_debug_rollout_data:
            yield "debug.debug_train_only: load_debug_rollout_data, the files of the batches to train; or num_rollout = 0 with sft_data"

    def _sizes(self) -> Iterator[str]:
        """Yields the sizes that contradict each other, each as ``section.field: what is wrong``."""
        ranks, trainer = self.trainer.ranks("actor"), self.trainer
        sizes = trainer.tensor_model_parallel_size, trainer.pipeline_model_parallel_size, trainer.context_parallel_size
        replica = math.prod(sizes)
        if ranks % replica:
            field, product = "trainer.tensor_model_parallel_size", str(replica)
            if replica != sizes[0]:
                field += " x pipeline_model_parallel_size x context_parallel_size"
                product = " x ".join(map(str, sizes)) + f" = {replica}"
            yield f"{field}: {product} does not divide the {ranks} trainer ranks"
        groups, n, steps = self.rollout.rollout_batch_size, self.rollout.n_samples_per_prompt, self.trainer.num_steps_per_rollout
        samples, size = groups * n, self.trainer.global_batch_size
        if size is not None and samples != size * steps:
            yield (
                f"trainer.global_batch_size: rollout_batch_size x n_samples_per_prompt = {groups} x {n} = {samples} samples are not "
                f"global_batch_size x num_steps_per_rollout = {size} x {steps} = {size * steps}; leave it out, and it follows from them"
            )
        if ranks % replica == 0 and samples % (steps * (ranks // replica)):
            yield (
                f"trainer.num_steps_per_rollout: rollout_batch_size x n_samples_per_prompt = {samples} samples do not divide "
                f"into {steps} optimizer steps over {ranks // replica} data-parallel ranks"
            )
        if self.has_steps and self.algorithm.needs_groups and n < 2 and not self.debug.debug_rollout_only:
            yield f"rollout.n_samples_per_prompt: {self.algorithm.advantage_estimator} compares the samples of a group; use at least 2"
        if self.has_steps and self.algorithm.needs_groups and n > 1 and self.rollout.fewest_rollouts < 2:
            yield f"rollout.min_rollouts: {self.algorithm.advantage_estimator} compares the rollouts of a group; use at least 2"

    def _engines_over_nodes(self) -> Iterator[str]:
        """Yields what does not go with engines over several nodes (SGLang's ``nnodes``)."""
        rollout, field = self.rollout, "rollout.sglang.nnodes"
        if (nodes := rollout.nodes_per_engine) == 1:
            return
        if rollout.rollout_num_gpus_per_engine % nodes:
            yield f"{field}: {nodes} nodes do not share rollout_num_gpus_per_engine = {rollout.rollout_num_gpus_per_engine} GPUs evenly"
        if self.trainer.colocate and rollout.rollout_num_gpus_per_engine != nodes * (ranks := self.trainer.ranks_per_node("actor")):
            yield (
                f"{field}: with colocate an engine on {nodes} nodes has all of the trainer's {ranks} GPUs of each, {nodes * ranks}, not "
                f"rollout_num_gpus_per_engine = {rollout.rollout_num_gpus_per_engine}"
            )

    def _shared_gpus(self) -> Iterator[str]:
        """Yields the settings of colocated services that contradict each other."""
        trainer, rollout = self.trainer, self.rollout
        if self.debug.debug_rollout_only or self.debug.trains_only:
            return  # one half alone shares no GPU
        if not trainer.colocate:
            for field in ("offload_train", "offload_rollout"):
                if getattr(trainer, field):
                    yield f"trainer.{field}: belongs to colocate = true: only what shares a GPU has to make room on it"
            return
        if rollout.external_engines:
            yield "rollout.external_engines: with colocate = true engines share the trainer's GPUs; leave one of them out"
        if "auto" not in (trainer.train_device, rollout.rollout_device) and trainer.train_device != rollout.rollout_device:
            yield (
                f"rollout.rollout_device: {rollout.rollout_device}, but train_device is {trainer.train_device}; colocated services "
                "compute on the same devices"
            )
        if (transport := self.weights.update_weight_transport) != "nccl":
            yield f"weights.update_weight_transport: {transport}, but colocated engines share the trainer's memory; leave it at nccl"
        if self.weights.join_from in ("peer", "disk"):
            yield (
                f"weights.join_from: {self.weights.join_from}, but colocated engines get all weights from the trainer, once it has "
                "trained; use auto or trainer"
            )
        if rollout.eval_replicas:
            yield f"rollout.eval_replicas: {rollout.eval_replicas}, but colocated engines sleep while the trainer computes; leave it at 0"
        engines, ranks = rollout.rollout_replicas * rollout.rollout_num_gpus_per_engine, trainer.ranks("actor")
        if engines > ranks:
            field = "rollout_replicas" if rollout.rollout_num_gpus is None else "rollout_num_gpus"
            yield (
                f"rollout.{field}: {rollout.rollout_replicas} engines of {rollout.rollout_num_gpus_per_engine} GPUs do not fit on "
                f"the trainer's {ranks} (actor_num_nodes x actor_num_gpus_per_node), which colocate makes them share"
            )

    @property
    def log_probs_reader(self) -> str | None:
        """Returns which setting needs the log-probs of the rollout's tokens, as a sentence; None where samples may lack them.

        A generate function may not store them. Where samples are trained by the very weights that generated them, and nothing is made of
        what engine and trainer differ by, the trainer's own log-probs at batch start are the rollout's: they stand in.
        """
        if self.rollout.missing_log_probs == "refuse":
            return "rollout.missing_log_probs = refuse"
        return next((f"{setting} reads them" for setting in self._log_probs_readers()), None)

    def _log_probs_readers(self) -> Iterator[str]:
        algorithm, staleness, interval = self.algorithm, self.rollout.max_staleness, self.weights.update_weights_interval
        if algorithm.loss_type != "policy_loss":
            if algorithm.correction == "rollout" and (algorithm.kl_coef or algorithm.use_opd):  # measured from them, whatever the loss
                yield "algorithm.off_policy = rollout"
            return
        for field in ("custom_tis_function_path", "use_m2po", "use_rs", "rs_veto_threshold", "tis_batch_normalize"):
            if value := getattr(algorithm, field):
                yield f"algorithm.{field} = {value}"
        yield from (f"algorithm.{field} = true" for field in ("use_rollout_logprobs", "use_tis") if getattr(algorithm, field))
        if algorithm.off_policy in ("decoupled", "rollout"):
            yield f"algorithm.off_policy = {algorithm.off_policy}"
        if algorithm.correction == "decoupled" and (staleness or interval > 1):
            further = f"rollout.max_staleness = {staleness}" if staleness else f"weights.update_weights_interval = {interval}"
            yield f"algorithm.off_policy = decoupled (the default) with {further}"

    @property
    def has_agents(self) -> bool:
        """Returns whether agents play rollouts, the run's or a set's: they need a gateway."""
        own = any(item.agent or item.agent_command for item in self.eval.named.values())
        return own or bool(self.rollout.agent or self.rollout.agent_command)

    @property
    def longest_sample(self) -> int:
        """Returns the most tokens of a sample that is trained."""
        return NO_LIMIT if self.rollout.overlong_samples == "alone" else self.trainer.micro_batch_tokens

    @property
    def engines_read_snapshots(self) -> bool:
        """Returns whether every version is written to disk and none is pushed: replicas read it there, those of external engines too, or
        download it from where it was uploaded. A run that only trains has none."""
        return not self.debug.trains_only and (self.weights.update_weight_transport != "nccl" or bool(self.rollout.external_engines))

    @property
    def gateways(self) -> int:
        """Returns how many gateways `myxo up` starts: as many as are asked for, else what the machine's cores feed, if any."""
        if self.tinker.tinker_endpoint:
            return 1
        if self.gateway.gateway_replicas is not None:
            return self.gateway.gateway_replicas
        agents = self.has_agents or any(name.startswith("SLIME_AGENT_") for name in self.reward.worker_environment)  # slime's own, or ours
        if agents and not self.gateway.gateway_port:
            return max(1, min(MOST_GATEWAYS, len(os.sched_getaffinity(0)) // CORES_OF_GATEWAY))
        return int(agents or bool(self.gateway.gateway_port) or self.ingest.ingest_groups != "off")

    @property
    def saves_at_start(self) -> bool:
        """Returns whether the trainer writes a checkpoint before the first step."""
        return self.trainer.save_at_start or self.sft.sft_data is not None

    @property
    def trained(self) -> Path:
        """Returns the directory of all that the trainer writes, which need be writable by the trainer alone."""
        return self.run.root if self.trainer.save is None else self.trainer.save / self.run.name

    def steps_of_version(self, version: int) -> int:
        """Returns after how many training steps a version of the weights is the policy; the last one may have fewer than others."""
        return min(version * self.weights.update_weights_interval, self.rollout.num_rollout)

    def bisect_command(self, sample: str) -> str:
        """Returns the command that finds where engine and trainer differ, for a sample, and what keeps the sample's tokens for it."""
        kept = "" if self.monitoring.keep_rollouts_tokens else " (once monitoring.keep_rollouts_tokens = true keeps them)"
        return f"`myxo bisect {self.run.argument} --sample {sample}`{kept}"

    def shown(self) -> "RunConfig":
        """Returns the config as files, people and other programs get it, without credentials; itself where it holds none."""
        values = json.loads(self.model_dump_json())
        hidden = without_credentials(values)
        return self if hidden == values else RunConfig.model_validate_json(json.dumps(hidden))

    def with_fields(self, **sections: Mapping[str, Any]) -> "RunConfig":
        """Returns the config with other values of some fields: section → field → value."""
        return self.model_copy(update={name: getattr(self, name).model_copy(update=fields) for name, fields in sections.items()})

    def absolute(self, base: Path) -> "RunConfig":
        """Returns the config with every path absolute, relative ones resolved from ``base``; other models become names on the hub."""
        resolved = {}
        for section, value in self:
            paths = {
                field: hub_names.model_path(item, base) if field in MODEL_FIELDS and item is not None else data_files.absolute(item, base)
                for field, item in value
            }
            # fields that stay as they are must not count as given
            resolved[section] = {field: path for field, path in paths.items() if path is not getattr(value, field)}
        absolute = self.with_fields(**resolved)
        rollout = absolute.rollout.with_checkpoints(lambda _, path: hub_names.model_path(path, base))
        return absolute.model_copy(update={"eval": absolute.eval.absolute(base), "rollout": rollout})

    def of_engines(self, model: str = "", group: int = 0) -> "RunConfig":
        """Returns the config of the engines of one group: their shape, and the run's flags under the model's and the group's own. For a
        frozen model it is that of a run which trains nothing, with this model's checkpoint.

        ``model``: its name; empty for the policy. ``group``: from 0, among the model's groups that have engines.
        """
        shape, own = self.rollout.engines(model)[group], self.rollout.models.get(model)
        engines = {
            "rollout_replicas": shape.replicas,
            "rollout_num_gpus_per_engine": shape.num_gpus_per_engine,
            "sglang": flags_over(self.rollout.sglang, shape.sglang),
        }
        alone = {"engine_groups": [shape]} if shape.worker_type in APART else {}
        if own is None:
            return self.with_fields(rollout=engines | alone)
        unlimited = {"rollout_max_prompt_len": None, "rollout_max_context_len": None, "rollout_max_response_len": 1}
        unused: dict[str, Any] = {
            "rollout_device": own.device or self.rollout.rollout_device,
            "eval_replicas": 0,
            "rollout_precision": "checkpoint",
            "models": {},
            "engine_groups": [],
            **alone,
        }
        return self.with_fields(
            model={"hf_checkpoint": own.hf_checkpoint or self.model.hf_checkpoint},
            rollout={**engines, **unlimited, **unused},
            trainer={"colocate": False, "use_rollout_routing_replay": False, "support_replay": "off"},
            debug={"debug_rollout_only": True},
            data={"multimodal_keys": None},  # the gateway shows it no pictures
        )

    def queues(self) -> list[str]:
        """Returns the queues of the environments that prompts of this run may name, those of its evaluation sets among them."""
        custom = {CUSTOM for item in self.eval.named.values() if item.custom_rm_path is not None}
        return sorted({*self.reward.queues(), *custom})


def section_model(section: str) -> type[Section]:
    """Returns the class of a section."""
    model = RunConfig.model_fields[section].annotation
    assert isinstance(model, type) and issubclass(model, Section)
    return model


@functools.cache
def field_sections() -> Mapping[str, str]:
    """Returns the section of every field. The names of fields are unique over all sections (a test holds that)."""
    return {field: section for section in RunConfig.model_fields for field in section_model(section).model_fields}


def changes(old: RunConfig, new: RunConfig, mark: str = "") -> list[str]:
    """Returns the fields that differ, as ``section.field: old → new``: those that may not change on resume, or those with a ``mark``."""
    found = []
    for section in RunConfig.model_fields:
        before, after = getattr(old, section), getattr(new, section)
        for field, info in section_model(section).model_fields.items():
            extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
            wanted = extra.get(mark) if mark else not extra.get("mutable")
            wanted = wanted or (mark == "recorded" and field == "num_rollout" and new.trainer.decays_over_the_run)
            wanted = wanted or (not mark and field == "train_env_vars" and before.rounded_by != after.rounded_by)
            if wanted and getattr(before, field) != getattr(after, field):
                found.append(f"{section}.{field}: {getattr(before, field)!r} → {getattr(after, field)!r}")
    return found


def unsound(old: RunConfig, new: RunConfig, field: str) -> str:
    """Returns why a field that may change (``section.field``) cannot change from one config to the other; empty where it can."""
    policy = new.algorithm
    if field in ("algorithm.kl_loss_coef", "algorithm.kl_coef") and getattr(policy, field.partition(".")[2]):
        known = old.algorithm.measures_kl or old.algorithm.kl_coef
        return "" if known else "the run has no reference policy: one is kept from the beginning, by use_kl_loss, kl_loss_coef or kl_coef"
    uncorrected = field == "rollout.rollout_temperature" and policy.loss_type == "policy_loss" and policy.correction == "none"
    return "off_policy = none does not correct for samples that were generated at the other temperature" if uncorrected else ""
