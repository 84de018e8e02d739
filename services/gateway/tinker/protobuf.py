"""The protocol buffers of the Tinker SDK: the fields that this server reads and writes; it skips others."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from numpy.typing import NDArray

# message → its fields: number, name, kind (* where it repeats). Maps are lists of entries, which is the same on the wire.
_MESSAGES = {
    "Unread": "",  # only whether it is there
    "Text": "1 tokens bytes",
    "Chunk": "1 encoded_text Text, 2 image Unread, 3 dmel Unread",
    "Tensor": "1 dense bytes, 2 sparse_csr Unread, 3 dtype int32, 4 shape int64*",
    "Input": "1 key string, 2 value Tensor",
    "Datum": "1 model_input Chunk*, 2 loss_fn_inputs Input*",
    "Number": "1 key string, 2 value double",
    "Setting": "1 number double, 2 text string",
    "NamedSetting": "1 key string, 2 value Setting",
    "ForwardBackwardRequest": "1 model_id string, 2 seq_id int32, 3 data Datum*, 4 loss_fn string, 5 loss_fn_config Number*, "
    "6 forward_only bool, 7 loss_fn_config_v2 NamedSetting*",
    "BatchedTensor": "1 data bytes, 2 offsets bytes, 3 dtype int32",
    "Output": "1 key string, 2 value BatchedTensor",
    "ArrayRecord": "2 fields Output*, 3 num_datums int64",
    "ForwardBackwardOutput": "1 loss_fn_output_type string, 2 loss_fn_outputs ArrayRecord*, 3 metrics Number*",
    "SampledSequence": "1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes",
    "SampleResponse": "1 sequences SampledSequence*, 2 prompt_logprobs bytes, 4 prompt_cache_hit_tokens int32",
}
DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}


def _classes() -> dict[str, Any]:
    file = FileDescriptorProto(name="tinker.proto", package="tinker", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, field, kind in (each.split() for each in fields.split(", ") if each):
            one, repeats = kind.rstrip("*"), kind.endswith("*")
            added = message.field.add(name=field, number=int(number), label=3 if repeats else 1)
            if one in _MESSAGES:
                added.type, added.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".tinker.{one}"
            else:
                added.type = FieldDescriptorProto.Type.Value(f"TYPE_{one.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    found = message_factory.GetMessageClassesForFiles([file.name], pool)
    return {name.removeprefix("tinker."): kind for name, kind in found.items()}


MESSAGES = _classes()


def forward_backward_output(log_probs: Sequence[NDArray[np.float32]], metrics: Mapping[str, float]) -> bytes:
    """Returns an encoded ``ForwardBackwardOutput`` with the log-probs of each datum's targets."""
    offsets = np.cumsum([0, *(values.nbytes for values in log_probs)]).astype("<i8").tobytes()
    tensor = {"data": b"".join(values.astype("<f4").tobytes() for values in log_probs), "offsets": offsets, "dtype": 1}
    record = {"fields": [{"key": "logprobs", "value": tensor}], "num_datums": len(log_probs)}
    named = [{"key": name, "value": value} for name, value in metrics.items()]
    answer = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics=named)
    return bytes(answer.SerializeToString())


def sample_response(found: Mapping[str, Any]) -> bytes:
    """Returns an encoded ``SampleResponse``.

    ``found``: ``sequences``, each with its ``tokens``, their ``log_probs`` and whether it ``stopped`` by itself; ``prompt``, the log-probs
    of the prompt, NaN where there is none, or None; ``cached``, tokens of the prompt whose keys and values were there already.
    """
    prompt = None if found["prompt"] is None else found["prompt"].astype("<f4").tobytes()
    answer = MESSAGES["SampleResponse"](prompt_logprobs=prompt, prompt_cache_hit_tokens=found["cached"])
    for one in found["sequences"]:
        tokens, log_probs = one["tokens"].astype("<i4").tobytes(), one["log_probs"].astype("<f4").tobytes()
        answer.sequences.add(stop_reason=int(not one["stopped"]), tokens=tokens, logprobs=log_probs)
    return bytes(answer.SerializeToString())
