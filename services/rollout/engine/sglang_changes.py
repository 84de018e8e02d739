"""What the launchers change in SGLang's server: what it reads of prompts with sounds or videos, their very ids and both in their stored
form, and on GPUs how many segments the kernels of clients' adapters begin blocks for in CUDA graphs.
"""

import base64
import importlib.util
import io
import itertools
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from shared.data.media import FRAMES_PER_SECOND, WATCHING


def read_media(model_path: str) -> None:
    """Prepares SGLang for a checkpoint whose model hears, or sees videos; does nothing for another."""
    config = Path(model_path, "config.json")
    entries = json.loads(config.read_text()) if config.is_file() else {}
    hears, sees = "audio_config" in entries, entries.get("model_type") in WATCHING
    if hears or sees:
        keep_ids()
    if hears:
        read_sounds()
    if sees:
        read_videos()


def read_sounds() -> None:
    """Does without torchaudio where there is none: SGLang imports it to read even a sound that is at the model's rate."""
    if importlib.util.find_spec("torchaudio") is not None:
        return
    import soundfile
    from sglang.srt.multimodal.processors import base_processor

    base_processor.load_audio = lambda url, *_: soundfile.read(io.BytesIO(base64.b64decode(url.partition(",")[2])))[0]


def read_videos() -> None:
    """Has SGLang read the frames of a video as they are stored, two a second. It would choose other frames than transformers does, and
    resize them before the checkpoint's processor does."""
    from sglang.srt.multimodal.processors import base_processor

    def frames_of(url: str, *_: Any) -> np.ndarray[Any, Any]:
        strip = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])), formats=("PNG",))
        pixels = np.asarray(strip)
        return pixels.reshape(int(strip.info["frames"]), -1, *pixels.shape[1:])

    base_processor.load_video = frames_of


def keep_ids() -> None:
    """Has prompts keep the ids that they are sent with, and videos their frames. SGLang does so for pictures alone, and makes the ids of
    other prompts anew of their text, which a model may have sampled otherwise than the tokenizer spells it."""
    from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor
    from sglang.srt.multimodal.processors.qwen_audio import Qwen2AudioMultimodalProcessor

    combine, collect, sent = (
        BaseMultimodalProcessor.process_and_combine_mm_data,
        BaseMultimodalProcessor._process_and_collect_mm_items,
        threading.local(),
    )

    def combined(self: Any, given: Any, tokens: Any, *arguments: Any, **options: Any) -> Any:
        sent.ids, sent.token = given.input_ids, tokens.audio_token_id if given.audios else tokens.video_token_id if given.videos else None
        return combine(self, given, tokens, *arguments, **options)

    def collected(self: Any, *arguments: Any, **options: Any) -> Any:
        if videos := options["videos"]:
            sampled = [{"fps": FRAMES_PER_SECOND, "total_num_frames": len(one), "frames_indices": range(len(one))} for one in videos]
            options |= {"do_sample_frames": False, "video_metadata": sampled}
        items, ids, found = collect(self, *arguments, **options)
        if sent.ids is not None and sent.token is not None:
            counts = [len(list(run)) for token, run in itertools.groupby(ids.tolist()) if token == sent.token]
            ids = torch.tensor(self._expand_input_ids(sent.ids, counts, sent.token), dtype=ids.dtype)
        return items, ids, found

    BaseMultimodalProcessor.process_and_combine_mm_data, BaseMultimodalProcessor._process_and_collect_mm_items = combined, collected
    Qwen2AudioMultimodalProcessor._build_transcription_prompt = lambda _, given: given  # it would make a text of ids


def shorten_adapter_segments() -> None:
    """Has a captured decode step begin blocks for as many segments as there can be: runs of rows of one adapter.

    SGLang (0.5.16 to 0.5.20) begins them for as many segments as the largest graph has rows, and a segment has 16: with 512 rows, 151,936
    columns and 28 layers, four million blocks a token, nearly all of which have nothing to compute.
    """
    from sglang.srt.lora.backend import chunked_backend

    plain = chunked_backend.ChunkedSgmvLoRABackend.init_cuda_graph_batch_info

    def with_few_segments(backend: Any, **sizes: int) -> None:
        plain(backend, **sizes)
        info = backend.cuda_graph_batch_info
        most = -(-len(info.permutation) // chunked_backend.MIN_CHUNK_SIZE) + backend.max_loras_per_batch
        info.seg_lens, info.weight_indices, info.seg_indptr = info.seg_lens[:most], info.weight_indices[:most], info.seg_indptr[: most + 1]

    chunked_backend.ChunkedSgmvLoRABackend.init_cuda_graph_batch_info = with_few_segments
