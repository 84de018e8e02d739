"""Text for terminals and logs: without control characters and credentials, figures and durations in few characters."""

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

_UNSAFE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 and C1, escape among them, but tab and newline
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u206f"  # marks that turn the direction of writing
    r"\u2028\u2029\ufeff\ufff9-\ufffb"  # line ends of Unicode, and marks that are not seen
    r"\ud800-\udfff"  # surrogates, which no stream can encode
    r"\U000e0000-\U000e0fff]"  # tags, which are not seen either
)


def printable(text: str) -> str:
    """Returns the text with every character that is unsafe to print spelled out, as ``\\x1b``."""
    return _UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text)


def printable_line(text: str, most: int) -> str:
    """Returns the text as one safe line of about ``most`` characters at most."""
    line = printable(" ".join(text[: 4 * most].split()))
    return line if len(line) <= most else line[: most - 2] + " …"


def say(line: str) -> None:
    """Prints text as one safe line on the standard error."""
    print(printable(line).replace("\n", " "), file=sys.stderr, flush=True)


LINE_LIMIT = 160  # Characters of a reason in a line
LARGE = 1e15  # Numbers from here on are shown by their order


def duration(seconds: float) -> str:
    """Returns a time as people write it: 45s, 2m10s, 3h05m."""
    if not math.isfinite(seconds):
        return f"{seconds}s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def number(value: float, form: str = ".0f") -> str:
    """Returns a number in a format; ``nan`` and ``inf`` as such, and one that is too large for a line by its order."""
    return f"{value:{form}}" if abs(value) < LARGE or not math.isfinite(value) else f"{value:.2g}"


def shortened_line(text: str) -> str:
    """Returns the text as one short safe line."""
    return printable_line(text, LINE_LIMIT)


def json_text(value: Any) -> str:
    """Returns plain data as strict JSON, indented and in ASCII; what is not finite becomes null."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None), indent=2)


def by_fault(faults: Mapping[str, int]) -> str:
    """Returns how many groups died of what, the most frequent first."""
    return ", ".join(f"{count} {fault}" for fault, count in sorted(faults.items(), key=lambda entry: -entry[1]))


def figure_table(figures: Iterable[tuple[str, str]], title: str | None = None) -> "Table":
    """Returns one line a figure: its name and its value, indented under a title."""
    from rich.table import Table  # services do without it, and start sooner
    from rich.text import Text

    heading = None if title is None else Text(title)
    table = Table(title=heading, title_justify="left", show_header=False, box=None, padding=(0, 2) if title else (0, 2, 0, 0))
    for name, value in figures:
        table.add_row(Text(name, style="dim"), Text(value))
    return table


# --- credentials

_CREDENTIAL = re.compile(
    r"(NATS_URL|REDIS_URL)|(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|AUTH|APIKEY|KEY)(_|\Z)", re.IGNORECASE
)


def names_credential(name: str) -> bool:
    """Returns whether a variable, or a key with dashes, is called as those are that hold a secret."""
    return bool(_CREDENTIAL.search(name.replace("-", "_")))


_SERVICE = r"\b((?:sk|hf|gh[op]|glpat|xox[bap])[-_])"  # how keys of well-known services begin
_KEY, _MARK = re.compile(_SERVICE + r"[\w-]{16,}"), re.compile(f"://…@|{_SERVICE}…")
_USER, _SECRET_QUERY = re.compile(r"(\w+://)[^/\s?#]*@"), re.compile(r"([?&]([^=&\s]+)=)[^&\s#]+")
_FREE = ("custom_args", "agent_options", "judge_sampling", "sglang")
"""Fields whose keys are the user's own, so that a key says whether its value is a secret; elsewhere ``label_key`` names a column."""


def without_credentials(value: Any, free: bool = False) -> Any:
    """Returns plain values as files, people and other programs get them, with ``…`` for the user and password of URLs and the parts of a
    query that are named as credentials, for keys of well-known services and, in maps of the user's own (``free``), for what is named so.
    """
    if isinstance(value, dict):
        secret = {key for key, item in value.items() if free and not isinstance(item, int | float | None) and names_credential(str(key))}
        return {key: "…" if key in secret else without_credentials(item, free or key in _FREE) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_credentials(item, free) for item in value]
    if not isinstance(value, str):
        return value
    text = _KEY.sub(r"\1…", _USER.sub(r"\1…@", value))
    return _SECRET_QUERY.sub(lambda found: f"{found[1]}…" if names_credential(found[2]) else found[0], text)


def is_masked(value: Any, free: bool = False) -> bool:
    """Returns whether plain values hold a ``…`` that `without_credentials` has put in a credential's place."""
    with suppress(TypeError, ValueError):  # else it is no table's JSON text
        value = json.loads(value)
    if isinstance(value, dict):
        secret = any(free and item == "…" and names_credential(str(key)) for key, item in value.items())
        return secret or any(is_masked(item, free or key in _FREE) for key, item in value.items())
    if isinstance(value, list | tuple):
        return any(is_masked(item, free) for item in value)
    if not isinstance(value, str) or _MARK.search(value):
        return isinstance(value, str)
    return any(found[0].endswith("=…") and names_credential(found[2]) for found in _SECRET_QUERY.finditer(value))
