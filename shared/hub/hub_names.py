"""Names of models and data sets on the hub, as a config gives them. Pure: nothing here reaches for a network.

A model is ``hf:ORG/NAME[@REVISION]``, the split of a data set ``hf:ORG/NAME[/CONFIG][@REVISION]:SPLIT``. A revision is a branch, a tag or a
commit; a pinned name carries the commit too, ``@REVISION=COMMIT``, where the revision is none. Configs hold names as paths that begin with
``hf:``, so that a field may hold either.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

PREFIX = "hf:"

DEFAULT_REVISION = "main"

_PART = r"[A-Za-z0-9][\w.-]*"
_REVISION = r"(?:@(?P<revision>[^@:\s]+?)(?:=(?P<commit>[0-9a-f]{40}))?)?"
_MODEL = re.compile(rf"(?P<repo>{_PART}(?:/{_PART})?){_REVISION}")
_DATASET = re.compile(rf"(?P<repo>{_PART}(?:/{_PART})?)(?:/(?P<config>[^@:/\s]+))?{_REVISION}(?::(?P<split>\w[\w.-]*))?")
_BARE_MODEL = re.compile(rf"{_PART}/{_PART}(?:@[^@:\s]+)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")

MODEL_FORM = "hf:ORG/NAME or hf:ORG/NAME@REVISION"
DATASET_FORM = "hf:ORG/NAME:SPLIT, hf:ORG/NAME/CONFIG:SPLIT or hf:ORG/NAME@REVISION:SPLIT"


@dataclass(frozen=True)
class HubName:
    """The name of a model or of a data set's split. ``revision``: as it was asked for. ``commit``: 40 hexadecimal digits, None before the
    name is pinned. ``config``, ``split``: only for data sets; None is the data set's default config."""

    kind: str  # "model" or "dataset", as the hub has it
    repo: str
    revision: str = DEFAULT_REVISION
    commit: str | None = None
    config: str | None = None
    split: str | None = None

    def pinned(self, commit: str) -> "HubName":
        """Returns the same name at a commit."""
        return replace(self, commit=commit)

    @property
    def unpinned(self) -> "HubName":
        """Returns the name without its commit, as it was asked for."""
        return self if self.revision == self.commit else replace(self, commit=None)

    def __str__(self) -> str:
        """Returns text that `model` or `dataset` reads back."""
        text = PREFIX + self.repo + ("" if self.config is None else f"/{self.config}")
        if self.commit is not None and self.commit != self.revision:
            text += f"@{self.revision}={self.commit}"
        elif self.revision != DEFAULT_REVISION:
            text += f"@{self.revision}"
        return text if self.split is None else f"{text}:{self.split}"


def is_name(path: Path | str) -> bool:
    """Returns whether a config's path is a name on the hub."""
    return str(path).startswith(PREFIX)


def model(text: str | Path) -> HubName:
    """Reads ``hf:…`` as a model. Raises ValueError with what would be right."""
    return _read("model", _MODEL, str(text), MODEL_FORM)


def dataset(text: str | Path) -> HubName:
    """Reads ``hf:…`` as a split of a data set; the split may be missing. Raises ValueError with what would be right."""
    return _read("dataset", _DATASET, str(text), DATASET_FORM)


def _read(kind: str, form: re.Pattern[str], text: str, expected: str) -> HubName:
    match = form.fullmatch(text.removeprefix(PREFIX))
    if match is None:
        raise ValueError(f"{text!r} is no name of a {kind} on the hub; give {expected}")
    found = {key: value for key, value in match.groupdict().items() if value is not None}
    name = HubName(kind, **found)
    return replace(name, commit=name.revision) if name.commit is None and _COMMIT.fullmatch(name.revision) else name


def checked_model(path: Path | None) -> Path | None:
    """Returns a config's path to a model. Raises ValueError where it is a name that cannot be read."""
    if path is not None and is_name(path):
        model(path)
    return path


def model_path(path: Path, base: Path) -> Path:
    """Returns what a config's path to a model means: a directory under ``base`` where there is one, else a name where it looks like one,
    else the directory that is missing."""
    if is_name(path) or path.is_absolute():
        return path
    if not (base / path).exists() and _BARE_MODEL.fullmatch(str(path)):
        return Path(PREFIX + str(path))
    return base / path
