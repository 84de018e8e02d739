"""Pictures of prompts: found in rows, checked, and brought into the one form that engines and the trainer see. Without torch.

A picture is decoded once, here, and stored as a PNG of RGB in the size that the checkpoint's image processor gives it. Engines and the
trainer run that processor over the same pixels, which it has no need to resize; so both see the same patches, whichever library decodes and
resizes for them. How many tokens a picture takes follows from its size alone.
"""

import base64
import binascii
import io
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.config.data_sections import DataSection
from shared.config.run_config import RunConfig
from shared.runtime.errors import ConfigError, shown
from shared.runtime.safe_files import parse_json
from shared.schema.sample import Sample

GLM = ("glm4v", "glm4v_moe")  # Values of ``model_type`` whose processor resizes as GLM-4.1V's
SEEING = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", *GLM)  # Those whose pictures are taken
MOST_BYTES = 64 << 20  # The most bytes of one prompt's pictures, as they are stored
MOST_ASPECT = 200  # The widest picture, by its sides, that the families' processors take
PLACEHOLDER = "<image>"  # In a prompt's text: the next of its pictures, as slime has it

_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
_PNG = b"\x89PNG\r\n\x1a\n"
_FIELD = "data.multimodal_keys"


class BadPicture(ValueError):
    """A picture that is not taken; the message says what was found, and what is expected."""


class Picture(NamedTuple):
    """A picture as it is stored: a PNG, which takes so many ``tokens``."""

    data: bytes
    tokens: int


@dataclass(frozen=True)
class PictureRule:
    """What a checkpoint's own files say of pictures.

    Args:
        token: the id that stands for a picture, once for each patch that the language model sees. forbidden: ids that are never sampled,
            since they would stand for pictures that are not there. factor: pixels of a patch's side, as the language model sees it.
        min_pixels, max_pixels: of a picture, after it was resized. resample: PIL's number of the filter. kind: the model's ``model_type``.
    """

    token: int
    forbidden: tuple[int, ...]
    factor: int
    min_pixels: int
    max_pixels: int
    resample: int
    kind: str

    @classmethod
    def of_run(cls, config: RunConfig) -> "PictureRule | None":
        """Returns what the checkpoint of a run says; None where its prompts are text. Raises ConfigError as `read` does."""
        return None if config.data.multimodal_keys is None else cls.read(config.model.hf_checkpoint)

    @classmethod
    def read(cls, model: Path) -> "PictureRule":
        """Reads a checkpoint. Raises ConfigError: its family's pictures are not taken, or its processor's files lack an entry."""
        config = _json(model / "config.json")
        if (kind := config.get("model_type")) not in SEEING:
            raise ConfigError(_FIELD, str(kind), f"none for this model; pictures are shown to {', '.join(SEEING)} alone")
        path = next((model / name for name in ("preprocessor_config.json", "processor_config.json") if (model / name).is_file()), None)
        if path is None:
            raise ConfigError(_FIELD, str(model), "the checkpoint's preprocessor_config.json beside it; there is none")
        entries = _json(path)
        entries = entries.get("image_processor", entries)
        size = entries.get("size") or {}
        try:
            token = int(config["image_token_id"])
            names = ("image_token_id", "video_token_id", "vision_start_token_id", "image_start_token_id", "video_start_token_id")
            if kind in GLM:  # its bounds are of a picture's pixels in as many frames as a patch has
                frames = int(entries["temporal_patch_size"])
                entries = {**entries, "min_pixels": -(-size["shortest_edge"] // frames), "max_pixels": size["longest_edge"] // frames}
            return cls(
                token,
                tuple(sorted({int(config[name]) for name in names if config.get(name) is not None})),
                int(entries["patch_size"]) * int(entries["merge_size"]),
                int(entries.get("min_pixels") or size["shortest_edge"]),
                int(entries.get("max_pixels") or size["longest_edge"]),
                int(entries.get("resample", 3)),
                kind,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                _FIELD, str(path), f"patch_size, merge_size, min_pixels and max_pixels, and config.json's ids ({error})"
            ) from None

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

    def expanded(self, ids: NDArray[np.int32], counts: Sequence[int]) -> NDArray[np.int32]:
        """Returns ids with each picture's one token repeated so often. Raises BadPicture where there are more pictures, or fewer."""
        if (found := int(np.count_nonzero(ids == self.token))) != len(counts):
            raise BadPicture(f"expected as many pictures as places for them in the rendered prompt, found {len(counts)} for {found} places")
        repeats = np.ones(len(ids), np.int64)
        repeats[ids == self.token] = counts
        return np.repeat(ids, repeats).astype(np.int32)

    def unexpanded(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Returns ids with each picture's tokens taken together to one, as engines are sent them."""
        again = np.zeros(len(ids), bool)
        again[1:] = (ids[1:] == self.token) & (ids[:-1] == self.token)
        return ids[~again]


class ShownPictures(NamedTuple):
    """The pictures of a sequence, PNGs in the order of their tokens, and what its model's checkpoint says of pictures."""

    rule: PictureRule
    pictures: tuple[bytes, ...] = ()


def picture_check(config: RunConfig) -> Callable[[Sample], str | None]:
    """Returns what says why a sample's pictures are not those of its tokens; the trainer's processor counts as this does.

    Raises ConfigError: the model sees none, though prompts show some.
    """
    rule = PictureRule.of_run(config)

    def problem(sample: Sample) -> str | None:
        if rule is None:
            return "pictures are there, and data.multimodal_keys shows none" if sample.pictures else None
        places = sum(int(np.count_nonzero(ids == rule.token)) for ids in (sample.prompt, sample.response))
        if any(picture[:8] != _PNG or len(picture) < 24 for picture in sample.pictures):
            return "pictures holds one that is no PNG"
        sizes = [struct.unpack(">II", picture[16:24]) for picture in sample.pictures]
        if any(0 in size or rule.size(*size) != size for size in sizes):
            return f"pictures holds one of another size than the checkpoint's processor gives it: {sizes}"
        wanted = sum(rule.tokens(*size) for size in sizes)
        return None if places == wanted else f"pictures take {wanted} tokens, and {places} tokens stand for pictures"

    return problem


class PictureReader:
    """Reads the pictures of rows. Raises ConfigError for a model that sees none, and where pillow is not installed."""

    def __init__(self, model: Path, data: DataSection) -> None:
        self.rule, self._data = PictureRule.read(model), data
        self._key = (data.multimodal_keys or {}).get("image", "")
        try:
            import PIL.Image  # noqa: F401
        except ModuleNotFoundError:
            raise ConfigError(_FIELD, data.multimodal_keys, "none, or pillow, which reads pictures: pip install pillow") from None

    def separated(self, content: Any, row: Mapping[str, Any]) -> tuple[Any, list[Any]]:
        """Returns a prompt whose pictures are parts without data, ``{"type": "image"}``, and what stood for each of them, in order.

        Pictures are those of the row's own key, of which each `PLACEHOLDER` in the text takes the next, and those that parts of messages
        hold. Raises BadPicture where there are more places than pictures, or fewer.
        """
        given = row.get(self._key)
        waiting = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
        found: list[Any] = []
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            return content, found
        made = [{**message, "content": self._parts(message.get("content"), waiting, found)} for message in messages]
        if waiting:
            raise BadPicture(f"expected a {PLACEHOLDER} in the prompt for each picture of {self._key!r}, found {len(waiting)} without one")
        if len(found) > self._data.max_pictures:
            raise BadPicture(f"expected at most max_pictures = {self._data.max_pictures} pictures, found {len(found)}")
        return made, found

    def _parts(self, content: Any, waiting: list[Any], found: list[Any]) -> Any:
        if isinstance(content, str):
            pieces = content.split(PLACEHOLDER)
            parts: list[dict[str, Any]] = [{"type": "text", "text": pieces[0]}] if pieces[0] else []
            for piece in pieces[1:]:
                if not waiting:
                    raise BadPicture(f"expected a picture in {self._key!r} for each {PLACEHOLDER} of the prompt, found fewer")
                found.append(waiting.pop(0))
                parts += [{"type": "image"}, *([{"type": "text", "text": piece}] if piece else [])]
            return parts if len(pieces) > 1 else content
        if not isinstance(content, list):
            return content
        return [self._part(part, waiting, found) for part in content]

    def _part(self, part: Any, waiting: list[Any], found: list[Any]) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("video", "video_url", "audio", "input_audio"):
            raise BadPicture(f"expected text and pictures, found a part of type {kind!r}")
        if kind not in ("image", "image_url"):
            return part
        if other := sorted(part.keys() - {"type", "image", "image_url"}):
            raise BadPicture(f"expected a picture's part with type and {kind} alone, found {other[0]!r}")
        given = part.get(kind)
        if given is None and not waiting:
            raise BadPicture(f"expected a picture in the part, or in {self._key!r}, found neither")
        found.append(waiting.pop(0) if given is None else given)
        return {"type": "image"}

    def data_of(self, given: Any, folder: Path) -> bytes:
        """Returns the encoded picture that a value of a row stands for: bytes, base64, a data URL, a file beside the data or an object
        that holds one of these. Raises BadPicture.

        Args:
            folder: of the row's file, from which paths start.
        """
        for _ in range(2):  # {"image_url": {"url": "data:…"}}
            if isinstance(given, Mapping):
                if other := sorted(map(str, given.keys() - {"type", "image", "image_url", "url", "bytes", "path"})):
                    raise BadPicture(f"expected a picture alone, found an object with {other[0]!r}")
                given = next((given[name] for name in ("bytes", "image", "image_url", "url", "path") if given.get(name) is not None), None)
        if isinstance(given, bytes):
            data = given
        elif isinstance(given, str):
            data = self._read(given, folder)
        else:
            raise BadPicture(f"expected a picture's bytes, base64, data URL or path, found {shown(given)}")
        if not 0 < len(data) <= self._data.max_picture_bytes:
            raise BadPicture(f"expected 1 to max_picture_bytes = {self._data.max_picture_bytes} bytes of a picture, found {len(data)}")
        return data

    def _read(self, given: str, folder: Path) -> bytes:
        if given.startswith("data:"):
            head, comma, encoded = given.partition(",")
            if not comma or not head.endswith(";base64"):
                raise BadPicture(f"expected a data URL in base64, found {given[:60]!r}")
            return _from_base64(encoded)
        if "://" in given[:16]:
            raise BadPicture(f"expected a file, bytes or a data URL, found {given[:80]!r}; addresses are not asked for: download it first")
        path = folder / given
        try:
            with path.open("rb") as file:
                return file.read(self._data.max_picture_bytes + 1)
        except (OSError, ValueError) as error:
            if len(given) >= 64 and "." not in given:
                return _from_base64(given)
            raise BadPicture(f"expected a readable file beside the data, found {str(path)[:200]!r} ({error})"[:400]) from None

    def measured(self, data: bytes) -> int:
        """Returns how many tokens a picture takes, by its header alone. Raises BadPicture."""
        return self.rule.tokens(*self._opened(data).size)

    def prepared(self, data: bytes) -> Picture:
        """Returns a picture in its stored form. Raises BadPicture for one that cannot be decoded to its end."""
        import PIL.Image
        import PIL.ImageOps

        try:
            picture = PIL.ImageOps.exif_transpose(self._opened(data)).convert("RGB")
        except BadPicture:
            raise
        except Exception as error:  # decoders raise whatever they like on broken data
            raise BadPicture(f"expected a whole picture, found one that cannot be decoded ({str(error)[:120]})") from None
        size = self.rule.size(*picture.size)
        if picture.size != size:
            picture = picture.resize(size, PIL.Image.Resampling(self.rule.resample))
        picture.save(encoded := io.BytesIO(), "PNG", compress_level=1)
        return Picture(encoded.getvalue(), self.rule.tokens(*size))

    def _opened(self, data: bytes) -> Any:
        import PIL.Image

        try:
            picture = PIL.Image.open(io.BytesIO(data), formats=_FORMATS)
            frames = getattr(picture, "n_frames", 1)
        except PIL.Image.DecompressionBombError:
            raise BadPicture(f"expected at most max_picture_pixels = {self._data.max_picture_pixels} pixels, found far more") from None
        except Exception as error:  # as above
            raise BadPicture(f"expected a picture of {', '.join(_FORMATS)}, found {data[:12]!r} ({type(error).__name__})") from None
        width, height = picture.size
        if width * height > self._data.max_picture_pixels:
            raise BadPicture(f"expected at most max_picture_pixels = {self._data.max_picture_pixels} pixels, found {width} x {height}")
        if max(width, height) > MOST_ASPECT * min(width, height):
            raise BadPicture(f"expected sides in a ratio of at most {MOST_ASPECT}, found {width} x {height}")
        if self.rule.size(*(resized := self.rule.size(width, height))) != resized:  # engines and trainer would each resize it once more
            raise BadPicture(
                f"expected a picture less narrow, found {width} x {height}: it cannot have max_pixels = {self.rule.max_pixels}"
            )
        if frames != 1:
            raise BadPicture(f"expected a picture, found an animation of {frames} frames")
        if picture.mode not in _MODES:
            raise BadPicture(f"expected 8 bits a channel, found pixels of mode {picture.mode}")
        return picture


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadPicture(f"expected base64, found {text[:40]!r} ({error})") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(_FIELD, str(path), f"a readable JSON file ({error})") from None
    if not isinstance(found, dict):
        raise ConfigError(_FIELD, str(path), "a JSON object")
    return found
