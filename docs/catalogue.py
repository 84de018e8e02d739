"""Writes ``docs/messages.md`` from the pydantic models of the wire schema: ``python -m docs.catalogue [--check]``.

With ``--check`` nothing is written; exit code 1 and a diff where the page is not what the models say.
"""

import argparse
import difflib
import sys
import types
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from services.buffer.outcome_consumer import ROLE_OUTCOMES
from shared.bus.streams import DUPLICATE_WINDOW
from shared.bus.subjects import EVAL, PRODUCER, TRAIN, Subjects
from shared.config.service_sections import BusSection
from shared.schema import ledger, messages, service_messages, weight_messages
from shared.schema.ledger import LedgerRecord
from shared.schema.message import SCHEMA, Message, Part, Tokens

PAGE = Path(__file__).with_name("messages.md")

MODULES = (messages, service_messages, weight_messages)
"""The modules of the wire schema, in the order of the page."""

_LIMITS = {"gt": "> {}", "ge": "≥ {}", "lt": "< {}", "le": "≤ {}", "min_length": "at least {} long", "pattern": "matches `{}`"}


def main() -> int:
    """Writes or checks the page; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m docs.catalogue", description="docs/messages.md from the wire schema")
    parser.add_argument("--check", action="store_true", help="only compare; exit code 1 where the page is out of date")
    return settle(PAGE, render(), parser.parse_args().check)


def settle(path: Path, page: str, check: bool) -> int:
    """Writes a page, or with ``check`` only compares. Returns 1 where the page is not what it should be."""
    if not check:
        path.write_text(page)
        return 0
    found, name = path.read_text() if path.is_file() else "", str(path.relative_to(Path(__file__).parents[1]))
    diff = list(difflib.unified_diff(found.splitlines(), page.splitlines(), name, "what the code says", lineterm=""))
    if diff:
        print("\n".join([*diff, "", f"{name} is out of date; write it anew with `make docs`"]), file=sys.stderr)
    return 1 if diff else 0


def render() -> str:
    """The whole page."""
    concrete = [model for model in Message.kinds.values() if not model.__subclasses__()]
    flow = [model for module in MODULES for model in concrete if model.__module__ == module.__name__]
    records = [model for model in concrete if issubclass(model, LedgerRecord)]
    lines = [
        "# Messages",
        "",
        "Written by `python -m docs.catalogue` from `messages.py`, `service_messages.py`, `weight_messages.py` and `ledger.py` in",
        "`shared/schema`. Do not edit.",
        "",
        f'Every message is a MessagePack map `{{"schema": {SCHEMA}, "kind": <name>, …fields}}`. A receiver refuses an unknown schema',
        "version, an unknown kind, an unknown or missing field and a value that does not fit, naming it. An array is a map",
        '`{"dtype": "<i4", "shape": [n], "data": raw little-endian bytes}`. Seconds are floats; times are seconds since the epoch.',
        "",
        "## Names on the bus",
        "",
        *_names(),
        "",
        "## Messages",
        "",
    ]
    for model in flow:
        lines += _section(model)
    lines += ["## Records of the ledger", "", f"{_text(ledger)}", ""]
    for model in records:
        lines += _section(model, f"Event `{model.event()}`." if issubclass(model, LedgerRecord) else "")
    lines += ["## Parts", "", "Maps inside messages.", ""]
    for part in (part for module in MODULES for part in vars(module).values() if _is_part(part, module.__name__)):
        lines += _section(part)
    return "\n".join(lines).rstrip() + "\n"


def _names() -> list[str]:
    run = Subjects("<run>")
    jobs = (run.trainer_nodes("<role>"), run.engine_nodes("<replica>"))
    nodes, attempts = ", ".join(f"`{job}.<rank>`" for job in jobs), ", ".join(f"`{run.attempt(job)}`" for job in jobs)
    rows = [
        (
            run.task("<class>"),
            f"work queue `{run.task_stream}`, one consumer a class",
            f"`Task`; classes `{TRAIN}` and `{EVAL}`; of `{EVAL}` also `Evaluate`",
        ),
        (run.generated("<queue>"), f"work queue `{run.generated_stream}`, one consumer a queue of environments", "`Generated`"),
        *(
            (
                run.scored(role),
                f"work queue `{run.scored_stream}`",
                f"{' or '.join(f'`{kind.__name__}`' for kind in kinds)}, for the buffer",
            )
            for role, kinds in ROLE_OUTCOMES.items()
        ),
        (run.ledger("<event>"), f"stream `{run.ledger_stream}`, kept whole", "the records below, from one writer"),
        (run.batch, "request and reply", "`BatchRequest` → `Batch`, `BatchPending` or `RunDone`"),
        (run.trained, "request and reply", "`Trained` → `Accepted`"),
        (run.durable, "request and reply", "`Durable` → `Accepted`"),
        (run.refused, "request and reply", "`BatchRefused` → `Accepted`"),
        (run.evaluations, "request and reply", "`EvaluationsRequest` → `EvaluationsEnded`"),
        (run.object_urls, "request and reply", "`ObjectUrlsRequest` → `ObjectUrls`"),
        (run.replica_weights("<replica>", "<verb>"), "request and reply", "the `Weights…` messages of a push"),
        (run.environment("<environment>", "<verb>"), "request and reply", "plain maps, the [environment protocol](environments.md)"),
        (run.event("weights", "live"), f"stream `{run.events_stream}`, oldest discarded when full", "`WeightsLive`"),
        (run.event("weights", "pushed"), f"stream `{run.events_stream}`", "`WeightsPushed`"),
        (run.event("trainer", "metrics"), f"stream `{run.events_stream}`", "`MetricsWritten`"),
        (run.event("trainer", "step"), f"stream `{run.events_stream}`", "`Trained`"),
        (run.event("trainer", "warm_start"), f"stream `{run.events_stream}`", "`WarmStartEnded`"),
        (
            run.command("command", "<client>", 0),
            f"stream `{run.commands_stream}`, each subject once",
            "`Command`, its number last",
        ),
        (run.command("outcome", "<client>", 0), f"stream `{run.commands_stream}`, each subject once", "`CommandOutcome`"),
        (run.event("service", "<what>"), f"stream `{run.events_stream}`", "`ServiceEvent`"),
    ]
    buckets = [
        (run.config_bucket, "the frozen config, the store's URL, the run's phase"),
        (run.services_bucket, f"`<service>.<instance>` → `ServiceStatus`, gone {BusSection().registry_ttl:g} s after its last renewal"),
        (run.weights_bucket, "`live` → `WeightsLive`; `snapshot` → `WeightsSnapshot`"),
        (
            run.leases_bucket,
            f"`buffer`, `{PRODUCER}`: which buffer, and which replica with a rollout function, is the active one; "
            f"{nodes}, of each node of a trainer or an engine → `LeaseStatus`; {attempts} → `Attempt`",
        ),
        (run.secrets_bucket, "`engines.<replica>.<rank>` → `NodeSecret`; the account of the engines alone reads it"),
    ]
    lines = ["| subject | kind | carries |", "|---|---|---|", *(f"| `{subject}` | {kind} | {what} |" for subject, kind, what in rows), ""]
    lines += ["| KV bucket | holds |", "|---|---|", *(f"| `{bucket}` | {what} |" for bucket, what in buckets), ""]
    lines.append(f"A refused request is answered with `Refused`. A repeated `Nats-Msg-Id` counts once within {DUPLICATE_WINDOW:g} s.")
    return lines


def _is_part(value: object, module: str) -> bool:
    """Whether it is a part of messages that the module defines."""
    if not isinstance(value, type) or value.__module__ != module or value is Part:
        return False
    return (issubclass(value, Part) and not issubclass(value, Message)) or is_dataclass(value)


def _section(model: Any, note: str = "") -> list[str]:
    lines = [f"### {model.__name__}", "", " ".join(filter(None, [_text(model), note])), ""]
    hints = get_type_hints(model, include_extras=True)
    fields: dict[str, FieldInfo] = model.__pydantic_fields__
    if fields:
        lines += ["| field | type | default |", "|---|---|---|"]
        for name, info in fields.items():
            kind = "int32 [T]" if hints[name] == Tokens else _type(info.annotation)
            lines.append(f"| `{name}` | {', '.join([kind, *limits(info)])} | {_default(info)} |")
        lines.append("")
    return lines


def _text(documented: object) -> str:
    return " ".join((documented.__doc__ or "").replace("``", "`").split())


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return "nil"
    if annotation is Any:
        return "any"
    if origin is Annotated:
        return _type(arguments[0])
    if origin in (Union, types.UnionType):
        return " or ".join(_type(argument) for argument in arguments)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin is list:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return f"map of {_type(arguments[0])} to {_type(arguments[1])}"
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or is_dataclass(annotation)):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    return str(annotation.__name__)


def limits(info: FieldInfo) -> list[str]:
    """The bounds of a field's values, each in words."""
    found = [(text, getattr(item, limit, None)) for item in info.metadata for limit, text in _LIMITS.items()]
    finite = any(getattr(item, "allow_inf_nan", None) is False for item in info.metadata)
    return [text.format(value) for text, value in found if value is not None] + (["finite"] if finite else [])


def _default(info: FieldInfo) -> str:
    return "required" if info.is_required() else f"`{info.get_default(call_default_factory=True)!r}`"


if __name__ == "__main__":
    sys.exit(main())
