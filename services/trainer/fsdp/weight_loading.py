"""The start of a torch model: transformers' modules without weights, and each rank's rows read from the checkpoint.

transformers stacks experts and joins matrices that a checkpoint has apart. Its conversion back, applied to a parameter that holds nothing,
gives views of it under the checkpoint's names: where each tensor's elements lie. So a rank reads the rows that it keeps and no others.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import structlog
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from services.trainer.fsdp import packed_attention
from services.trainer.fsdp.shards import box_of, local, shard_of, whole_shape
from services.trainer.parallel.runtime import device
from services.trainer.parallel.safetensors_reader import SafetensorsReader, reader_of
from shared.data.media import HEARING
from shared.runtime.errors import ConfigError

FIELD = "model.hf_checkpoint"


def attention(sees: bool) -> Any:
    """Returns the attention of a model's parts; patches of pictures, or frames of sounds, attend to one another as transformers has it."""
    return {"text_config": packed_attention.NAME, "vision_config": "sdpa", "audio_config": "sdpa"} if sees else packed_attention.NAME


def skeleton(hf_dir: Path, random: bool = False, sees: bool = False) -> Any:
    """Returns transformers' model of a checkpoint's config: in float32 with random weights, or with parameters that hold nothing.

    Args:
        sees: with the part of it that sees pictures, or hears sounds.

    Raises ConfigError: transformers has no causal language model of the kind.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(hf_dir, local_files_only=True)
        for part in [config, *(one for one in vars(config).values() if isinstance(one, transformers.PretrainedConfig))]:
            # layers that compute again in the backward pass are in training, of which the code of some (OPT's) asks by itself
            vars(part).update({name: 0.0 for name, value in vars(part).items() if "drop" in name and type(value) in (int, float)})
        with device() if random else _parameters_hold_nothing():  # numbers by the billion are made where they are needed
            maker: Any = transformers.AutoModelForMultimodalLM if sees else transformers.AutoModelForCausalLM
            model = maker.from_config(config, dtype=torch.float32, attn_implementation=attention(sees))
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(FIELD, str(hf_dir), f"a causal language model that transformers has ({error})") from error
    if config.model_type in HEARING:  # of these transformers' own way back names the language model's tensors twice over
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        model._weight_conversions = [one for one in conversions if not one.scope_prefix]
    return model


@contextlib.contextmanager
def _parameters_hold_nothing() -> Iterator[None]:
    """Has every module made in the body register its parameters on the meta device; buffers are computed."""
    module_class: Any = torch.nn.Module
    register = module_class.register_parameter

    def on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # a tied one is there already
            parameter = torch.nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    module_class.register_parameter = on_meta
    try:
        yield
    finally:
        module_class.register_parameter = register


def materialize(module: torch.nn.Module) -> None:
    """Gives a module's parameters that hold nothing memory on this rank's device; what it holds has no meaning yet."""
    made: dict[int, torch.nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    empty = torch.empty_like(parameter, device=device())
                    made[id(parameter)] = torch.nn.Parameter(empty, parameter.requires_grad)
                part._parameters[name] = made[id(parameter)]


@torch.no_grad()
def fill(model: Any, held: dict[str, Tensor], directory: Path, own: bool) -> None:
    """Fills this rank's rows of parameters and buffers from a checkpoint.

    Args:
        model: transformers', sharded. held: its parameters and buffers by transformers' names. own: whether pushes and exports have the
            checkpoint's names.

    Raises ConfigError: the checkpoint is not one of this model, or quantized in a way that is not known here.
    """
    sources = _all_sources(model, held, reader := reader_of(directory))
    if sources is None:  # named or laid out otherwise: transformers knows how to read it, as a whole
        given = (whole := _whole(reader, model)).state_dict()
        if own:
            model._weight_conversions = getattr(whole, "_weight_conversions", None)
        for name, one in held.items():
            local(one).copy_(shard_of(one, given[name]))
        return
    for name, one in held.items():
        box, target = box_of(one), local(one)
        for tensor, view in sources[name].items():
            _copy_part(reader, tensor, view, whole_shape(one), target, box)
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    used = {tensor for tensors in sources.values() for tensor in tensors}
    unread = sorted(name for name in reader.names() - used if not any(pattern.search(name) for pattern in ignored))
    if unread and dist.get_rank() == 0:
        structlog.get_logger().warning("tensors_not_loaded", count=len(unread), first=unread[:5], checkpoint=str(directory))


def _all_sources(model: Any, held: dict[str, Tensor], reader: SafetensorsReader) -> dict[str, dict[str, Tensor]] | None:
    """Returns for each parameter the checkpoint's tensors that it is made of, as views of it that hold nothing; None where one is no view,
    or the checkpoint has no such tensors."""
    found, known = {}, reader.names()
    for name, one in held.items():
        whole = torch.empty(whole_shape(one), device="meta")
        found[name] = made = revert_weight_conversion(model, {name: whole})
        for tensor, view in made.items():
            is_view = view.untyped_storage()._cdata == whole.untyped_storage()._cdata
            cut = any(part.stop - part.start < size for part, size in zip(box_of(one)[1:], whole.shape[1:], strict=False))
            is_view = is_view and (not cut or view.shape == whole.shape)
            if not is_view or tensor not in known or tuple(reader.shape(tensor)) != tuple(view.shape):
                return None
    return found


def _copy_part(reader: SafetensorsReader, name: str, view: Tensor, shape: torch.Size, target: Tensor, box: tuple[slice, ...]) -> None:
    """Reads those elements of a tensor that lie in a box of a parameter of this ``shape``, which ``target`` is. Of a tensor that is only a
    part of the parameter, or in another order, the box has whole rows."""
    rows = (box[0].start, box[0].stop) if box else (0, 1)
    if view.shape == shape and target.shape[1:] != shape[1:]:
        target.copy_(reader.read_range(name, 0, *rows)[(slice(None), *box[1:])])
        return
    inner = shape[1:].numel()
    first, within = divmod(int(view.storage_offset()), inner)
    along = next((index for index in range(view.dim()) if view.size(index) > 1 and view.stride(index) == inner), None)
    start, stop = max(first, rows[0]), min(first + (1 if along is None else view.size(along)), rows[1])
    if start >= stop:
        return
    part = reader.read(name) if along is None else reader.read_range(name, along, start - first, stop - first)
    at = target.storage_offset() + (start - rows[0]) * inner + within
    target.as_strided(part.shape, view.stride(), at).copy_(part)


def _whole(reader: SafetensorsReader, model: Any) -> Any:
    """Returns transformers' model with its weights in host memory. Raises ConfigError: it does not read the checkpoint, or should not."""
    directory = reader.hf_dir
    if type(reader) is not SafetensorsReader:
        raise ConfigError(FIELD, str(directory), "plain numbers, or tensors with the names that transformers gives them")
    options: dict[str, Any] = {"dtype": torch.float32, "local_files_only": True, "output_loading_info": True}
    try:
        found, notes = cast(Any, type(model).from_pretrained)(directory, **options)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(FIELD, str(directory), f"a causal language model that transformers reads ({error})") from error
    if lacking := sorted(map(str, [*notes.get("missing_keys", ()), *notes.get("mismatched_keys", ())])):
        raise ConfigError(FIELD, str(directory), f"a checkpoint with all of its model's tensors, as config.json has them: {lacking[:5]}")
    vocab_size = model.config.get_text_config().vocab_size
    if found.config.get_text_config().vocab_size != vocab_size:
        raise ConfigError(FIELD, str(directory), f"a checkpoint of the same model, with a vocabulary of {vocab_size}")
    return found
