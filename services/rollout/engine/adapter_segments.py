"""Keeps the kernels of clients' adapters small in an engine's CUDA graphs."""

from typing import Any


def install() -> None:
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
