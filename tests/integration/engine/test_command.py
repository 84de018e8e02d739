"""The launch command. What it starts is tested with the engines."""

import json
import sys
from pathlib import Path

import pytest

from services.rollout.engine.engine_process import CPU_LAUNCHER, GPU_LAUNCHER, EngineRendezvous, engine_command
from services.rollout.engine.private_endpoints import SECRET_VARIABLE
from shared.config.engine_limits import CPU_MIN_TOKENS
from shared.runtime.errors import ConfigError

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
