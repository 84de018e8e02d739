"""The tensors of a Hugging Face checkpoint."""

from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared.model.architecture import Architecture
from shared.model.hf_checkpoint import VISION, draft_prefixes, tensor_problems, weight_files
from shared.model.tensor_table import hf_tensors
from shared.runtime.errors import ConfigError


class SafetensorsReader:
    """The tensors of a Hugging Face checkpoint directory, read one at a time.

    Args:
        hf_dir: holds ``*.safetensors``, which stay open while the reader lives.

    Raises:
        ConfigError: there are none, or one cannot be read.
    """

    def __init__(self, hf_dir: Path) -> None:
        self.hf_dir = hf_dir
        self.files: dict[str, safe_open] = {}
        for path in weight_files(hf_dir)[0]:
            try:
                opened = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ConfigError("model.hf_checkpoint", str(path), f"a readable safetensors file ({error})") from error
            self.files.update(dict.fromkeys(opened.keys(), opened))

    def check(self, architecture: Architecture) -> int:
        """Compares names and shapes with the model's; layers of :func:`draft_prefixes` may be there.

        Returns the number of tensors in the latter. Raises the first ConfigError of `shared.model.hf_checkpoint.tensor_problems`.
        """
        unread = draft_prefixes(architecture)
        shapes = {name: self.shape(name) for name in self.names()}
        for problem in tensor_problems(self.hf_dir, shapes, hf_tensors(architecture), unread, "model.hf_checkpoint"):
            raise problem
        return sum(name.startswith(unread) and not name.startswith(VISION) for name in self.names())

    def names(self) -> set[str]:
        """Returns the tensors that are part of a model."""
        return set(self.files)

    def shape(self, name: str) -> Sequence[int]:
        shape: Sequence[int] = self.files[name].get_slice(name).get_shape()
        return shape

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """Returns a tensor, or an expert's part of one of all experts."""
        if expert is None:
            return self.files[name].get_tensor(name)
        part: Tensor = self.files[name].get_slice(name)[expert]
        return part
