"""Reads the headers of a Hugging Face checkpoint's safetensors files, and checks that they hold the model."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from shared.model.architecture import Architecture
from shared.model.tensor_table import draft_prefix
from shared.runtime.errors import ConfigError
from shared.runtime.safe_files import is_plain_name, parse_json
from shared.transfer.tensor_file import TensorFileBroken, TensorFiles

TEMPLATE_FOLDER = "additional_chat_templates"
_SIDE_JSON = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
SIDE_FILES = (*_SIDE_JSON, "chat_template.jinja")  # The files, and the folder of more templates, that decide how a checkpoint reads text

INDEX = "model.safetensors.index.json"

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
DRAFT_COPIES = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": OUTPUT}  # A draft layer's names of them → the model's
VISION = "model.visual."  # Prefix of the tensors of a tower that sees, which is not trained and exported as it is

OTHER_FORMATS = ("*.bin", "*.pth", "*.pt", "*.gguf")  # Patterns of weight files that are not read
PIECE_BYTES = 1 << 24  # Bytes of two tensors that are compared at a time

Shape = tuple[int, ...]

_PART = re.compile(r"(.*?)\d+-of-(\d+)\.safetensors")


def weight_files(directory: Path, field: str = "model.hf_checkpoint") -> tuple[list[Path], Mapping[str, str]]:
    """Returns the files that the index names, or else all ``*.safetensors`` of the directory; and the index: tensor → name of the file
    that should hold it, empty if there is none.

    Raises ConfigError for ``field``: there are none, the index cannot be read, or without one files are missing by the others' names.
    """
    path = directory / INDEX
    if path.is_file():
        try:
            index = parse_json(path.read_bytes())["weight_map"]
            if astray := [name for name in index.values() if not is_plain_name(name)]:
                raise ValueError(f"it names {astray[0]!r}, which is no file of this directory")
            return [directory / name for name in sorted(set(index.values()))], index
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(field, str(path), f"an index of weights: JSON with a weight_map ({type(error).__name__}: {error})") from None
    if paths := sorted(directory.glob("*.safetensors")):
        for name, of in Counter(match.groups() for path in paths if (match := _PART.fullmatch(path.name))).items():
            if of != int(name[1]):
                raise ConfigError(field, str(directory), f"all files {name[0]}…-of-{name[1]}.safetensors; {of} are there, and no {INDEX}")
        return paths, {}
    others = sorted(other.name for pattern in OTHER_FORMATS for other in directory.glob(pattern))
    found = f"; {others[0]} is of another format: save the model again with safetensors" if others else ""
    raise ConfigError(field, str(directory), f"a directory with *.safetensors files; it has none{found}")


def read_headers(directory: Path, field: str = "model.hf_checkpoint") -> tuple[dict[str, tuple[str, Shape]], list[ConfigError]]:
    """Returns every tensor's dtype and shape from the files' headers, and the errors of the files. Raises as `weight_files`."""
    paths, index = weight_files(directory, field)
    held, where, problems = dict[str, tuple[str, Shape]](), dict[str, str](), list[ConfigError]()
    for path in paths:
        try:
            file = TensorFiles([path], links=True)
            if twice := sorted(held.keys() & file.tensors):
                wanted = f"each tensor in one file; {where[twice[0]]} has {some(twice)}, too. Remove the files that are not the model's"
                problems.append(ConfigError(field, str(path), wanted))
            held.update(file.tensors)
            where.update(dict.fromkeys(file.tensors, path.name))
        except TensorFileBroken as error:
            problems.append(ConfigError(field, str(path), _reason(path, error)))
    if not problems and (astray := [name for name, file_name in index.items() if where.get(name) != file_name]):
        wanted = f"files that hold what {INDEX} says; {index[astray[0]]} lacks {some(astray)}"
        problems.append(ConfigError(field, str(directory), wanted))
    return held, problems


def _reason(path: Path, error: TensorFileBroken) -> str:
    """Returns why a file holds no weights, for the user who fetched it."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            begin = file.read(40)
    except OSError:
        return f"no such file, but {INDEX} names it; download it, too" if not path.exists() else str(error)
    if size == 0:
        return "an empty file; download it again"
    if begin.startswith(b"version https://git-lfs"):
        return "a git-LFS pointer, not the weights; run `git lfs pull` in its directory"
    return f"not a whole safetensors file ({str(error.__cause__)[:200]}); was its download cut short? download it again"


def tensor_problems(
    directory: Path, held: Mapping[str, Sequence[int]], expected: Mapping[str, Shape], unread: tuple[str, ...], field: str
) -> Iterator[ConfigError]:
    """Yields why files do not hold exactly the ``expected`` names and shapes.

    Buffers that old exports carry along (``rotary_emb.inv_freq``) are passed over, and so is the output layer of a model that ties it to
    the embedding where it is the same: SGLang then reads the embedding alone, transformers both where they differ.

    Args:
        held: name → shape, of all tensors in the files. unread: prefixes of tensors that may be there and are not part of the model.
    """
    names = {name for name in held if not name.endswith("rotary_emb.inv_freq") and not name.startswith(unread)}
    if missing := [name for name in expected if name not in names]:
        tie = ", or tie_word_embeddings = true in config.json where the embedding is the output layer" if missing == [OUTPUT] else ""
        yield ConfigError(field, str(directory), f"all tensors of the model; missing: {some(missing)}{tie}")
    if unknown := sorted(names - set(expected) - {OUTPUT}):
        wanted = f"only the tensors that its config.json describes; besides them: {some(unknown)}"
        yield ConfigError(field, str(directory), wanted)
    if missing or unknown:
        return
    for name, shape in expected.items():
        if tuple(held[name]) != shape:
            yield ConfigError(f"{directory}:{name}", tuple(held[name]), f"shape {shape}, by the sizes in config.json")
            return
    if OUTPUT in names - set(expected):
        yield from _tied_problems(directory, field, next(iter(expected)))


def _tied_problems(directory: Path, field: str, embedding: str) -> Iterator[ConfigError]:
    """Yields that the output layer in a directory's files is not the embedding, to the bit."""
    held = {}
    for file in (TensorFiles([path], links=True) for path in weight_files(directory, field)[0]):
        held.update({name: (file.tensors[name], file[name]) for name in (embedding, OUTPUT) if name in file.tensors})
    (kind, one), (other_kind, other) = held[embedding], held[OUTPUT]
    pieces = (slice(first, first + PIECE_BYTES) for first in range(0, len(one), PIECE_BYTES))
    if kind != other_kind or not all(np.array_equal(one[piece], other[piece]) for piece in pieces):
        wanted = f"{embedding}, to which config.json ties it; set tie_word_embeddings to false there, or remove it from the file"
        yield ConfigError(f"{directory}:{OUTPUT}", "another matrix", wanted)


def some(names: Sequence[str]) -> str:
    """Returns the first five names, and how many more there are."""
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def draft_prefixes(architecture: Architecture) -> tuple[str, ...]:
    """Returns the prefixes of the names of draft layers' tensors (multi-token prediction) that are not in the trainer's model: of all, or
    where the layers are trained of the copies that they have of the embedding and the output layer."""
    if architecture.linear is not None:
        return (VISION,) if architecture.trained_drafts else ("mtp.", VISION)
    layers = [f"{draft_prefix(architecture, draft)}." for draft in range(architecture.draft_layers)]
    return tuple(layer + copy for layer in layers for copy in (DRAFT_COPIES if architecture.trained_drafts else ("",)))
