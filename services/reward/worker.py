"""Runs a verifier in a process of its own, which the service kills when it takes too long.

``python -m services.reward.worker math``; it speaks as `services.reward.worker_pool.WorkerPool` says. In, once: ``{}``; out, when
everything is loaded: ``{"ready": True}``; then in: ``{"responses": [text, …], "label": text}``; out: ``{"rewards": [float, …]}`` or
``{"error": text}``.
"""

import contextlib
import sys

from services.reward.frames import FrameStream
from services.reward.verifiers import VERIFIERS


def main() -> None:
    """Answers requests until the service is gone."""
    channel, name = FrameStream(), sys.argv[1]
    verifier = VERIFIERS[name]
    verifier("", "x")  # loads lazy imports now: sympy takes seconds, which no call's deadline should include
    with contextlib.suppress(EOFError):
        call_id, _ = channel.receive()
        channel.send([call_id, {"ready": True}])
        while True:
            call_id, request = channel.receive()
            channel.send([call_id, None])
            try:
                answer: dict[str, object] = {"rewards": [float(verifier(text, request["label"])) for text in request["responses"]]}
            except Exception as error:  # an exception of a verifier fails the sample, not this process
                answer = {"error": f"verifier {name}: {type(error).__name__}: {error}"}
            channel.send([call_id, answer])


if __name__ == "__main__":
    main()
