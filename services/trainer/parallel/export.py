"""A checkpoint directory of the model in Hugging Face's format, to which the ranks write files side by side.

Each rank gathers and writes its share of the parameters, those that it holds a part of. No rank has more than its share in host memory, and
at most two files of it where training waits. The directory appears when all files are on the disk (:mod:`.joint_write`).

`quantize` makes one with 8-bit or 4-bit weights of a plain one, file by file: ``myxo convert --to``.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from services.trainer.parallel import DEVICE_TYPE
from services.trainer.parallel.gather_plan import Bucket, GatherPlan, GatherUnit
from services.trainer.parallel.joint_write import HeldPart, JointWrite, Places, elect, find_places
from services.trainer.parallel.runtime import host_copy, timeout_seconds, together
from services.trainer.parallel.safetensors_reader import reader_of
from shared.model.architecture import Architecture
from shared.model.final_exports import MARK
from shared.model.hf_checkpoint import DRAFT_COPIES, EMBEDDING, INDEX, OUTPUT, TEMPLATE_FOLDER, VISION, draft_prefixes, weight_files
from shared.model.quantization import ENTRY, QuantizedFormat, is_quantized, parts_of
from shared.model.trainable_parameters import Lora
from shared.runtime.errors import ConfigError
from shared.runtime.safe_files import fsync_tree, publish, scratch
from shared.transfer.quantizer import quantized

_NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx", ".gguf"}
VISION_FILE = "model-vision.safetensors"
ADAPTER_DIRECTORY = "adapter"  # the directory beside a merged model that holds its adapters in PEFT's format
ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
FILE_BYTES = 1024**3  # the bytes of a file, and of a bucket: a rank gathers the next one while it writes the one before


@dataclass(frozen=True)
class HfFile:
    """One file of a checkpoint, and the rank that writes it."""

    name: str
    writer: int
    units: Sequence[GatherUnit]


def start_export(
    plan: GatherPlan, source: Path, target: Path, file_bytes: int = FILE_BYTES, copied: bool = True, mark: dict[str, Any] | None = None
) -> JointWrite:
    """Begins to write a Hugging Face checkpoint directory. A collective of all ranks, each of which writes files.

    ``target`` appears complete or not at all, and replaces an older one. For a model with adapters it holds the merged weights and, in
    a directory ``adapter``, the adapters alone. What cannot be written is raised by `JointWrite.finish`.

    Args:
        source: the checkpoint the model was loaded from; its config, tokenizer and whatever else is not weights are copied, as are draft
            layers that are not trained. Their copies of the embedding and the output layer are the policy's.
        file_bytes: the most bytes of a file, unless a single parameter is larger. copied: whether each rank copies its share to host
            memory, to be written while training continues. Else it is written now.
        mark: what the directory says of itself (`shared.model.final_exports`); None: nothing.
    """
    places = find_places(target.parent)
    rank, parts = dist.get_rank(), HfParts(plan, source, target, mark)
    with together(f"the preparation of {target}"):
        if rank == 0:
            scratch(target)
    with ThreadPoolExecutor(1, thread_name_prefix="hf-file") as thread:
        for file in files_of(plan, file_bytes, places):
            bucket = plan.bucket(file.units, destination=file.writer)
            if file.writer == rank:
                parts.add(file.name, _on_host(bucket, copied), None if copied else thread)
    if plan.model.lora is not None:
        bucket = plan.bucket(plan.adapter_units)
        if rank == 0:
            parts.adapters = _on_host(bucket, copied=True)
    if DEVICE_TYPE != "cpu":
        torch.cuda.current_stream().synchronize()  # the copies are asynchronous
    one = Places((0,) * len(places.leaders), places.hosts)  # rank 0's directory is the only one
    return JointWrite(f"the export {target}", parts, one, "training continues without it", timeout_seconds())


def files_of(plan: GatherPlan, file_bytes: int, places: Places) -> list[HfFile]:
    """Returns a checkpoint's files, the same on all ranks, in the order in which they are gathered.

    Only ranks that see rank 0's directory write. Each of them gets what it holds a part of, about as much as the others.
    """
    dtype, writers = plan.model.dtype, places.directories[0]
    held: list[dict[str, HeldPart]] = [{} for _ in places.leaders]
    for unit in plan.units:
        holders = {rank for one in unit.parameters for rank in plan.holders[one.name]}
        for rank in sorted(holders & set(writers)) or writers:
            held[rank][unit.name] = HeldPart(unit.nbytes(dtype))
    elected = elect(held, [writers])
    divided = [(rank, units) for rank in writers for units in plan.divided(file_bytes, elected[rank].main)]
    if len(divided) == 1 and plan.model.architecture.prefix == "model":  # else there is a file of what sees, and so an index
        return [HfFile("model.safetensors", *divided[0])]
    rounds: dict[int, int] = {}
    order = []
    for number, (rank, units) in enumerate(divided, start=1):
        rounds[rank] = rounds.get(rank, 0) + 1
        order.append((rounds[rank], HfFile(f"model-{number:05d}-of-{len(divided):05d}.safetensors", rank, units)))
    return [file for _, file in sorted(order, key=lambda item: (item[0], item[1].writer))]  # each rank's first, then each one's second


class HfParts:
    """One rank's files of a checkpoint directory that is written beside its ``target``."""

    def __init__(self, plan: GatherPlan, source: Path, target: Path, mark: dict[str, Any] | None = None) -> None:
        self._plan, self._source, self.target, self._mark = plan, source, target, mark
        self.partial = target.with_name(f".{target.name}.partial")
        self.adapters: Bucket | None = None
        self._files: list[tuple[str, Bucket]] = []
        self._names: dict[str, str] = {}
        self._writing: Future[None] | None = None
        self._error: Exception | None = None
        self._drafts = Drafts(source, plan.model.architecture)

    def add(self, name: str, bucket: Bucket, thread: ThreadPoolExecutor | None) -> None:
        """Takes a file's tensors, to be written by `write`, or on the thread at once. An error of the disk is raised by `write`: the other
        ranks gather on."""
        self._names |= dict.fromkeys(self._drafts.with_copies(dict.fromkeys(tensor for tensor, _ in bucket)), name)
        if thread is None:
            self._files.append((name, bucket))
            return
        self._await()
        if self._error is None:
            self._writing = thread.submit(self._write, name, bucket)

    def _write(self, name: str, bucket: Bucket) -> None:
        _write(self.partial / name, list(self._drafts.with_copies(dict(bucket)).items()))

    def _await(self) -> None:
        writing, self._writing = self._writing, None
        try:
            if writing is not None:
                writing.result()
        except Exception as error:
            self._error = error

    def write(self) -> dict[str, str]:
        self._await()
        if self._error is not None:
            raise self._error
        while self._files:
            self._write(*self._files.pop(0))
        if self.adapters is not None:
            assert self._plan.model.lora is not None  # or there were no adapters
            directory = self.partial / ADAPTER_DIRECTORY
            directory.mkdir()
            _write_adapters(directory, self.adapters, self._plan.model.lora, self._source)
        return self._names

    def beside(self, everyone: list[dict[str, str]]) -> list[bytes]:
        return [json.dumps({name: file for names in everyone for name, file in names.items()}).encode()]

    def publish(self, content: bytes) -> None:
        """Writes what stands beside the weights, and puts the directory into its place."""
        found, draft, dtype = json.loads(content), self.partial, self._plan.model.dtype
        weight_map = {name: found[name] for unit in self._plan.units for name, _ in unit.tensors}
        if not any(name.startswith(VISION) for name in weight_map):  # else the backend trains what sees
            weight_map |= dict.fromkeys(copy_vision(self._source, draft), VISION_FILE)
        copied, nbytes = self._drafts.write_rest(draft)
        weight_map |= {name: found[name] for name in self._drafts.names if name in found} | copied
        if len(set(weight_map.values())) > 1:
            embedding = self._plan.model.architecture.vocab_size * self._plan.model.architecture.hidden_size * dtype.itemsize
            size = nbytes + len(self._drafts.copies) * embedding + sum(unit.nbytes(dtype) for unit in self._plan.units)
            write_json(draft / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
        copy_beside_weights(self._source, draft)
        write_config(draft, str(dtype).removeprefix("torch."), bool(self._drafts.names) or self._plan.model.architecture.trained_drafts > 0)
        if self._mark is not None:
            write_json(draft / MARK, self._mark)
        fsync_tree(draft)
        publish(draft, self.target)

    def tidy(self) -> None:
        """Does nothing: the new directory replaces the older one by its name."""


def _write_adapters(directory: Path, bucket: Bucket, lora: Lora, source: Path) -> None:
    _write(directory / ADAPTER_WEIGHTS, bucket)
    write_json(directory / ADAPTER_CONFIG, peft_config([name for name, _ in bucket], lora, source))


def save_adapters(plan: GatherPlan, source: Path, target: Path) -> None:
    """Writes a model's adapters alone, in PEFT's format. A collective of all ranks; ``target`` appears complete or not at all.

    ``source``: the checkpoint that they belong to.
    """
    bucket = plan.bucket(plan.adapter_units)
    assert plan.model.lora is not None
    with together(f"writing {target}"):
        if dist.get_rank() == 0:
            draft = scratch(target)
            _write_adapters(draft, _on_host(bucket, copied=True), plan.model.lora, source)
            fsync_tree(draft)
            publish(draft, target)


class Drafts:
    """The tensors of a checkpoint's draft layers (multi-token prediction) that are not in the trainer's model.

    Attributes:
        names: of these tensors, as the checkpoint has them. copies: those of them that are the model's embedding or output layer, and the
            name of that.
    """

    def __init__(self, source: Path, architecture: Architecture) -> None:
        prefixes = tuple(prefix for prefix in draft_prefixes(architecture) if prefix != VISION)
        self.names: list[str] = []
        if prefixes and any(source.glob("*.safetensors")):  # a converted checkpoint has none
            self._reader = reader_of(source)
            self.names = sorted(name for name in self._reader.names() if name.startswith(prefixes))
        tied = {OUTPUT: EMBEDDING} if architecture.tied_embeddings else {}
        pairs = {name: copy for name in self.names for end, copy in DRAFT_COPIES.items() if name.endswith(f".{end}")}
        self.copies = {name: tied.get(copy, copy) for name, copy in pairs.items() if not name.startswith("mtp.")}

    def with_copies(self, held: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Returns tensors by their names with the copies of them; a None has a None."""
        copies = {name: held[of] for name, of in self.copies.items() if of in held}
        return held | {name: None if tensor is None else tensor.clone() for name, tensor in copies.items()}

    def write_rest(self, directory: Path) -> tuple[dict[str, str], int]:
        """Writes all but the copies as they are, and returns the file of each, and their bytes."""
        files, total, pending, size = dict[str, str](), 0, dict[str, Tensor](), 0
        rest = [name for name in self.names if name not in self.copies]
        for name in rest:
            pending[name] = self._reader.read(name)
            size += pending[name].nbytes
            if size >= FILE_BYTES or name == rest[-1]:
                file = f"model-draft-{len(set(files.values())) + 1:05d}.safetensors"
                _write(directory / file, list(pending.items()))
                files |= dict.fromkeys(pending, file)
                total, pending, size = total + size, {}, 0
        return files, total


def _on_host(bucket: Bucket, copied: bool) -> Bucket:
    return [(name, None if tensor is None else host_copy(tensor) if copied else tensor.cpu()) for name, tensor in bucket]


def _write(path: Path, bucket: Bucket) -> None:
    save_file({name: tensor.contiguous() for name, tensor in bucket if tensor is not None}, path, metadata={"format": "pt"})


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a file of indented JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def copy_beside_weights(source: Path, target: Path) -> None:
    """Copies the files of a Hugging Face checkpoint beside its weights: config, tokenizer, chat templates, license."""
    if (source / TEMPLATE_FOLDER).is_dir():
        shutil.copytree(source / TEMPLATE_FOLDER, target / TEMPLATE_FOLDER)
    for path in source.iterdir():
        copied = path.suffix not in _NOT_COPIED and not path.name.endswith(".index.json")
        if path.is_file() and copied and path.name not in (MARK, ADAPTER_CONFIG) and not path.name.startswith("."):
            shutil.copyfile(path, target / path.name)


def copy_vision(source: Path, target: Path) -> list[str]:
    """Copies the tensors that see, which are not trained, into a file of their own; returns their names, none for most models."""
    found = {}
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys() if name.startswith(VISION)})  # noqa: SIM118
    if found:
        save_file(found, target / VISION_FILE, metadata={"format": "pt"})
    return list(found)


def write_config(directory: Path, dtype: str, drafts: bool = False, entry: dict[str, Any] | None = None) -> None:
    """Makes a copied ``config.json`` fit the weights: their dtype may have changed.

    Args:
        drafts: whether there are draft layers. entry: what says how the weights are quantized; None: they are plain numbers.
    """
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config.pop(ENTRY, None)
    config |= {ENTRY: entry} if entry else {}
    for entries in (config, config.get("text_config") or {}):
        if entries is config or "dtype" in entries or "torch_dtype" in entries:
            entries["torch_dtype" if "torch_dtype" in entries else "dtype"] = dtype
        entries.update({name: 0 for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers") if entries.get(name) and not drafts})
    write_json(path, config)


def peft_config(names: Iterable[str], lora: Lora, base: Path) -> dict[str, Any]:
    """Returns the content of PEFT's config of adapters. ``names``: PEFT's. ``base``: the Hugging Face checkpoint that they belong to."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.split(".")[-3] for name in names}),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }


EXPERTS = re.compile(r"\.experts\.\d+\.")


def quantize(source: Path, target: Path, form: QuantizedFormat, progress: Callable[[int, int], None], experts: bool = False) -> Path:
    """Writes the checkpoint ``source`` with its layers' matrices quantized. Embeddings, the output layer, norms, routers and what sees stay
    as they are.

    Args:
        target: must not exist; it appears complete or not at all. progress: is called with the bytes read and those in all. experts:
            whether experts alone are quantized.

    Raises ConfigError: the source is quantized already, has no layers that can be, a matrix that groups do not divide, or experts in one
        tensor; the target exists.
    """
    config = json.loads((source / "config.json").read_text())
    if config.get(ENTRY) is not None:
        raise ConfigError(f"{source / 'config.json'}:{ENTRY}", config[ENTRY], "no such entry: a checkpoint of plain numbers")
    if target.exists():
        raise ConfigError("TARGET", str(target), "a path where nothing is yet")
    files, _ = weight_files(source)
    total, done, places, kept = sum(path.stat().st_size for path in files), 0, dict[str, str](), set[str]()
    draft, nbytes, chosen = scratch(target), 0, 0
    for path in files:
        made = dict[str, torch.Tensor]()
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                parts = _quantized(source, name, tensor, form) if EXPERTS.search(name) or not experts else {}
                made |= parts or {name: tensor}
                chosen += bool(parts)
                if not parts and tensor.dim() == 2 and name.endswith(".weight"):
                    kept.add(name.removesuffix(".weight"))
        save_file(made, draft / path.name, metadata={"format": "pt"})
        places |= dict.fromkeys(made, path.name)
        nbytes, done = nbytes + sum(tensor.nbytes for tensor in made.values()), done + path.stat().st_size
        progress(done, total)
    if not chosen:
        what = ("layers", "experts")[experts]
        raise ConfigError("SOURCE", str(source), f"a checkpoint with {what}' matrices (…_proj.weight); it has none")
    if len(files) > 1:
        write_json(draft / INDEX, {"metadata": {"total_size": nbytes}, "weight_map": places})
    copy_beside_weights(source, draft)
    write_json(draft / "config.json", config | {ENTRY: form.entry(kept)})
    fsync_tree(draft)
    publish(draft, target)
    return target


def _quantized(source: Path, name: str, tensor: torch.Tensor, form: QuantizedFormat) -> dict[str, torch.Tensor]:
    if not is_quantized(source, name, tensor.shape):
        return {}
    shape = {f"{name}_shape": torch.tensor(tensor.shape)} if form.endings[0] == "weight_packed" else {}
    return dict(zip(parts_of(name, form), quantized(_checked(source, name, tensor, form), form), strict=True)) | shape


def _checked(source: Path, name: str, tensor: torch.Tensor, form: QuantizedFormat) -> torch.Tensor:
    if not tensor.is_floating_point() or tensor.element_size() == 1 or not bool(tensor.isfinite().all()):
        raise ConfigError(f"{source}:{name}", str(tensor.dtype), "finite numbers of 16 or 32 bits")
    if wanted := form.obstacle(tensor.shape):
        raise ConfigError(f"{source}:{name}", list(tensor.shape), wanted)
    return tensor
