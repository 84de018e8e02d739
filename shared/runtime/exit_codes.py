"""Exit codes of commands, and how a command ends with them."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from shared.runtime.errors import BadInput, MyxoError, no_room, problems_of
from shared.runtime.safe_text import printable_line, say

DONE = 0

FAILED = 1  # An audit found a violation, or another error occurred
BAD_INPUT = 2  # The input of a person cannot be used. Services end with the same code for it (`shared.service.service_base`).
RUN_FAILED = 3  # A run was given up: a service ended again and again without a training step in between, or too many groups failed
INTERRUPTED = 130  # The command ended by SIGINT with nothing to stop
STOPPED = 143  # A trainer was asked to stop: there may be steps left, for which a supervisor that did not stop it starts it again

LONGEST_ERROR = 1000  # The most characters of an error that are shown: it may contain a whole prompt


class Parser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line, with how to get help."""

    def error(self, message: str) -> NoReturn:
        complain(f"{message} (see {self.prog} --help)", self.prog)
        sys.exit(BAD_INPUT)


def ended(program: str, work: Callable[[], int], *failures: type[Exception]) -> int:
    """Returns the exit code of ``work``, or of the error that it ended with, which is printed.

    Args:
        failures: further errors beside `MyxoError` that are no bug of the program.
    """
    expected: tuple[type[Exception], ...] = (MyxoError, *failures)
    try:
        return work()
    except BrokenPipeError:  # the reader of the output has closed it
        sys.stderr.close()
        return DONE
    except expected as error:
        for problem in problems_of(error) if isinstance(error, BadInput) else [error]:
            complain(str(problem), program)
        return BAD_INPUT if isinstance(error, BadInput) else FAILED
    except OSError as error:
        if not (full := no_room(error)) and not (isinstance(error, PermissionError) and error.filename):
            raise
        complain(f"{error}; {'make room there' if full else 'let this user in there'}, and give the command again", program)
        return FAILED if full else BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED


def complain(message: str, program: str) -> None:
    """Prints one safe line on the standard error."""
    say(f"{program}: {printable_line(message, LONGEST_ERROR)}")
