"""The agent of `openai_calculator.py` behind a URL, in a container of its own. It needs nothing of Myxo.

It is posted rollouts, `{"data": …, "base_url": …, "api_key": …}`, and answers each with `{"reward": …}` when it has ended.
"""

import asyncio
import json
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from examples.agents.openai_calculator import run

PORT = 8600


class Rollouts(BaseHTTPRequestHandler):
    """Plays a rollout for each request, in a thread of its own."""

    def do_POST(self) -> None:
        """Answers the reward, or why there is none."""
        try:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._answer(200, {"reward": asyncio.run(run(asked["data"], asked["base_url"], asked["api_key"]))})
        except Exception as error:
            traceback.print_exc()
            self._answer(500, {"error": f"{type(error).__name__}: {error}"})

    def _answer(self, status: int, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class AgentServer(ThreadingHTTPServer):
    """Takes as many connections at once as a batch has rollouts."""

    request_queue_size = 512


if __name__ == "__main__":
    AgentServer(("0.0.0.0", PORT), Rollouts).serve_forever()
