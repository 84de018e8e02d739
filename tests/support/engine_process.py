"""What an engine's scheduler does for a receiver of weights, without an engine."""

import threading

from services.rollout.engine.receiver.command_session import CommandSession


def serve(session: CommandSession, stopping: threading.Event) -> None:
    """Opens the session's socket and does the commands that come, until ``stopping`` is set."""
    session.open()
    try:
        while not stopping.is_set():
            if not session.work():
                stopping.wait(0.01)
    finally:
        session.close()
