"""Foreign text made fit for a terminal: what a service, an environment, a model or a file says must not move the cursor, set the window's
title, turn the direction of writing, or end the command that shows it.

This is the one place that decides which characters are shown as they are. The console of `myxo` (`myxo.display.safe_console`) applies it to
everything that it prints, `say` to plain lines; displays apply it before they lay text out, since a character that is spelled out is wider.
"""

import re
import sys

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
