"""Megatron's parallel groups, which `services.trainer.parallel.runtime` forms and leaves."""

import gc
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

from shared.model.parallel_layout import ParallelLayout


def form(layout: ParallelLayout, timeout_seconds: float) -> None:
    """Forms the groups of a layout, after those that there were are left. ``timeout_seconds``: of their collectives."""
    leave()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor_size,
        create_gloo_process_groups=False,
        # declared an integer, but handed to timedelta(minutes=...) as it is
        distributed_timeout_minutes=timeout_seconds / 60,
    )


def leave() -> None:
    """Ends the groups: Megatron forgets its own without that, and each would keep threads of gloo's, which wake up a hundred times a
    second."""
    if not parallel_state.model_parallel_is_initialized():
        return
    groups = list(parallel_state._global_process_group_list or [])
    parallel_state.destroy_model_parallel()
    for group in groups:
        if group is not None and group is not dist.GroupMember.NON_GROUP_MEMBER and group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    groups, group = [], None
    for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
        embedding.forward.cache_clear()  # its keys are the embeddings, which hold the ranks that share a sequence
    for _ in range(2):  # models are in reference cycles and hold their groups; objects that the first round frees hold more of them
        gc.collect()


def seed(seed: int) -> None:
    """Seeds the random numbers of this rank's device, by its place in the layout."""
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def random_states() -> dict[str, Any]:
    """Returns the states of Megatron's own random numbers, for a checkpoint."""
    return {"tracker": tensor_parallel.get_cuda_rng_tracker().get_states()}


def set_random_states(states: Mapping[str, Any]) -> None:
    """Takes what `random_states` returned."""
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])


def data_parallel() -> dist.ProcessGroup:
    """Returns the group of the ranks that hold the same parameters and train other samples."""
    group: dist.ProcessGroup = parallel_state.get_data_parallel_group()
    return group
