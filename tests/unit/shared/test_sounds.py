"""Sounds in prompts: how they are found, counted and stored, and those that are refused."""

import base64
import io
import struct
from dataclasses import replace

import numpy as np
import pytest
import soundfile
from transformers import WhisperFeatureExtractor

from shared.data.media import MediaRule, SoundRule, picture_check
from shared.data.prompts import PromptReader
from shared.data.rows import RowEntry
from shared.data.tokenizer import Tokenizer
from shared.runtime.errors import ConfigError
from shared.schema.sample import Sample
from tests.support.run_config import run_config
from tests.support.tables import not_refused
from tests.support.tiny_audio import wav, write_tiny_audio_model
from tests.support.tiny_vision import write_tiny_vision_model
from tests.support.valid_messages import example


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sounds")
    write_tiny_audio_model(directory / "model")
    (directory / "a.wav").write_bytes(wav(0.5))
    return directory


def config(folder, **data):
    data = {"label_key": "", "apply_chat_template": True, "multimodal_keys": {"audio": "sounds"}, "max_sound_seconds": 4} | data
    return run_config(folder, data=data, trainer={"trainer_backend": "torch"}, reward={"custom_rm_path": "a:b"})


def reader(folder, **data):
    return PromptReader(config(folder, **data), Tokenizer(folder / "model"))


def entry(folder, **row):
    return RowEntry(row, "data.prompt_data", lambda: f"{folder / 'prompts.jsonl'}:7")


def written(waves, rate=16000, **options):
    soundfile.write(made := io.BytesIO(), waves, rate, **options)
    return made.getvalue()


def test_a_sound_is_found_wherever_it_stands_and_counted_as_the_extractor_does(folder):
    data = wav(0.5)
    text, url = base64.b64encode(data).decode(), f"data:audio/wav;base64,{base64.b64encode(data).decode()}"
    in_parts = [
        {"type": "audio", "audio": "a.wav"},
        {"type": "audio", "audio": {"bytes": data, "path": "elsewhere.wav"}},
        {"type": "audio_url", "audio_url": {"url": url}},
        {"type": "input_audio", "input_audio": {"data": text, "format": "wav"}},
    ]
    rows = [{"prompt": "<audio>?", "sounds": given} for given in (data, ["a.wav"], [url], [{"path": "a.wav"}])]
    rows += [{"prompt": [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]} for part in in_parts]
    found = [reader(folder).read(entry(folder, **row)) for row in rows]
    rule = SoundRule.read(folder / "model")
    assert all(one.pictures == (data,) and one.tokens.tolist() == found[0].tokens.tolist() for one in found), (
        "16 bits are stored as they are"
    )
    assert int((found[0].tokens == rule.token).sum()) == rule.tokens(8000) == 12
    extractor = WhisperFeatureExtractor.from_pretrained(folder / "model")
    for count in (970, 1281, 1600, 8000, 8001, 8159, 8160, 8161, 64_000):
        mask = extractor(np.zeros(count), sampling_rate=16000, padding="max_length", return_attention_mask=True)["attention_mask"]
        assert rule.tokens(count) == ((int(mask.sum()) - 1) // 2 + 1 - 2) // 2 + 1, count


def test_other_rates_channels_and_formats_become_one_form(folder):
    """A tone keeps its pitch and its loudness, whatever it is read from; what the model's rate cannot hold is left out."""
    rule, read = SoundRule.read(folder / "model"), reader(folder)
    times = np.arange(44100) / 44100
    tones = 0.5 * np.sin(2 * np.pi * 440 * times) + 0.3 * np.sin(2 * np.pi * 12_000 * times)
    wanted = 0.5 * np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
    for options, off in (({"format": "WAV"}, 0.01), ({"format": "FLAC"}, 0.01), ({"format": "WAV", "subtype": "FLOAT"}, 0.01)):
        prompt = read.read(entry(folder, prompt="<audio>?", sounds=[written(np.stack([tones, tones], 1), 44100, **options)]))
        assert np.abs(rule.waves(prompt.pictures[0]) - wanted)[200:-200].max() < off, options
    for options in ({"format": "OGG"}, {"format": "MP3"}):
        prompt = read.read(entry(folder, prompt="<audio>?", sounds=[written(tones, 44100, **options)]))
        spectrum = np.abs(np.fft.rfft(rule.waves(prompt.pictures[0])))
        assert abs(int(spectrum.argmax()) * 16000 / (2 * len(spectrum)) - 440) < 5, options


def test_bad_sounds_are_refused(folder):
    whole, waves = wav(0.5), np.zeros(8000)
    no_sounds = (b"what is this? it is no sound at all", b"\x89PNG\r\n\x1a\n", b"RIFF or not", written(waves, format="MP3")[:20])
    (folder / "empty.wav").write_bytes(b"")
    nothing, broken = waves.copy(), written(np.random.default_rng(0).uniform(-1, 1, 8000), format="FLAC")
    nothing[77] = np.nan
    rated = bytearray(whole)
    rated[24:28] = struct.pack("<I", 3_000_000)
    rows = [
        ({"sounds": ["http://example.org/a.wav"]}, "addresses are not asked for"),
        ({"sounds": ["gone.wav"]}, "readable file beside the data"),
        ({"sounds": ["empty.wav"]}, "found 0"),
        ({"sounds": [whole[: len(whole) // 2]]}, f"a whole WAV of {len(whole)} bytes, found {len(whole) // 2}"),
        ({"sounds": [whole[:30]]}, "expected a"),
        ({"sounds": [broken[: len(broken) // 2]]}, "whole sound"),
        ({"sounds": [wav(0)]}, "2 tokens or more, found 0 seconds"),
        ({"sounds": [wav(0.06)]}, "2 tokens or more"),
        ({"sounds": [wav(4.1)]}, "at most 4 seconds"),
        ({"sounds": [written(np.zeros(400_000), format="FLAC")]}, "at most 4 seconds"),
        ({"sounds": [written(nothing, format="WAV", subtype="FLOAT")]}, "found NaN or infinity"),
        ({"sounds": [written(waves + np.inf, format="WAV", subtype="DOUBLE")]}, "found NaN or infinity"),
        ({"sounds": [written(waves + 3, format="WAV", subtype="FLOAT")]}, "samples from -1 to 1, found 3"),
        ({"sounds": [bytes(rated)]}, "4000 to 192000 samples a second, found 3000000"),
        ({"sounds": [wav(3, rate=2000)]}, "found 2000"),
        ({"sounds": [wav(0.5, channels=6)]}, "1 or 2 channels, found 6"),
        *(({"sounds": [data]}, "expected a sound of WAV") for data in no_sounds),
        ({"sounds": [written(waves, format="AIFF")]}, "found AIFF"),
        ({"sounds": [b"\0" * 2000]}, "max_picture_bytes = 1000"),
        ({"sounds": [17]}, "expected a sound's bytes"),
        ({"sounds": [{"array": [0.0], "sampling_rate": 16000}]}, "found an object with 'array'"),
        ({"sounds": ["a.wav", "a.wav"]}, "found 1 without one"),
        ({"sounds": []}, "found fewer"),
        ({"prompt": "<|AUDIO|><audio>", "sounds": ["a.wav"]}, "found 1 for 2 places"),
        ({"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]}, "'image'"),
        ({"prompt": [{"role": "user", "content": [{"type": "audio", "audio": "a.wav", "speed": 2}]}]}, "'speed'"),
    ]  # fmt: skip
    cases = [(row, {"max_picture_bytes": 1000} if "max_picture_bytes" in words else {}, [words, "prompts.jsonl:7"]) for row, words in rows]
    assert not not_refused(lambda row, data: reader(folder, **data).read(entry(folder, **{"prompt": "<audio>?", **row})), cases)


def test_samples_whose_sounds_are_not_those_of_their_tokens_are_refused(folder):
    problem, rule = picture_check(config(folder)), MediaRule.of_run(config(folder))
    prompt = reader(folder).read(entry(folder, prompt="<audio>?", sounds=["a.wav"]))
    sample = example(Sample, prompt=prompt.tokens, pictures=prompt.pictures)
    assert problem(sample) is None and rule.unexpanded(prompt.tokens).tolist().count(rule.token) == 1
    assert "sounds take 6 tokens, and 12 tokens stand for sounds" in problem(replace(sample, pictures=(wav(0.25),)))
    for wrong in (wav(0.5, rate=8000), wav(0.5, channels=2), wav(31), wav(0), b"RIFF", prompt.pictures[0][:30], b"\x89PNG"):
        assert "no WAV" in problem(replace(sample, pictures=(wrong,))), wrong[:50]


def test_runs_that_cannot_hear_are_refused(folder, tmp_path):
    write_tiny_vision_model(tmp_path / "model", "qwen3_vl")
    with pytest.raises(ConfigError, match="none for this model; sounds are shown to qwen2_audio alone"):
        reader(tmp_path)
    given = {name: getattr(config(folder), name).model_dump(exclude_unset=True) for name in ("data", "trainer", "reward")}
    with pytest.raises(Exception, match="custom_generate_function_path makes rollouts of its own"):
        run_config(folder, **given, rollout={"custom_generate_function_path": "a:b"})
