"""Speculative decoding on a CPU: what SGLang has kernels for on GPUs and AMX only, in plain torch, inside the engine's processes alone.

* The tree of drafts, for chains (``--speculative-eagle-topk 1``) and for NGRAM's trees; where drafted and accepted tokens lie in the cache.
* Torch's native attention verifies drafts, and decodes as many steps ahead as are drafted.
* The target is *sampled* from the policy at the request's temperature, top-p, top-k and min-p, as without speculation, and drafts that are
  equal to it are accepted: each token has exactly the policy's distribution. SGLang takes the likeliest token on a CPU, at any temperature.
"""

import ctypes
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def build_chain(*given: Any) -> None:
    """Lays one chain of drafts out for each sequence: a draft is seen by those after it, and its next one is its only child."""
    _parents, _scores, lengths, mask, positions, index, following, siblings, topk, _steps, size, _mode = given
    if topk != 1:
        raise NotImplementedError(f"--speculative-eagle-topk {topk}: expected 1 on a CPU")
    places = torch.arange(size)
    mask.copy_(torch.ones(size, size, dtype=torch.bool).tril().expand(len(lengths), size, size).reshape(-1))
    positions.copy_((lengths[:, None] + places).reshape(-1))
    index.copy_(torch.arange(len(lengths) * size).view_as(index))
    following.copy_(torch.cat([places[1:], torch.tensor([-1])]).expand_as(following))
    siblings.fill_(-1)


def tree_of_mask(
    mask: Tensor, lengths: Tensor, positions: Tensor, index: Tensor, following: Tensor, siblings: Tensor, batch: int, size: int
) -> None:
    """Reads positions and links of NGRAM's trees from their masks: bool [batch, size, size], which drafts a draft sees."""
    from sglang.srt.speculative.ngram_worker import _derive_tree_links

    trees = mask.reshape(batch, size, size).bool()
    links = _derive_tree_links(trees.numpy(), batch, size)
    for target, link in zip((following, siblings), links, strict=True):
        target.copy_(link.view_as(target))
    index.copy_(torch.arange(batch * size).view_as(index))
    positions.copy_((lengths[:batch, None] + trees.tril(-1).sum(-1)).reshape(-1))


def accept_equal(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Accepts, from each tree's root on, the draft that is the target's token there, and ends with the target's token after the last."""
    targets = target_predict.reshape(-1).tolist()
    trees = zip(*(given.tolist() for given in (candidates, retrive_index, retrive_next_token, retrive_next_sibling)), strict=True)
    for row, (drafts, places, children, siblings) in enumerate(trees):
        accepted, node = [places[0]], children[0]
        while node != -1 and len(accepted) < accept_index.shape[1]:
            if drafts[node] != targets[accepted[-1]]:
                node = siblings[node]
                continue
            accepted.append(places[node])
            node = children[node]
        accept_index[row, : len(accepted)] = torch.tensor(accepted)
        accept_token_num[row] = len(accepted) - 1
        predicts[accepted] = torch.tensor([targets[place] for place in accepted], dtype=predicts.dtype)


def cache_places(requests: Tensor, table: Tensor, start: Tensor, end: Tensor, out: Tensor, *_: Any) -> None:
    """Gathers the cache's places of tokens ``start`` to ``end`` of each request."""
    found = torch.cat([table[one, first:last] for one, first, last in zip(requests.tolist(), start.tolist(), end.tolist(), strict=True)])
    out[: len(found)] = found


def draft_places(requests: Tensor, table: Tensor, lengths: Tensor, out: Tensor, _width: int, topk: int, steps: int) -> None:
    """Gathers the cache's places of the tokens to be drafted."""
    cache_places(requests, table, lengths, lengths + topk * steps, out)


def assign_places(requests: Tensor, table: Tensor, start: Tensor, end: Tensor, places: Tensor, *_: Any) -> None:
    """Writes the cache's places of tokens ``start`` to ``end`` of each request."""
    parts = places.split((end - start).tolist())
    for one, first, last, part in zip(requests.tolist(), start.tolist(), end.tolist(), parts, strict=True):
        table[one, first:last] = part.to(table.dtype)


def last_accepted(tokens: Tensor, lengths: Tensor, out: Tensor, stride: int) -> None:
    """Writes the last accepted token of each request."""
    out.copy_(tokens.reshape(-1)[torch.arange(len(lengths)) * stride + lengths.long() - 1])


def accepted_places(index: Tensor, places: Tensor, out: Tensor) -> None:
    """Gathers the cache's places of accepted tokens."""
    found = places[index[index > -1].long()]
    out[: len(found)] = found


def copy_cache(addresses: Tensor, strides: Tensor, targets: Tensor, sources: Tensor) -> None:
    """Copies rows of each layer's cache. ``addresses``: of the layers; ``strides``: bytes of a row."""
    if not len(targets):
        return
    to, of = targets.numpy(), sources.numpy()
    rows = int(max(to.max(), of.max())) + 1
    for address, stride in zip(addresses.tolist(), strides.tolist(), strict=True):
        cache = np.ctypeslib.as_array((ctypes.c_uint8 * (rows * stride)).from_address(address)).reshape(rows, stride)
        cache[to] = cache[of]


KERNELS: dict[str, Callable[..., None]] = {
    "build_tree_kernel_efficient_cpu": build_chain,
    "verify_tree_greedy_cpu": accept_equal,
    "assign_extend_cache_locs_cpu": cache_places,
    "assign_draft_cache_locs_contiguous_cpu": draft_places,
    "assign_req_to_token_pool_cpu": assign_places,
    "fill_bonus_tokens_cpu": last_accepted,
    "fill_accept_out_cache_loc_cpu": accepted_places,
    "copy_all_layer_kv_cache_cpu": copy_cache,
}
"""SGLang's names of these functions in ``sgl_kernel``; they have to be there before SGLang is imported."""


def stand_in_for_trees() -> None:
    """Installs ``sgl_kernel.speculative``, from which NGRAM takes `tree_of_mask`."""
    module = types.ModuleType("sgl_kernel.speculative")
    module.reconstruct_indices_from_tree_mask = tree_of_mask  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module


def install() -> None:
    """Makes the speculation of this process's SGLang sample on a CPU, and verify by torch's native attention. Imports SGLang."""
    torch.cuda.synchronize = lambda *_: None  # models that share their embedding with a draft wait for a GPU
    _sample_targets()
    _verify_natively()


def _sample_targets() -> None:
    from sglang.srt.speculative import eagle_utils

    plain, verify = eagle_utils.eagle_sample, eagle_utils.verify_tree_greedy_func
    sampled: list[Callable[[], Tensor]] = []  # of the batch that is being verified, once its logits have been masked

    def eagle_sample(verified: Any, batch: Any, output: Any, *given: Any, **options: Any) -> Any:
        if not batch.forward_mode.is_idle() and not batch.sampling_info.is_all_greedy:
            sampled.append(lambda: sampled_targets(output.next_token_logits, batch.sampling_info, verified))
        try:
            return plain(verified, batch, output, *given, **options)
        finally:
            sampled.clear()

    def verify_tree(*, target_predict: Tensor, **options: Any) -> Any:
        return verify(target_predict=sampled[0]().view_as(target_predict) if sampled else target_predict, **options)

    eagle_utils.verify_tree_greedy_func = verify_tree
    for module in [module for name, module in sys.modules.items() if name.startswith("sglang.srt.speculative")]:
        if getattr(module, "eagle_sample", None) is plain:
            module.eagle_sample = eagle_sample  # type: ignore[attr-defined]


def sampled_targets(logits: Tensor, info: Any, verified: Any) -> Tensor:
    """Returns a token for each row of ``logits``, [batch * drafts, vocabulary], sampled as SGLang does it without speculation."""
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

    def each(values: Any) -> Any:
        return None if values is None else values.repeat_interleave(verified.draft_token_num, dim=0)

    probs = (logits.float() / each(info.temperatures)).softmax(-1)
    if not (info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling):
        return torch.multinomial(probs, 1)
    shares = (each(info.top_ks), each(info.top_ps), each(info.min_ps), info.need_min_p_sampling)
    return top_k_top_p_min_p_sampling_from_probs_torch(probs, *shares, None, verified.positions)


def _verify_natively() -> None:
    from sglang.srt.layers.attention import torch_native_backend as native
    from sglang.srt.speculative import draft_utils

    Backend = native.TorchNativeAttnBackend
    extend = Backend.forward_extend

    def forward_extend(
        self: Any, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save_kv_cache: bool = True, **options: Any
    ) -> Tensor:
        if not batch.forward_mode.is_target_verify():
            return extend(self, q, k, v, layer, batch, save_kv_cache, **options)
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None:
            pool.set_kv_buffer(layer, native.KVWriteLoc(batch.out_cache_loc, self.swa_out_cache_loc), k, v)
        size, heads = batch.spec_info.draft_token_num, layer.tp_q_head_num
        masks = batch.spec_info.custom_mask.reshape(-1, size, size).bool()
        queries = q.view(-1, size, heads, layer.qk_head_dim).transpose(1, 2)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        found = []
        for row, (one, length) in enumerate(zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True)):
            places = self.req_to_token_pool.req_to_token[one, : length + size]
            seen = torch.cat([torch.ones(size, length, dtype=torch.bool), masks[row]], dim=1)
            key, value = (cache[places].transpose(0, 1)[None].to(q.dtype) for cache in (keys, values))
            attended = scaled_dot_product_attention(
                queries[row][None], key, value, attn_mask=seen, scale=layer.scaling, enable_gqa=heads != layer.tp_k_head_num
            )
            found.append(attended[0].transpose(0, 1))
        return torch.cat(found).reshape(-1, heads * layer.v_head_dim)

    class DraftStep(Backend):  # type: ignore[misc, valid-type]
        """Decodes the token that lies ``ahead`` beyond the sequence's end, which the batch still has where it was."""

        def __init__(self, runner: Any, ahead: int) -> None:
            super().__init__(runner)
            self._ahead = ahead

        def forward_decode(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, *given: Any, **options: Any) -> Any:
            lengths = batch.seq_lens
            batch.seq_lens = lengths + self._ahead
            try:
                return super().forward_decode(q, k, v, layer, batch, *given, **options)
            finally:
                batch.seq_lens = lengths

    class DraftSteps:
        """The steps of drafting, each with its own backend."""

        def __init__(self, runner: Any, steps: int) -> None:
            self.attn_backends, self.device = [DraftStep(runner, index + 1) for index in range(steps - 1)], "cpu"

        def init_forward_metadata(self, batch: Any) -> None:
            for backend in self.attn_backends:
                backend.init_forward_metadata(batch)

    Factory, name = draft_utils.DraftBackendFactory, "torch_native"
    Backend.forward_extend, create = forward_extend, Factory._create_backend
    Factory._create_triton_decode_backend = lambda self: (name, DraftSteps(self.draft_model_runner, self.speculative_num_steps))
    Factory._create_triton_prefill_backend = lambda self: (name, Backend(self.draft_model_runner))
    Factory._create_backend = lambda self, stage, known, *given, **options: create(
        self, stage, {**known, name: known["triton"]}, *given, **options
    )
