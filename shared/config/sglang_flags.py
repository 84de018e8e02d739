"""SGLang's own flags as a config's ``[rollout.sglang]`` holds them, and the check that the installed SGLang's parser takes them.

Importing that parser takes seconds, so its flags are read from a catalogue: ``sglang_flags.json`` is that of the very source of the
parser that Myxo is made with. Any other, of another version or one that somebody has changed, is asked itself at the first use, by a
process of the rollout service's code, and its answer kept in the user's cache.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import xxhash
from pydantic import TypeAdapter

from shared.runtime import user_cache
from shared.runtime.errors import ConfigError, MyxoError, nearest

CATALOGUE = Path(__file__).with_name("sglang_flags.json")
FURTHER = Path(__file__).with_name("sglang_flags_cuda.json")
"""The catalogue of the SGLang that goes with torch 2.11 on CUDA 13, made once: importing it on a fresh machine takes half a minute."""

LISTING = "services.rollout.engine.sglang_catalogue"  # The module that prints the catalogue of the installed SGLang
LISTING_SECONDS = 120.0  # The seconds that importing SGLang may take

RESERVED = {
    "model-path": "set model.hf_checkpoint",
    **dict.fromkeys(("host", "port"), "nothing to set: an engine listens on a private socket; MYXO_ROUTER_URL opens it to a router"),
    "device": "set rollout.rollout_device",
    **dict.fromkeys(("api-key", "admin-api-key"), "nothing to set: an engine listens on a private socket, which takes no key"),
    "skip-server-warmup": "nothing to set: the rollout service sends the first request",
    **dict.fromkeys(
        ("enable-http2", "grpc-mode", "smg-grpc-mode", "grpc-port", "smg-http-sidecar-port", "sidecar", "use-ray", "encoder-only"),
        "leave it out: an engine answers over a private socket only, and this would have it listen elsewhere",
    ),
    **dict.fromkeys(("node-rank", "dist-init-addr"), "the rollout services of an engine's nodes agree upon it; set nnodes alone"),
    "enable-eplb": "leave it out: experts that move would get others' weights with the next push",
    "weight-version": "nothing to set: the weight version is the run's",
    "custom-weight-loader": "nothing to set: an engine's weights come from the trainer",
}
"""Flags that only the rollout service sets, and what to do instead."""

ONE_ALONE = {"dp-size": "1, or more with enable-dp-attention; further engines are rollout services of their own (rollout_num_gpus)"}
"""Flags of which only a value of 1 is taken, and why; but for ``dp-size`` where attention is shared over it."""

OF_OTHER_WEIGHTS = {
    **dict.fromkeys(("enable-lmcache", "enable-flexkv"), "it finds prefixes by their tokens alone, whatever weights have computed them"),
    "kt-weight-path": "the experts on the CPU stay as that directory has them",
    "enable-cp-decode-attn-tp": "decode steps compute with slices of attention that are copied once",
    "dcp-replicate-q-proj": "decode steps compute queries with what was gathered at the start",
    "offload-group-size": "experts are computed with copies, made once or ahead of a push",
}
"""Flags by which an engine computes with what older weights have left, or with weights that no push reaches; and why."""

# Kernels for which SGLang rearranges plain experts as it loads them, not as they are pushed (with the last it can load others from disk),
# and those for which it does so with experts in 8-bit blocks.
LAID_OUT_ANEW, OF_BLOCKS = ("flashinfer_trtllm", "experimental_sgl_trtllm", "flashinfer_trtllm_routed"), ("megamoe",)

OF_FIELDS = {
    "tp-size": "set rollout.rollout_num_gpus_per_engine",
    "trust-remote-code": "set model.trust_remote_code",
    "config": "give each of its flags here",
    "disaggregation-mode": "set worker_type in [[rollout.engine_groups]]",
    "disaggregation-bootstrap-port": "each prefill engine has a free port of its own",
}
"""Flags that follow from other fields of the config, or that would pass others unchecked; and what to do instead."""

PARSER = ("srt/server_args.py", "srt/arg_groups/**/*.py", "srt/function_call/*.py", "srt/parser/*.py")
"""The source of the parser in SGLang's package, and of the names that it offers."""

FORMER = {
    "cuda-graph-bs": "cuda-graph-bs-decode",
    "cuda-graph-max-bs": "cuda-graph-max-bs-decode",
    "nsa-prefill-backend": "dsa-prefill-backend",
    "nsa-decode-backend": "dsa-decode-backend",
    "mamba-scheduler-strategy": "mamba-radix-cache-strategy",
}
"""Names that flags of SGLang's had, as scripts still spell them, and the present ones; each goes by the one that is installed."""

SIZES = ("pp-size", "dp-size", "ep-size", "nnodes", "attn-cp-size", "moe-dp-size", "max-running-requests", "page-size")
"""Flags whose value counts what there is at least one of, which the parser does not check."""

SHARES = ("mem-fraction-static",)  # Flags whose value is a share, which the parser does not check


def count(text: str) -> int:
    """Returns the number that SGLang reads in 4096, 25.6k or 32Ki. Raises ValueError."""
    found = re.fullmatch(r"(\d+)([KMGT]i)|(\d+(?:\.\d+)?)([kMGT])", text)
    if found is None:
        return int(text)
    whole, iec, decimal, si = found.groups()
    return int(whole) * 1024 ** ("KMGT".index(iec[0]) + 1) if iec else int(float(decimal) * 1000 ** ("kMGT".index(si) + 1))


_READERS: dict[str, Callable[[str], Any]] = {"int": int, "count": count, "float": float, "json": json.loads}


class NoCatalogue(MyxoError):
    """The flags of the installed SGLang cannot be determined."""


@dataclass(frozen=True)
class EngineFlag:
    """One flag.

    Args:
        spellings: without the leading dashes, the first is its name. kind: switch, int, count (25.6k, 32Ki), float, json or text.
        several: takes several values. bare: may stand without a value. choices: none: any value of the kind.
    """

    spellings: tuple[str, ...]
    kind: str = "text"
    several: bool = False
    bare: bool = False
    choices: tuple[str, ...] = ()

    def problem(self, value: Any) -> str | None:
        """Returns what is expected in place of ``value``; None if the value is valid."""
        if value is None or value is False:
            return None  # left out
        if self.kind == "switch":
            return None if value is True else "nothing, or true: it is a switch; false leaves it out"
        if value is True:
            return None if self.bare else f"a value: {self._wanted}"
        values = value if isinstance(value, list) else [value]
        if len(values) > 1 and not self.several:
            return f"one value: {self._wanted}"
        return None if (values or self.bare) and all(map(self._fits, values)) else self._wanted

    @property
    def _wanted(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.spellings[0] in SHARES:
            return "a number between 0 and 1"
        if self.spellings[0] in SIZES:
            return "a whole number, 1 or more"
        one = {"int": "a whole number", "count": "a whole number", "float": "a number", "json": "JSON in a string"}.get(self.kind, "text")
        return f"{one}, or several" if self.several else one

    def _fits(self, value: Any) -> bool:
        text = str(value)
        if self.choices:
            return text in self.choices
        try:
            found = _READERS.get(self.kind, str)(text)
        except ValueError:
            return False
        return (0 < found < 1) if self.spellings[0] in SHARES else self.spellings[0] not in SIZES or found > 0


@dataclass(frozen=True)
class EngineFlags:
    """All flags of one SGLang. sglang: its version. parser: the `fingerprint` of its parser."""

    sglang: str
    flags: tuple[EngineFlag, ...]
    parser: str = ""

    @classmethod
    def of_json(cls, text: str | bytes) -> "EngineFlags":
        """Reads a catalogue. Raises ValueError if it is malformed."""
        return TypeAdapter(EngineFlags).validate_json(text)

    @cached_property
    def _spelled(self) -> dict[str, EngineFlag]:
        return {spelling: flag for flag in self.flags for spelling in flag.spellings}

    def present_name(self, name: str) -> str:
        """Returns what this SGLang calls a flag that had another name; any other name as it is."""
        return name if name in self._spelled or FORMER.get(name) not in self._spelled else FORMER[name]

    def __contains__(self, name: str) -> bool:
        return name in self._spelled

    def find(self, name: str) -> EngineFlag | None:
        """Returns the flag of that name, or the only one with that prefix, which SGLang accepts too."""
        name = self.present_name(name)
        if name in self._spelled:
            return self._spelled[name]
        begun = {flag for spelling, flag in self._spelled.items() if spelling.startswith(name)}
        return begun.pop() if len(begun) == 1 else None

    def problems(self, given: Mapping[str, Any]) -> Iterator[ConfigError]:
        """Yields an error for each flag of ``[rollout.sglang]`` that this SGLang's parser refuses or that the run sets itself."""
        seen: dict[str, str] = {}
        shares_attention = any(plain_name(key) == "enable-dp-attention" and value is not False for key, value in given.items())
        for key, value in given.items():
            flag = self.find(name := plain_name(key))
            own = name if flag is None else flag.spellings[0]
            if (reserved := RESERVED.get(name) or RESERVED.get(own) or OF_FIELDS.get(own)) is not None:
                found: str | None = f"the rollout service sets this one; {reserved}"
            elif flag is None:
                hint = nearest(name, list(self._spelled))
                hint = hint if hint.startswith("did you mean") else "`python -m sglang.launch_server --help` lists them"
                found = f"unknown flag of SGLang {self.sglang}; {hint}"
            elif own in seen:
                found = f"--{own} is given twice in [rollout.sglang]: {seen[own]} is the other"
            else:
                found = self._of_value(flag, value, alone=not (own == "dp-size" and shares_attention))
            if found is not None:
                yield ConfigError(f"rollout.sglang.{key}", value, found)
            seen.setdefault(own, key)

    def _of_value(self, flag: EngineFlag, value: Any, *, alone: bool) -> str | None:
        own = flag.spellings[0]
        if alone and own in ONE_ALONE and str(value) != "1":
            return ONE_ALONE[own]
        expected = flag.problem(value)
        return None if expected is None else f"expected {expected} (--{own} of SGLang {self.sglang})"


def unfit_for_pushes(flags: Mapping[str, Any], entries: Mapping[str, Any], transport: str, drafts: bool) -> Iterator[tuple[str, str]]:
    """Yields which of an engine's ``flags``, by plain names, have it compute with other weights than those that are pushed, and why.

    ``entries``: its model's ``config.json``. ``transport``: `update_weight_transport`. ``drafts``: the model's own draft is pushed, too."""
    for name, why in OF_OTHER_WEIGHTS.items():
        if str(flags.get(name)) not in ("None", "False", "", "-1", "0"):
            yield name, why
    form = entries.get("quantization_config") or {}
    kernels = OF_BLOCKS if form.get("quant_method") == "fp8" else LAID_OUT_ANEW if transport == "nccl" else LAID_OUT_ANEW[:-1]
    sparse = any("experts" in key and value for key, value in {**entries, **(entries.get("text_config") or {})}.items())
    for name, plain in (("moe-runner-backend", "triton"), ("moe-a2a-backend", "none")) if sparse else ():
        for own in (name, *([f"speculative-{name}"] if drafts else [])):
            if flags.get(own) in kernels:
                yield own, f"it wants experts in another layout than they are pushed in; --{own} {plain} does not"


@cache
def plain_name(key: str) -> str:
    """Returns a flag's name as SGLang spells it first, without the leading dashes: of an alias, and of the beginning of one name alone."""
    name = key.lstrip("-").replace("_", "-")
    if name in FORMER or name.startswith("no-"):  # former names go by what is installed; the others turn a flag around
        return name
    flag = made_with().find(name)
    return name if flag is None else flag.spellings[0]


@cache
def made_with(path: Path = CATALOGUE) -> EngineFlags:
    """Returns the flags of an SGLang that Myxo is made with."""
    return EngineFlags.of_json(path.read_text())


def present_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``[rollout.sglang]`` under the names that the installed SGLang has; as it is given where that cannot be determined."""
    flags = None
    if not FORMER.keys().isdisjoint(map(plain_name, given)):
        with contextlib.suppress(NoCatalogue):
            flags = of_installed()
    return dict(given) if flags is None else {flags.present_name(plain_name(key)): value for key, value in given.items()}


def known_ones(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of Myxo's own ``defaults``, by plain names, that the parser of the installed SGLang has in its source."""
    source = "".join(path.read_text() for _, path in _parser_files())
    return {name: value for name, value in defaults.items() if f" {name.replace('-', '_')}:" in source}


def installed() -> str | None:
    """Returns the version of SGLang in this environment; None if it is not installed."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def fingerprint() -> str:
    """Returns what the source of the installed SGLang's parser is known by, without importing it."""
    found = xxhash.xxh3_64()
    for root, path in _parser_files():
        found.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return found.hexdigest()


def _parser_files() -> Iterator[tuple[Path, Path]]:
    """Yields the installed SGLang's directory and each file of its parser, in order."""
    spec = importlib.util.find_spec("sglang")
    for root in map(Path, (spec.submodule_search_locations or ()) if spec is not None else ()):
        yield from ((root, path) for path in sorted({path for pattern in PARSER for path in root.glob(pattern)}))


def of_installed() -> EngineFlags | None:
    """Returns the flags of the installed SGLang; None if it is not installed. Raises NoCatalogue if they cannot be read."""
    if (version := installed()) is None:
        return None
    parser = fingerprint()
    for path in filter(Path.is_file, (CATALOGUE, FURTHER)):
        if ((known := made_with(path)).sglang, known.parser) == (version, parser):
            return known
    name = f"sglang-flags-{version}-{parser}.json"
    with contextlib.suppress(ValueError):
        return EngineFlags.of_json(user_cache.read(name) or b"")
    try:
        listing = subprocess.run([sys.executable, "-m", LISTING], capture_output=True, text=True, timeout=LISTING_SECONDS)
        if listing.returncode:
            raise NoCatalogue(f"SGLang {version} could not be asked for its flags: {' '.join(listing.stderr.split())[-300:]}")
        text = listing.stdout[listing.stdout.index('{"sglang"') :]  # SGLang may print, too
        flags = EngineFlags.of_json(text)
    except (subprocess.TimeoutExpired, ValueError) as error:
        raise NoCatalogue(f"SGLang {version} could not be asked for its flags: {error}") from error
    user_cache.write(name, text.encode())
    return flags
