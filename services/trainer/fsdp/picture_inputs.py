"""What a model that sees is given beside the tokens of a pack: its pictures' pixels, and places in the rows and columns of pictures."""

import io
import itertools
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from services.trainer.packing import PackedBatch
from shared.data.pictures import GLM, PictureRule
from shared.runtime.errors import BadMessage


class SeenPack(NamedTuple):
    """A pack as a model that sees is given it.

    Args:
        tokens: int64 [T + F], with a sequence of F tokens that shows a blank picture behind the others where the pack has none.
        starts: of the sequences, and T + F. positions: int64 [4, 1, T + F]: places in the sequence, then in time, rows and columns.
        pixels: what the checkpoint's processor makes of the pictures.
    """

    tokens: Tensor
    starts: list[int]
    positions: Tensor
    pixels: dict[str, Tensor]


class PictureInputs:
    """Makes the inputs of packs. ``model``: transformers' model that sees. Raises ConfigError for a family whose pictures are not taken."""

    def __init__(self, hf_dir: Path, model: Any) -> None:
        self.rule, self._model = PictureRule.read(hf_dir), model
        processor: Any = Glm4vImageProcessorPil if self.rule.kind in GLM else Qwen2VLImageProcessorPil
        self._processor = processor.from_pretrained(hf_dir, local_files_only=True)

    def seen(self, batch: PackedBatch, everywhere: bool) -> SeenPack:
        """Returns the inputs of a pack. Raises BadMessage where a sequence's tokens are not those of its pictures.

        Args:
            everywhere: show a blank picture in a pack without one: layers that see are collectives of all ranks.
        """
        tokens, starts = batch.tokens, batch.cu_seqlens.tolist()
        pictures = [list(shown) for shown in batch.pictures] or [[] for _ in starts[1:]]
        grids, pixels = [], list[dict[str, Tensor]]()
        for number, shown in enumerate(pictures):
            found = self._pixels(shown)
            grids.append(found.get("image_grid_thw"))
            self._check(tokens[starts[number] : starts[number + 1]], grids[-1], number)
            pixels += [found] if shown else []
        if everywhere and not pixels:
            filler = self._blank
            tokens, starts = torch.cat([tokens, filler[0]]), [*starts, starts[-1] + len(filler[0])]
            pixels, grids = [filler[1]], [*grids, filler[1]["image_grid_thw"]]
        places = [self._places(tokens[start:stop], grid) for (start, stop), grid in zip(itertools.pairwise(starts), grids, strict=True)]
        joined = {name: torch.cat([each[name] for each in pixels]) for name in (pixels[0] if pixels else ())}
        return SeenPack(tokens, starts, torch.cat(places, 1)[:, None], joined)

    def _check(self, tokens: Tensor, grid: Tensor | None, number: int) -> None:
        places = int((tokens == self.rule.token).sum())
        wanted = 0 if grid is None else int(grid.prod(1).sum()) // int(self._processor.merge_size) ** 2
        if places != wanted:
            raise BadMessage(
                f"sequence {number} has {places} tokens of pictures; its pictures take {wanted}, by the checkpoint's processor"
            )

    def _pixels(self, pictures: Sequence[bytes]) -> dict[str, Tensor]:
        if not pictures:
            return {}
        opened = [Image.open(io.BytesIO(picture), formats=("PNG",)) for picture in pictures]
        found = self._processor(images=opened, return_tensors="pt")
        return {"pixel_values": found["pixel_values"], "image_grid_thw": found["image_grid_thw"]}

    def _places(self, tokens: Tensor, grid: Tensor | None) -> Tensor:
        """Returns the places of one sequence's tokens, int64 [4, L]."""
        own = torch.arange(len(tokens))
        if grid is None:
            return own.expand(4, -1)
        kinds = (tokens == self.rule.token).int()[None]
        found, _ = self._model.base_model.get_rope_index(input_ids=tokens[None], mm_token_type_ids=kinds, image_grid_thw=grid)
        return torch.cat([own[None], found[:, 0]])

    @cached_property
    def _blank(self) -> tuple[Tensor, dict[str, Tensor]]:
        size = self.rule.size(1, 1)
        Image.new("RGB", size).save(encoded := io.BytesIO(), "PNG")
        return torch.tensor([0, *[self.rule.token] * self.rule.tokens(*size), 0]), self._pixels([encoded.getvalue()])
