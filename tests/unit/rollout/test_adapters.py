"""Adapters: over an engine's own checkpoint, and of several clients in one engine."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from services.rollout.client_adapters import Adapters
from services.rollout.engine.receiver.receiver import Receiver, Reception, merged
from shared.runtime.errors import BadMessage, ConfigError
from shared.transfer.manifest import Manifest, lay_out
from shared.transfer.weight_channel import TransferDeadline
from tests.support.run_config import SERVED, run_config
from tests.support.weights_group import flat_of

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"


def adapter(dtype: torch.dtype = torch.float32, rank: int = 3) -> tuple[Manifest, dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(1)
    shapes = {f"{Q}.lora_A": (rank, 8), f"{Q}.lora_B": (12, rank), f"{DOWN}.lora_B": (8, rank), f"{DOWN}.lora_A": (rank, 20)}
    tensors = {f"base_model.model.{name}.weight": torch.randn(shape, generator=random).to(dtype) for name, shape in shapes.items()}
    return manifest_of(tensors), tensors


def manifest_of(tensors: dict[str, torch.Tensor]) -> Manifest:
    slots = [(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in tensors.items()]
    return lay_out(slots, 400, "adapter", 0.5)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """In two files, with an index and a tensor that no adapter is for."""
    random = torch.Generator().manual_seed(2)
    files = {"a.safetensors": {f"{Q}.weight": (12, 8), "model.norm.weight": (8,)}, "b.safetensors": {f"{DOWN}.weight": (8, 20)}}
    for file, shapes in files.items():
        save_file({name: torch.randn(shape, generator=random).bfloat16() for name, shape in shapes.items()}, tmp_path / file)
    weight_map = {name: file for file, shapes in files.items() for name in shapes}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    save_file({"unrelated": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    return tmp_path


class Fused(torch.nn.Module):
    """Latent attention's two projections to low ranks as one parameter, which SGLang's loaders set where both come in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = torch.nn.Parameter(torch.zeros(6, 8), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        given = dict(weights)
        if len(halves := [given[name] for name in LATENT if name in given]) == 2:
            self.fused.data.copy_(torch.cat(halves))


LATENT = [f"model.layers.0.self_attn.{name}.weight" for name in ("q_a_proj", "kv_a_proj_with_mqa")]


@pytest.mark.parametrize("differing", [False, True])
def test_a_check_compares_matrices_of_one_parameter_together(differing: bool, tmp_path: Path) -> None:
    """One alone is dropped by the engine's model, so that nothing would be compared."""
    base = {name: torch.randn(size, 8) for name, size in zip(LATENT, (2, 4), strict=True)}
    save_file(base, tmp_path / "model.safetensors")
    shapes = {"lora_A": lambda weight: (3, 8), "lora_B": lambda weight: (len(weight), 3)}
    stems = {f"base_model.model.{name.removesuffix('.weight')}": weight for name, weight in base.items()}
    tensors = {f"{stem}.{part}.weight": torch.randn(shape(one)) for stem, one in stems.items() for part, shape in shapes.items()}
    model, manifest = Fused(), manifest_of(tensors)
    model.load_weights(merged(manifest, tensors, tmp_path))
    model.fused.data[5, 7] += differing
    channel: Any = SimpleNamespace(
        manifest=lambda *_: manifest,
        take=lambda index, *_: flat_of(manifest.buckets[index], tensors),
        release=lambda _: None,
        finish=lambda _: None,
        name="",
        begun_at=0.0,
    )
    reception = Reception(Receiver(model, 0, "cpu", str(tmp_path)), 1, 1, True, [channel], TransferDeadline(60.0), {})
    assert sum(reception.run()["differences"].values()) == differing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_are_the_base_with_the_scaled_product(dtype: torch.dtype, checkpoint: Path) -> None:
    from safetensors.torch import load_file

    manifest, tensors = adapter(dtype)
    base = load_file(checkpoint / "a.safetensors") | load_file(checkpoint / "b.safetensors")
    found = dict(merged(manifest, tensors, checkpoint))
    assert list(found) == [f"{Q}.weight", f"{DOWN}.weight"]
    for name, tensor in found.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        product = tensors[f"{stem}.lora_B.weight"].double() @ tensors[f"{stem}.lora_A.weight"].double()
        expected = base[name].double() + 0.5 * product
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor.double(), expected, atol=1e-5, rtol=0)


def test_one_file_without_an_index_is_read_too(tmp_path: Path) -> None:
    base = {f"{Q}.weight": torch.randn(12, 8), f"{DOWN}.weight": torch.randn(8, 20)}
    save_file(base, tmp_path / "model.safetensors")
    manifest, tensors = adapter()
    silent = {name: tensor * ("lora_A" in name) for name, tensor in tensors.items()}
    assert all(torch.equal(tensor, base[name]) for name, tensor in merged(manifest, silent, tmp_path))


def test_half_an_adapter_and_one_of_another_shape_are_refused(checkpoint: Path) -> None:
    _, tensors = adapter()
    half = {name: tensor for name, tensor in tensors.items() if not name.endswith("down_proj.lora_B.weight")}
    with pytest.raises(BadMessage, match=r"lacks .*down_proj.lora_B"):
        next(merged(manifest_of(half), half, checkpoint))
    wide = {**tensors, f"base_model.model.{DOWN}.lora_A.weight": torch.zeros(3, 21)}
    with pytest.raises(BadMessage, match=r"down_proj.weight of shape \(8, 20\)"):
        next(merged(manifest_of(wide), wide, checkpoint))  # although the first matrix would fit
    with pytest.raises(BadMessage, match="no name of PEFT's"):
        next(merged(manifest_of({"model.norm.weight": torch.zeros(8)}), {}, checkpoint))


def test_a_checkpoint_without_the_matrix_is_refused_with_its_name(checkpoint: Path, tmp_path: Path) -> None:
    manifest, tensors = adapter()
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {f"{Q}.weight": "a.safetensors"}}))
    with pytest.raises(ConfigError, match=r"hf_checkpoint.*down_proj"):
        next(merged(manifest, tensors, checkpoint))
    (checkpoint / "a.safetensors").write_bytes(b"no safetensors")
    with pytest.raises(ConfigError, match=r"hf_checkpoint.*readable"):
        next(merged(manifest, tensors, checkpoint))


# --- clients' weights in one engine: whole models take turns, adapters lie side by side


class Engine:
    """It notes what it loads."""

    def __init__(self) -> None:
        self.transport, self.loads = self, list[str]()

    async def update_weights_from_disk(self, path: str, version: int, *, deadline: float) -> None:
        await asyncio.sleep(0)
        self.loads.append(Path(path).name)

    async def post(self, path: str, body: dict[str, str], *rest: Any) -> None:
        await asyncio.sleep(0)
        self.loads.append(f"{path} {Path(body.get('lora_path', '')).name}")


class Clients:
    """Requests that hold weights until they are told to end."""

    def __init__(self, directory: Path, **trainer: Any) -> None:
        config = run_config(directory, trainer=trainer, **SERVED)
        self.root, self.engine, self.adapters = config.trained / "clients" / "sampler_weights", Engine(), Adapters(config)
        self.begun = list[str]()

    def ask(self, name: str) -> tuple[asyncio.Task[None], asyncio.Event]:
        (self.root / name).mkdir(parents=True, exist_ok=True)
        end = asyncio.Event()

        async def request() -> None:
            async with self.adapters.serving(self.engine, str(self.root / name) if name != "base" else ""):  # type: ignore[arg-type]
                self.begun.append(name)
                await end.wait()

        return asyncio.create_task(request()), end


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def tried(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(bounded())


def test_a_model_that_is_waited_for_has_its_turn_before_later_requests_for_the_one_that_is_held(tmp_path: Path) -> None:
    async def test() -> None:
        clients = Clients(tmp_path)
        asked = []
        for name in ("a", "b", "a", "b"):
            asked.append(clients.ask(name))
            await settled()
        assert clients.begun == ["a"]
        asked[0][1].set()
        await settled()
        assert clients.begun == ["a", "b", "b"] and clients.engine.loads == ["a", "b"], "those that wait for one model go together"
        given_up, _ = asked[2]
        given_up.cancel()
        later = clients.ask("b")
        await settled()
        assert clients.begun == ["a", "b", "b", "b"], "no one waits any more"
        for task, end in (asked[1], asked[3], later):
            end.set()
            await task
        assert clients.engine.loads == ["a", "b"]

    tried(test)


def test_base_and_adapters_lie_side_by_side(tmp_path: Path) -> None:
    async def test() -> None:
        clients = Clients(tmp_path, lora_rank=4)
        asked = [clients.ask(name) for name in ("a", "base", "b", "a")]
        await settled()
        assert sorted(clients.begun) == ["a", "a", "b", "base"]
        assert sorted(clients.engine.loads) == ["/load_lora_adapter a", "/load_lora_adapter b"]
        for task, end in asked:
            end.set()
            await task

    tried(test)
