"""What a model that sees or hears is given beside the tokens of a pack: pictures' pixels, or sounds' frames, and places in the rows and
columns of pictures."""

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
from shared.data.media import GLM, MediaRule, SoundRule
from shared.runtime.errors import BadMessage


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
        self.rule = rule

    @staticmethod
    def of(hf_dir: Path, model: Any) -> "MediaInputs":
        """Returns the maker for a checkpoint. ``model``: transformers' own. Raises ConfigError for a family of which nothing is taken."""
        rule = MediaRule.of_model(hf_dir)
        return SoundInputs(rule, hf_dir) if isinstance(rule, SoundRule) else PictureInputs(rule, hf_dir, model)

    def seen(self, batch: PackedBatch, everywhere: bool) -> SeenPack:
        """Returns the inputs of a pack. Raises BadMessage where a sequence's tokens are not those of its pictures.

        Args:
            everywhere: show a blank picture in a pack without one: layers that see are collectives of all ranks.
        """
        tokens, starts = batch.tokens, batch.cu_seqlens.tolist()
        pictures = [list(shown) for shown in batch.pictures] or [[] for _ in starts[1:]]
        pixels = [self._pixels(shown) for shown in pictures]
        for number, (start, stop) in enumerate(itertools.pairwise(starts)):
            found = int((tokens[start:stop] == self.rule.token).sum())
            if found != (wanted := self._taken(pixels[number])):
                noun = self.rule.noun
                raise BadMessage(
                    f"sequence {number} has {found} tokens of {noun}s; its {noun}s take {wanted}, by the checkpoint's processor"
                )
        if everywhere and not any(pixels):
            filler = self._blank
            tokens, starts, pixels = torch.cat([tokens, filler[0]]), [*starts, starts[-1] + len(filler[0])], [*pixels, filler[1]]
        places = [self._places(tokens[start:stop], each) for (start, stop), each in zip(itertools.pairwise(starts), pixels, strict=True)]
        given = [each for each in pixels if each]
        joined = {name: torch.cat([each[name] for each in given]) for name in (given[0] if given else ())}
        return SeenPack(tokens, starts, torch.cat(places, -1).unsqueeze(-2), joined)

    def _pixels(self, pictures: Sequence[bytes]) -> dict[str, Tensor]:
        """Returns what the model is given of a sequence's pictures or sounds; nothing where there are none."""
        raise NotImplementedError

    def _taken(self, pixels: dict[str, Tensor]) -> int:
        """Returns how many tokens they take."""
        raise NotImplementedError

    def _places(self, tokens: Tensor, pixels: dict[str, Tensor]) -> Tensor:
        """Returns the places of one sequence's tokens, int64 [L] or [4, L]."""
        return torch.arange(len(tokens))

    @property
    def _blank(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns a sequence that shows something to no end, and what the model is given of it."""
        raise NotImplementedError


class PictureInputs(MediaInputs):
    """Those of a model that sees."""

    def __init__(self, rule: Any, hf_dir: Path, model: Any) -> None:
        super().__init__(rule)
        self._model = model
        processor: Any = Glm4vImageProcessorPil if self.rule.kind in GLM else Qwen2VLImageProcessorPil
        self._processor = processor.from_pretrained(hf_dir, local_files_only=True)

    def _taken(self, pixels: dict[str, Tensor]) -> int:
        return int(pixels["image_grid_thw"].prod(1).sum()) // int(self._processor.merge_size) ** 2 if pixels else 0

    def _pixels(self, pictures: Sequence[bytes]) -> dict[str, Tensor]:
        if not pictures:
            return {}
        opened = [Image.open(io.BytesIO(picture), formats=("PNG",)) for picture in pictures]
        found = self._processor(images=opened, return_tensors="pt")
        return {"pixel_values": found["pixel_values"], "image_grid_thw": found["image_grid_thw"]}

    def _places(self, tokens: Tensor, pixels: dict[str, Tensor]) -> Tensor:
        own = torch.arange(len(tokens))
        if not pixels:
            return own.expand(4, -1)
        grid = pixels["image_grid_thw"]
        kinds = (tokens == self.rule.token).int()[None]
        found, _ = self._model.base_model.get_rope_index(input_ids=tokens[None], mm_token_type_ids=kinds, image_grid_thw=grid)
        return torch.cat([own[None], found[:, 0]])

    @cached_property
    def _blank(self) -> tuple[Tensor, dict[str, Tensor]]:
        size = self.rule.size(1, 1)
        Image.new("RGB", size).save(encoded := io.BytesIO(), "PNG")
        return torch.tensor([0, *[self.rule.token] * self.rule.tokens(*size), 0]), self._pixels([encoded.getvalue()])


class SoundInputs(MediaInputs):
    """Those of a model that hears."""

    def __init__(self, rule: Any, hf_dir: Path) -> None:
        super().__init__(rule)
        self._extractor: Any = WhisperFeatureExtractor.from_pretrained(hf_dir, local_files_only=True)

    def _pixels(self, pictures: Sequence[bytes]) -> dict[str, Tensor]:
        if not pictures:
            return {}
        waves = [self.rule.waves(sound) for sound in pictures]
        options: dict[str, Any] = {"padding": "max_length", "return_attention_mask": True, "return_tensors": "pt"}
        found = self._extractor(waves, sampling_rate=self.rule.rate, **options)
        return {"input_features": found["input_features"], "feature_attention_mask": found["attention_mask"]}

    def _taken(self, pixels: dict[str, Tensor]) -> int:
        frames = pixels["feature_attention_mask"].sum(1).tolist() if pixels else ()
        return sum(self.rule.tokens(int(count) * self.rule.hop) for count in frames)

    @cached_property
    def _blank(self) -> tuple[Tensor, dict[str, Tensor]]:
        silence = self.rule.stored(np.zeros(16 * self.rule.hop))
        return torch.tensor([0, *[self.rule.token] * self.rule.stored_tokens(silence), 0]), self._pixels([silence])
