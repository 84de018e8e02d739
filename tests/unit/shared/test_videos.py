"""Videos in prompts: which frames are shown, how they are stored and counted, and those that are refused."""

import base64
import io
import json
import sys
from dataclasses import replace

import av
import numpy as np
import pytest
from PIL import Image

from shared.data import media
from shared.data.media import VideoRule, picture_check, strip_of
from shared.data.prompts import PromptReader
from shared.data.rows import RowEntry
from shared.data.tokenizer import Tokenizer
from shared.runtime.errors import ConfigError
from shared.schema.sample import Sample
from tests.support.run_config import run_config
from tests.support.tables import not_refused
from tests.support.tiny_vision import gif, png, write_tiny_vision_model
from tests.support.valid_messages import example
from tests.unit.shared.test_pictures import bomb

SHADES = [20, 60, 100, 140, 180, 220]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    directory = tmp_path_factory.mktemp("videos")
    write_tiny_vision_model(directory / "model", "qwen2_5_vl")
    (directory / "a.png").write_bytes(png(56, 56))
    return directory


def config(folder, **data):
    data = {"label_key": "", "apply_chat_template": True, "multimodal_keys": {"video": "videos"}, "max_video_frames": 8} | data
    return run_config(folder, data=data, trainer={"trainer_backend": "torch"}, reward={"custom_rm_path": "a:b"})


def read(folder, data=None, **row):
    entry = RowEntry({"prompt": "<video>?", **row}, "data.prompt_data", lambda: f"{folder / 'prompts.jsonl'}:7")
    return PromptReader(config(folder, **(data or {})), Tokenizer(folder / "model")).read(entry)


def shades(width=56, height=56, of=SHADES):
    return [Image.new("RGB", (width, height), (shade,) * 3) for shade in of]


def animated(kind, milliseconds, **size):
    frames = shades(**size)
    frames[0].save(made := io.BytesIO(), kind, save_all=True, append_images=frames[1:], duration=milliseconds, lossless=True)
    return made.getvalue()


def filmed(container, codec, rate, width=56, height=56, of=SHADES, turned=0):
    """A film of as many frames a second. ``turned``: degrees, as a telephone says that it was held."""
    with av.open(made := io.BytesIO(), "w", format=container) as film:
        stream = film.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.set_display_rotation(turned)
        for frame in shades(width, height, of):
            film.mux(stream.encode(av.VideoFrame.from_image(frame)))
        film.mux(stream.encode())
    return made.getvalue()


def shown(prompt, rule):
    """The shade of each frame of a prompt's video."""
    count, width, height = rule.strip(prompt.pictures[0])
    strip = np.asarray(Image.open(io.BytesIO(prompt.pictures[0])))
    assert strip.shape == (count * height, width, 3)
    return strip[height // 2 :: height, width // 2, 0].tolist()


def test_two_frames_a_second_are_shown_of_whatever_holds_a_video(folder):
    rule = VideoRule.read(folder / "model")
    for kind in ("GIF", "WEBP", "PNG"):
        slow, fast = (read(folder, videos=[animated(kind, each)]) for each in (500, 250))
        assert shown(slow, rule) == SHADES and shown(fast, rule) == SHADES[::2], kind
    uneven = read(folder, videos=[animated("GIF", [1200, 100, 100, 100, 400, 100])])
    assert shown(uneven, rule) == [20, 20, 20, 180], "those that are seen after 0, 0.5, 1 and 1.5 seconds"
    encoded = []
    for frame in shades():
        frame.save(made := io.BytesIO(), "PNG")
        encoded.append(made.getvalue())
    urls = ["data:image/png;base64," + base64.b64encode(one).decode() for one in encoded]
    whole = base64.b64encode(animated("GIF", 500)).decode()
    for part in (
        {"type": "video", "video": encoded},
        {"type": "video", "video": urls},
        {"type": "video_url", "video_url": {"url": f"data:image/gif;base64,{whole}"}},
    ):
        assert shown(read(folder, prompt=[{"role": "user", "content": [part]}]), rule) == SHADES
    one = read(folder, videos=["a.png"])
    assert rule.strip(one.pictures[0]) == (1, 56, 56) and int((one.tokens == rule.token).sum()) == 4, (
        "a moment of two frames, the last twice"
    )
    assert int((slow.tokens == rule.token).sum()) == 3 * 4 and rule.unexpanded(slow.tokens).tolist().count(rule.token) == 1


@pytest.mark.parametrize(("container", "codec"), [("mp4", "libx264"), ("mov", "mpeg4"), ("webm", "libvpx-vp9"), ("matroska", "libx265")])
def test_films_are_shown_as_animations_are(folder, container, codec):
    rule = VideoRule.read(folder / "model")
    for rate, wanted in ((2, SHADES), (4, SHADES[::2]), (1, [shade for shade in SHADES[:4] for _ in range(2)])):
        film = filmed(container, codec, rate, of=SHADES if rate > 1 else SHADES[:4])
        assert np.allclose(shown(read(folder, videos=[film]), rule), wanted, atol=4), rate
    (folder / "a.film").write_bytes(film)
    assert read(folder, videos=["a.film"]).pictures == read(folder, videos=[film]).pictures
    lying = read(folder, videos=[filmed(container, codec, 2, 112, 56)])
    held = read(folder, videos=[filmed(container, codec, 2, 112, 56, turned=90)])
    assert [rule.strip(one.pictures[0]) for one in (lying, held)] == [(6, 112, 56), (6, 56, 112)]


def test_without_what_reads_films_they_are_refused_by_its_name(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ConfigError, match=r"pip install 'myxo\[media\]'"):
        read(folder, videos=[filmed("mp4", "mpeg4", 2)])


def test_a_film_of_too_many_frames_is_refused(folder, monkeypatch):
    monkeypatch.setattr(media, "MOST_FRAMES", 4)
    assert read(folder, videos=[filmed("mp4", "mpeg4", 100)]).pictures
    with pytest.raises(ConfigError, match="at most 120 a second, found others after 0.005 s"):
        read(folder, videos=[filmed("mp4", "mpeg4", 1000)])


def test_bad_videos_are_refused(folder):
    whole, strip = animated("GIF", 500), strip_of(shades())
    film, long = filmed("matroska", "mpeg4", 2, of=SHADES * 3), filmed("mp4", "mpeg4", 1)
    (folder / "empty.gif").write_bytes(b"")
    small = {"max_picture_bytes": 3000}
    rows = [
        ({"videos": ["https://example.org/a.mp4"]}, "addresses are not asked for"),
        ({"videos": ["gone.gif"]}, "readable file beside the data"),
        ({"videos": ["empty.gif"]}, "found 0"),
        ({"videos": [b"\0\0\0 ftypisom" + bytes(60)]}, "film, found one that cannot be decoded"),
        ({"videos": [b"RIFF" + bytes(60)]}, "expected a video of PNG"),
        ({"videos": [long]}, "max_video_frames = 8 frames, found 9"),
        ({"videos": [long[: len(long) // 2]]}, "film, found one that cannot be decoded"),
        ({"videos": [film[: len(film) * 2 // 3]], "data": {"max_video_frames": 20}}, "a whole film of 9 seconds, found"),
        ({"videos": [filmed("matroska", "ffv1", 2)]}, "found ffv1"),
        ({"videos": [filmed("mp4", "mpeg4", 2, 400, 400)], "data": {"max_picture_pixels": 100_000}}, "100000 pixels, found 400 x 400"),
        ({"videos": [whole[: len(whole) // 2]]}, "whole video"),
        ({"videos": [animated("WEBP", 500)[:200]]}, "video"),
        ({"videos": [bomb()]}, "far more"),
        ({"videos": [animated("GIF", 3000)]}, "max_video_frames = 8 frames, found 9"),
        ({"videos": [[png(56, 56)] * 9]}, "1 to max_video_frames = 8 frames, found 9"),
        ({"videos": [[]]}, "1 to max_video_frames = 8 frames, found 0"),
        ({"videos": [[png(56, 56), b"no picture"]]}, "expected a video of PNG"),
        ({"videos": [[png(56, 56), png(56, 112)]]}, "frames of one size, found (56, 112) beside (56, 56)"),
        ({"videos": [[png(56, 56), whole]]}, "an animation of 6 frames"),
        ({"videos": [[png(56, 56)[:60]]]}, "video"),
        ({"videos": [[png(56, 56), "https://example.org/b.png"]]}, "addresses are not asked for"),
        ({"videos": [[17]]}, "expected a video's bytes"),
        ({"videos": [png(801, 4)]}, "ratio of at most 200"),
        ({"videos": [gif(200, 200, [500] * 6)], "data": {"max_picture_pixels": 100_000}}, "at most 100000 pixels of all frames"),
        ({"videos": [gif(400, 400, [500] * 2)], "data": {"max_picture_pixels": 100_000}}, "100000 pixels, found 400 x 400"),
        ({"videos": [gif(90, 90, [500] * 2)], "data": small}, "max_picture_bytes = 3000"),
        ({"videos": [[png(28, 28)] * 2], "data": small}, "3000 bytes of frames"),
        ({"videos": [strip[:-200]]}, "strip that cannot be decoded"),
        ({"videos": [strip.replace(b"frames\x006", b"frames\x005")]}, "other frames than"),
        ({"videos": ["a.png", "a.png"]}, "found 1 without one"),
        ({"videos": []}, "found fewer"),
        ({"prompt": "<|video_pad|><video>", "videos": ["a.png"]}, "found 1 for 2 places"),
        ({"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]}, "'image'"),
        ({"prompt": [{"role": "user", "content": [{"type": "video", "video": ["a.png"], "fps": 2}]}]}, "'fps'"),
    ]  # fmt: skip
    assert not not_refused(lambda row: read(folder, **row), [(row, [words, "prompts.jsonl:7"]) for row, words in rows])


def test_samples_whose_videos_are_not_those_of_their_tokens_are_refused(folder):
    problem, prompt = picture_check(config(folder)), read(folder, videos=[animated("GIF", 500)])
    sample = example(Sample, prompt=prompt.tokens, pictures=prompt.pictures)
    assert problem(sample) is None
    assert "videos take 4 tokens, and 12 tokens stand for videos" in problem(replace(sample, pictures=(strip_of(shades()[:2]),)))
    for wrong in (png(56, 56), strip_of(shades(50, 50)), b"RIFF", b"", prompt.pictures[0][:40]):
        assert "pictures holds one" in problem(replace(sample, pictures=(wrong,))), wrong[:50]


def test_checkpoints_of_which_no_videos_are_taken_are_refused(folder, tmp_path):
    write_tiny_vision_model(tmp_path / "model", "qwen3_vl")
    with pytest.raises(ConfigError, match="none for this model; videos are shown to qwen2_5_vl alone"):
        read(tmp_path, videos=["a.png"])
    path = folder / "model" / "preprocessor_config.json"
    entries = path.read_text()
    try:
        path.write_text(json.dumps(json.loads(entries) | {"temporal_patch_size": 4}))
        with pytest.raises(ConfigError, match="without temporal_patch_size = 2"):
            read(folder, videos=["a.png"])
    finally:
        path.write_text(entries)
