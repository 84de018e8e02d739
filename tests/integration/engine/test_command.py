"""The launch command, and the CPU launcher's stand-ins, in a process that imports it as a spawned child of the engine does."""

import asyncio
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from services.rollout.engine.early_processes import DETOKENIZER, SCHEDULER
from services.rollout.engine.engine_process import CPU_LAUNCHER, GPU_LAUNCHER, EngineProcess, EngineRendezvous, engine_command, engine_site
from services.rollout.engine.private_endpoints import SECRET_VARIABLE
from services.rollout.replica_command import replica_command
from shared.config import devices
from shared.config.engine_limits import CPU_MIN_TOKENS
from shared.data.media import WATCHING
from shared.process.embedded_servers import free_port
from shared.runtime.errors import ConfigError
from shared.service.service_base import Service
from tests.integration.engine.conftest import START_SECONDS, Checkpoints
from tests.support.run_config import run_config
from tests.unit.trainer.megatron.tiny import make_checkpoint

ROOT = Path(__file__).parents[3]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with no more than the configuration."""
    return write_config(tmp_path / "model", layers=2, kv_heads=2, head_dim=16)


def write_config(path: Path, *, layers: int, kv_heads: int, head_dim: int) -> Path:
    path.mkdir()
    sizes = {"num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    (path / "config.json").write_text(json.dumps(sizes))
    return path


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An engine site as far as the command looks: it is not imported here."""
    directory = tmp_path / "site"
    (directory / "torchvision").mkdir(parents=True)
    (directory / "torchvision" / "__init__.py").touch()
    monkeypatch.setenv("MYXO_ENGINE_SITE", str(directory))
    return directory


def flag(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_auto_leaves_the_kernels_to_what_is_pushed(tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given, it would hide the choice for GPUs on which SGLang's own rearranges experts."""
    monkeypatch.setattr(devices, "gpu_capabilities", lambda: [10.0])
    make_checkpoint("qwen3_moe", tmp_path / "experts")
    for name in ("moe-runner-backend", "moe_runner_backend"):
        rollout: dict[str, Any] = {"rollout_device": "cuda", "sglang": {name: "auto"}}
        config = run_config(tmp_path, model={"hf_checkpoint": str(tmp_path / "experts")}, rollout=rollout)
        argv = replica_command(cast("Service", SimpleNamespace(config=config, name="rollout")), "rollout-0").argv
        assert argv.count("--moe-runner-backend") == 1 and flag(argv, "--moe-runner-backend") == "triton"


def test_on_a_cpu(model: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    command = engine_command(model, 31000, device="cpu", random_seed=9)
    assert command.argv[:2] == [sys.executable, str(CPU_LAUNCHER)]
    expected = {
        "--model-path": str(model),
        "--host": "127.0.0.1",
        "--port": "31000",
        "--device": "cpu",
        "--weight-version": "0",
        "--random-seed": "9",
        "--attention-backend": "torch_native",
        "--dtype": "float32",
        "--max-total-tokens": "65536",
    }
    assert {name: flag(command.argv, name) for name in expected} == expected
    assert {"--sleep-on-idle", "--skip-server-warmup", "--disable-cuda-graph"} <= set(command.argv)
    assert "--enable-metrics" in command.argv
    assert command.env["PYTHONPATH"] == f"{site}:/mine:{ROOT}"  # the receiver is imported by the engine
    assert flag(command.argv, "--custom-weight-loader") == "services.rollout.engine.receiver.loader.load"
    assert command.env["OMP_NUM_THREADS"] == "1"


def test_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    command = engine_command("Qwen/Qwen3-4B", 31000, device="cuda")
    assert command.argv[:2] == [sys.executable, str(GPU_LAUNCHER)]
    assert "--skip-server-warmup" in command.argv
    assert flag(command.argv, "--model-path") == "Qwen/Qwen3-4B"
    assert "--enable-metrics" in command.argv
    assert not {"--attention-backend", "--dtype", "--max-total-tokens"} & set(command.argv)
    assert command.env["NCCL_CUMEM_ENABLE"] == "0" and command.env["PYTHONPATH"] == str(ROOT)


def test_the_memory_saver_finds_cudas_runtime_where_pip_has_put_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = tmp_path / "nvidia" / "cu13" / "lib"
    libraries.mkdir(parents=True)
    (libraries / "libcudart.so.13").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/mine")
    command = engine_command("org/model", 30000, device="cuda", flags={"enable_memory_saver": True})
    assert command.env["LD_LIBRARY_PATH"].split(":")[-1] == "/mine"
    assert str(libraries) in command.env["LD_LIBRARY_PATH"].split(":")
    assert "LD_LIBRARY_PATH" not in engine_command("org/model", 30000, device="cuda").env


def test_the_runs_flags_go_through_and_win(model: Path, site: Path) -> None:
    flags = {
        "mem-fraction-static": 0.8,
        "disable_radix_cache": True,
        "--tp-size": 2,
        "dtype": "bfloat16",
        "sleep-on-idle": False,
        "max-total-tokens": None,
        "cuda-graph-bs": [1, 2, 4],
        "a-flag-of-tomorrow": "x",
    }
    argv = engine_command(model, 31000, device="cpu", flags=flags).argv
    assert flag(argv, "--mem-fraction-static") == "0.8"
    assert flag(argv, "--tp-size") == "2"
    assert flag(argv, "--dtype") == "bfloat16" and argv.count("--dtype") == 1
    assert flag(argv, "--a-flag-of-tomorrow") == "x"
    assert "--disable-radix-cache" in argv
    assert "--sleep-on-idle" not in argv and "--max-total-tokens" not in argv
    at = argv.index("--cuda-graph-bs")
    assert argv[at : at + 4] == ["--cuda-graph-bs", "1", "2", "4"]


@pytest.mark.parametrize("name", ["port", "--host", "model_path", "device", "weight-version", "skip-server-warmup"])
def test_what_the_service_sets_wins(name: str) -> None:
    assert "x" not in engine_command("m", 31000, device="cuda", flags={name: "x"}).argv


def test_an_engine_that_shares_attention_has_a_secret_of_its_own_or_that_of_its_nodes() -> None:
    shared, one = {"enable-dp-attention": True, "dp-size": 2}, {"enable-dp-attention": False}
    first, second = (engine_command("m", 31000, device="cuda", flags=shared).env[SECRET_VARIABLE] for _ in range(2))
    assert len(first) == 32 and first != second
    meeting = EngineRendezvous(1, 2, "127.0.0.1", 4000, "f" * 32)
    assert engine_command("m", 31000, device="cuda", flags=shared, meeting=meeting).env[SECRET_VARIABLE] == "f" * 32
    assert not any(SECRET_VARIABLE in engine_command("m", 31000, device="cuda", flags=given, meeting=meeting).env for given in (one, {}))


def test_a_large_models_cache_is_bounded_by_its_bytes(tmp_path: Path, site: Path) -> None:
    middle = write_config(tmp_path / "middle", layers=12, kv_heads=2, head_dim=128)  # 24576 bytes a token
    large = write_config(tmp_path / "large", layers=64, kv_heads=8, head_dim=128)
    assert flag(engine_command(middle, 1, device="cpu").argv, "--max-total-tokens") == str(512 * 2**20 // 24576)
    assert flag(engine_command(large, 1, device="cpu").argv, "--max-total-tokens") == str(CPU_MIN_TOKENS)


def test_a_missing_engine_site_says_how_to_install_it(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MYXO_ENGINE_SITE", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"MYXO_ENGINE_SITE = .*pip install --no-deps --target .*nowhere torchvision=="):
        engine_command(model, 31000, device="cpu")
    monkeypatch.delenv("MYXO_ENGINE_SITE")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(ConfigError, match=r"the engine site = .*engine-site"):
        engine_command(model, 31000, device="cpu")


def test_a_model_that_is_not_there(site: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.hf_checkpoint = .*config.json"):
        engine_command(tmp_path / "nothing", 31000, device="cpu")


AS_SPAWNED = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("__mp_main__", {launcher!r})
launcher = importlib.util.module_from_spec(spec)
sys.modules["__mp_main__"] = launcher
spec.loader.exec_module(launcher)
"""


def child(code: str, torchvision_site: Path | None = None, before: str = "") -> str:
    """What a fresh process prints that has imported the launcher, with ``torchvision_site`` for the engine's, after ``before``."""
    environment = {"PYTHONPATH": str(torchvision_site or engine_site()), "PATH": "/usr/bin:/bin"}
    script = before + AS_SPAWNED.format(launcher=str(CPU_LAUNCHER)) + code
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.extra  # an engine that starts has imported it so
def test_torchvision_is_whole() -> None:
    """transformers' image classes are imported through it."""
    code = "import torch, torchvision\nfrom torchvision.transforms.v2 import functional\nprint(torch.ops.torchvision.nms.__name__)"
    assert child(code) == "nms"


TORCHVISION = """
import contextlib, pathlib, torch
with contextlib.suppress(OSError):
    torch.ops.load_library(str(pathlib.Path(__file__).with_name("_C.so")))
for name in ("nms", "qnms"):
    torch.library.register_fake("torchvision::" + name)(lambda *tensors: None)
"""
"""What torchvision's import does with its operators."""

REGISTERS = """
import functools, pathlib, torch

@functools.cache
def load_library(path):
    assert pathlib.Path(path).name == "_C.so", path
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return operators

torch.ops.load_library = load_library
"""
"""A loader of an extension that registers operators when it is first loaded; the dispatcher refuses them a second time."""

IMPORTED = "import torch, torchvision\nprint(torch.ops.torchvision.nms.__name__, torch.ops.torchvision.qnms.__name__)"


@pytest.fixture
def torchvision_site(tmp_path: Path) -> Path:
    """An engine site with a torchvision whose extension is not a library."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(TORCHVISION)
    (package / "_C.so").write_text("no library\n")
    return tmp_path


def test_operators_that_torchvision_registers_itself_are_left_to_it(torchvision_site: Path) -> None:
    """As beside torch for CUDA, where a second registration aborts the engine."""
    assert child(IMPORTED, torchvision_site, REGISTERS) == "nms qnms"


def test_operators_are_declared_where_the_extension_does_not_load(torchvision_site: Path) -> None:
    assert child(IMPORTED, torchvision_site) == "nms qnms"


@pytest.mark.extra
def test_operators_are_declared_where_there_is_no_extension(torchvision_site: Path) -> None:
    (torchvision_site / "torchvision" / "_C.so").unlink()
    assert child(IMPORTED, torchvision_site) == "nms qnms"


STANDINS = """
import multiprocessing
print("sglang" in sys.modules, multiprocessing.get_start_method(allow_none=True))
try:
    import megatron.core
except ImportError:
    print("hidden")
import triton, triton.language as tl
from triton.runtime.autotuner import OutOfResources
from triton.runtime.jit import KernelInterface

@triton.autotune(configs=[triton.Config({"BLOCK": 64}, num_warps=4)], key=["n"])
@triton.jit
def kernel(x, BLOCK: tl.constexpr):
    return tl.load(x)

class Mine(KernelInterface[int]):
    pass

try:
    kernel[(1,)](3)
except TypeError as error:
    print(error)
print(triton.cdiv(7, 2), triton.next_power_of_2(5), issubclass(OutOfResources, Exception))
from sgl_kernel import silu_and_mul_cpu
try:
    silu_and_mul_cpu()
except NotImplementedError as error:
    print(error)
try:
    from sgl_kernel import silu_and_mul
except ImportError:
    print("CUDA names stay missing")
"""


ADAPTERS = """
import random, types
from services.rollout.engine import sglang_changes
launcher.pin_nothing()
import torch
from sglang.srt.lora.backend import chunked_backend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

sglang_changes.shorten_adapter_segments()
chunked_backend.get_lora = lambda: types.SimpleNamespace(max_lora_chunk_size=16)
backend, rng = chunked_backend.ChunkedSgmvLoRABackend(8, torch.device("cpu"), None), random.Random(0)
backend.init_cuda_graph_batch_info(max_bs_in_cuda_graph=512, num_tokens_per_req=1)
for rows in (1, 2, 15, 17, 128, 505, 511, 512, 512):
    wanted = [rng.randrange(8) for _ in range(rows)]
    batch = types.SimpleNamespace(batch_size=rows, forward_mode=ForwardMode.DECODE, spec_info=None, return_logprob=False)
    backend.prepare_lora_batch(batch, wanted, [8] * 8, [1.0] * 8, True)
    info = backend.batch_info
    bounds = info.seg_indptr.tolist()
    assert bounds[-1] == rows and max(b - a for a, b in zip(bounds, bounds[1:])) <= 16, bounds
    found = {row: int(info.weight_indices[one]) for one in range(40) for row in info.permutation[bounds[one] : bounds[one + 1]].tolist()}
    assert found == dict(enumerate(wanted))
print(len(info.weight_indices), len(bounds))
"""
"""SGLang's bookkeeping of adapters in the graphs of decode steps."""


def test_stand_ins_and_adapters() -> None:
    """An import launches nothing and hides the trainer's library; kernels can be defined and not launched; one that is missing says so.
    Then every row of a decode graph keeps its adapter, in few segments: 512 rows by 16, and one more for each of 8 adapters."""
    at_import, hidden, launched, helpers, missing, cuda, *_, segments = child(STANDINS + ADAPTERS).splitlines()
    assert (at_import, hidden, launched) == ("False None", "hidden", "'function' object is not subscriptable")
    assert helpers == "4 8 True"
    assert missing.startswith("sgl_kernel.silu_and_mul_cpu: PyPI has no CPU build") and cuda == "CUDA names stay missing"
    assert segments == "40 41"


PACKED = """
import types
from services.rollout.engine import quantized_layers
quantized_layers.entry_format = lambda _: types.SimpleNamespace(bits=4, endings=("weight_packed", "weight_scale"))
quantized_layers.install("", on_cpu=False)
import torch
from sglang.srt.layers.quantization.compressed_tensors import schemes

layer, method = torch.nn.Module(), object.__new__(schemes.CompressedTensorsWNA16TritonMoE)
for name in ("w13_weight", "w2_weight"):
    for ending, kind in (("packed", torch.int32), ("scale", torch.float32)):
        layer.register_parameter(f"{name}_{ending}", torch.nn.Parameter(torch.zeros(2, 4, 6, dtype=kind), requires_grad=False))
        getattr(layer, f"{name}_{ending}").weight_loader = print
method.process_weights_after_loading(layer)
copy = vars(layer)["_working_copy"]
for step in range(2):
    layer.w2_weight_scale.data += 1
    quantized_layers.refresh()
print(*layer.w2_weight_packed.shape, *copy.w2_weight_packed.shape, *copy.w2_weight_scale.unique().tolist())
print(all(hasattr(parameter, "weight_loader") for parameter in layer.parameters()))
"""


def test_packed_experts_of_tritons_kernels_stay_as_they_are_pushed() -> None:
    assert child(PACKED).splitlines() == ["2 4 6 2 6 16 2.0", "True"]


READS = """
from sglang.srt.multimodal.processors import base_processor
print(base_processor.load_video.__module__)
"""


def test_servers_beside_one_another_read_videos_as_one_does(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "{next(iter(WATCHING))}"}}')
    given = ["launcher", "--model-path", str(tmp_path), "--tokenizer-worker-num", "2"]
    assert child(READS, before=f"import sys\nsys.argv = {given}\n").startswith("services.rollout")


STAND_INS = """
import sys
if {launcher!r} in sys.orig_argv or "--multiprocessing-fork" in sys.orig_argv:  # not multiprocessing's resource tracker
    import services.rollout.engine.cpu_launcher
"""
"""What each of the engine's interpreters runs before anything else."""


@pytest.mark.extra
def test_sglang_gets_the_processes_that_were_begun_early(checkpoint: Checkpoints, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(STAND_INS.format(launcher=str(GPU_LAUNCHER)))
    command = engine_command(checkpoint(0).path, free_port(), device="cpu")
    argv = [str(GPU_LAUNCHER) if argument == str(CPU_LAUNCHER) else argument for argument in command.argv]
    env = command.env | {"PYTHONPATH": os.pathsep.join([str(tmp_path), command.env["PYTHONPATH"]])}
    engine = EngineProcess(replace(command, argv=argv, env=env), tmp_path / "engine.log")
    try:
        asyncio.run(engine.ready(START_SECONDS))
        log = (tmp_path / "engine.log").read_text()
        started = re.findall(r"Process (\d+), begun [\d.]+ s ago, runs (\S+)", log)
        assert [module for _, module in started] == [SCHEDULER, DETOKENIZER], log[-3000:]
        names = [psutil.Process(int(pid)).cmdline()[0] for pid, _ in started]
        assert "scheduler" in names[0] and "detokenizer" in names[1]
        assert not engine.fault()
        engine.stop(120)  # SIGTERM, which SGLang passes on
        assert engine.members() == []
    finally:
        engine.stop(0)
