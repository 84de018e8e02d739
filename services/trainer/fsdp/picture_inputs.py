"""Inputs of a model that sees or hears beside a pack's tokens: pixels or frames of sounds, and places in time, rows and columns."""

import io
import itertools
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor

from services.trainer.packing import PackedBatch
from shared.data.media import FRAMES_PER_SECOND, GLM, RULES, strip_of
from shared.runtime.errors import BadMessage

RECENT_BYTES = 1 << 30  # of pixels that a rank keeps in host memory


class SeenPack(NamedTuple):
    """A pack as a model that sees is given it.

    Args:
        tokens: int64 [T + F], with a sequence of F tokens that shows a blank picture behind the others where the pack has none.
        starts: of the sequences, and T + F. positions: int64 [4, 1, T + F]: places in the sequence, then in time, rows and columns; of a
            model that hears [1, T + F], places in the sequence.
        pixels: what the checkpoint's processor makes of the pictures, or of the sounds.
    """

    tokens: Tensor
    starts: list[int]
    positions: Tensor
    pixels: dict[str, Tensor]


class MediaInputs:
    """Makes the inputs of packs. ``rule``: what the checkpoint says."""

    def __init__(self, rule: Any) -> None:
        self.rule, self._recent = rule, dict[tuple[bytes, ...], dict[str, Tensor]]()

    @staticmethod
    def of(hf_dir: Path, model: Any, kind: str) -> "MediaInputs":
        """Returns the maker for a checkpoint. ``model``: transformers' own. ``kind``: of what is shown. Raises ConfigError for a family of
        which that is not taken."""
        rule = RULES[kind].read(hf_dir)
        return SoundInputs(rule, hf_dir) if kind == "audio" else (VideoInputs if kind == "video" else PictureInputs)(rule, hf_dir, model)

    def seen(self, batch: PackedBatch, everywhere: bool) -> SeenPack:
        """Returns the inputs of a pack. Raises BadMessage where a sequence's tokens are not those of its pictures.

        Args:
            everywhere: show a blank picture in a pack without one: layers that see are collectives of all ranks.
        """
        tokens, starts = batch.tokens, batch.cu_seqlens.tolist()
        pixels = [self._once(shown) for shown in batch.pictures] or [{} for _ in starts[1:]]
        for number, (start, stop) in enumerate(itertools.pairwise(starts)):
            found = int((tokens[start:stop] == self.rule.token).sum())
            if found != (wanted := self._taken(pixels[number])):
                noun = f"{self.rule.noun}s"
                raise BadMessage(f"sequence {number} has {found} tokens of {noun}; its {noun} take {wanted}, by the checkpoint's processor")
        if everywhere and not any(pixels):
            filler = self._blank
            tokens, starts, pixels = torch.cat([tokens, filler[0]]), [*starts, starts[-1] + len(filler[0])], [*pixels, filler[1]]
        places = [self._places(tokens[start:stop], each) for (start, stop), each in zip(itertools.pairwise(starts), pixels, strict=True)]
        given = [each for each in pixels if each]
        joined = {name: torch.cat([each[name] for each in given]) for name in (given[0] if given else ())}
        return SeenPack(tokens, starts, torch.cat(places, -1).unsqueeze(-2), joined)

    def _once(self, pictures: tuple[bytes, ...]) -> dict[str, Tensor]:
        """Returns `_pixels`, nothing of none. The newest are kept: a group's samples show the same, and so do the passes over them."""
        found = self._recent.pop(pictures, None)
        self._recent[pictures] = found = found or (self._pixels(pictures) if pictures else {})
        while sum(tensor.nbytes for each in self._recent.values() for tensor in each.values()) > RECENT_BYTES:
            del self._recent[next(iter(self._recent))]
        return found

    def _pixels(self, pictures: Sequence[bytes]) -> dict[str, Tensor]:
        """Returns what the model is given of a sequence's pictures or sounds, at least one."""
        raise NotImplementedError

    def _taken(self, pixels: dict[str, Tensor]) -> int:
        """Returns how many tokens they take."""
        raise NotImplementedError

    def _places(self, tokens: Tensor, pixels: dict[str, Tensor]) -> Tensor:
        """Returns the places of one sequence's tokens, int64 [L] or [4, L]."""
        return torch.arange(len(tokens))

    @cached_property
    def _blank(self) -> tuple[Tensor, dict[str, Tensor]]:
        """A sequence that shows something to no end, and what the model is given of it."""
        shown = self._example
        return torch.tensor([0, *[self.rule.token] * self.rule.stored_tokens(shown), 0]), self._pixels([shown])

    @property
    def _example(self) -> bytes:
        """Something short, in its stored form."""
        raise NotImplementedError


class PictureInputs(MediaInputs):
    """Those of a model that sees."""

    grid, number = "image_grid_thw", 1  # the name of the sizes, and what tells pictures from videos where places are computed

    def __init__(self, rule: Any, hf_dir: Path, model: Any) -> None:
        super().__init__(rule)
        self._model = model
        processor: Any = Glm4vImageProcessorPil if self.rule.kind in GLM else Qwen2VLImageProcessorPil
        self._processor = processor.from_pretrained(hf_dir, local_files_only=True)

    def _taken(self, pixels: dict[str, Tensor]) -> int:
        return int(pixels[self.grid].prod(1).sum()) // int(self._processor.merge_size) ** 2 if pixels else 0

    def _pixels(self, pictures: Sequence[bytes]) -> dict[str, Tensor]:
        opened = [Image.open(io.BytesIO(picture), formats=("PNG",)) for picture in pictures]
        found = self._processor(images=opened, return_tensors="pt")
        return {"pixel_values": found["pixel_values"], "image_grid_thw": found["image_grid_thw"]}

    def _places(self, tokens: Tensor, pixels: dict[str, Tensor]) -> Tensor:
        own = torch.arange(len(tokens))
        if not pixels:
            return own.expand(4, -1)
        kinds, grid = self.number * (tokens == self.rule.token).int()[None], {self.grid: pixels[self.grid]}
        found, _ = self._model.base_model.get_rope_index(input_ids=tokens[None], mm_token_type_ids=kinds, **grid)
        return torch.cat([own[None], found[:, 0]])

    @property
    def _example(self) -> bytes:
        Image.new("RGB", self.rule.size(1, 1)).save(encoded := io.BytesIO(), "PNG")
        return encoded.getvalue()


class VideoInputs(PictureInputs):
    """Those of a model that sees videos, of which a patch lasts a second.

    Text behind a video begins behind its last moment, as in Qwen's own code and in SGLang: transformers 5.12 begins it behind the rows."""

    grid, number = "video_grid_thw", 2

    def __init__(self, rule: Any, hf_dir: Path, model: Any) -> None:
        super().__init__(rule, hf_dir, model)
        self._processor.image_mean, self._processor.image_std = list(rule.mean), list(rule.std)

    def _pixels(self, pictures: Sequence[bytes]) -> dict[str, Tensor]:
        patches, grids = zip(*map(self._patches, pictures), strict=True)
        return {"pixel_values_videos": torch.cat(patches), self.grid: torch.stack(grids)}

    def _places(self, tokens: Tensor, pixels: dict[str, Tensor]) -> Tensor:
        found, grids, at = list[Tensor](), pixels[self.grid].tolist() if pixels else [], 0
        ticks, merge = int(self._model.config.vision_config.tokens_per_second), int(self._processor.merge_size)
        for shown, run in itertools.groupby((tokens == self.rule.token).tolist()):
            if shown:
                times, rows, columns = grids.pop(0)
                axes = torch.arange(times) * ticks, torch.arange(rows // merge), torch.arange(columns // merge)
                found.append(at + torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1))
            else:
                found.append(at + torch.arange(len(list(run))).expand(3, -1))
            at = int(found[-1].max()) + 1
        return torch.cat([torch.arange(len(tokens))[None], torch.cat(found, 1)])

    def _patches(self, strip: bytes) -> tuple[Tensor, Tensor]:
        """Returns a video's patches and their numbers in time, rows and columns. A picture fills a patch's frames alike: of each frame its
        own part is taken."""
        frames, together = list(self.rule.frames(strip)), FRAMES_PER_SECOND
        frames += frames[-1:] * (-len(frames) % together)
        found = self._processor(images=frames, do_resize=False, return_tensors="pt")
        whole = found["pixel_values"].reshape(len(frames) // together, together, -1, 3, together, self._processor.patch_size**2)
        own = whole.diagonal(dim1=1, dim2=4).movedim(-1, 3)  # patches in time, in the picture, channels, frames of a patch, pixels
        grid = found["image_grid_thw"][0] * torch.tensor([len(frames) // together, 1, 1])
        return own.reshape(-1, found["pixel_values"].shape[1]), grid

    @property
    def _example(self) -> bytes:
        return strip_of([Image.new("RGB", self.rule.size(1, 1))])


class SoundInputs(MediaInputs):
    """Those of a model that hears."""

    def __init__(self, rule: Any, hf_dir: Path) -> None:
        super().__init__(rule)
        self._extractor: Any = WhisperFeatureExtractor.from_pretrained(hf_dir, local_files_only=True)

    def _pixels(self, pictures: Sequence[bytes]) -> dict[str, Tensor]:
        waves = [self.rule.waves(sound) for sound in pictures]
        options: dict[str, Any] = {"padding": "max_length", "return_attention_mask": True, "return_tensors": "pt"}
        found = self._extractor(waves, sampling_rate=self.rule.rate, **options)
        return {"input_features": found["input_features"], "feature_attention_mask": found["attention_mask"]}

    def _taken(self, pixels: dict[str, Tensor]) -> int:
        frames = pixels["feature_attention_mask"].sum(1).tolist() if pixels else ()
        return sum(self.rule.tokens(int(count) * self.rule.hop) for count in frames)

    @property
    def _example(self) -> bytes:
        return bytes(self.rule.stored(np.zeros(16 * self.rule.hop)))
