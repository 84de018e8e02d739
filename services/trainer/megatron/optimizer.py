"""Megatron's optimizer (distributed or not), its Adam, and an update that checks the gradient before it changes anything.

`PrecisionAdam` is Adam whose state may lie in host memory and in fewer bits (``--optimizer-cpu-offload``,
``--use-precision-aware-optimizer`` and what belongs to them).

Megatron has a path for an optimizer that keeps the main weights itself: it is handed the model's own shards, whose gradients are in
``decoupled_grad``, and checkpoints ask it for ``get_unscaled_state`` and ``set_scaled_state``. It was made for Transformer Engine's
FusedAdam; `PrecisionAdam` is one of that shape. Whatever the state is kept as, an update is computed in float32, on the model's device,
by the kernel of the plain Adam: state in host memory comes over in slices and goes back. So state in float32 gives the plain Adam's bits,
wherever it lies.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import megatron.core.optimizer.clip_grads as clip_grads
import megatron.core.optimizer.distrib_optimizer as distributed_optimizer
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey
from torch import Tensor

from services.trainer.backend import ScheduledOptimizer, adam
from services.trainer.megatron.gpt_model import MegatronModel, flat_buffers, laid_over, sharding_metadata
from services.trainer.megatron.sharded_state import LiveState
from services.trainer.parallel.runtime import anywhere
from shared.config.trainer_section import LearningRateSchedule, OptimizerState, TrainerSection

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
STATES = ("master_param", "exp_avg", "exp_avg_sq")  # the names of a parameter's state, which are Transformer Engine's
# Elements that are on their way at a time; each takes 12 bytes on the device, three times where transfers overlap
SLICE_ELEMENTS = 32 << 20
# the dtypes that are kept with a scale, one a slice, and their largest value
LARGEST = {torch.float16: 65504.0, torch.float8_e4m3fn: 448.0}


@dataclass
class _Slice:
    """A slice of a shard during an update.

    Args:
        shard: the model's. group: its settings. part: the elements. index: of the slice in its shard.
        state: float32, on the device: what is kept itself, or a copy of it. ready: recorded once that is there.
    """

    shard: Tensor
    group: dict[str, Any]
    part: slice
    index: int
    state: dict[str, Tensor] = field(default_factory=dict)
    ready: Any = None


class PrecisionAdam(torch.optim.Optimizer):
    """AdamW over a model's own shards, with the interface of Transformer Engine's ``FusedAdam``.

    Args:
        params: groups of flat shards, views of the model's weights. keeping: the state's dtypes and place. lr, weight_decay, betas, eps: as
            in ``torch.optim.AdamW``. The other options are Megatron's for FusedAdam, and follow from ``keeping``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        keeping: OptimizerState,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        **_: object,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps, "bias_correction": True})
        self.keeping = keeping
        self._dtypes = dict(zip(STATES, (DTYPES[name] for name in keeping.dtypes), strict=True))
        self.scales: dict[tuple[Tensor, str], Tensor] = {}
        self._in_host_memory: set[Tensor] | None = None
        self._streams: Any = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates every shard that has a gradient, in ``decoupled_grad``. ``closure`` is not supported."""
        if closure is not None:
            raise ValueError("closures are not supported")
        work: list[_Slice] = []
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = int(group.get("step", 0)) + 1
            for shard in group["params"]:
                if getattr(shard, "decoupled_grad", None) is not None and shard.numel():
                    self.initialize_state(shard)
                    work += [_Slice(shard, group, part, index) for index, part in enumerate(_parts(shard))]
        if self.keeping.overlap and work and work[0].shard.is_cuda:
            self._run_overlapped(work)
        else:
            for one in work:
                self._bring(one)
                _update(one)
                self._take_back(one)
        if self.keeping.offload_fraction and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # whoever reads host memory next waits for no stream

    @torch.no_grad()
    def initialize_state(self, parameter: Tensor) -> None:
        """Makes the state of a shard that has none: its main weights from the model's, moments of zero."""
        if STATES[0] in self.state[parameter]:
            return
        for name in STATES:
            self.state[parameter][name] = self._empty(parameter, name)
            if self._dtypes[name] in LARGEST:
                self.scales[parameter, name] = torch.ones(len(_parts(parameter)), device=parameter.device)
            if name == STATES[0]:
                self.set_scaled_state(parameter, name, parameter)
            else:
                self.state[parameter][name].zero_()

    def get_unscaled_state(self, parameter: Tensor, name: str) -> Tensor:
        """Returns a shard's state in float32, where it lies: the state itself, or a copy where it is kept in fewer bits."""
        kept: Tensor = self.state[parameter][name]
        if kept.dtype == torch.float32:
            return kept
        found = torch.empty(kept.shape, dtype=torch.float32, device=kept.device)
        for index, part in enumerate(_parts(kept)):
            found[part] = kept[part].float() * (self.scales[parameter, name][index].to(kept.device) if kept.dtype in LARGEST else 1.0)
        return found

    @torch.no_grad()
    def set_scaled_state(self, parameter: Tensor, name: str, value: Tensor) -> None:
        """Sets a shard's state from float32. What `get_unscaled_state` returned stands for the same values again."""
        kept: Tensor = self.state[parameter][name]
        if value is not kept:
            for index, part in enumerate(_parts(kept)):
                self._store(parameter, name, index, part, value[part].detach().float())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the groups' settings. The state keeps its tensors, which torch would replace by ones of the model's dtype on its device;
        `set_scaled_state` sets them."""
        for group, given in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in given.items() if name != "params"})
        for shard in self._shards():
            self.initialize_state(shard)

    def renew_main(self, state_dict: Any = None) -> None:
        """Takes the main weights from the model's anew, as after a load of weights alone."""
        assert state_dict is None
        for shard in self._shards():
            self.initialize_state(shard)
            self.set_scaled_state(shard, STATES[0], shard)

    def _shards(self) -> list[Tensor]:
        return [shard for group in self.param_groups for shard in group["params"]]

    # --- where the state lies

    def _empty(self, parameter: Tensor, name: str) -> Tensor:
        dtype = self._dtypes[name]
        if parameter in self._offloaded():
            return torch.empty(parameter.shape, dtype=dtype, pin_memory=parameter.is_cuda)
        return torch.empty(parameter.shape, dtype=dtype, device=parameter.device)

    def _offloaded(self) -> set[Tensor]:
        if self._in_host_memory is None:
            shards = sorted(self._shards(), key=lambda shard: -shard.numel())
            left = self.keeping.offload_fraction * sum(shard.numel() for shard in shards)
            self._in_host_memory = set()
            for shard in shards if self.keeping.offload_fraction else ():
                if shard.numel() <= left + 0.5:
                    self._in_host_memory.add(shard)
                    left -= shard.numel()
        return self._in_host_memory

    def _store(self, parameter: Tensor, name: str, index: int, part: slice, value: Tensor) -> None:
        """Stores float32 as what is kept. A scale is a power of two, so that nothing is lost but by the rounding to fewer bits."""
        kept: Tensor = self.state[parameter][name]
        if (largest := LARGEST.get(kept.dtype)) is not None:
            mantissa, exponent = torch.frexp(value.abs().amax() / largest)
            scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
            self.scales[parameter, name][index] = scale
            value = value / scale
        kept[part].copy_(value.to(kept.dtype), non_blocking=True)

    # --- the update

    def _bring(self, one: _Slice) -> None:
        device = one.shard.device
        for name in STATES:
            kept = self.state[one.shard][name][one.part]
            if kept.device != device or kept.dtype != torch.float32:
                kept = kept.to(device, non_blocking=True).float()
                if self._dtypes[name] in LARGEST:
                    kept = kept * self.scales[one.shard, name][one.index]
            one.state[name] = kept

    def _take_back(self, one: _Slice) -> None:
        for name, value in one.state.items():
            kept = self.state[one.shard][name][one.part]
            if kept.data_ptr() != value.data_ptr():
                self._store(one.shard, name, one.index, one.part, value)

    def _run_overlapped(self, work: list[_Slice]) -> None:
        """The next slice comes and the last one goes while one is computed. The host keeps at most three alive."""
        self._streams = self._streams or (torch.cuda.Stream(), torch.cuda.Stream())
        coming, going = self._streams
        compute = torch.cuda.current_stream()
        coming.wait_stream(compute)

        def bring(one: _Slice) -> None:
            with torch.cuda.stream(coming):
                self._bring(one)
                one.ready = coming.record_event()

        gone: list[tuple[_Slice, Any]] = []
        bring(work[0])
        for one, following in zip(work, [*work[1:], None], strict=True):
            if len(gone) > 1:
                earlier, event = gone.pop(0)
                event.synchronize()
                earlier.state.clear()
            if following is not None:
                bring(following)
            compute.wait_event(one.ready)
            _update(one)
            going.wait_stream(compute)
            with torch.cuda.stream(going):
                self._take_back(one)
                gone.append((one, going.record_event()))
        compute.wait_stream(going)
        going.synchronize()  # the slices' memory is the coming stream's


def _parts(tensor: Tensor) -> list[slice]:
    return [slice(first, min(first + SLICE_ELEMENTS, tensor.numel())) for first in range(0, tensor.numel(), SLICE_ELEMENTS)]


def _update(one: _Slice) -> None:
    gradient, main = one.shard.decoupled_grad[one.part].float(), one.state["master_param"]  # type: ignore[attr-defined]
    adam(one.group, [main], [gradient], [one.state])
    one.shard[one.part].copy_(main)


def arm(config: OptimizerConfig, keeping: OptimizerState | None) -> OptimizerConfig:
    """Returns Megatron's configuration, with the path for an optimizer that keeps its main weights if there is a ``keeping``.

    The fields are set on a configuration that is made: Megatron's own checks ask for Transformer Engine.
    """
    if keeping is not None:
        config.use_precision_aware_optimizer = config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        config.store_param_remainders = False
        config.main_params_dtype, config.exp_avg_dtype, config.exp_avg_sq_dtype = (DTYPES[name] for name in keeping.dtypes)
    return config


@contextmanager
def precision_adam(keeping: OptimizerState | None) -> Iterator[None]:
    """Has Megatron make a `PrecisionAdam` in the body, where there is a ``keeping``."""
    if keeping is None:
        yield
        return
    before = megatron_optimizer.Adam, distributed_optimizer.Adam, megatron_optimizer.is_te_min_version

    def make(params: Iterable[Any], **options: Any) -> PrecisionAdam:
        return PrecisionAdam(params, keeping=keeping, **options)

    megatron_optimizer.Adam, distributed_optimizer.Adam = make, (PrecisionAdam, before[1])
    megatron_optimizer.is_te_min_version = lambda *_, **__: False  # where it is not installed, asking for its version fails (0.16)
    try:
        yield
    finally:
        megatron_optimizer.Adam, distributed_optimizer.Adam, megatron_optimizer.is_te_min_version = before


class Adam(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) with the interface and state of Apex' and Transformer Engine's ``FusedAdam``.

    The number of updates is in the parameter group, not beside each parameter. Megatron's distributed optimizer reloads
    a ``torch.optim.AdamW`` wrongly without an error: all parameters come to share one ``step`` tensor, which every one of
    them then increments. An optimizer of this shape takes the code path that GPUs with either library take.

    Args:
        params: parameters or groups. lr, weight_decay, betas, eps: as in ``torch.optim.AdamW``.
        adam_w_mode: must be true; the name is ``FusedAdam``'s.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
    ) -> None:
        if not adam_w_mode:
            raise ValueError("only decoupled weight decay (AdamW) is implemented")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps, "bias_correction": True})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient. ``closure`` is not supported."""
        if closure is not None:
            raise ValueError("closures are not supported")
        for group in self.param_groups:
            if not group["params"]:
                continue  # as FusedAdam: an empty group does not count
            group["step"] = int(group.get("step", 0)) + 1
            parameters = [p for p in group["params"] if p.grad is not None and p.numel()]
            if not parameters:
                continue
            for parameter in parameters:
                self.initialize_state(parameter)
            adam(group, parameters, [p.grad for p in parameters], [self.state[p] for p in parameters])

    def initialize_state(self, parameter: Tensor) -> None:
        """Makes zero moments for parameters that have none."""
        state = self.state[parameter]
        if "exp_avg" not in state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)


def _norm(_: int, __: Tensor, tensors: list[list[Tensor]], ___: bool) -> tuple[Tensor, None]:
    """The norm of all tensors, float32 [1], in a few kernels. Megatron's own takes one and a wait of the host for each tensor."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors[0], dtype=torch.float32))).view(1), None


def register_adam() -> None:
    """Gives Megatron :class:`Adam` and operations on many tensors where neither Transformer Engine nor Apex provides them. Idempotent."""
    if not megatron_optimizer.USING_PYTORCH_OPTIMIZER:
        return
    clip_grads.l2_norm_impl = _norm
    clip_grads.multi_tensor_scale_impl = lambda _, __, tensors, factor: torch._foreach_mul_(tensors[0], factor)  # onto themselves
    megatron_optimizer.Adam = distributed_optimizer.Adam = Adam
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
    distributed_optimizer.HAVE_APEX_OR_TE = True
    distributed_optimizer.USING_APEX_OPTIMIZER = True


class Optimizer(ScheduledOptimizer):
    """Adam over float32 main weights, its moments split over the data-parallel ranks if so configured.

    Args:
        model: loaded; in bfloat16 the main weights are copied from it now. overrides: fields of Megatron's OptimizerConfig as given.
    """

    def __init__(self, model: MegatronModel, trainer: TrainerSection, schedule: LearningRateSchedule, overrides: Mapping[str, Any]) -> None:
        super().__init__(trainer, schedule)
        register_adam()
        bfloat16 = model.config.params_dtype == torch.bfloat16
        for problem in OptimizerState.problems(overrides, trainer.train_dtype, trainer.use_distributed_optimizer):
            raise problem
        keeping = OptimizerState.of(overrides)
        config = arm(
            laid_over(
                OptimizerConfig,
                {
                    "optimizer": "adam",
                    "lr": schedule.lr,
                    "weight_decay": trainer.weight_decay,
                    "adam_beta1": trainer.adam_beta1,
                    "adam_beta2": trainer.adam_beta2,
                    "adam_eps": trainer.adam_eps,
                    "clip_grad": trainer.clip_grad,
                    "bf16": bfloat16,
                    "params_dtype": model.config.params_dtype,
                    "use_distributed_optimizer": trainer.use_distributed_optimizer,
                    "log_num_zeros_in_grad": False,
                },
                {name: value for name, value in overrides.items() if name not in OptimizerState.FLAGS},
                "optimizer",
            ),
            keeping,
        )
        with precision_adam(keeping):
            groups = {**get_standard_config_overrides(config), ParamKey(attr="draft"): {"draft": True}}
            self.megatron: ChainedOptimizer = get_megatron_optimizer(config, list(model.chunks), groups, use_gloo_process_groups=False)
        # draft layers are clipped by a norm of their own, so that the policy's update is the one that it has without them
        self._kinds = (False, True) if model.architecture.trained_drafts else (False,)
        for part in self.parts().values():
            if isinstance(part.optimizer, PrecisionAdam):
                part._copy_model_params_to_main_params = part.optimizer.renew_main
            part.init_state_fn(part.optimizer, part.config)  # saving before the first update needs moments, as loading does

    def reset_moments(self) -> None:
        self.steps = 0
        for part in self.parts().values():
            for group in part.optimizer.param_groups:
                group.pop("step", None)
            for state in part.optimizer.state.values():
                state["exp_avg"].zero_()
                state["exp_avg_sq"].zero_()

    def update(self) -> tuple[float, str | None]:
        optimizer = self.megatron
        optimizer.prepare_grads()
        norms = []
        for draft in self._kinds:
            with self._parameters_of(draft):
                norms.append(float(optimizer.get_grad_norm()))
        grad_norm = norms[0]
        if anywhere(not all(map(math.isfinite, norms))):
            return grad_norm, f"gradient norm is {grad_norm}" + "".join(f", of the draft layers {norm}" for norm in norms[1:])
        for draft, norm in zip(self._kinds, norms, strict=True):
            with self._parameters_of(draft):
                for part in self.megatron.chained_optimizers:
                    parameters = part.get_parameters()
                    if parameters and self.trainer.clip_grad > 0:
                        decoupled = isinstance(part.optimizer, PrecisionAdam)
                        clip_grads.clip_grad_by_total_norm_fp32(parameters, self.trainer.clip_grad, norm, use_decoupled_grad=decoupled)
        for group in optimizer.param_groups:
            group["lr"] = self.lr
            group["weight_decay"] = self.trainer.weight_decay * group["wd_mult"]
        optimizer.step_with_ready_grads()
        self.updates += 1
        self.steps += 1
        return grad_norm, None

    def set_adam(self, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, clip_grad: float) -> None:
        """Sets what the next updates use in the place of the run's; the rate is constant. ``clip_grad``: 0: the norm is not clipped."""
        self.schedule = LearningRateSchedule(lr)
        self.trainer = self.trainer.model_copy(update={"weight_decay": weight_decay, "clip_grad": clip_grad})
        for group in self.megatron.param_groups:
            group["betas"], group["eps"] = tuple(betas), eps

    def count(self, updates: int) -> None:
        """Sets how many updates were made, by which Adam corrects its bias."""
        self.updates = self.steps = updates
        for part in self.parts().values():
            for group in part.optimizer.param_groups:
                group["step"] = updates

    def weights_loaded(self) -> None:
        self.megatron.reload_model_params()

    @contextmanager
    def _parameters_of(self, draft: bool) -> Iterator[None]:
        """Has Megatron's optimizers take norms of the draft layers' gradients in the body, or of all others."""
        parts = list(self.parts().values())
        for part in parts:
            groups = [group["params"] for group in part.optimizer.param_groups if group.get("draft", False) == draft]
            part.get_parameters = partial(list, chain.from_iterable(groups))
        try:
            yield
        finally:
            for part in parts:
                del part.get_parameters

    def zero_gradients(self) -> None:
        """Zeroes the gradients before the backward passes. Without a distributed optimizer the parameters' gradients *are* the model's
        buffers after an update, and the next backward pass would add each buffer to itself."""
        self.megatron.zero_grad()

    def sharded_state(self, model: MegatronModel, loading: bool, steps: int) -> tuple[dict[str, Any], dict[str, Callable[[Any], None]]]:
        # a stack of layers of which some are frozen would have moments for a part only
        apart = model.sharded_state(layers_apart=not model.freezing.nothing)
        source = apart["model0"] if len(apart) == 1 else apart
        state, take_loaded = dict[str, Any](), dict[str, Callable[[Any], None]]()
        for role, part in self.parts().items():
            if isinstance(part, DistributedOptimizer):
                live = LiveState(part, source)
                state[role] = live.sharded()
                take_loaded[role] = partial(live.take_loaded, steps)
            else:
                sharded = part.sharded_state_dict(source, is_loading=loading, metadata=sharding_metadata())
                state[role], take_loaded[role] = _sharded_part(sharded, steps), part.load_state_dict
        return state, take_loaded

    def live_tensors(self, model: MegatronModel) -> Iterator[tuple[Tensor, bool]]:
        for part in self.parts().values():
            for group in part.optimizer.param_groups:
                yield from ((tensor, True) for tensor in group["params"])
            for state in part.optimizer.state.values():
                yield from ((value, True) for value in state.values() if isinstance(value, Tensor))
            yield from ((scale, True) for scale in getattr(part.optimizer, "scales", {}).values())
        for chunk in model.chunks:
            yield from ((buffer.grad_data, False) for buffer in flat_buffers(chunk))

    def parts(self) -> dict[str, Any]:
        """Returns Megatron's optimizers of this rank by what they update: ``dense`` and, where the rank has some, ``experts``."""
        held = [part for part in self.megatron.chained_optimizers if not part.is_stub_optimizer]
        return dict(zip(("dense", "experts")[: len(held)], held, strict=True))


def _sharded_part(state: dict[str, Any], steps: int) -> dict[str, Any]:
    """Returns one optimizer's state, of which only tensors are saved: their names do not depend on how many optimizers a rank
    has. Other entries differ between layouts and ranks, and Megatron would save rank 0's; all of them
    but the count of updates are configuration, so each rank loads its own."""
    for group in state.get("optimizer", state)["param_groups"]:
        group.pop("step", None)
        if steps:
            group["step"] = steps
        if isinstance(group.get("params"), LocalNonpersistentObject):
            group["params"] = group["params"].unwrap()
    return {key: _mark_local(value) for key, value in state.items()}


def _mark_local(state: Any) -> Any:
    """Returns ``state`` with every entry that holds no tensor to be saved marked as not to be saved."""
    if isinstance(state, ShardedBase):
        return state
    if isinstance(state, dict | list) and any(isinstance(value, ShardedBase) for value in nested_values(state)):
        if isinstance(state, dict):
            return {key: _mark_local(value) for key, value in state.items()}
        return [_mark_local(value) for value in state]
    return LocalNonpersistentObject(state)
