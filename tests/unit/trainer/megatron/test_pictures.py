"""Models that see, on the torch backend: packs with pictures beside transformers' single sequences, and ranks of which one has none."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.utils.checkpoint import checkpoint

from services.trainer.fsdp import fused_layers, picture_inputs
from services.trainer.fsdp.picture_inputs import MediaInputs
from services.trainer.packing import separate
from services.trainer.parallel.safetensors_reader import SafetensorsReader
from shared.config.data_sections import DataSection
from shared.data.media import MediaReader
from shared.model.families import tower_of
from shared.model.hf_checkpoint import read_headers
from shared.model.memory_plan import tower_bytes
from shared.runtime.errors import BadMessage
from tests.support.tiny_audio import wav, write_tiny_audio_model
from tests.support.tiny_vision import png, write_tiny_vision_model
from tests.unit.trainer.megatron import rank_steps
from tests.unit.trainer.megatron.tiny import pack

TORCH = {"trainer_backend": "torch", "adam_eps": 1e-3, "shows": "image"}
SHOWN = [[(30, 41)], [], [(16, 24), (50, 20)], [(8, 8)]]  # of four sequences, sizes of the pictures
KINDS = ("qwen3_vl", "qwen2_5_vl", "qwen3_5", "glm4v")
HEARS, WATCHES = TORCH | {"shows": "audio"}, TORCH | {"shows": "video"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}

    def model(kind):
        if kind not in made:
            made[kind] = directory = tmp_path_factory.mktemp(kind)
            write_tiny_vision_model(directory, kind)
        return made[kind]

    return model


def shown_by(kind):
    return DataSection(apply_chat_template=True, multimodal_keys={kind: "shown"})


def video(width, height, frames, seed=0):
    return [png(width, height, seed=seed + number) for number in range(frames)]


def batch_of(directory, shown=SHOWN, kind="image"):
    """One micro-batch: text, pictures, or videos of five frames, text, in each sequence."""
    reader = MediaReader.of(directory, shown_by(kind))
    generator, sequences, pictures = torch.Generator().manual_seed(5), [], []
    for number, sizes in enumerate(shown):
        given = [png(*size, seed=number) if kind == "image" else video(*size, 5, number) for size in sizes]
        made = [reader.prepared(reader.data_of(one, directory)) for one in given]
        ids = torch.randint(4, 90, (9 + 4 * number,), generator=generator).int()
        for picture in made:
            ids = torch.cat([ids, torch.tensor([reader.rule.token] * picture.tokens + [5, 6]).int()])
        sequences.append(torch.cat([ids, torch.randint(4, 90, (7,), generator=generator).int()]).long())
        pictures.append(tuple(picture.data for picture in made))
    batch = replace(pack(sequences), pictures=tuple(pictures) if any(pictures) else ())
    seen = torch.isin(batch.labels, torch.tensor(reader.rule.forbidden))
    return replace(batch, loss_mask=batch.loss_mask * ~seen)


def reference(directory, shows, batch):
    """Log-probs of each sequence alone, by transformers, over the ids that may be sampled."""
    import transformers

    model = transformers.AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    inputs, found = MediaInputs.of(directory, model, shows), []
    rule = inputs.rule
    for one in separate(batch):
        kinds = inputs.number * (one.tokens == rule.token).int()[None]
        pixels = inputs._once(one.pictures[0])
        places = {} if shows == "image" else {"position_ids": inputs._places(one.tokens, pixels)[:, None]}
        with torch.no_grad():
            logits = model(input_ids=one.tokens[None], mm_token_type_ids=kinds, **pixels, **places).logits[0]
        logits[:, list(rule.forbidden)] = -torch.inf
        found.append(logits.log_softmax(-1).gather(1, one.labels[:, None])[:, 0])
    return torch.cat(found)


@pytest.mark.parametrize(
    ("kind", "shows"),
    [
        ("qwen3_vl", "image"),
        *(pytest.param(kind, "image", marks=pytest.mark.extra) for kind in KINDS if kind != "qwen3_vl"),
        ("qwen2_5_vl", "video"),
    ],
)
def test_packs_with_pictures_are_computed_as_single_sequences(kind, shows, models, alone, tmp_path):
    directory = models(kind)
    model, batch = alone.actor(directory, **TORCH | {"shows": shows}), batch_of(directory, kind=shows)
    trained = batch.loss_mask > 0
    (packed,) = model.log_probs([batch])
    torch.testing.assert_close(packed[trained], reference(directory, shows, batch)[trained], atol=2e-5, rtol=0)
    assert packed.isfinite().all()
    singles = torch.cat(model.log_probs(separate(batch)))
    torch.testing.assert_close(packed, singles, atol=2e-5, rtol=0)
    blind = replace(batch, pictures=())
    with pytest.raises(BadMessage, match=f"its {MediaReader.of(directory, shown_by(shows)).rule.noun}s take 0"):
        model.log_probs([blind])
    saved, exported = load_file(directory / "model.safetensors"), alone.exported(model)
    assert exported.keys() == saved.keys() and all(torch.equal(exported[name], tensor) for name, tensor in saved.items())
    weights = {name: tensor.clone() for name, tensor in model.model.named_parameters().items()}
    first, second = (model.train_step([batch], alone.weighted_loss, need_entropy=True) for _ in range(2))
    assert second.loss < first.loss
    changed = {name for name, tensor in model.model.named_parameters().items() if not torch.equal(tensor, weights[name])}
    assert any("visual" in name for name in changed) and any("visual" not in name for name in changed)
    model.save_hf(tmp_path / "out")
    written, (_, problems) = SafetensorsReader(tmp_path / "out"), read_headers(tmp_path / "out")
    assert not problems
    assert all(torch.equal(written.read(name), tensor) for name, tensor in alone.exported(model).items()), "what sees as it was trained"


def test_pictures_of_a_group_are_prepared_once(models, monkeypatch):
    """Over all sequences and passes that show them, until others have taken their room."""
    import transformers

    directory = models("qwen3_vl")
    inputs = MediaInputs.of(directory, transformers.AutoModelForImageTextToText.from_pretrained(directory), "image")
    batch, prepared, plain = batch_of(directory, [[(30, 41)]] * 2 + [[]] + [[(16, 24)]]), [], inputs._pixels
    batch = replace(batch, pictures=(batch.pictures[0], (bytes(bytearray(batch.pictures[0][0])),), *batch.pictures[2:]))
    monkeypatch.setattr(inputs, "_pixels", lambda pictures: prepared.append(pictures) or plain(pictures))
    tokens = batch.tokens.clone()
    first, again = inputs.seen(batch, False), inputs.seen(batch, False)
    assert [len(each) for each in prepared] == [1, 1] and torch.equal(batch.tokens, tokens)
    torch.testing.assert_close(first.pixels, again.pixels, atol=0, rtol=0)
    monkeypatch.setattr(picture_inputs, "RECENT_BYTES", first.pixels["pixel_values"].nbytes // 2)
    third = inputs.seen(batch, False)
    assert len(prepared) > 2 and torch.equal(first.pixels["pixel_values"], third.pixels["pixel_values"])


def test_adapters_are_of_the_language_model_alone(models, alone):
    directory = models("glm4v")
    model, batch = alone.actor(directory, **TORCH, lora_rank=4), batch_of(directory)
    saved = load_file(directory / "model.safetensors")
    first, second = (model.train_step([batch], alone.weighted_loss, need_entropy=True) for _ in range(2))
    assert second.loss < first.loss
    exported = alone.exported(model)
    changed = {name for name, tensor in saved.items() if not torch.equal(exported[name], tensor)}
    assert len(changed) > 10 and not any("visual" in name for name in changed)


@pytest.mark.parametrize("kind", [*KINDS, "qwen2_audio"])
def test_a_layer_that_sees_or_hears_keeps_what_the_plan_says(kind, models, hearing, monkeypatch):
    """In bfloat16, with the modules fused that are on a GPU; frozen ones keep nothing, and the name that decides it is the model's."""
    import transformers

    def kernel(function):
        return lambda *given: checkpoint(function, *given, use_reentrant=True)

    def norm(module, given):
        return kernel(lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-6))(given, module.weight)

    monkeypatch.setattr(fused_layers, "_rms_norm", norm)
    monkeypatch.setattr(fused_layers, "_gated", kernel(lambda gate, up: F.silu(gate) * up))
    sees, kept = kind in KINDS, []
    config = transformers.AutoConfig.from_pretrained(models(kind) if sees else hearing)
    part = config.vision_config if sees else config.audio_config
    wider = {"hidden_size": 256, "intermediate_size": 1024, "num_heads": 4, "out_hidden_size": 192, "deepstack_visual_indexes": []}
    for name, size in (wider if sees else {"d_model": 256, "encoder_ffn_dim": 1024, "encoder_attention_heads": 4}).items():
        setattr(part, name, size)
    part._attn_implementation, tokens = "sdpa", 96 if sees else part.max_source_positions // 2
    for layers in (2, 3):
        setattr(part, "depth" if sees else "encoder_layers", layers)
        whole = transformers.AutoModelForMultimodalLM.from_config(config)
        tower = whole.model.visual if sees else whole.model.audio_tower
        fused_layers.fuse(tower)
        weights, held = {one.untyped_storage()._cdata for one in tower.bfloat16().parameters()}, {}

        def keep(tensor, held=held):
            held[tensor.untyped_storage()._cdata] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            if sees:
                grid = torch.tensor([[1, 16, 16], [1, 8, 16]])
                patch = 3 * part.temporal_patch_size * part.patch_size**2
                tower(torch.randn(int(grid.prod(1).sum()), patch).bfloat16().requires_grad_(), grid_thw=grid)
            else:
                tower(torch.randn(1, part.num_mel_bins, 2 * part.max_source_positions).bfloat16().requires_grad_())
        kept.append(sum(tensor.untyped_storage().nbytes() for storage, tensor in held.items() if storage not in weights))
    entries = config.to_dict()
    planned = tower_of(entries, sum(one.numel() for one in tower.parameters()))
    assert kept[1] - kept[0] == pytest.approx(tower_bytes(planned, tokens, 2), rel=0.02)
    assert planned.layers == 3 and planned.matrix in dict(whole.named_parameters())


@pytest.fixture(scope="module")
def hearing(tmp_path_factory):
    write_tiny_audio_model(directory := tmp_path_factory.mktemp("qwen2_audio"))
    return directory


def heard(directory, lengths):
    """As `batch_of`, with sounds of so many seconds."""
    reader = MediaReader.of(directory, DataSection(apply_chat_template=True, multimodal_keys={"audio": "sounds"}))
    sounds = [[reader.prepared(wav(seconds, seed=number)) for seconds in each] for number, each in enumerate(lengths)]
    sequences = [
        torch.tensor([7, 8, *(id for one in each for id in [*[reader.rule.token] * one.tokens, 9]), 10, 11, 12]) for each in sounds
    ]
    batch = replace(pack(sequences), pictures=tuple(tuple(one.data for one in each) for each in sounds) if any(sounds) else ())
    return replace(batch, loss_mask=batch.loss_mask * (batch.labels != reader.rule.token))


def test_packs_with_sounds_are_computed_as_single_sequences(hearing, alone):
    model, batch = alone.actor(hearing, **HEARS), heard(hearing, [[0.5], [], [1.3, 0.09], [4.0]])
    (packed,) = model.log_probs([batch])
    torch.testing.assert_close(packed, torch.cat(model.log_probs(separate(batch))), atol=2e-5, rtol=0)
    with pytest.raises(BadMessage, match="its sounds take 0"):
        model.log_probs([replace(batch, pictures=())])
    saved, exported = load_file(hearing / "model.safetensors"), alone.exported(model)
    assert exported.keys() == saved.keys() and all(torch.equal(exported[name], tensor) for name, tensor in saved.items())
    first, second = (model.train_step([batch], alone.weighted_loss, need_entropy=True) for _ in range(2))
    assert second.loss < first.loss
    changed = {name for name, tensor in saved.items() if not torch.equal(alone.exported(model)[name], tensor)}
    assert any("audio_tower" in name for name in changed) and "audio_tower.embed_positions.weight" not in changed


def trained(directory, config, batch, all_shown):
    """Two steps, in which the first rank has all pictures or sounds and the second none."""
    model = rank_steps.actor(directory, **config)
    own = [batch(directory, all_shown), batch(directory, [[], []])][model.data_parallel_rank :: model.data_parallel_size]
    found = [model.train_step(own, rank_steps.weighted_loss, need_entropy=True) for _ in range(2)]
    return [(step.loss, step.grad_norm) for step in found]


@pytest.mark.parametrize("kind", ["tower trained", *(pytest.param(kind, marks=pytest.mark.extra) for kind in ("tower frozen", "sounds"))])
def test_a_rank_without_a_picture_or_a_sound_takes_part(kind, models, hearing, two_ranks):
    pictures = (models("qwen3_vl"), TORCH | ({"freeze_params_name_list": [r"visual\."]} if kind == "tower frozen" else {}), batch_of, SHOWN)
    given = (hearing, HEARS, heard, [[0.5], [1.0]]) if kind == "sounds" else pictures
    expected = trained(*given)
    for found in two_ranks.run(trained, *given):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)
