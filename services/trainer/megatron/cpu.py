"""Stock ``megatron-core`` on a machine without CUDA, over gloo.

The wheel names CUDA in about 120 files. Where there is no CUDA, :func:`install` puts an import hook before the first
``import megatron.core``; it rewrites the syntax tree of exactly those modules as they load:

============================================  ==================================================================
in the source                                 becomes
============================================  ==================================================================
``torch.cuda.NAME``                           ``NAME`` of :class:`CpuDevice`
``"cuda"``                                    ``"cpu"``
``"torch.cuda.FloatTensor"`` and its kin      ``"torch.FloatTensor"`` (optimizers compare ``Tensor.type()`` with it)
``x.cuda(...)``                               ``x.cpu()``
``pin_memory=True``                           nothing: only memory that a device copies from can be pinned
============================================  ==================================================================

torch itself and every other package stay as they are. What was rewritten is kept beside the usual bytecode, under a name that no
other import reads: to compile it takes as long as all else that an import does. Where CUDA is there, nothing happens at all: GPUs
run the stock library. Made for megatron-core 0.16; the layout tests compare its numbers.
"""

import ast
import contextlib
import importlib.machinery
import logging
import marshal
import sys
import types
import zlib
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import MAGIC_NUMBER, cache_from_source, source_hash
from pathlib import Path
from typing import Any

import torch

from shared.runtime.errors import MyxoError

PACKAGE = "megatron.core"
_DEVICE_NAME = "__myxo_cpu_device__"


class CpuStream:
    """The stand-in for ``torch.cuda.Stream`` and ``torch.cuda.Event`` on the CPU, where nothing is asynchronous: all is over at once."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def record(self, *args: object) -> "CpuStream":
        return self

    wait = wait_stream = wait_event = record_event = synchronize = record

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "CpuStream") -> float:
        return 0.0


class CpuRandom:
    """The random state of "the device": on the CPU the default generator, which takes no device argument."""

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        torch.random.default_generator.manual_seed(seed)


class CpuDevice(CpuRandom):
    """The stand-in for ``torch.cuda`` in rewritten modules: ``torch.cpu``, with the names that only CUDA has."""

    random = CpuRandom()
    Stream = Event = CpuStream
    _stream = CpuStream()

    def __getattr__(self, name: str) -> Any:
        """Returns ``torch.cpu``'s attribute for a name not defined here, else ``torch.cuda``'s, which is then only named, not called."""
        return getattr(torch.cpu, name) if hasattr(torch.cpu, name) else getattr(torch.cuda, name)

    def current_stream(self, device: object = None) -> CpuStream:
        return self._stream

    default_stream = current_stream

    def stream(self, stream: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def empty_cache(self) -> None: ...

    def memory_allocated(self, device: object = None) -> int:
        return 0

    max_memory_allocated = memory_reserved = memory_allocated


class CudaToCpu(ast.NodeTransformer):
    """The rewriting rules of this module's table."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if node.value == "cuda":
            return ast.copy_location(ast.Constant("cpu"), node)
        if isinstance(node.value, str) and node.value.startswith("torch.cuda.") and node.value.endswith("Tensor"):
            return ast.copy_location(ast.Constant(node.value.replace(".cuda", "")), node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return ast.copy_location(ast.Name(_DEVICE_NAME, node.ctx), node)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            moved = ast.copy_location(ast.Attribute(node.func.value, "cpu", ast.Load()), node)
            return ast.copy_location(ast.Call(moved, [], []), node)
        node.keywords = [
            keyword
            for keyword in node.keywords
            if not (keyword.arg == "pin_memory" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True)
        ]
        return node


def _with_cpu_generator(module: types.ModuleType) -> None:
    """Has the tracker set the CPU's generator: it uses CUDA's C bindings, and warns where the CPU's moved as well."""

    def set_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    module.__dict__["_set_cuda_rng_state"] = set_state
    logging.getLogger(module.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _with_numpy_splits(module: types.ModuleType) -> None:
    """Converts the all-to-all dispatcher's split sizes to plain integers, as it does for tensors on CUDA only."""

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    module.__dict__["maybe_move_tensor_to_cpu"] = move


def _with_even_gathers(module: types.ModuleType) -> None:
    """Makes gathers and scatters work on parts of different sizes (of experts both distributed and split), which gloo lacks: the
    parts are padded to the longest."""
    gather, scatter = module.__dict__["_gather_along_first_dim"], module.__dict__["_reduce_scatter_along_first_dim"]

    def padded(part: torch.Tensor, rows: int) -> torch.Tensor:
        return torch.cat([part, part.new_zeros(rows - part.size(0), *part.shape[1:])])

    def gather_any(part: torch.Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return gather(part, group, None, use_global_buffer)
        longest = max(int(size) for size in sizes)
        if not longest:
            return part
        parts = gather(padded(part, longest), group).split(longest)
        return torch.cat([each[: int(size)] for each, size in zip(parts, sizes, strict=True)])

    def scatter_any(whole: torch.Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return scatter(whole, group, None, use_global_buffer)
        sizes = [int(size) for size in sizes]
        if not max(sizes):
            return whole
        mine = scatter(torch.cat([padded(part, max(sizes)) for part in whole.split(sizes)]), group)
        return mine[: sizes[group.rank()]]

    module.__dict__.update(_gather_along_first_dim=gather_any, _reduce_scatter_along_first_dim=scatter_any)


_AFTER_IMPORT: dict[str, Callable[[types.ModuleType], None]] = {
    # torch.compile, which on a CPU would call a C++ compiler for every fused function
    f"{PACKAGE}.jit": lambda module: module.__dict__.update(jit_fuser=lambda function: function),
    f"{PACKAGE}.tensor_parallel.random": _with_cpu_generator,
    f"{PACKAGE}.tensor_parallel.mappings": _with_even_gathers,
    f"{PACKAGE}.transformer.moe.moe_utils": _with_numpy_splits,
}


# In the name of rewritten bytecode: other rules, which are in this file, have another
_REWRITTEN = f"myxo{sys.flags.optimize}x{zlib.crc32(Path(__file__).read_bytes()):08x}"


class CpuLoader(SourceFileLoader):
    """Loads one module of Megatron-Core, rewritten if it mentions CUDA."""

    def get_code(self, fullname: str) -> types.CodeType | None:
        source = self.get_data(self.path)
        if b"cuda" not in source:
            return super().get_code(fullname)
        kept, header = cache_from_source(self.path, optimization=_REWRITTEN), MAGIC_NUMBER + source_hash(source)
        with contextlib.suppress(OSError, EOFError, ValueError, TypeError):  # not there, or cut short
            data = self.get_data(kept)
            if data.startswith(header):
                code: types.CodeType = marshal.loads(data[len(header) :])
                return code
        tree = ast.fix_missing_locations(CudaToCpu().visit(ast.parse(source, self.path)))
        code = compile(tree, self.path, "exec", dont_inherit=True)
        if not sys.dont_write_bytecode:
            self.set_data(kept, header + marshal.dumps(code))  # whole or not at all; nothing where the folder is read-only
        return code

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__[_DEVICE_NAME] = CpuDevice()
        super().exec_module(module)
        _AFTER_IMPORT.get(module.__name__, lambda _: None)(module)


class CpuFinder:
    """Finds modules of Megatron-Core as usual and hands them to :class:`CpuLoader`."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None) -> ModuleSpec | None:
        if fullname != PACKAGE and not fullname.startswith(PACKAGE + "."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = CpuLoader(spec.loader.name, spec.loader.path)
        return spec


def install() -> str:
    """Makes ``import megatron.core`` work on this machine; call it before the first such import. Idempotent.

    Returns:
        ``"cuda"`` where CUDA is available (nothing was changed), else ``"cpu"``.

    Raises:
        MyxoError: there is no CUDA and ``megatron.core`` is loaded already, unchanged: it holds references to CUDA.
    """
    if torch.cuda.is_available():
        return "cuda"
    if any(isinstance(finder, CpuFinder) for finder in sys.meta_path):
        return "cpu"
    if PACKAGE in sys.modules:
        raise MyxoError(f"{PACKAGE} was imported before services.trainer.megatron; import services.trainer.megatron first")
    sys.meta_path.insert(0, CpuFinder())
    return "cpu"
