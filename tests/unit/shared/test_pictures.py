"""Pictures in prompts: how they are found, counted and stored, and those that are refused."""

import base64
import io
import json
import struct
import zlib
from dataclasses import replace
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
from PIL import Image

from services.rollout.task_outcomes import TaskOutcomes
from shared.data.media import BadMedia, PictureRule, picture_check
from shared.data.prompts import PromptReader, TrainingPrompts
from shared.data.rows import RowEntry
from shared.data.tokenizer import Tokenizer
from shared.runtime.errors import BadMessage, ConfigError
from shared.schema.sample import Sample, SampleLimits, decode, encode, fitted
from tests.support.run_config import run_config, write_jsonl
from tests.support.tables import not_refused
from tests.support.tiny_audio import wav
from tests.support.tiny_vision import png, write_tiny_vision_model
from tests.support.train_samples import train_sample
from tests.support.valid_messages import example

KEY = {"image": "images"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pictures")
    write_tiny_vision_model(directory / "model", "qwen3_vl")
    (directory / "a.png").write_bytes(png(61, 40))
    return directory


def config(folder, **data):
    data = {
        "label_key": "",
        "apply_chat_template": True,
        "multimodal_keys": KEY,
        "max_picture_bytes": 1 << 20,
        "max_picture_pixels": 1 << 22,
    } | data
    return run_config(folder, data=data, trainer={"trainer_backend": "torch"}, reward={"custom_rm_path": "a:b"})


def reader(folder, **data):
    return PromptReader(config(folder, **data), Tokenizer(folder / "model"))


def entry(folder, **row):
    return RowEntry(row, "data.prompt_data", lambda: f"{folder / 'prompts.jsonl'}:7")


def encoded(kind="PNG", size=(30, 30), mode="RGB", **options):
    Image.new(mode, size).save(made := io.BytesIO(), kind, **options)
    return made.getvalue()


def bomb(side=60_000):
    """A PNG of a few bytes that says that it has 3,600 million pixels."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
        + chunk(b"IDAT", b"")
        + chunk(b"IEND", b"")
    )


def url(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def test_a_picture_is_found_wherever_it_stands(folder):
    data = (folder / "a.png").read_bytes()
    same = [
        {"prompt": "<image>?", "images": ["a.png"]},
        {"prompt": "<image>?", "images": str(folder / "a.png")},
        {"prompt": "<image>?", "images": [data]},
        {"prompt": "<image>?", "images": [{"bytes": data, "path": None}]},
        {"prompt": "<image>?", "images": [{"type": "image", "image": "a.png"}]},
        {"prompt": "<image>?", "images": [url(data)]},
        {"prompt": "<image>?", "images": [base64.b64encode(data).decode()]},
        {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}], "images": ["a.png"]},
        {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url(data)}}, {"type": "text", "text": "?"}]}]},
    ]
    read = reader(folder)
    found = [read.read(entry(folder, **row)) for row in same]
    assert {prompt.pictures for prompt in found} == {found[0].pictures} and len(found[0].pictures) == 1
    assert {prompt.tokens.tobytes() for prompt in found} == {found[0].tokens.tobytes()}
    assert found[0].content == [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]  # without its data
    stored = Image.open(io.BytesIO(found[0].pictures[0]))
    assert (
        stored.size == (64, 40) and stored.mode == "RGB" and int((found[0].tokens == PictureRule.read(folder / "model").token).sum()) == 40
    )
    lengths = read.measure(_Rows(folder, same), range(len(same)))
    assert lengths == [len(prompt.tokens) for prompt in found]


class _Rows(list):
    def __init__(self, folder, rows):
        super().__init__(entry(folder, **row) for row in rows)

    def entry(self, index):
        return self[index]


@pytest.mark.parametrize("kind", ["qwen3_vl", "glm4v"])
def test_sizes_and_tokens_are_those_of_the_checkpoints_processor(kind, folder):
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    if kind == "glm4v":
        folder /= "glm4v"
        write_tiny_vision_model(folder / "model", kind)
    made = Glm4vImageProcessorPil if kind == "glm4v" else Qwen2VLImageProcessorPil
    rule, processor = PictureRule.read(folder / "model"), made.from_pretrained(folder / "model")
    patch = rule.factor // 2
    rng = np.random.default_rng(0)
    for width, height in [*rng.integers(1, 190, (60, 2)).tolist(), (1, 1), (1, 200), (900, 30), (3000, 3000), (12, 12), (20, 20)]:
        picture = Image.new("RGB", (width, height))
        grid = processor(images=[picture], return_tensors="np")["image_grid_thw"][0].tolist()
        assert [1, *(side // patch for side in rule.size(width, height)[::-1])] == grid, (width, height)
        assert rule.tokens(width, height) == grid[1] * grid[2] // 4
        again = rule.tokens(*rule.size(width, height))
        assert rule.tokens(width, height) == again or (kind == "glm4v" and max(width, height) > 50 * min(width, height)), (
            "those are refused"
        )


def test_bad_pictures_are_refused(folder):
    """Each by what was found and what is expected, with the line."""
    whole = png(50, 50)
    no_pictures = [whole[:20], png(30, 30, kind="JPEG")[:15], b"GIF or not", b"GIF89a nonsense", b"PK\x03\x04" + bytes(400), wav(0.1)]
    no_pictures += [b"<svg xmlns='http://www.w3.org/2000/svg'/>", encoded("TIFF"), encoded("TIFF", mode="F")]
    no_pictures += [b"\x89PNG\r\n\x1a\n" + b"what is this?" * 9]
    (folder / "empty.png").write_bytes(b"")
    (folder / "folder.png").mkdir()
    rows = [
        ({"images": ["http://example.org/a.png"]}, "addresses are not asked for"),
        ({"images": ["gone.png"]}, "readable file beside the data"),
        ({"images": ["empty.png"]}, "found 0"),
        ({"images": ["folder.png"]}, "readable file"),
        ({"images": ["a\0.png"]}, "readable file"),
        ({"images": [whole[: len(whole) // 2]]}, "cannot be decoded"),
        ({"images": [png(60, 60, kind="JPEG")[:700]]}, "cannot be decoded"),
        ({"images": [png(60, 60, kind="WEBP")[:400]]}, ""),
        ({"images": [png(30, 30)[:200] + b"\0" + png(30, 30)[201:]]}, "cannot be decoded"),
        *(({"images": [data]}, "expected a picture of PNG") for data in no_pictures),
        ({"images": [b""]}, "expected 1 to max_picture_bytes"),
        ({"images": [bomb()]}, "found far more"),
        ({"images": [encoded(size=(2100, 2000))]}, "2100 x 2000"),
        ({"images": [encoded(size=(801, 4))]}, "ratio of at most 200"),
        ({"images": [encoded(size=(4000, 30))]}, "less narrow"),
        ({"images": [b"\0" * ((1 << 20) + 1)]}, "max_picture_bytes = 1048576"),
        ({"images": [encoded("GIF", save_all=True, append_images=[Image.new("RGB", (30, 30), "red")])]}, "2 frames"),
        ({"images": [encoded(mode="I;16")]}, "mode I;16"),
        ({"images": [url(whole)[:-3]]}, "expected base64"),
        ({"images": ["data:image/png,abc"]}, "data URL in base64"),
        ({"images": [17]}, "bytes, base64, data URL or path, found 17"),
        ({"images": [{"image": "a.png", "max_pixels": 100}]}, "'max_pixels'"),
        ({"images": [{}]}, "found None"),
        ({"images": ["a.png", "a.png"]}, "found 1 without one"),
        ({"images": []}, "found fewer"),
        ({"images": None}, "found fewer"),
        ({"prompt": "<image>" * 17, "images": ["a.png"] * 17}, "max_pictures = 16"),
        ({"prompt": "<|image_pad|><image>", "images": ["a.png"]}, "found 1 for 2 places"),
        ({"prompt": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]}, "'video'"),
        ({"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png", "resized_width": 3}]}]}, "'resized_width'"),
    ]  # fmt: skip
    read, cases = reader(folder), [(row, [words, "prompts.jsonl:7"]) for row, words in rows]
    assert not not_refused(lambda row: read.read(entry(folder, **{"prompt": "<image>?", **row})), cases)


def test_files_with_bad_pictures_are_refused_or_left_out(folder):
    rows = [{"prompt": "<image>?", "images": [name]} for name in ("a.png", "gone.png")]
    write_jsonl(folder / "prompts.jsonl", rows)
    with pytest.raises(ConfigError, match=r"prompts.jsonl:2.*gone.png"):
        TrainingPrompts(config(folder), Tokenizer(folder / "model")).check()
    kept = TrainingPrompts(config(folder, bad_prompts="skip"), Tokenizer(folder / "model"))
    assert len(kept) == 1 and kept.left_out["bad"] == 1
    overlong = config(folder, overlong_prompts="filter").model_copy(deep=True)
    write_jsonl(folder / "prompts.jsonl", [rows[0], {"prompt": "?"}])
    overlong.rollout.rollout_max_prompt_len = 40  # 40 of the picture and what is around it
    assert len(TrainingPrompts(overlong, Tokenizer(folder / "model"))) == 1


def test_runs_that_cannot_show_pictures_are_refused(folder):
    row = entry(folder, prompt=[{"role": "user", "content": [{"type": "image", "image": "a.png"}]}])
    with pytest.raises(ConfigError, match="multimodal_keys has prompts show pictures"):
        reader(folder, multimodal_keys=None).read(row)
    cases = [
        ({"trainer": {"trainer_backend": "megatron"}}, "megatron trains text alone"),
        ({"data": {"multimodal_keys": {"video": "videos", "image": "images"}}}, "one entry"),
        ({"data": {"apply_chat_template": False}}, "apply_chat_template = true"),
        ({"rollout": {"custom_generate_function_path": "a:b"}}, "makes rollouts of its own"),
        ({"rollout": {"rollout_sample_hook_path": ["a:b"]}}, "rollout_sample_hook_path makes rollouts of its own"),
        ({"ingest": {"ingest_groups": "beside"}}, "groups from outside"),
        ({"debug": {"save_debug_rollout_data": "/a/{rollout_id}.pt"}}, "stores or reads batches"),
        ({"trainer": {"trainer_backend": "torch", "use_routing_replay": True}}, "routing is replayed"),
        ({"debug": {"dump_details": "/a"}}, "debug.dump_details stores or reads batches"),
    ]

    def changed(change):
        given = {"data": {"label_key": "", "apply_chat_template": True, "multimodal_keys": KEY}, "trainer": {"trainer_backend": "torch"}}
        given["reward"] = {"custom_rm_path": "a:b"}
        run_config(folder, **given | {section: given.get(section, {}) | fields for section, fields in change.items()})

    assert not not_refused(changed, [(change, [words]) for change, words in cases])
    (folder / "blind").mkdir()
    (folder / "blind" / "config.json").write_text(json.dumps({"model_type": "gemma3"}))
    with pytest.raises(ConfigError, match="gemma3.*pictures are shown to qwen2_5_vl"):
        PictureRule.read(folder / "blind")


def test_samples_whose_pictures_are_not_those_of_their_tokens_are_refused(folder):
    prompt, check = reader(folder).read(entry(folder, prompt="<image>?", images=["a.png"])), picture_check(config(folder))
    whole = example(Sample, prompt=prompt.tokens, pictures=prompt.pictures)
    limits = SampleLimits(pictures=check)
    assert whole.problem(limits) is None
    cases = {
        (): "pictures take 0 tokens, and 40 tokens",
        prompt.pictures * 2: "pictures take 80 tokens, and 40 tokens",
        (b"GIF89a",): "no PNG",
        (png(61, 40),): "another size",
        (prompt.pictures[0][:16] + bytes(8),): "another size",
        (b"",): "not a list of encoded pictures",
    }
    for pictures, words in cases.items():
        assert words in str(replace(whole, pictures=pictures).problem(limits))
    blind = run_config(folder)
    assert "shows none" in str(whole.problem(SampleLimits(pictures=picture_check(blind))))
    [again] = decode(encode([whole], 100), limits)
    assert again.pictures == whole.pictures


@pytest.mark.parametrize("policy", ["mask", "truncate"])
def test_of_a_longer_sample_no_picture_is_cut_in_two_and_those_behind_are_left_out(folder, policy):
    shown = reader(folder).read(entry(folder, prompt="<image>?", images=["a.png"]))
    rule, begun, limits = PictureRule.read(folder / "model"), len(shown.tokens), SampleLimits(pictures=picture_check(config(folder)))
    response = [5, 6, *[rule.token] * 40, 7, *[rule.token] * 40, 8]
    fits, long = train_sample([1], [2]), train_sample(shown.tokens, response, pictures=shown.pictures * 3, index=1)
    for room, expected in {1: (1, 1), 2: (2, 1), 3: (2, 1), 41: (2, 1), 42: (42, 2), 43: (43, 2), 82: (43, 2), 83: (83, 3)}.items():
        _, cut = fitted([fits, long], begun + room, policy, rule.shown)
        assert (len(cut.response), len(cut.pictures), cut.problem(limits)) == (*expected, None)
        assert cut.mask.any() == (policy == "truncate")
    with pytest.raises(BadMessage, match=f"sample g/1 has {begun + 84} tokens, a micro-batch holds at most {begun}"):
        fitted([fits, long], begun, policy, rule.shown)


async def test_a_group_is_handed_in_without_the_pictures_behind_the_cut(folder):
    outcomes = TaskOutcomes(Mock(config=config(folder)))
    rule, outcomes._longest, outcomes._stored = PictureRule.read(folder / "model"), 4, AsyncMock()
    long = train_sample([1], [2, 3, *[rule.token] * 40], pictures=(png(64, 40),), index=1)
    await outcomes.generated(Mock(group="g00000001"), [train_sample([1], [2]), long], 0.0, 0.0)
    [_, cut] = outcomes._stored.call_args.args[1]
    assert (cut.response.tolist(), cut.pictures, cut.mask.any()) == ([2, 3], (), False)


def test_ids_for_engines_have_one_place_for_each_picture(folder):
    rule = PictureRule.read(folder / "model")
    ids = np.array([5, rule.token, 6, rule.token, 7], np.int32)
    expanded = rule.expanded(ids, [3, 2])
    assert expanded.tolist() == [5, *[rule.token] * 3, 6, *[rule.token] * 2, 7]
    assert np.array_equal(rule.unexpanded(expanded), ids)
    with pytest.raises(BadMedia, match="found 1 for 2 places"):
        rule.expanded(ids, [3])
