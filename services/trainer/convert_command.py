"""The command line of the conversion: ``myxo convert``, or ``python -m services.trainer.convert_command``."""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from shared.model.hf_checkpoint import read_headers
from shared.model.quantization import GROUP_SIZES, QuantizedFormat, in_groups
from shared.runtime import exit_codes
from shared.runtime.errors import ConfigError
from shared.runtime.exit_codes import Parser, ended

PROGRAM = "myxo convert"
_ABOUT = """Convert a model between Hugging Face's format (config.json, *.safetensors) and Megatron's distributed one (torch_dist).

The direction follows from SOURCE: a Hugging Face checkpoint becomes a checkpoint directory that the trainer loads in any
layout; a checkpoint of the trainer, or one made here, becomes a Hugging Face checkpoint. Both are streamed: a model may be larger than
the memory (but not one of the torch backend's, which is read as a whole). TARGET appears complete or not at all. docs/models.md lists the
families. With --to a Hugging Face checkpoint becomes one with 8-bit or 4-bit weights (docs/precision.md)."""

FP8, WHOLE, INT4 = "fp8-block", "fp8-tensor", "int4"
OPTIONS = {FP8: ("--block", "--scale-fmt"), WHOLE: (), INT4: ("--group-size", "--layout", "--experts-only")}  # beside --to


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit code."""
    given = parser().parse_args(arguments)

    def work() -> int:
        print(_convert(given))
        return exit_codes.DONE

    return ended(PROGRAM, work, OSError)  # a full disk, a directory that may not be written


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all options."""
    top = Parser(prog=PROGRAM, description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    top.add_argument("source", metavar="SOURCE", type=Path, help="a Hugging Face checkpoint, or a directory of the trainer's checkpoints")
    top.add_argument("target", metavar="TARGET", type=Path, help="the directory to make; nothing may be there yet")
    dtype = "float32 or bfloat16, into torch_dist (default: that of SOURCE); the run's train_dtype must be the same"
    top.add_argument("--dtype", choices=("float32", "bfloat16"), help=dtype)
    top.add_argument("--step", type=int, metavar="K", help="which of the trainer's checkpoints (default the newest)")
    hf = "from the trainer: where config and tokenizer come from (default: what a converted checkpoint keeps)"
    top.add_argument("--hf", metavar="DIR", type=Path, help=hf)
    quantized = "a Hugging Face checkpoint again, its layers' matrices as 8-bit floats with a factor a block or a matrix, or 4-bit integers"
    top.add_argument("--to", choices=tuple(OPTIONS), help=quantized)
    block = "with --to fp8-block: rows and columns of a block (default 128 128)"
    top.add_argument("--block", type=int, nargs=2, metavar=("ROWS", "COLUMNS"), help=block)
    top.add_argument("--scale-fmt", choices=("float32", "ue8m0"), help="of fp8-block: factors, or powers of two alone (default float32)")
    size = "with --to int4: numbers of a row that share a scale (default 32)"
    top.add_argument("--group-size", type=int, choices=GROUP_SIZES, help=size)
    layout = "with --to int4: compressed-tensors' (default), or AWQ's, with zero points"
    top.add_argument("--layout", choices=("compressed-tensors", "awq"), help=layout)
    top.add_argument("--experts-only", action="store_true", default=None, help="with --to int4: every other matrix stays as it is")
    return top


def _check_options(given: argparse.Namespace, from_hf: bool) -> None:
    options = {name: getattr(given, name[2:].replace("-", "_")) for names in OPTIONS.values() for name in names}
    of_quantizing = {name: options[name] for name in options if name not in OPTIONS.get(given.to, ())}
    of_torch_dist, from_trainer = {"--dtype": given.dtype}, {"--step": given.step, "--hf": given.hf}
    if not from_hf:
        misplaced, there = of_torch_dist | of_quantizing | {"--to": given.to}, "SOURCE is a torch_dist checkpoint"
    elif given.to is None:
        misplaced, there = from_trainer | of_quantizing, "SOURCE is a Hugging Face checkpoint, and there is no --to"
    else:
        misplaced, there = from_trainer | of_torch_dist | of_quantizing, f"--to {given.to} makes a Hugging Face checkpoint of one"
    for option, value in misplaced.items():
        if value is not None:
            raise ConfigError(option, str(value), f"not given; {there}")
    if given.block is not None and min(given.block) < 1:
        raise ConfigError("--block", given.block, "two numbers from 1 up")


def _convert(given: argparse.Namespace) -> Path:
    if not given.source.is_dir():
        raise ConfigError("SOURCE", str(given.source), "a directory; there is none")
    from_hf = (given.source / "config.json").is_file()
    _check_options(given, from_hf)
    for problem in read_headers(given.source, "SOURCE")[1] if from_hf else ():
        raise problem
    # The conversion computes nothing: it must not take a GPU's memory. torch reads this while it is imported.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    warnings.filterwarnings("ignore")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"to {given.to or ('torch_dist' if from_hf else 'Hugging Face')}", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        if given.to is not None:  # beside engines there may be no Megatron
            from services.trainer.parallel import export

            return export.quantize(given.source, given.target, _format(given), progress, bool(given.experts_only))
        from services.trainer.fsdp import shard_gathering
        from services.trainer.megatron import hf_conversion
        from services.trainer.parallel.checkpoint import policy_checkpoint

        if from_hf:
            return hf_conversion.to_torch_dist(given.source, given.target, given.dtype, progress)
        if policy_checkpoint(given.source, given.step)[1].get("backend") == "torch":
            return shard_gathering.to_hf(given.source, given.target, given.hf, given.step, progress)
        return hf_conversion.to_hf(given.source, given.target, given.hf, given.step, progress)


def _format(given: argparse.Namespace) -> QuantizedFormat:
    if given.to == INT4:
        return in_groups(given.group_size or GROUP_SIZES[0], given.layout == "awq")
    rows, columns = (0, 0) if given.to == WHOLE else given.block or (128, 128)
    return QuantizedFormat(rows, columns, given.scale_fmt == "ue8m0")


if __name__ == "__main__":
    sys.exit(main())
