"""What one rank does in the tests that compare layouts; also run in the test's own process, as the world of one."""

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from services.trainer.actor import Actor, StepResult
from services.trainer.backend import TrainerSettings, gather_plan
from services.trainer.fsdp.experts import experts_of
from services.trainer.objective.loss import PolicyLoss, SftLoss, ValueLoss
from services.trainer.packing import PackedBatch
from services.trainer.parallel import checkpoint, runtime
from services.trainer.parallel.joint_write import SaveFailed
from services.trainer.parallel.likelihood import OutputHead, VocabularySlice
from services.trainer.parallel.safetensors_reader import SafetensorsReader
from services.trainer.parallel.staged_shards import StagedShards
from services.trainer.reference_policy import FrozenWeights, ReferencePolicy
from services.trainer.weights.stage_sender import StageExport
from shared.config.algorithm import AlgorithmSection
from shared.config.trainer_section import TrainerSection
from shared.runtime.errors import MyxoError
from shared.schema.kept_tokens import Kept
from shared.transfer.bucket_ring import slot_view
from shared.transfer.manifest import Manifest
from tests.unit.trainer.megatron.tiny import VOCAB, pack, sequences

TIMEOUT_SECONDS = 60.0
MICRO_BATCHES = 4


OWN = {"train_dtype": "float32", "collective_timeout": TIMEOUT_SECONDS, "lr": 3e-3, "weight_decay": 0.01, "adam_beta2": 0.999}
"""What these tests have instead of the defaults of ``[trainer]``."""


def actor(hf_dir: Path, *, role: Any = "actor", updates: int = 0, temperature: float = 1.0, shows: str = "", **trainer: Any) -> Actor:
    return Actor.create(TrainerSettings(TrainerSection(**{**OWN, **trainer}), role, updates, temperature, shows), hf_dir)


def weighted_loss(log_probs: Tensor, entropy: Tensor | None, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """A policy-gradient-like sum whose denominator is already in the weights, and an entropy term."""
    weights = batch.loss_mask * batch.fields["advantages"] / 100
    assert entropy is not None
    loss = -(weights * log_probs).sum() - 0.001 * (batch.loss_mask * entropy).sum()
    return loss, {"tokens": batch.loss_mask.sum(), "entropy": (batch.loss_mask * entropy).sum()}


def micro_batch(index: int, seed: int = 0) -> PackedBatch:
    return pack(sequences(5, seed=seed * 100 + index))


def share(model: Actor, seed: int) -> list[PackedBatch]:
    """This rank's part of a global batch that is the same in every layout."""
    micro_batches = [micro_batch(index, seed) for index in range(MICRO_BATCHES)]
    return micro_batches[model.data_parallel_rank :: model.data_parallel_size]


def steps(model: Actor, count: int, first: int = 0) -> list[StepResult]:
    return [model.train_step(share(model, first + i), weighted_loss, need_entropy=True) for i in range(count)]


def logits(model: Actor, batch: PackedBatch) -> Tensor:
    """Float32 [T, V], before the step that asking for them takes."""
    seen = []

    def look(given: Tensor, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        seen.append(given.detach().float())
        return given.sum() * 0, {}

    look.takes_logits = True  # type: ignore[attr-defined]
    model.train_step([batch], look)
    return seen[0]


def exported(model: Actor, bucket_bytes: int = 4096) -> dict[str, Tensor | None]:
    return {n: None if t is None else t.clone() for bucket in model.export(bucket_bytes) for n, t in bucket}


def train(hf_dir: Path, config: dict[str, Any], count: int) -> dict[str, Any]:
    model = actor(hf_dir, **config)
    results = steps(model, count)
    batch = pack(sequences(6, seed=9))
    return {"steps": results, "log_probs": model.log_probs([batch])[0], "weights": exported(model)}


def train_without_entry(hf_dir: Path, config: dict[str, Any], entry: str) -> str:
    """Returns why a Qwen3 does not train whose plan of tensor parallelism lacks an entry, behind an update without a gradient."""
    import transformers

    plan = transformers.Qwen3Config.base_model_tp_plan
    held = plan.pop(entry)
    try:
        model = actor(hf_dir, **config)
        model.train_step(share(model, 0), lambda found, *_: (found.sum() * 0, {}))
        steps(model, 1)
    except MyxoError as error:
        return str(error)
    finally:
        plan[entry] = held
    return ""


def resume(hf_dir: Path, config: dict[str, Any], root: Path) -> dict[str, Any]:
    """Two steps, a checkpoint, two more; then the same two again from the checkpoint, in a model made anew."""
    model = actor(hf_dir, **config)
    steps(model, 2)
    model.save_checkpoint(root, 2, {"prompts": [1, 2]})
    noise = torch.rand(3)
    straight = steps(model, 2, first=2)
    weights = exported(model)
    again = actor(hf_dir, **{**config, "seed": 99})
    extra = again.load_checkpoint(root)
    noise_again = torch.rand(3)
    resumed = steps(again, 2, first=2)
    return {"straight": straight, "resumed": resumed, "noise": (noise, noise_again), "weights": (weights, exported(again)), "extra": extra}


def rl_batches(model: Actor, seed: int, per_token: bool) -> list[PackedBatch]:
    """This rank's part of a batch with all that policy and value losses read; advantages of sequences, or of tokens."""
    batches = []
    for batch in share(model, seed):
        place = torch.arange(batch.tokens.numel(), dtype=torch.float32)
        of_sequence = torch.repeat_interleave(torch.arange(5.0) - 2, batch.cu_seqlens.diff().long())
        fields = {
            "advantages": torch.sin(place) if per_token else of_sequence,
            "rollout_log_probs": -4 + torch.cos(place),
            "returns": torch.cos(place * 0.7),
            "values": torch.sin(place * 0.3) * 0.1,
            "weights": torch.full_like(place, 1 / 400),
        }
        batches.append(batch.with_fields(**{name: tensor * batch.loss_mask for name, tensor in fields.items()}))
    return batches


def reinforce(hf_dir: Path, config: dict[str, Any]) -> dict[str, Any]:
    """A step of GRPO, one of PPO on given advantages, and a critic's, all from the same checkpoint."""
    config = {"adam_eps": 1e-3, **config}  # with less, Adam makes whole steps of gradients that are rounding errors
    policy = actor(hf_dir, **config)
    grpo = policy.train_step(rl_batches(policy, 0, per_token=False), PolicyLoss(AlgorithmSection()))
    ppo_loss = PolicyLoss(AlgorithmSection(advantage_estimator="ppo", entropy_coef=0.01))
    ppo = policy.train_step(rl_batches(policy, 1, per_token=True), ppo_loss, need_entropy=True)
    whole = pack(sequences(6, seed=9))
    report = {"grpo": grpo, "ppo": ppo, "log_probs": policy.log_probs([whole])[0], "weights": exported(policy)}
    critic = actor(hf_dir, **{**config, "lr": 0.03, "role": "critic"})
    for step in range(3):  # the first moves the head alone, which is zero
        report[f"critic {step}"] = critic.train_step(rl_batches(critic, step, per_token=True), ValueLoss(value_clip=0.5))
    report["values"] = critic.values([whole])[0]
    return report


def demonstrated(hf_dir: Path, config: dict[str, Any], teacher: Path, root: Path) -> dict[str, Any]:
    """A step on demonstrations, and the log-probs behind it of policy, reference and teacher."""
    model, whole = actor(hf_dir, **config), pack(sequences(6, seed=9))
    reference = ReferencePolicy(model, root, None, root)
    reference.save_first()
    reference.load(0)
    step = model.train_step(rl_batches(model, 0, per_token=False), SftLoss())
    found = {"loss": step.loss, "grad_norm": step.grad_norm, "policy": model.log_probs([whole])[0]}
    with reference.in_place_of_the_policy():
        found["reference"] = model.log_probs([whole])[0]
    with FrozenWeights.from_hf(model.model, teacher).in_place_of(model.model):
        found["teacher"] = model.log_probs([whole])[0]
    return found


def log_probs_of(hf_dir: Path, config: dict[str, Any], teacher: Path) -> Tensor:
    """Returns a teacher's log-probs, in the policy's modules."""
    model = actor(hf_dir, **config)
    with FrozenWeights.from_hf(model.model, teacher).in_place_of(model.model):
        return model.log_probs([pack(sequences(6, seed=9))])[0]


def logit_loss(hf_dir: Path, config: dict[str, Any], from_logits: bool) -> StepResult:
    """A step on the log-probs at temperature 0.7, as the actor computes them or as the loss does from the logits."""
    model = actor(hf_dir, temperature=0.7, **config)

    def from_log_probs(log_probs: Tensor, entropy: Tensor | None, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return -(batch.loss_mask * batch.fields["advantages"] * log_probs).sum() / 100, {}

    def of_logits(logits: Tensor, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        log_probs, _ = likelihood_of(logits, batch.labels, VOCAB, 1.0, need_entropy=False)
        return from_log_probs(log_probs, None, batch)

    of_logits.takes_logits = True  # type: ignore[attr-defined]
    return model.train_step(share(model, 0), of_logits if from_logits else from_log_probs)


def candidate_loss(hf_dir: Path, config: dict[str, Any], from_logits: bool) -> StepResult:
    """A step on the log-probs of three candidates a token at temperature 0.7, as the actor gives them or as plain torch does."""
    model = actor(hf_dir, temperature=0.7, **config)
    names = "ids"

    def of_candidates(log_probs: Tensor, entropy: Tensor | None, batch: PackedBatch, found: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        place = torch.arange(3.0) + 1
        return -(batch.loss_mask[:, None] * found * place).sum() / 100, {"mean": (batch.loss_mask[:, None] * found).sum() / 100}

    def of_logits(logits: Tensor, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        found = logits.float()[:, :VOCAB].log_softmax(-1).gather(1, batch.fields[names])
        return of_candidates(found[:, 0], None, batch, found)

    of_logits.takes_logits = True  # type: ignore[attr-defined]
    of_candidates.candidates = names  # type: ignore[attr-defined]
    batches = [batch.with_fields(ids=(batch.labels[:, None] * 7 + torch.tensor([0, 1, 2])) % VOCAB) for batch in share(model, 0)]
    return model.train_step(batches, of_logits if from_logits else of_candidates)


def kept_batch(batch: PackedBatch, alike: bool = False) -> PackedBatch:
    """The same batch, whose labels were sampled from a few tokens each, or a third of them from all. ``alike``: depending on the token."""
    rows = []
    for place, label in enumerate(batch.labels.tolist()):
        generator = torch.Generator().manual_seed(label if alike else place)
        count = int(torch.randint(0, 9, (1,), generator=generator)) if label % 3 and batch.loss_mask[place] else 0
        rows.append([label, *torch.randint(0, VOCAB, (count,), generator=generator).tolist()] if count else [])
    return replace(batch, kept=Kept.of(rows))


def kept_step(hf_dir: Path, config: dict[str, Any], plain: bool = False) -> tuple[StepResult, Tensor]:
    """A step over kept tokens at temperature 0.7, and log-probs before it, as the actor computes them or as plain torch does."""
    model = actor(hf_dir, temperature=0.7, **config)
    batches = [kept_batch(batch) for batch in share(model, 0)]
    seen = []

    def of_logits(logits: Tensor, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        distribution = logits.float()[:, :VOCAB].masked_fill(batch.fields["left_out"], -torch.inf).log_softmax(-1)
        log_probs = distribution.gather(1, batch.labels[:, None]).squeeze(1)
        seen.append(log_probs.detach() * batch.loss_mask)
        entropy = -(distribution.exp() * distribution.masked_fill(batch.fields["left_out"], 0.0)).sum(1)
        return weighted_loss(log_probs, entropy, batch)

    of_logits.takes_logits = True  # type: ignore[attr-defined]
    if not plain:
        found = [log_probs * batch.loss_mask for log_probs, batch in zip(model.log_probs(batches), batches, strict=True)]
        return model.train_step(batches, weighted_loss, need_entropy=True), torch.cat(found)
    masked = []
    for batch in batches:
        assert batch.kept is not None
        left_out = torch.zeros(batch.tokens.numel(), VOCAB, dtype=torch.bool)
        for place in range(len(left_out)):
            if len(own := batch.kept.part(place, place + 1).ids):
                left_out[place] = True
                left_out[place, own] = False
        masked.append(replace(batch, kept=None).with_fields(left_out=left_out))
    step = model.train_step(masked, of_logits, need_entropy=True)
    return step, torch.cat(seen)


def odd_micro_batches(hf_dir: Path, config: dict[str, Any]) -> tuple[StepResult, list[Tensor]]:
    """Two steps of three micro-batches, which no even number of stages divides."""
    model = actor(hf_dir, adam_eps=1e-3, **config)
    batches = share(model, 0)[:3]
    model.train_step(batches, weighted_loss, need_entropy=True)
    return model.train_step(batches, weighted_loss, need_entropy=True), model.log_probs(batches)


def first_step(hf_dir: Path, config: dict[str, Any]) -> dict[str, float]:
    """Metrics of a step with the weights that made the reference's log-probs; every trained token weighs 1."""
    model = actor(hf_dir, **config)
    batches = [batch.with_fields(weights=batch.loss_mask) for batch in rl_batches(model, 0, per_token=False)]
    with FrozenWeights.of(model.model).in_place_of(model.model):
        reference = model.log_probs(batches)
    batches = [b.with_fields(ref_log_probs=r.cpu()) for b, r in zip(batches, reference, strict=True)]
    return model.train_step(batches, PolicyLoss(AlgorithmSection(kl_loss_coef=0.1))).metrics


def save_meanwhile(hf_dir: Path, config: dict[str, Any], root: Path) -> dict[str, Any]:
    """Two steps, a checkpoint in the background, two more; then the same two from the checkpoint, in a model made anew."""
    model = actor(hf_dir, **config)
    steps(model, 2)
    go = threading.Event()
    write = StagedShards.write

    def held(self: StagedShards) -> list[list[Any]]:
        if not go.wait(TIMEOUT_SECONDS):
            raise TimeoutError("the test did not let the writer go")
        return write(self)

    StagedShards.write = held
    try:
        target = model.save_checkpoint(root, 2, {"at": 2}, wait=False)
        straight = steps(model, 2, first=2)
        early = target.exists()  # the steps are through before a byte was written
    finally:
        go.set()
        StagedShards.write = write
    published = model.finish_save()
    assert published == target and target.is_dir() and model.finish_save() is None
    again = actor(hf_dir, **config)
    extra = again.load_checkpoint(root)
    return {"early": early, "straight": straight, "resumed": steps(again, 2, first=2), "extra": extra}


def fail_to_save(hf_dir: Path, root: Path) -> list[tuple[str, str, str]]:
    """Rank 1's disk refuses in the background, twice; then it is well again."""
    model = actor(hf_dir)
    write = StagedShards.write

    def full(self: StagedShards) -> list[list[Any]]:
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return write(self)

    errors = []
    StagedShards.write = full
    try:
        model.save_checkpoint(root, 1, wait=False)
        for attempt in (model.finish_save, lambda: model.save_checkpoint(root, 2)):
            try:
                attempt()
            except SaveFailed as error:
                errors.append((type(error).__name__, str(error), type(error.__cause__).__name__))
        model.save_checkpoint(root, 3, wait=False)
    finally:
        StagedShards.write = write
    try:
        model.save_checkpoint(root, 4, wait=False)
    except SaveFailed as error:
        errors.append((type(error).__name__, str(error), type(error.__cause__).__name__))
    model.save_checkpoint(root, 5)
    return errors


def load_and_train(hf_dir: Path, config: dict[str, Any], root: Path, count: int) -> tuple[list[StepResult], dict[str, Tensor | None]]:
    """Steps from the checkpoint of two, and the weights after them."""
    model = actor(hf_dir, **{"seed": 99, **config})
    model.load_checkpoint(root)
    return steps(model, count, first=2), exported(model)


def save_after(hf_dir: Path, config: dict[str, Any], root: Path, count: int) -> tuple[list[StepResult], dict[str, Tensor | None]]:
    """A checkpoint after so many steps; two more, and the weights after them."""
    model = actor(hf_dir, **config)
    steps(model, count)
    model.save_checkpoint(root, count)
    return steps(model, 2, first=count), exported(model)


def save_both(hf_dir: Path, config: dict[str, Any], root: Path, target: Path) -> Tensor:
    """Log-probs after a step, of which a checkpoint and a Hugging Face one are made."""
    model = actor(hf_dir, **config)
    steps(model, 1)
    model.save_checkpoint(root, 1)
    model.save_hf(target)
    return model.log_probs([pack(sequences(6, seed=9))])[0]


def load_and_export(hf_dir: Path, config: dict[str, Any]) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
    """The weights as `Actor.export` gives them, and what this rank would send to the engines."""
    model = actor(hf_dir, **config)
    return exported(model), pushed(model)


def pushed(model: Actor, bucket_bytes: int = 4096, **options: Any) -> dict[str, Tensor]:
    """What the channel of this rank's pipeline stage would carry, if this is its source; the last of two pushes over two buffers."""
    return push(model, bucket_bytes, **options)[1]


def push(model: Actor, bucket_bytes: int, **options: Any) -> tuple[Manifest, dict[str, Tensor]]:
    """The manifest of this rank's stage, and that."""
    plan = gather_plan(model.model, apart=True)
    stage = StageExport(plan, bucket_bytes, **options)
    buckets, found = stage.manifest.buckets, {}
    ring = [torch.zeros(max(bucket.nbytes for bucket in buckets), dtype=torch.uint8) for _ in range(2)]
    for _ in range(2):
        for number, bucket in enumerate(buckets):
            flat = ring[number % 2][: bucket.nbytes].zero_() if plan.is_source else None
            stage.fill(number, flat)
            if flat is not None:
                found |= {slot.name: slot_view(flat, slot).clone() for slot in bucket.slots}
    plan.leave()
    return stage.manifest, found


def bytes_read(hf_dir: Path, config: dict[str, Any]) -> int:
    """The bytes of the checkpoint that this rank reads to make its model."""
    found, reads = [], {name: getattr(SafetensorsReader, name) for name in ("read", "read_range")}

    def counted(name: str) -> Callable[..., Tensor]:
        def read(*given: Any) -> Tensor:
            found.append((tensor := reads[name](*given)).nbytes)
            return tensor

        return read

    try:
        for name in reads:
            setattr(SafetensorsReader, name, counted(name))
        actor(hf_dir, **config)
    finally:
        for name, read in reads.items():
            setattr(SafetensorsReader, name, read)
    return sum(found)


def saved_bytes(hf_dir: Path, config: dict[str, Any]) -> int:
    """The bytes that a step's forward pass keeps for its backward pass outside of layers that are computed again."""
    model, kept = actor(hf_dir, **config), dict[int, int]()

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        steps(model, 1)
    return sum(kept.values())


def load_and_save(hf_dir: Path, config: dict[str, Any], target: Path) -> None:
    actor(hf_dir, **config).save_hf(target)


def head_of(weight: Tensor, vocab: int, chunk_size: int = -1) -> OutputHead:
    """``weight``: this rank's rows; the parallel groups are formed already."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group(check_initialized=False)  # the torch backend has none
    vocabulary = VocabularySlice(None, 0, vocab) if group is None else VocabularySlice.of(group, weight.size(0), vocab)
    return OutputHead(weight, vocabulary, chunk_size=chunk_size)


def likelihood_of(
    logits: Tensor, labels: Tensor, vocab: int, temperature: float, need_entropy: bool = True, chunk_size: int = -1
) -> tuple[Tensor, Tensor | None]:
    """``logits``: this rank's slice [T, rows], which an output layer of ones and zeros gives as they are."""
    head = head_of(torch.eye(logits.size(1), dtype=logits.dtype), vocab, chunk_size)
    log_probs, entropy = head.likelihood(logits, labels[:, None], temperature, need_entropy)
    return log_probs.squeeze(1), entropy


def split_likelihood(
    hf_dir: Path, logits: Tensor, labels: Tensor, weights: Tensor, vocab: int, temperature: float
) -> tuple[Tensor, Tensor]:
    actor(hf_dir, tensor_model_parallel_size=2)
    rank = torch.distributed.get_rank()
    mine = logits.chunk(2, 1)[rank].clone().requires_grad_()
    log_probs, entropy = likelihood_of(mine, labels, vocab, temperature, chunk_size=16)
    assert entropy is not None
    values = torch.stack([log_probs, entropy])
    (gradient,) = torch.autograd.grad((values * weights).sum(), mine)
    return values.detach(), gradient


def save_and_die(hf_dir: Path, root: Path, point: str) -> None:
    """Save step 1; then be killed in the middle of a save: after the shards of step 2 are written, when its marker is
    written too, or, saving step 1 again, between the two renames that replace it."""
    model = actor(hf_dir)
    model.save_checkpoint(root, 1, {"from": "before"})
    steps(model, 1)
    die = partial(os.kill, os.getpid(), signal.SIGKILL)
    if point == "shards":
        write = StagedShards.write
        StagedShards.write = lambda self: (write(self), die())
    elif point == "marker":
        checkpoint.publish = lambda *_: die()
    else:
        rename = Path.rename
        Path.rename = lambda self, target: rename(self, target) if self.name.startswith("step_") else die()
    model.save_checkpoint(root, 1 if point == "aside" else 2, {"from": "never"})


def _wait_for(path: Path) -> None:
    ends = time.monotonic() + TIMEOUT_SECONDS
    while not path.exists():
        if time.monotonic() > ends:
            raise TimeoutError(f"{path} did not appear within {TIMEOUT_SECONDS:g} s")
        time.sleep(0.05)


def wait_for_a_sleeper(hf_dir: Path, woken: Path) -> tuple[str, str] | None:
    """Rank 1 sleeps inside its loss function until rank 0 has given up on it."""
    actor(hf_dir)  # the ranks have met; only the groups of the next model have the short deadline
    model = actor(hf_dir, collective_timeout=6.0)

    def slow(log_probs: Tensor, entropy: Tensor | None, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        if model.data_parallel_rank == 1:
            _wait_for(woken)
        return log_probs.sum(), {}

    try:
        model.train_step(share(model, 0), slow)
    except MyxoError as error:
        woken.touch()
        return type(error).__name__, str(error)
    return None


def outlive_a_peer(hf_dir: Path, seen: Path) -> None:
    """Rank 1 is killed inside its loss function; rank 0 writes down the error that it gets."""
    model = actor(hf_dir)

    def fatal(log_probs: Tensor, entropy: Tensor | None, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        if model.data_parallel_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return log_probs.sum(), {}

    try:
        model.train_step(share(model, 0), fatal)
    except MyxoError as error:
        seen.write_text(f"{type(error).__name__}:{error}")
        raise


def fail_together(hf_dir: Path) -> tuple[str, str] | None:
    actor(hf_dir)
    try:
        with runtime.together("the test"):
            if torch.distributed.get_rank() == 1:
                raise ValueError("mine")
    except (MyxoError, ValueError) as error:
        return type(error).__name__, str(error)
    return None


def exchange(hf_dir: Path) -> list[Any]:
    actor(hf_dir)
    rank = torch.distributed.get_rank()
    return runtime.gather_json({"rank": rank, "text": "ü" * 70 * rank})


def tree(seed: int, count: int = 10) -> list[Tensor]:
    """Sequences that fork from one another; the last two are one that ends at a fork, and one that is there already."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    found = sequences(1, seed)
    for _ in range(count - 3):
        before = found[draw(0, len(found))]
        found.append(torch.cat([before[: draw(0, len(before) + 1)], torch.randint(0, VOCAB, (draw(1, 30),), generator=generator)]))
    return [*found, found[-1][: len(found[-1]) // 2 + 1], found[0].clone()]


def shared_step(hf_dir: Path, config: dict[str, Any]) -> dict[str, Any]:
    """A step on sequences that share beginnings, and log-probs before it; how many tokens this rank's embedding has seen for these."""
    model = actor(hf_dir, adam_eps=1e-3, **config)
    batches = [pack(tree(seed)) for seed in range(2)][model.data_parallel_rank :: model.data_parallel_size]
    seen: list[int] = []
    for chunk in model.model.modules:
        if chunk.pre_process:
            chunk.embedding.register_forward_pre_hook(lambda _, __, given: seen.append(given["input_ids"].numel()), with_kwargs=True)
    log_probs = [found * batch.loss_mask for found, batch in zip(model.log_probs(batches), batches, strict=True)]
    computed, tokens = sum(seen), sum(batch.tokens.numel() for batch in batches)
    step = model.train_step(batches, weighted_loss, need_entropy=True)
    return {"log_probs": torch.cat(log_probs), "step": step, "weights": exported(model), "computed": computed, "tokens": tokens}


def refused(hf_dir: Path, config: dict[str, Any]) -> str:
    """What an actor with this config is refused for."""
    try:
        actor(hf_dir, **config)
    except MyxoError as error:
        return str(error)
    return "nothing"


def replayed_steps(hf_dir: Path, layout: dict[str, Any]) -> dict[str, Any]:
    """A step and log-probs through experts that are given, and those of a pass that repeats what another one has recorded."""
    model = actor(hf_dir, **layout)
    batches = []
    for batch in share(model, 7):
        generator = torch.Generator().manual_seed(int(batch.tokens.sum()))
        given = torch.rand(batch.tokens.numel(), 2, 4, generator=generator).argsort(-1)[..., :2].to(torch.int16)
        batches.append(replace(batch, experts=given))
    found, recorded = model.log_probs_and_routing(batches)
    again = [replace(batch, experts=None, routing=routing) for batch, routing in zip(batches, recorded, strict=True)]
    repeated = model.log_probs(again)
    step = model.train_step(batches, weighted_loss, need_entropy=True)
    return {"loss": step.loss, "grad_norm": step.grad_norm, "log_probs": found, "recorded": repeated}


def gate_types(hf_dir: Path, config: dict[str, Any]) -> set[str]:
    """The types of the routers' weights as the torch backend's experts get them."""
    model, seen = actor(hf_dir, trainer_backend="torch", **config), set[str]()
    for module in experts_of(model.model.modules[0]).values():
        module.register_forward_pre_hook(lambda _, given: seen.add(str(given[2].dtype)))
    model.log_probs(share(model, 7))
    return seen
