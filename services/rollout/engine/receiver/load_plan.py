"""Loads a bucket's bytes into the model's parameters: the model's ``load_weights`` is traced once, and its copies are replayed later.

Invariant: a plan holds copies from the flat buffer into parameters, constants that parameters are filled with, and buffers that are a
parameter plus a constant (of norms that multiply by one more than their weight), and exists only for a bucket for which ``load_weights``
did nothing else. A replay would miss anything else that it did with the buffer or with a parameter (a conversion through another tensor, a
quantization, another value computed from parameters, a replaced parameter): such a bucket is loaded by ``load_weights`` every time.
"""

import bisect
import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shared.runtime.errors import BadMessage
from shared.transfer.bucket_ring import bucket_views
from shared.transfer.manifest import Bucket

log = logging.getLogger(__name__)

aten = torch.ops.aten

_POOLS = threading.RLock()

# The number of flat buffers of which a plan keeps views; a channel has three, and they are dropped when the channel is left.
VIEWED_BUFFERS = 8


@dataclass(frozen=True)
class TensorCopy:
    """One copy into a parameter. ``target``: a view of the parameter. ``offset``: bytes from the flat buffer's beginning. ``dtype``,
    ``stride``: of the source, whose shape is the target's."""

    target: Tensor
    offset: int
    dtype: torch.dtype
    stride: tuple[int, ...]

    def source(self, flat: Tensor) -> Tensor:
        whole = flat.view(self.dtype)
        start = whole.storage_offset() + self.offset // self.dtype.itemsize
        return whole.as_strided(self.target.shape, self.stride, start)


@dataclass
class LoadPlan:
    """The copies and fills that load one bucket, and the sums that follow: (target, parameter, constant)."""

    copies: list[TensorCopy] = field(default_factory=list)
    fills: list[tuple[Tensor, Any]] = field(default_factory=list)
    sums: list[tuple[Tensor, Tensor, Any]] = field(default_factory=list)
    _views: dict[int, list[tuple[list[Tensor], list[Tensor]]]] = field(default_factory=dict)

    def replay(self, flat: Tensor) -> None:
        """Loads the bucket from ``flat``, as the bucket's first load did from its own buffer."""
        for target, value in self.fills:
            target.fill_(value)
        for targets, sources in self._grouped(flat):
            torch._foreach_copy_(targets, sources)
        for target, parameter, value in self.sums:
            torch.add(parameter, value, out=target)

    def forget(self) -> None:
        """Lets go of all flat buffers."""
        self._views.clear()

    def _grouped(self, flat: Tensor) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Returns targets and sources, in lists that one kernel can copy: same dtypes, contiguous or not."""
        found = self._views.get(flat.data_ptr())
        if found is None:
            if len(self._views) >= VIEWED_BUFFERS:
                self._views.clear()
            groups: dict[tuple[Any, ...], tuple[list[Tensor], list[Tensor]]] = {}
            for copy in self.copies:
                target, source = copy.target, copy.source(flat)
                dense = target.is_contiguous() and source.is_contiguous()
                if dense:
                    target, source = target.view(-1), source.view(-1)
                targets, sources = groups.setdefault((target.dtype, source.dtype, dense), ([], []))
                targets.append(target)
                sources.append(source)
            found = self._views[flat.data_ptr()] = list(groups.values())
        return found


class BucketLoader:
    """Loads one bucket, at every push anew."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.traced = False
        self._plan: LoadPlan | None = None

    def load(self, model: Any, flat: Tensor) -> None:
        """Loads the bucket into the model, in the current stream's order."""
        if not self.traced:
            self._plan, obstacle = trace(model, self.bucket, flat)
            self.traced = True
            if self._plan is None:
                first = self.bucket.slots[0].name
                log.info("the bucket that begins with %s will always be loaded by the model itself: %s", first, obstacle)
        elif self._plan is not None:
            self._plan.replay(flat)
        else:
            with torch.no_grad():
                model.load_weights(bucket_views(self.bucket, flat))

    def forget(self) -> None:
        """Lets go of all flat buffers."""
        if self._plan is not None:
            self._plan.forget()


def trace(model: Any, bucket: Bucket, flat: Tensor) -> tuple[LoadPlan | None, str]:
    """Loads the bucket by ``load_weights``, and traces its operations. Returns the plan, or None and the reason why there is none."""
    before = _storages(model)
    watching = _Tracing(flat, before)
    _load(model, bucket_views(bucket, flat), watching)
    after = _storages(model)
    if not watching.obstacle and after != before:
        watching.obstacle = "it replaced a parameter"
    return (None, watching.obstacle) if watching.obstacle else (watching.plan, "")


def compare(model: Any, bucket: Bucket, flat: Tensor) -> dict[str, Tensor]:
    """Returns, without loading the bucket, how many elements loading it would change: name → count of differing elements (int64, on the
    device; names of which nothing is copied are absent).

    Raises NotImplementedError: ``load_weights`` does something to a parameter that cannot be compared."""
    comparing = _Comparing(bucket, flat, _storages(model))
    _load(model, comparing.named(bucket_views(bucket, flat)), comparing)
    return comparing.differences


def held_copies(model: Any, bucket: Bucket, flat: Tensor) -> list[TensorCopy]:
    """Returns the copies that loading the bucket from ``flat`` would make, without loading it: what they would set, the parameters hold.
    Raises BadMessage: ``load_weights`` does something to the bucket from which its bytes cannot be told again."""
    held, values = _storages(model), (value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor))
    inverting = _Inverting(flat, held, {value.untyped_storage().data_ptr() for value in values} - held - {0})
    _load(model, bucket_views(bucket, flat), inverting)
    return inverting.copies


def parameters_of(model: Any) -> Iterator[Tensor]:
    """Yields all tensors that a load may write into."""
    yield from model.parameters()
    yield from model.buffers()


def _storages(model: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in parameters_of(model)} - {0}


def _load(model: Any, tensors: Iterable[tuple[str, Tensor]], mode: TorchDispatchMode) -> None:
    with torch.no_grad(), _pools_run_here(), mode:
        model.load_weights(tensors)


class _Watching(TorchDispatchMode):
    """Sees every operation on the flat buffer or a parameter; views of them, which it lets pass, are on the same storages."""

    def __init__(self, flat: Tensor, parameters: set[int]) -> None:
        super().__init__()
        self._flat, self._parameters = flat.untyped_storage().data_ptr(), parameters
        self._watched = parameters | {self._flat}
        self._start = flat.data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not any(_storage(tensor) in self._watched for tensor in _tensors((*args, *kwargs.values()))):
            return func(*args, **kwargs)
        returns = func._schema.returns
        if not returns or func._schema.is_mutable or any(value.alias_info is None for value in returns):  # it is no view
            return self.met(func, args, kwargs)
        result = func(*args, **kwargs)
        if not all(_storage(tensor) in self._watched for tensor in _tensors([result])):
            self.left(func)  # a view where it can be one: `reshape`, `contiguous`, `to`
        return result

    def met(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def left(self, func: Any) -> None:
        """Notes that an operation has copied watched data to another place."""

    def is_parameter(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and _storage(tensor) in self._parameters

    def is_sum(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Returns whether an operation sets a buffer to a parameter plus a constant."""
        constant = func is aten.add.out and not (isinstance(args[1], Tensor) and args[1].dim())
        return constant and self.is_parameter(args[0]) and self.is_parameter(kwargs["out"]) and args[0].shape == kwargs["out"].shape


class _Tracing(_Watching):
    def __init__(self, flat: Tensor, parameters: set[int]) -> None:
        super().__init__(flat, parameters)
        self.plan, self.obstacle = LoadPlan(), ""

    def met(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if self.obstacle:
            return result
        if func is aten.copy_.default and self.is_parameter(args[0]) and _storage(args[1]) == self._flat and args[0].shape == args[1].shape:
            target, source = args[0].detach(), args[1]
            if target.numel():
                self.plan.copies.append(TensorCopy(target, source.data_ptr() - self._start, source.dtype, source.stride()))
        elif self.is_sum(func, args, kwargs):
            self.plan.sums.append((kwargs["out"].detach(), args[0].detach(), args[1]))
        elif (value := _constant(func, args)) is not None and self.is_parameter(args[0]):
            target = args[0].detach()
            if any(_overlap(target, copy.target) for copy in self.plan.copies):
                self.obstacle = "it fills what it has loaded"
            elif target.numel():
                self.plan.fills.append((target, value))
        else:
            self.obstacle = f"it calls {func}"
        return result

    def left(self, func: Any) -> None:
        self.obstacle = self.obstacle or f"it calls {func}"


class _Inverting(_Watching):
    """Notes the copies into parameters and makes none. What is in the buffer has no meaning, so that nothing else may use it. ``computed``:
    the storages of what the model has computed from parameters, which stays as it is."""

    def __init__(self, flat: Tensor, parameters: set[int], computed: set[int]) -> None:
        super().__init__(flat, parameters | computed)
        self._computed = computed
        self.copies: list[TensorCopy] = []

    def met(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.is_sum(func, args, kwargs):
            return kwargs["out"]
        reads = any(_storage(tensor) == self._flat for tensor in _tensors((*args, *kwargs.values())))
        writes = bool(args) and func._schema.is_mutable and self.is_parameter(args[0])
        if not (reads or writes):
            return func(*args, **kwargs)
        if reads and writes and func is aten.copy_.default and args[0].shape == args[1].shape:
            self._note(args[0].detach(), args[1])
        elif reads or not (_constant(func, args) is not None or _storage(args[0]) in self._computed):
            self.left(func)
        return args[0]

    def _note(self, target: Tensor, source: Tensor) -> None:
        if torch.promote_types(source.dtype, target.dtype) != target.dtype:
            raise BadMessage(f"a tensor of {source.dtype} is held as {target.dtype}: what was pushed cannot be told from it")
        if target.numel():
            self.copies.append(TensorCopy(target, source.data_ptr() - self._start, source.dtype, source.stride()))

    def left(self, func: Any) -> None:
        raise BadMessage(f"the engine's model calls {func} when it loads weights: what was pushed cannot be told from its parameters")


class _Comparing(_Watching):
    def __init__(self, bucket: Bucket, flat: Tensor, parameters: set[int]) -> None:
        super().__init__(flat, parameters)
        self.differences: dict[str, Tensor] = {}
        self._slots, self._offsets = bucket.slots, [slot.offset for slot in bucket.slots]
        self._name = ""

    def named(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors and notes their names: an operation that is no copy from the buffer belongs to the last yielded tensor."""
        for name, tensor in tensors:
            self._name = name
            yield name, tensor

    def met(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not args or not self.is_parameter(args[0]) or not func._schema.is_mutable:
            return func(*args, **kwargs)
        if self.is_sum(func, args, kwargs):
            return kwargs["out"]
        target, name = args[0], self._name
        if func is aten.copy_.default:
            if _storage(args[1]) == self._flat:
                name = self._slots[bisect.bisect_right(self._offsets, args[1].data_ptr() - self._start) - 1].name
            wanted = args[1].to(device=target.device, dtype=target.dtype)
        elif (value := _constant(func, args)) is not None:
            wanted = torch.full_like(target, value)
        else:
            raise NotImplementedError(f"{func} on the parameter of {name} cannot be compared")
        if target.numel():
            differing = _bits(target).ne(_bits(wanted.expand_as(target))).sum()
            self.differences[name] = self.differences.get(name, 0) + differing
        return target


def _bits(tensor: Tensor) -> Tensor:
    """Returns the tensor's elements as integers, so that a NaN equals itself, and 0 differs from -0."""
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(size[tensor.element_size()])


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _constant(func: Any, args: tuple[Any, ...]) -> Any:
    """Returns the value that an operation fills its first argument with; None if it does something else."""
    if func is aten.zero_.default:
        return 0
    return args[1] if func is aten.fill_.Scalar else None


def _overlap(first: Tensor, other: Tensor) -> bool:
    (begin, end), (other_begin, other_end) = _extent(first), _extent(other)
    return begin < other_end and other_begin < end


def _extent(tensor: Tensor) -> tuple[int, int]:
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


@contextlib.contextmanager
def _pools_run_here() -> Iterator[None]:
    """Runs the work that this thread submits to thread pools on this thread, since operations of other threads would not be traced. One
    thread at a time: each puts back what it has found."""
    here = threading.get_ident()

    def at_once(pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if threading.get_ident() != here:
            return submit(pool, function, *args, **kwargs)
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    with _POOLS:
        submit = ThreadPoolExecutor.submit
        ThreadPoolExecutor.submit = at_once  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]
