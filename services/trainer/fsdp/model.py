"""A causal language model of transformers', sharded over all ranks by FSDP2.

The parameters that a rank keeps are float32 shards, which the optimizer updates; layers compute in the run's dtype, gathered one at a time.
Log-probs are taken from hidden states by chunks, inside the forward pass of the root, where FSDP2 has gathered the output layer.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from services.trainer.backend import TrainerSettings
from services.trainer.fsdp import all_ranks, experts, packed_attention
from services.trainer.fsdp.adapters import MARK, adapters_of, attach, peft_name
from services.trainer.fsdp.fused_layers import compile_layers, compute_in_float8, fuse
from services.trainer.fsdp.packed_attention import ContextPart, Sequences, TokenRows
from services.trainer.fsdp.picture_inputs import MediaInputs
from services.trainer.fsdp.shards import box_of, is_first_copy, local, mark, shard_of, whole_shape
from services.trainer.fsdp.split_layers import SplitLayers, split
from services.trainer.fsdp.weight_loading import attention, fill, materialize, skeleton
from services.trainer.packing import PackedBatch
from services.trainer.parallel import DEVICE_TYPE
from services.trainer.parallel.export import ADAPTER_WEIGHTS
from services.trainer.parallel.likelihood import OutputHead, VocabularySlice
from services.trainer.parallel.runtime import device, together
from services.trainer.parallel.staged_shards import CheckpointPart, StagedShards, read_parts
from services.trainer.parallel.trained_model import LayerModules, TrainedModel
from shared.model.architecture import Architecture
from shared.model.parallel_layout import ParallelLayout
from shared.model.trainable_parameters import Freezing, Lora
from shared.runtime.errors import ConfigError, MyxoError

PROBED = (7, 4)  # tokens of the two sequences that `check_packing` compares
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.15}  # of log-probs that the same kernels compute of the same rows
ROUNDED = 0.25  # of a token's spread over the vocabulary: what other kernels may differ by on average, in bfloat16
FIELD = "trainer.trainer_backend"

# Hidden states [n, hidden size], the output layer's weight [V, hidden size], which n of T tokens they are (None: all) → tensors [n, ...]
Read = Callable[[Tensor, Tensor, TokenRows | None], Any]


class ScoredModel(torch.nn.Module):
    """The root that FSDP2 wraps: whatever reads the output layer does it inside this module's forward pass."""

    def __init__(self, language_model: Any, value_head: bool = False) -> None:
        super().__init__()
        self.language_model, self.value_head = language_model, None
        if value_head:
            size = language_model.config.get_text_config().hidden_size
            self.value_head = torch.nn.Linear(size, 1, bias=False, dtype=torch.float32)
            torch.nn.init.zeros_(self.value_head.weight)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        sequences: Sequences | None = None,
        read: Read | None = None,
        pixels: Mapping[str, Tensor] = {},
        length: int | None = None,
        rows: TokenRows | None = None,
    ) -> Any:
        """Takes ``tokens`` and ``positions``, int64 [1, T], or positions [4, 1, T] of one that sees. Returns what ``read`` returns.

        Args:
            rows: which tokens are read, where ranks share them. pixels: of pictures, or what is heard of sounds.
            length: tokens that are read; those behind them are computed for their pictures alone.

        Without it, and so for one sequence, it returns transformers' own logits [T, V], and those that hidden states and output layer give.
        """
        model = self.language_model
        if read is None or sequences is None:
            hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0]
            return model(input_ids=tokens, use_cache=False).logits[0], F.linear(hidden, model.get_output_embeddings().weight)
        given: dict[str, Any] = {"packed_sequences": sequences}
        if sequences.part is None:
            numbers = torch.repeat_interleave(sequences.cu_seqlens.diff().long()).int()
            given |= {"cu_seq_lens_q": sequences.cu_seqlens, "seq_idx": numbers[None]}
        found = model.base_model(input_ids=tokens, position_ids=positions, use_cache=False, **given, **pixels)
        head = model.get_output_embeddings() if self.value_head is None else self.value_head
        hidden = found.last_hidden_state[0]
        if length is not None and length < len(hidden):
            hidden = hidden[:length] + 0 * hidden[length:].sum()  # every rank's layers that see take part in the backward pass
        return read(hidden, head.weight, rows)


@dataclass(kw_only=True)
class FsdpModel(TrainedModel):
    """The model as this rank holds it: ``chunks`` is its root, sharded.

    Args:
        hf_dir: the checkpoint that it was made from. seeing: makes the inputs of a model that sees; None for one that is given text alone.
        reshards: whether layers' weights are gathered anew for each pass. split: what ranks share within layers.
        replay: of the routers' choices.
    """

    backend: ClassVar[str | None] = "torch"
    hf_dir: Path
    replay: experts.RoutingReplay
    seeing: MediaInputs | None = None
    reshards: bool = True
    split: SplitLayers = field(default_factory=SplitLayers)

    @property
    def root(self) -> Any:
        return self.chunks[0]

    @property
    def language_model(self) -> Any:
        return self.root.language_model

    @property
    def modules(self) -> list[torch.nn.Module]:
        return [self.language_model]

    @property
    def layer_modules(self) -> LayerModules:
        base = self.language_model.base_model if self.seeing is None else self.language_model.base_model.language_model
        return LayerModules(dict(enumerate(base.layers)), base.norm, observe_attention=packed_attention.observed)

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Returns the parameters by transformers' names, tied ones once, and a critic's head by its own."""
        return {name.removeprefix("language_model."): one for name, one in self.root.named_parameters()}

    def buffers(self) -> dict[str, Tensor]:
        """Returns the buffers that checkpoints hold, such as routers' biases: whole on every rank, and never updated."""
        own = self.named_parameters()
        state = self.language_model.state_dict()
        return {name: tensor for name, tensor in state.items() if name not in own and not isinstance(tensor, DTensor)}

    def train(self, mode: bool) -> None:
        """Has layers compute again in backward passes, or not. Nothing else knows of training: no dropout, and no noise in routers."""
        self.root.eval()
        for module in self.root.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = mode

    def keep_gathered(self, keep: bool) -> None:
        """Has the next backward pass keep the weights that the forward pass has gathered, or give them up."""
        self.root.set_reshard_after_backward(not keep or self.reshards)

    def reshard(self) -> None:
        """Gives up gathered weights, which a pass without gradients keeps where backward passes begin with them."""
        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def zero_gradients(self) -> None:
        self.root.zero_grad()

    def weight_tensors(self, adapters: bool = False) -> list[Tensor]:
        if adapters:
            return [local(one) for name, one in self.named_parameters().items() if MARK in name]
        return [local(parameter) for parameter in self.named_parameters().values()] + list(self.buffers().values())

    def live_tensors(self) -> Iterator[Tensor]:
        yield from self.weight_tensors()
        yield from self.language_model.buffers()

    def load_hf(self, directory: Path) -> None:
        """Fills this rank's shards from another checkpoint of the same model."""
        with together(f"loading {directory}"):
            named = {name: one for name, one in self.language_model.named_parameters() if MARK not in name}
            fill(self.language_model, {**named, **self.buffers()}, directory, own=directory == self.hf_dir)

    def sharded_state(self) -> dict[str, Any]:
        """Returns the weights as checkpoints hold them: this rank's rows, which are read in place, whatever the ranks that wrote them."""
        held = {name: one for name, one in self.named_parameters().items() if local(one).numel()}
        return {"model0": dict(sharded("weights", name, one, local(one)) for name, one in {**held, **self.buffers()}.items())}

    def stage_state(self, state: dict[str, Any], random: Any, shards: StagedShards, directory: Path) -> None:
        shards.stage([*_parts(state), *([] if random is None else [CheckpointPart.of_rank("random", random)])], directory)

    def read_state(self, state: dict[str, Any], directory: Path, *, with_random: bool, exact: bool) -> dict[str, Any]:
        found = read_parts([*_parts(state), *([CheckpointPart.of_rank("random", None)] if with_random else [])], directory)
        return {**state, **({"random": next(iter(found.values()))} if with_random else {})}

    def load_state(self, loaded: Mapping[str, Any]) -> None:
        """Does nothing: the weights were read in place."""

    @torch.no_grad()
    def load_adapters(self, directory: Path) -> None:
        path = directory / ADAPTER_WEIGHTS
        try:
            with safe_open(path, framework="pt") as held:
                for adapter in adapters_of(self.language_model):
                    for part, parameter in adapter.named_parameters():
                        wholes = [held.get_tensor(peft_name(matrix, part)) for matrix in adapter.matrices]
                        shape = tuple(parameter.shape[-2:])
                        for matrix, whole in zip(adapter.matrices, wholes, strict=True):
                            if whole.shape != shape:
                                raise ConfigError(f"{path}:{matrix}", tuple(whole.shape), f"shape {shape}")
                        local(parameter).copy_(shard_of(parameter, torch.stack(wholes) if parameter.dim() == 3 else wholes[0]))
        except (OSError, SafetensorError) as error:
            raise ConfigError("trainer.lora_rank", str(path), f"a readable file with the adapters of this model ({error})") from error

    @torch.no_grad()
    def silence_adapters(self) -> None:
        for adapter in adapters_of(self.language_model):
            local(adapter.b).zero_()

    def run(self, batch: PackedBatch, read: Read, record: bool = False) -> Any:
        """Returns what ``read`` makes of a micro-batch on this rank's device. A collective of all ranks.

        Args:
            record: whether the routers' choices are kept.
        """
        if self.seeing is not None:
            seen = self.seeing.seen(batch, everywhere=dist.get_world_size() > 1)
            sequences = Sequences(seen.starts, torch.tensor(seen.starts, dtype=torch.int32, device=device()))
            pixels = {name: tensor.to(device()) for name, tensor in seen.pixels.items()}
            tokens, positions = seen.tokens.to(device())[None], seen.positions.to(device())
            return self.root(tokens, positions, sequences, read, pixels, len(batch.tokens))
        group, tokens, starts, part, missing = all_ranks.group("batch"), batch.tokens, batch.cu_seqlens.tolist(), None, 0
        rows = None if group is None else TokenRows(len(tokens), self.layout.context, self.layout.tensor, group.rank())
        if rows is not None:
            starts = starts if rows.total == rows.count else [*starts, rows.total]
            missing = rows.total - rows.count
            tokens = F.pad(tokens, (0, missing))
        positions = torch.cat([torch.arange(stop - start) for start, stop in itertools.pairwise(starts)])
        own: Any = slice(None)
        if rows is not None and (context := all_ranks.group("context")) is not None:
            part = ContextPart(rows, starts, context, device())
            own = rows.of_layers(context.rank())
            tokens, positions = tokens[own], positions[own]
        sequences = Sequences(starts, torch.tensor(starts, dtype=torch.int32, device=device()), part)
        if self.split.exchange is not None:
            self.split.exchange.agree(len(tokens))
        self.replay.begin(batch, lambda chosen: F.pad(chosen, (0, 0, 0, missing), value=-1)[own], record)
        self.split.cuts = self.layout.tensor > 1
        try:
            found = self.root(tokens.to(device())[None], positions.to(device())[None], sequences, read, rows=rows)
        finally:
            self.split.cuts = False
        if rows is None or group is None:
            return found
        return rows.joined(found, group) if isinstance(found, Tensor) else tuple(rows.joined(one, group) for one in found)

    def head(self, weight: Tensor) -> OutputHead:
        """Returns the output layer over its gathered weight."""
        vocabulary = VocabularySlice(None, 0, self.architecture.vocab_size, self.forbidden)
        return OutputHead(weight, vocabulary, chunk_size=self.chunk_size, **logit_transform(self.language_model.config.get_text_config()))

    @property
    def forbidden(self) -> tuple[int, ...]:
        """Returns the ids that engines never sample, since they would stand for pictures or sounds."""
        return () if self.seeing is None else self.seeing.rule.forbidden

    def labels(self, batch: PackedBatch) -> Tensor:
        """Returns a batch's labels, with a token that can be sampled in the place of each that is not: none of these is trained."""
        return batch.labels.masked_fill(torch.isin(batch.labels, torch.tensor(self.forbidden, dtype=torch.int64)), 0)


def logit_transform(config: Any) -> dict[str, Any]:
    """Returns what a family does to its logits behind the output layer, as `OutputHead` has it; `check_packing` holds it to the model."""
    scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)  # Cohere's; Granite's
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma's
    return {"scale": scale, **({} if cap is None else {"cap": cap})}


def _parts(state: Mapping[str, Any]) -> Iterator[CheckpointPart]:
    for one in state.values():
        if isinstance(one, CheckpointPart):
            yield one
        else:
            yield from _parts(one)


def sharded(prefix: str, name: str, parameter: Tensor, data: Tensor) -> tuple[str, CheckpointPart]:
    """Returns a name, and a part of a checkpoint that is laid out as a parameter is: by rows over the ranks, or whole on each of them."""
    key = f"{prefix}.{name}"
    return key, CheckpointPart(
        key, data, tuple(part.start for part in box_of(parameter)), tuple(whole_shape(parameter)), is_first_copy(parameter)
    )


def assemble(settings: TrainerSettings, hf_dir: Path, architecture: Architecture, random: bool = False) -> FsdpModel:
    """Makes a role's model, random or of parameters that have no meaning yet, and shards it over all ranks, whose process group is there.

    Raises ConfigError: transformers has no such model, or the patterns fit nothing.
    """
    trainer, layout, lora, dtype = settings.trainer, settings.layout, settings.lora, settings.dtype
    with together(f"the making of the model of {hf_dir}"):
        model = experts.installed(skeleton(hf_dir, random, bool(settings.shows)))
        seeing = MediaInputs.of(hf_dir, model, settings.shows) if settings.shows else None
    _choose_trained(model, settings.freezing, lora, trainer.seed)
    if trainer.recomputes_layers:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _check_layout(model, layout, bool(settings.shows))
    packed_attention.keep_sequences_apart(model)
    layers = _layers(model)
    if DEVICE_TYPE != "cpu":  # there the casts keep the order of transformers'
        fuse(model)
    if trainer.fsdp_float8 is not None and not settings.value_head:
        compute_in_float8(layers, trainer.fsdp_float8)
    if trainer.fsdp_compile:
        compile_layers(layers)
    options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=DEVICE_TYPE != "cpu")} if trainer.fsdp_cpu_offload else {}
    options["mp_policy"] = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    replay = experts.RoutingReplay(model, architecture.experts)
    root, cut, reshards = ScoredModel(model, settings.value_head), split(model, layout), trainer.fsdp_reshard_after_forward
    _shard(root, layers, layout, _mesh(trainer.fsdp_shard_ranks), reshards, options)
    for name, one in model.named_parameters():
        mark(one, cut.splits.get(name))
    return FsdpModel(
        architecture=architecture,
        layout=layout,
        chunks=[root],
        dtype=dtype,
        value_head=settings.value_head,
        lora=lora,
        freezing=settings.freezing,
        chunk_size=trainer.log_probs_tokens,
        hf_dir=hf_dir,
        seeing=seeing,
        reshards=reshards,
        split=cut,
        replay=replay,
    )


def _layers(model: Any) -> list[Any]:
    """Returns the layers of transformers' model, none inside of another. Raises ConfigError."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigError(FIELD, "torch", f"megatron; transformers does not say what the layers of {type(model).__name__} are")
    inner = {part for layer in layers for part in layer.modules() if part is not layer}
    return [layer for layer in layers if layer not in inner]


def _shard(root: Any, layers: list[Any], layout: ParallelLayout, mesh: DeviceMesh, reshards: bool, options: dict[str, Any]) -> None:
    """Shards experts that ranks share, layers, and the rest, each over the ranks that have the same piece of it."""
    apart = list(experts.experts_of(root).values()) if layout.expert > 1 else []
    for module in [*apart, *layers, root]:
        materialize(module)
        shared = 1 if module is root else layout.expert if module in apart else layout.tensor
        shape = dist.get_world_size() // shared, shared  # neighbours hold different pieces
        own = mesh if shared == 1 else init_device_mesh(DEVICE_TYPE, shape, mesh_dim_names=("shards", "pieces"))["shards"]
        # the root's backward pass begins where its forward pass ends; experts get routers' weights in float32, as they do without a mesh
        given = options if module not in apart else options | {"mp_policy": replace(options["mp_policy"], cast_forward_inputs=False)}
        fully_shard(module, mesh=own, reshard_after_forward=reshards and module is not root, **given)


def _check_layout(model: Any, layout: ParallelLayout, sees: bool) -> None:
    sizes = {"tensor_model": layout.tensor, "context": layout.context, "expert_model": layout.expert}
    shared = {f"trainer.{name}_parallel_size": size for name, size in sizes.items() if size > 1}
    for name, size in shared.items() if sees else ():
        raise ConfigError(name, size, "1 where pictures or sounds are shown, with trainer_backend = torch")
    if layout.context > 1 and any(
        hasattr(module, "chunk_gated_delta_rule") or getattr(module, "rope_type", None) == "longrope" for module in model.modules()
    ):
        wanted = f"1; gated delta rules or angles by length of {type(model).__name__} want whole sequences here"
        raise ConfigError("trainer.context_parallel_size", layout.context, wanted)


def build(settings: TrainerSettings, hf_dir: Path, architecture: Architecture, random: bool) -> FsdpModel:
    """Makes a model as `assemble` does, and loads it unless it is to be random.

    Raises ConfigError: as `assemble`; transformers does not read it, or packed sequences would see one another.
    """
    made = assemble(settings, hf_dir, architecture, random)
    if not random:
        made.load_hf(hf_dir)
    check_packing(made, settings.trainer.use_routing_replay)
    return made


def _choose_trained(model: Any, freezing: Freezing, lora: Lora | None, seed: int) -> None:
    if lora is not None:
        attach(model, lora, seed)
    elif not freezing.nothing:
        freezing.check([name for name, _ in model.named_parameters()])
    for name, parameter in model.named_parameters():
        if not freezing.trains(name) or ".indexer." in name:  # a choice of keys has no gradient, and is not to decay
            parameter.requires_grad_(False)


def _mesh(shard_ranks: int | None) -> DeviceMesh:
    """Returns all ranks, or with several copies of the model [copies, ranks that share one's shards]."""
    world = dist.get_world_size()
    if shard_ranks is None or shard_ranks == world:
        return init_device_mesh(DEVICE_TYPE, (world,))
    return init_device_mesh(DEVICE_TYPE, (world // shard_ranks, shard_ranks), mesh_dim_names=("copies", "shards"))


@torch.no_grad()
def check_packing(model: FsdpModel, replays: bool = False) -> None:
    """Compares two sequences in a pack with the same in the other order, and with each alone through transformers' own logits.

    A collective of all ranks. Rounding is the same in either order, so that it hides nothing; between packed and single sequences kernels
    round differently, and a trained model's improbable tokens differ by more than a tenth of a nat.

    Raises ConfigError: they differ, since layers mix sequences, or a model changes its logits behind the output layer; or it is to have
        its choices of experts replayed (``replays``), and these are not known.
    """
    if model.value_head:
        return  # the same layers as the actor's
    generator, plain, name = torch.Generator().manual_seed(0), model.language_model, type(model.language_model).__name__
    sequences = [torch.randint(0, model.architecture.vocab_size, (length,), generator=generator) for length in PROBED]
    sequences = [one.masked_fill(torch.isin(one, torch.tensor(model.forbidden, dtype=torch.int64)), 0) for one in sequences]
    text = plain.config.get_text_config()
    model.train(False)

    def packed(order: list[Tensor]) -> list[Tensor]:
        lengths, tokens = [len(one) for one in order], torch.cat(order)
        starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        batch = PackedBatch(tokens, tokens, torch.ones(len(tokens)), starts, max(lengths), {})
        found = model.run(batch, lambda hidden, weight, _: model.head(weight).logits(hidden), replays)
        return list(found.float().log_softmax(-1).split(lengths))

    try:
        first, second = torch.cat(packed(sequences)), torch.cat(packed(sequences[::-1])[::-1])
        caps = getattr(text, "attn_logit_softcapping", None)  # PyTorch's attention would leave it out in silence
        if model.split.exchange is not None:
            model.split.exchange.agree(max(PROBED))
        plain.set_attn_implementation("sdpa" if plain._supports_sdpa and caps is None else "eager")
        alone, plainly = (torch.cat(rows) for rows in zip(*[model.root(one[None].to(device())) for one in sequences], strict=True))
        plainly = OutputHead(plainly, VocabularySlice(None, 0, 0), **logit_transform(text)).capped(plainly)
    except (AttributeError, LookupError, MyxoError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(FIELD, "torch", f"megatron; {name} takes no packed sequences here ({error})") from error
    finally:
        model.reshard()
        plain.set_attn_implementation(attention(model.seeing is not None))
    if replays:
        model.replay.recorded()
    if not torch.allclose(alone, plainly, rtol=1e-3, atol=1e-4):
        raise ConfigError(FIELD, "torch", f"megatron; {name} changes its logits behind the output layer in a way that is not known here")
    alone = alone.float().log_softmax(-1)
    ordered, single = (first - second).abs(), (first - alone).abs()
    most, exact = TOLERANCES[model.dtype], model.dtype == torch.float32
    apart = (single.max(), most) if exact else (single.mean(), ROUNDED * float(alone.std(-1).mean()))
    for difference, bound, where in ((ordered.max(), most, "with the order of packed"), (*apart, "between packed and single")):
        if not float(difference) < bound:
            raise ConfigError(FIELD, "torch", f"megatron; the log-probs of {name} differ by {difference:.2g} {where} sequences")
