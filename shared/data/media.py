"""Pictures and sounds of prompts: found in rows, checked, and brought into the one form that engines and the trainer get. Without torch.

A picture is decoded once, here, and stored as a PNG of RGB in the size that the checkpoint's image processor gives it. Engines and the
trainer run that processor over the same pixels, which it has no need to resize; so both see the same patches, whichever library decodes and
resizes for them. How many tokens a picture takes follows from its size alone.

A sound is stored as a WAV of one channel of 16 bits at the rate of the checkpoint's feature extractor; its tokens follow from its length.
A video is stored as a strip: a PNG of its frames one below the other, each formed as a picture is, two of them a second.
Samples and messages have sounds and videos where they have pictures.
"""

import base64
import binascii
import importlib
import io
import math
import struct
import wave
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from shared.config.data_sections import DataSection
from shared.config.run_config import RunConfig
from shared.runtime.errors import ConfigError, shown
from shared.runtime.safe_files import parse_json
from shared.schema.sample import Sample

GLM = ("glm4v", "glm4v_moe")  # Values of ``model_type`` whose processor resizes as GLM-4.1V's
SEEING = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", *GLM)  # Those whose pictures are taken
HEARING = ("qwen2_audio",)  # Those whose sounds are taken
WATCHING = ("qwen2_5_vl",)  # Those whose videos are taken
FRAMES_PER_SECOND = 2  # Of a video as it is stored; a patch holds as many frames, so that one lasts a second in all positions
MOST_PIXELS = 1 << 26  # Of all frames of a video, as it is stored
MOST_FRAMES = 4096  # The most frames of an animation before two a second are taken
MOST_RATE = 120  # The most frames a second of a film
SAMPLE_RATES = (4000, 192_000)  # The lowest and the highest of a sound, in Hz
MOST_PEAK = 1.5  # What is cut off at 1 in silence: lossy formats, and another rate, overshoot a little
MOST_BYTES = 64 << 20  # The most bytes of one prompt's pictures, as they are stored
MOST_ASPECT = 200  # The widest picture, by its sides, that the families' processors take
PROCESSOR_FILES = ("video_preprocessor_config.json", "preprocessor_config.json", "processor_config.json")  # The first: of videos alone
# Types of parts of messages, by kind
PARTS = {"image": ("image", "image_url"), "audio": ("audio", "audio_url", "input_audio"), "video": ("video", "video_url")}

_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
_SOUNDS = ("WAV", "WAVEX", "FLAC", "OGG", "MP3")
_FILMS = {"mov": b"ftyp", "matroska": b"\x1aE\xdf\xa3"}  # PyAV's name of a container → what its first bytes hold: MP4 and MOV, MKV and WebM
_CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "mpeg4")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
_PNG = b"\x89PNG\r\n\x1a\n"
_STRIP, _LIST = b"tEXtframes\0", b"\x00frames\n"  # What stands in a strip behind its header, and before a list of encoded frames
_FIELD = "data.multimodal_keys"


class BadMedia(ValueError):
    """A picture or a sound that is not taken; the message says what was found, and what is expected."""


class Picture(NamedTuple):
    """A picture or a video as it is stored, a PNG, or a sound, a WAV, which takes so many ``tokens``."""

    data: bytes
    tokens: int


@dataclass(frozen=True)
class MediaRule:
    """What a checkpoint's own files say of what prompts show besides text.

    Args:
        token: the id that stands for a picture or a sound, once for each place in the language model that it takes. forbidden: ids that are
            never sampled, since they would stand for what is not there. kind: the model's ``model_type``.
    """

    token: int
    forbidden: tuple[int, ...]
    kind: str
    noun: ClassVar[str]
    media_type: ClassVar[str]
    families: ClassVar[Sequence[str]]
    processor: ClassVar[str]

    @staticmethod
    def of_run(config: RunConfig) -> "MediaRule | None":
        """Returns what the checkpoint of a run says; None where its prompts are text. Raises ConfigError as `read` does."""
        kind = config.data.shows
        return RULES[kind].read(config.model.hf_checkpoint) if kind else None

    @classmethod
    def read(cls, model: Path) -> Self:
        """Reads a checkpoint. Raises ConfigError: its family is not among those that are taken, or its processor's files lack an entry."""
        config, noun = _json(model / "config.json"), cls.noun
        if (kind := str(config.get("model_type"))) not in cls.families:
            raise ConfigError(_FIELD, kind, f"none for this model; {noun}s are shown to {', '.join(cls.families)} alone")
        files = PROCESSOR_FILES if noun == "video" else PROCESSOR_FILES[1:]
        path = next((model / name for name in files if (model / name).is_file()), None)
        if path is None:
            raise ConfigError(_FIELD, str(model), "the checkpoint's preprocessor_config.json beside it; there is none")
        entries = _json(path)
        try:
            return cls._of(kind, config, entries.get(cls.processor, entries))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(_FIELD, str(path), f"the entries of a {noun}'s processor, and config.json's ids; without {error}") from None

    @classmethod
    def _of(cls, kind: str, config: dict[str, Any], entries: dict[str, Any]) -> Self:
        raise NotImplementedError

    def stored_tokens(self, data: bytes) -> int:
        """Returns how many tokens a picture or a sound in its stored form takes. Raises BadMedia where it is in another one."""
        raise NotImplementedError

    def shown(self, sample: Sample, longest: int) -> tuple[int, tuple[bytes, ...]]:
        """Returns how many of a sample's first ``longest`` tokens end in no picture or sound, and those that they show."""
        places = np.flatnonzero(np.concatenate([sample.prompt, sample.response]) == self.token)
        ends = np.cumsum([0, *map(self.stored_tokens, sample.pictures)])
        count = int(np.searchsorted(ends, np.searchsorted(places, longest), "right")) - 1
        return min([longest, *places[ends[count] : ends[count] + 1].tolist()]), sample.pictures[:count]

    def expanded(self, ids: NDArray[np.int32], counts: Sequence[int]) -> NDArray[np.int32]:
        """Returns ids with each one's single token repeated so often. Raises BadMedia where there are more to show, or fewer."""
        if (found := int(np.count_nonzero(ids == self.token))) != len(counts):
            wanted = f"as many {self.noun}s as places for them in the rendered prompt"
            raise BadMedia(f"expected {wanted}, found {len(counts)} for {found} places")
        repeats = np.ones(len(ids), np.int64)
        repeats[ids == self.token] = counts
        return np.repeat(ids, repeats).astype(np.int32)

    def unexpanded(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Returns ids with the tokens of each one taken together to one, as engines are sent them."""
        again = np.zeros(len(ids), bool)
        again[1:] = (ids[1:] == self.token) & (ids[:-1] == self.token)
        return ids[~again]


@dataclass(frozen=True)
class PictureRule(MediaRule):
    """What a checkpoint's own files say of pictures.

    Args:
        factor: pixels of a patch's side, as the language model sees it. min_pixels, max_pixels: of a picture, after it was resized.
            resample: PIL's number of the filter.
    """

    factor: int
    min_pixels: int
    max_pixels: int
    resample: int
    noun, media_type, processor = "picture", "image/png", "image_processor"
    families: ClassVar[Sequence[str]] = SEEING

    @classmethod
    def _of(cls, kind: str, config: dict[str, Any], entries: dict[str, Any]) -> Self:
        size = entries.get("size") or {}
        names = ("image_token_id", "video_token_id", "vision_start_token_id", "image_start_token_id", "video_start_token_id")
        if kind in GLM:  # its bounds are of a picture's pixels in as many frames as a patch has
            frames = int(entries["temporal_patch_size"])
            entries = {**entries, "min_pixels": -(-size["shortest_edge"] // frames), "max_pixels": size["longest_edge"] // frames}
        return cls(
            int(config["image_token_id"]),
            tuple(sorted({int(config[name]) for name in names if config.get(name) is not None})),
            kind,
            int(entries["patch_size"]) * int(entries["merge_size"]),
            int(entries.get("min_pixels") or size["shortest_edge"]),
            int(entries.get("max_pixels") or size["longest_edge"]),
            int(entries.get("resample", 3)),
        )

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Returns the width and the height to which the processor resizes a picture: multiples of ``factor``, within its bounds."""
        if self.kind in GLM and (least := min(width, height)) < self.factor:
            width, height = (int(side * (self.factor / least)) for side in (width, height))
        sides = [round(side / self.factor) * self.factor for side in (width, height)]
        if math.prod(sides) > self.max_pixels:
            scale = math.sqrt(width * height / self.max_pixels)
            sides = [max(self.factor, math.floor(side / scale / self.factor) * self.factor) for side in (width, height)]
        elif math.prod(sides) < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (width * height))
            sides = [math.ceil(side * scale / self.factor) * self.factor for side in (width, height)]
        return sides[0], sides[1]

    def tokens(self, width: int, height: int) -> int:
        """Returns how many tokens a picture of that size takes, before or after it is resized."""
        return math.prod(self.size(width, height)) // self.factor**2

    def stored_tokens(self, data: bytes) -> int:
        if data[:8] != _PNG or len(data) < 24:
            raise BadMedia("one that is no PNG")
        size = struct.unpack(">II", data[16:24])
        if 0 in size or self.size(*size) != size:
            raise BadMedia(f"one of another size than the checkpoint's processor gives it: {size}")
        return self.tokens(*size)


@dataclass(frozen=True)
class VideoRule(PictureRule):
    """What a checkpoint's own files say of videos. ``mean``, ``std``: of each channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    noun, media_type, processor = "video", "video/png", "video_processor"
    families = WATCHING

    @classmethod
    def _of(cls, kind: str, config: dict[str, Any], entries: dict[str, Any]) -> Self:
        if entries["temporal_patch_size"] != FRAMES_PER_SECOND:
            raise ValueError(f"temporal_patch_size = {FRAMES_PER_SECOND}")
        fields = vars(PictureRule._of(kind, config, entries)) | {"token": int(config["video_token_id"])}
        return cls(**fields, mean=tuple(entries["image_mean"]), std=tuple(entries["image_std"]))

    def video_tokens(self, frames: int, width: int, height: int) -> int:
        """Returns how many tokens a video of so many frames of that size takes."""
        return -(-frames // FRAMES_PER_SECOND) * self.tokens(width, height)

    def strip(self, data: bytes) -> tuple[int, int, int]:
        """Returns the frames of a video in its stored form, their width and height. Raises BadMedia where it is in another one."""
        count = data[48 : 41 + int.from_bytes(data[33:37], "big")] if data[:8] == _PNG and data[37:48] == _STRIP else b""
        if not (count.isdigit() and len(count) <= 4):
            raise BadMedia("one that is no strip of frames")
        (width, height), frames = struct.unpack(">II", data[16:24]), int(count)
        if not frames or not width or not height or height % frames or self.size(width, height // frames) != (width, height // frames):
            raise BadMedia(f"one of other frames than the checkpoint's processor gives it: {frames} in {width} x {height}")
        return frames, width, height // frames

    def stored_tokens(self, data: bytes) -> int:
        return self.video_tokens(*self.strip(data))

    def frames(self, data: bytes) -> Iterator[Any]:
        """Yields the frames of a strip. Raises BadMedia for one that cannot be decoded."""
        import PIL.Image

        try:
            (count, width, height), strip = self.strip(data), PIL.Image.open(io.BytesIO(data), formats=("PNG",)).convert("RGB")
        except Exception as error:  # decoders raise whatever they like on broken data
            raise BadMedia(f"expected a whole video, found a strip that cannot be decoded ({str(error)[:120]})") from None
        yield from (strip.crop((0, number * height, width, (number + 1) * height)) for number in range(count))


@dataclass(frozen=True)
class SoundRule(MediaRule):
    """What a checkpoint's own files say of sounds.

    Args:
        rate: samples a second. hop: samples from one frame to the next. window: the most samples that the encoder hears.
    """

    rate: int
    hop: int
    window: int
    noun, media_type, families, processor = "sound", "audio/wav", HEARING, "feature_extractor"

    @classmethod
    def _of(cls, kind: str, config: dict[str, Any], entries: dict[str, Any]) -> Self:
        token, rate = int(config["audio_token_index" if "audio_token_index" in config else "audio_token_id"]), int(entries["sampling_rate"])
        return cls(token, (token,), kind, rate, int(entries["hop_length"]), int(entries["chunk_length"]) * rate)

    def tokens(self, samples: int) -> int:
        """Returns how many tokens a sound of so many samples takes: the encoder halves its frames twice."""
        frames = -(-samples // self.hop)
        return ((frames + 1) // 2) // 2

    def stored_tokens(self, data: bytes) -> int:
        return self.tokens(len(self.waves(data)))

    def waves(self, data: bytes) -> NDArray[np.float64]:
        """Returns the samples of a sound in its stored form, -1 to 1. Raises BadMedia where it is in another one."""
        try:
            with wave.open(io.BytesIO(data)) as file:
                form = (file.getnchannels(), file.getsampwidth(), file.getframerate())
                found = np.frombuffer(file.readframes(file.getnframes()), "<i2") if form == (1, 2, self.rate) else np.zeros(0)
        except (wave.Error, EOFError, ValueError) as error:
            raise BadMedia(f"one that is no WAV ({error})") from None
        if not 0 < len(found) <= self.window:
            raise BadMedia(f"one that is no WAV of one channel, 16 bits and 1 to {self.window} samples at {self.rate} Hz")
        return found / 32768.0

    def stored(self, waves: NDArray[np.float64]) -> bytes:
        """Returns samples, -1 to 1, in the stored form."""
        with wave.open(encoded := io.BytesIO(), "wb") as file:
            file.setparams((1, 2, self.rate, len(waves), "NONE", ""))
            file.writeframes(np.clip(np.rint(waves * 32768), -32768, 32767).astype("<i2").tobytes())
        return encoded.getvalue()


RULES: dict[str, type[MediaRule]] = {"image": PictureRule, "audio": SoundRule, "video": VideoRule}


class ShownPictures(NamedTuple):
    """The pictures or videos of a sequence, PNGs, or its sounds, WAVs, in the order of their tokens, and what the checkpoint says."""

    rule: MediaRule
    pictures: tuple[bytes, ...] = ()


def picture_check(config: RunConfig) -> Callable[[Sample], str | None]:
    """Returns what says why a sample's pictures, or sounds, are not those of its tokens; the trainer's processor counts as this does.

    Raises ConfigError: the model takes none, though prompts show some.
    """
    rule = MediaRule.of_run(config)

    def problem(sample: Sample) -> str | None:
        if rule is None:
            return "pictures are there, and data.multimodal_keys shows none" if sample.pictures else None
        places = sum(int(np.count_nonzero(ids == rule.token)) for ids in (sample.prompt, sample.response))
        try:
            wanted = sum(map(rule.stored_tokens, sample.pictures))
        except BadMedia as error:
            return f"pictures holds {error}"
        return None if places == wanted else f"{rule.noun}s take {wanted} tokens, and {places} tokens stand for {rule.noun}s"

    return problem


class MediaReader:
    """Reads the pictures, or the sounds, of rows."""

    kind: ClassVar[str]

    def __init__(self, rule: Any, data: DataSection) -> None:
        self.rule, self._data, self._noun, self._place = rule, data, rule.noun, f"<{self.kind}>"
        self._key = (data.multimodal_keys or {}).get(self.kind, "")

    @staticmethod
    def of(model: Path, data: DataSection) -> "MediaReader":
        """Returns the reader of what ``multimodal_keys`` names. Raises ConfigError for a model that takes none, and where the package that
        reads them is not installed."""
        reader: type[MediaReader] = {"audio": SoundReader, "video": VideoReader}.get(data.shows, PictureReader)
        module, rule = "soundfile" if reader is SoundReader else "PIL.Image", RULES[reader.kind].read(model)
        try:
            importlib.import_module(module)
        except (ModuleNotFoundError, OSError):
            raise ConfigError(_FIELD, data.multimodal_keys, f"none, or {module}, for {rule.noun}s: pip install 'myxo[media]'") from None
        return reader(rule, data)

    def measured(self, data: bytes) -> int:
        """Returns how many tokens an encoded picture or sound takes, by its header alone. Raises BadMedia."""
        raise NotImplementedError

    def prepared(self, data: bytes) -> Picture:
        """Returns one in its stored form. Raises BadMedia for one that cannot be decoded to its end."""
        raise NotImplementedError

    def separated(self, content: Any, row: Mapping[str, Any]) -> tuple[Any, list[Any]]:
        """Returns a prompt whose pictures are parts without data, ``{"type": "image"}``, and what stood for each of them, in order.

        Pictures are those of the row's own key, of which each ``<image>`` in the text takes the next, and those that parts of messages
        hold. Raises BadMedia where there are more places than pictures, or fewer. Sounds are ``audio`` in the same way.
        """
        given = row.get(self._key)
        waiting = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
        found: list[Any] = []
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            return content, found
        made = [{**message, "content": self._parts(message.get("content"), waiting, found)} for message in messages]
        if waiting:
            raise BadMedia(
                f"expected a {self._place} in the prompt for each {self._noun} of {self._key!r}, found {len(waiting)} without one"
            )
        if len(found) > self._data.max_pictures:
            raise BadMedia(f"expected at most max_pictures = {self._data.max_pictures} {self._noun}s, found {len(found)}")
        return made, found

    def _parts(self, content: Any, waiting: list[Any], found: list[Any]) -> Any:
        if isinstance(content, str):
            pieces = content.split(self._place)
            parts: list[dict[str, Any]] = [{"type": "text", "text": pieces[0]}] if pieces[0] else []
            for piece in pieces[1:]:
                if not waiting:
                    raise BadMedia(f"expected a {self._noun} in {self._key!r} for each {self._place} of the prompt, found fewer")
                found.append(waiting.pop(0))
                parts += [empty_part(self.kind), *([{"type": "text", "text": piece}] if piece else [])]
            return parts if len(pieces) > 1 else content
        if not isinstance(content, list):
            return content
        return [self._part(part, waiting, found) for part in content]

    def _part(self, part: Any, waiting: list[Any], found: list[Any]) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in PARTS[self.kind]:
            if any(kind in types for types in PARTS.values()):
                raise BadMedia(f"expected text and {self._noun}s, found a part of type {kind!r}")
            return part
        if other := sorted(part.keys() - {"type", *PARTS[self.kind]}):
            raise BadMedia(f"expected a {self._noun}'s part with type and {kind} alone, found {other[0]!r}")
        given = part.get(kind)
        if given is None and not waiting:
            raise BadMedia(f"expected a {self._noun} in the part, or in {self._key!r}, found neither")
        found.append(waiting.pop(0) if given is None else given)
        return empty_part(self.kind)

    def data_of(self, given: Any, folder: Path) -> bytes:
        """Returns the encoded picture or sound that a value of a row stands for: bytes, base64, a data URL, a file beside the data or an
        object that holds one of these. Raises BadMedia.

        Args:
            folder: of the row's file, from which paths start.
        """
        names = ("bytes", *PARTS[self.kind], "url", *(("data",) if self.kind == "audio" else ()), "path")
        for _ in range(2):  # {"image_url": {"url": "data:…"}}, {"input_audio": {"data": "…", "format": "wav"}}
            if isinstance(given, Mapping):
                if other := sorted(map(str, given.keys() - {"type", *names, *(("format",) if "data" in given else ())})):
                    raise BadMedia(f"expected a {self._noun} alone, found an object with {other[0]!r}")
                given = next((given[name] for name in names if given.get(name) is not None), None)
        if isinstance(given, bytes):
            data = given
        elif isinstance(given, str):
            data = self._read(given, folder)
        else:
            raise BadMedia(f"expected a {self._noun}'s bytes, base64, data URL or path, found {shown(given)}")
        if not 0 < len(data) <= self._data.max_picture_bytes:
            raise BadMedia(f"expected 1 to max_picture_bytes = {self._data.max_picture_bytes} bytes of a {self._noun}, found {len(data)}")
        return data

    def _read(self, given: str, folder: Path) -> bytes:
        if given.startswith("data:"):
            head, comma, encoded = given.partition(",")
            if not comma or not head.endswith(";base64"):
                raise BadMedia(f"expected a data URL in base64, found {given[:60]!r}")
            return _from_base64(encoded)
        if "://" in given[:16]:
            raise BadMedia(f"expected a file, bytes or a data URL, found {given[:80]!r}; addresses are not asked for: download it first")
        path = folder / given
        try:
            with path.open("rb") as file:
                return file.read(self._data.max_picture_bytes + 1)
        except (OSError, ValueError) as error:
            if len(given) >= 64 and "." not in given:
                return _from_base64(given)
            raise BadMedia(f"expected a readable file beside the data, found {str(path)[:200]!r} ({error})"[:400]) from None


class PictureReader(MediaReader):
    """Reads pictures with pillow."""

    kind = "image"

    def measured(self, data: bytes) -> int:
        return self.rule.tokens(*self._opened(data).size)

    def prepared(self, data: bytes) -> Picture:
        picture = self._formed(self._opened(data))
        picture.save(encoded := io.BytesIO(), "PNG", compress_level=1)
        return Picture(encoded.getvalue(), self.rule.tokens(*picture.size))

    def _formed(self, opened: Any) -> Any:
        """Returns a picture upright, in RGB, and in the size that the checkpoint's processor gives it."""
        import PIL.Image
        import PIL.ImageOps

        try:
            picture = PIL.ImageOps.exif_transpose(opened).convert("RGB")
        except Exception as error:  # decoders raise whatever they like on broken data
            raise BadMedia(f"expected a whole {self._noun}, found one that cannot be decoded ({str(error)[:120]})") from None
        size = self.rule.size(*picture.size)
        return picture if picture.size == size else picture.resize(size, PIL.Image.Resampling(self.rule.resample))

    def _opened(self, data: bytes, most: int = 1) -> Any:
        """Returns a picture whose header is good. ``most``: frames of an animation."""
        import PIL.Image

        try:
            picture = PIL.Image.open(io.BytesIO(data), formats=_FORMATS)
            frames = getattr(picture, "n_frames", 1)
        except PIL.Image.DecompressionBombError:
            raise BadMedia(f"expected at most max_picture_pixels = {self._data.max_picture_pixels} pixels, found far more") from None
        except Exception as error:  # as above
            raise BadMedia(f"expected a {self._noun} of {', '.join(_FORMATS)}, found {data[:12]!r} ({type(error).__name__})") from None
        self._check_size(*picture.size)
        if frames > most:
            wanted = "a picture" if most == 1 else f"at most {most} frames"
            raise BadMedia(f"expected {wanted}, found an animation of {frames} frames")
        if picture.mode not in _MODES:
            raise BadMedia(f"expected 8 bits a channel, found pixels of mode {picture.mode}")
        return picture

    def _check_size(self, width: int, height: int) -> None:
        """Raises BadMedia for a picture, or a frame, of a size that is not taken."""
        if width * height > self._data.max_picture_pixels:
            raise BadMedia(f"expected at most max_picture_pixels = {self._data.max_picture_pixels} pixels, found {width} x {height}")
        if max(width, height) > MOST_ASPECT * min(width, height):
            raise BadMedia(f"expected sides in a ratio of at most {MOST_ASPECT}, found {width} x {height}")
        if self.rule.size(*(resized := self.rule.size(width, height))) != resized:  # engines and trainer would each resize it once more
            raise BadMedia(f"expected a picture less narrow, found {width} x {height}: it cannot have max_pixels = {self.rule.max_pixels}")


class VideoReader(PictureReader):
    """Reads animations, and lists of frames, with pillow, and films with PyAV."""

    kind = "video"

    def data_of(self, given: Any, folder: Path) -> bytes:
        if not isinstance(given, list | tuple):
            return super().data_of(given, folder)
        if not 0 < len(given) <= self._data.max_video_frames:
            raise BadMedia(f"expected 1 to max_video_frames = {self._data.max_video_frames} frames, found {len(given)}")
        found = [_LIST]
        for frame in given:
            data = super().data_of(frame, folder)
            found += [struct.pack(">I", len(data)), data]
        if (size := sum(map(len, found))) > self._data.max_picture_bytes:
            raise BadMedia(f"expected at most max_picture_bytes = {self._data.max_picture_bytes} bytes of frames, found {size}")
        return b"".join(found)

    def measured(self, data: bytes) -> int:
        count, size, _ = self._frames(data)
        return self.rule.video_tokens(count, *size)

    def prepared(self, data: bytes) -> Picture:
        formed = [self._formed(frame) for frame in self._frames(data)[2]]
        if other := {frame.size for frame in formed} - {size := formed[0].size}:
            raise BadMedia(f"expected frames of one size, found {min(other)} beside {size}")
        return Picture(strip_of(formed), self.rule.video_tokens(len(formed), *size))

    def _frames(self, data: bytes) -> tuple[int, Sequence[int], Iterable[Any]]:
        """Returns how many frames of a video are shown, their size, and each of them."""
        most = self._data.max_video_frames
        if data.startswith(_LIST):
            frames, at = [self._opened(b"")] if data == _LIST else list[Any](), len(_LIST)
            while at < len(data) and len(frames) <= most:
                end = at + 4 + int.from_bytes(data[at : at + 4], "big")
                frames.append(self._opened(data[at + 4 : end]))
                at = end
            count, size, found = len(frames), frames[0].size, iter(frames)
        elif data[37:48] == _STRIP:
            (count, *size), found = self.rule.strip(data), self.rule.frames(data)
        elif container := next((name for name, mark in _FILMS.items() if mark in data[:8]), ""):
            frames = self._filmed(data, container)
            count, size, found = len(frames), frames[0].size, iter(frames)
        else:
            opened = self._opened(data, MOST_FRAMES)
            shown = self._moments(opened)
            count, size, found = len(shown), opened.size, (self._at(opened, number) for number in shown)
        if count > most:
            raise BadMedia(f"expected at most max_video_frames = {most} frames, found {count} ({FRAMES_PER_SECOND} a second)")
        if (pixels := count * math.prod(self.rule.size(*size))) > (most := min(self._data.max_picture_pixels, MOST_PIXELS)):
            raise BadMedia(f"expected at most {most} pixels of all frames (max_picture_pixels), found {pixels}")
        return count, size, found

    def _filmed(self, data: bytes, container: str) -> list[Any]:
        """Returns the frames of a film that are shown, in the form of pictures. Its sound is not heard."""
        try:
            import av
        except ImportError:
            raise BadMedia("expected an animation or frames, found a film, which needs PyAV: pip install 'myxo[media]'") from None
        try:
            with av.open(io.BytesIO(data), "r", format=container) as film:
                return self._seen(film)
        except BadMedia:
            raise
        except Exception as error:  # as above
            raise BadMedia(f"expected a whole film, found one that cannot be decoded ({str(error)[:120]})") from None

    def _seen(self, film: Any) -> list[Any]:
        """Returns the frames that are seen at each half second of an opened film."""
        stream, most = film.streams.video[0], self._data.max_video_frames
        if (codec := stream.codec_context.codec.canonical_name) not in _CODECS:
            raise BadMedia(f"expected a film in {', '.join(_CODECS)}, found {codec}")
        self._check_size(stream.width, stream.height)
        stream.codec_context.thread_count = 1
        shown, last, end = list[Any](), None, 0.0
        for frame, begin, ending in _decoded(film, stream):
            self._show(shown, last, begin)
            last, end = frame, ending
            if len(shown) > most:
                break
        self._show(shown, last, end)
        whole = film.duration if len(film.streams) == 1 else 0  # a sound may be longer
        seconds = float(stream.duration * stream.time_base) if stream.duration else float(whole or 0) / 1e6
        if not shown or (len(shown) <= most and end < seconds - 1 / FRAMES_PER_SECOND):
            raise BadMedia(f"expected a whole film of {seconds:g} seconds, found {end:g}")
        return shown

    def _show(self, shown: list[Any], frame: Any, until: float) -> None:
        """Adds a film's frame for each half second at which it is seen; ``until``: seconds. One too many is enough to refuse the film."""
        while len(shown) <= self._data.max_video_frames and len(shown) < until * FRAMES_PER_SECOND:
            shown.append(self._formed(frame.to_image().rotate(frame.rotation, expand=True)))

    def _moments(self, opened: Any) -> list[int]:
        """Returns which frames of an animation are shown, two for each second of it."""
        shown, until = list[int](), 0.0
        for number in range(getattr(opened, "n_frames", 1)):
            until += float(self._at(opened, number).info.get("duration") or 100)  # milliseconds; browsers take 100 for none
            while len(shown) * 1000 / FRAMES_PER_SECOND < until and len(shown) <= self._data.max_video_frames:
                shown.append(number)
            if len(shown) > self._data.max_video_frames:
                break
        return shown

    def _at(self, opened: Any, number: int) -> Any:
        try:
            opened.seek(number)
            opened.load()
        except Exception as error:  # as above
            raise BadMedia(f"expected a whole video, found one whose frame {number} cannot be decoded ({str(error)[:120]})") from None
        return opened


class SoundReader(MediaReader):
    """Reads sounds with soundfile."""

    kind = "audio"

    def measured(self, data: bytes) -> int:
        return self._opened(data)[1]

    def prepared(self, data: bytes) -> Picture:
        sound, tokens, count = self._opened(data)
        try:
            waves = sound.read(dtype="float64", always_2d=True).mean(1)
        except Exception as error:  # as with pictures
            raise BadMedia(f"expected a whole sound, found one that cannot be decoded ({str(error)[:120]})") from None
        if len(waves) != sound.frames:
            raise BadMedia(f"expected a whole sound of {sound.frames} samples, found {len(waves)}")
        if not np.isfinite(waves).all():
            raise BadMedia("expected finite samples, found NaN or infinity")
        if (peak := float(np.abs(waves).max())) > MOST_PEAK:
            raise BadMedia(f"expected samples from -1 to 1, found {peak:.3g}: it would be cut off there")
        if sound.samplerate != self.rule.rate:  # what is above half of the lower rate is left out
            waves = np.fft.irfft(np.fft.rfft(waves)[: count // 2 + 1], count) * (count / len(waves))
        return Picture(self.rule.stored(waves), tokens)

    def _opened(self, data: bytes) -> tuple[Any, int, int]:
        """Returns a sound, its tokens, and its samples at the model's rate."""
        import soundfile

        try:
            sound = soundfile.SoundFile(io.BytesIO(data))
        except Exception as error:  # as above
            raise BadMedia(f"expected a sound of {', '.join(_SOUNDS)}, found {data[:12]!r} ({type(error).__name__})") from None
        if sound.format not in _SOUNDS:
            raise BadMedia(f"expected a sound of {', '.join(_SOUNDS)}, found {sound.format}")
        if data[:4] == b"RIFF" and (wanted := int.from_bytes(data[4:8], "little") + 8) > len(data):
            raise BadMedia(f"expected a whole WAV of {wanted} bytes, found {len(data)}")
        rate, (lowest, highest) = sound.samplerate, SAMPLE_RATES
        if not lowest <= rate <= highest:
            raise BadMedia(f"expected {lowest} to {highest} samples a second, found {rate}")
        if sound.channels > 2:
            raise BadMedia(f"expected 1 or 2 channels, found {sound.channels}")
        count, most = round(sound.frames * self.rule.rate / rate), min(self._data.max_sound_seconds, self.rule.window / self.rule.rate)
        if sound.frames > most * rate:
            raise BadMedia(
                f"expected at most {most:g} seconds (max_sound_seconds, and what the model hears), found {sound.frames / rate:.6g}"
            )
        if (tokens := self.rule.tokens(count)) < 2:  # of one token transformers takes its place for the sound's whole place
            raise BadMedia(f"expected a sound of 2 tokens or more, found {sound.frames / rate:.6g} seconds")
        return sound, tokens, count


def _decoded(film: Any, stream: Any) -> Iterator[tuple[Any, float, float]]:
    """Yields a film's frames, and when each begins and ends, in seconds."""
    first: Any = None
    for number, frame in enumerate(film.decode(stream)):
        first = frame if first is None else first
        begin = frame.time - first.time
        if frame.is_corrupt or (frame.width, frame.height) != (stream.width, stream.height) or number > MOST_FRAMES + MOST_RATE * begin:
            raise BadMedia(f"expected whole frames of one size, at most {MOST_RATE} a second, found others after {begin:g} s")
        yield frame, begin, begin + float((frame.duration or 0) * frame.time_base)


def strip_of(frames: Sequence[Any]) -> bytes:
    """Returns the stored form of a video. ``frames``: RGB, of one size."""
    import PIL.Image
    import PIL.PngImagePlugin

    width, height = frames[0].size
    strip, mark = PIL.Image.new("RGB", (width, len(frames) * height)), PIL.PngImagePlugin.PngInfo()
    mark.add_text("frames", str(len(frames)))
    for number, frame in enumerate(frames):
        strip.paste(frame, (0, number * height))
    strip.save(encoded := io.BytesIO(), "PNG", compress_level=1, pnginfo=mark)
    return encoded.getvalue()


def empty_part(kind: str) -> dict[str, Any]:
    """Returns the part of a message that stands for a picture or a sound in a chat template."""
    return {"type": kind, **({kind: ""} if kind == "audio" else {})}  # Qwen2-Audio's template asks for the key alone


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadMedia(f"expected base64, found {text[:40]!r} ({error})") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(_FIELD, str(path), f"a readable JSON file ({error})") from None
    if not isinstance(found, dict):
        raise ConfigError(_FIELD, str(path), "a JSON object")
    return found
