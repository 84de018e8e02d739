"""Megatron-Core without CUDA: the rewriting rules, and the order of imports that they need."""

import ast
import subprocess
import sys
import types

import pytest
import torch

from services.trainer.megatron import DEVICE_TYPE, cpu
from tests.support.tables import table

needs_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA nothing is rewritten")


@table(
    ("source", "rewritten"),
    [
        ("torch.cuda.current_device()", "__myxo_cpu_device__.current_device()"),
        ("torch.zeros(1, device='cuda')", "torch.zeros(1, device='cpu')"),
        ("kind == 'torch.cuda.HalfTensor'", "kind == 'torch.HalfTensor'"),
        ("tensor.cuda(non_blocking=True)", "tensor.cpu()"),
        ("make(x).cuda().float()", "make(x).cpu().float()"),
        ("torch.tensor(x, device='cpu', pin_memory=True)", "torch.tensor(x, device='cpu')"),
        ("x = 'a word about cuda'", "x = 'a word about cuda'"),
        ("config.cuda_graph_impl", "config.cuda_graph_impl"),
    ],
)
def test_rewriting(source, rewritten):
    assert ast.unparse(cpu.CudaToCpu().visit(ast.parse(source))) == rewritten


def test_what_was_rewritten_is_kept_apart_and_read_again_only_while_it_fits(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    source = tmp_path / "named.py"

    def loaded():
        module = types.ModuleType("named")
        cpu.CpuLoader("named", str(source)).exec_module(module)
        return module.NAME

    source.write_text("NAME = 'cuda'")
    assert loaded() == "cpu"
    (kept,) = (tmp_path / "__pycache__").iterdir()
    assert ".opt-myxo" in kept.name, "stock imports read no such name"
    whole = kept.read_bytes()
    kept.write_bytes(whole.replace(b"cpu", b"CPU"))
    assert loaded() == "CPU", "the kept one was read"
    for cut in (0, 8, 16, len(whole) - 4):
        kept.write_bytes(whole[:cut])
        assert loaded() == "cpu"
        assert kept.read_bytes() == whole, "written anew"
    source.write_text("NAME = 'cuda', 'cuda'")  # of another length or not, its content counts
    assert loaded() == ("cpu", "cpu")


@needs_cpu
def test_only_megatron_core_sees_the_other_device():
    from megatron.core.tensor_parallel import random as megatron_random

    assert DEVICE_TYPE == "cpu" and cpu.install() == "cpu"
    assert isinstance(megatron_random.__dict__["__myxo_cpu_device__"], cpu.CpuDevice)
    assert torch.cuda.__name__ == "torch.cuda" and not torch.cuda.is_available()


@pytest.mark.extra
@needs_cpu
def test_megatron_imported_too_early_is_refused():
    program = "import sys, types; sys.modules['megatron.core'] = types.ModuleType('megatron.core')\nimport services.trainer.megatron"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "import services.trainer.megatron first" in done.stderr


@needs_cpu
def test_the_generator_of_the_tracker_is_the_cpus():
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    tracker.add("a", 7)
    torch.manual_seed(1)
    outside = torch.rand(2)
    torch.manual_seed(1)
    with tracker.fork("a"):
        inside = torch.rand(2)
    assert torch.equal(torch.rand(2), outside)
    assert torch.equal(inside, torch.rand(2, generator=torch.Generator().manual_seed(7)))
