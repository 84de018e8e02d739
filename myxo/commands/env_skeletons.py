"""What ``myxo env new`` writes: small environments and agents that work, to be changed. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Skeleton:
    """A kind. ``what`` it is, ``about``: its module's docstring, ``body``: what follows. ``steps``: what for, and the command.

    ``{module}`` and ``{name}`` stand for the file's and the class's name."""

    what: str
    about: str
    body: str
    steps: tuple[tuple[str, str], ...]

    def text(self, module: str, name: str) -> str:
        """Returns the module's text."""
        commands = "\n".join(self.commands(module, name))
        return f'"""{self.about}\n\n{commands}\n"""\n' + _filled(self.body, module, name)

    def commands(self, module: str, name: str) -> Iterator[str]:
        """Yields the commands, one a line."""
        width = max(len(what) for what, _ in self.steps) + 3
        for what, command in self.steps:
            yield f"{what + ':':{width}}{_filled(command, module, name)}"


def _filled(text: str, module: str, name: str) -> str:
    return text.replace("{module}", module).replace("{name}", name)


ENVIRONMENT = Skeleton(
    "an environment that scores and steps",
    "An environment of yours: it scores answers, and plays episodes of several turns. Keep what you need, delete the rest.",
    '''

class {name}:
    def score(self, request):
        """Returns one reward for each of request["samples"], which answer request["prompt"]: a number, or named ones with "reward"."""
        return [float(sample["response"].strip() == request["label"]) for sample in request["samples"]]

    def reset(self, request):
        """Begins an episode of request["prompt"]. Returns your own state of it, and messages that the model sees behind the prompt."""
        return {"turns": 0, "label": request["label"]}, []

    def step(self, state, message, request):
        """Takes what the model said. Returns messages that it sees next, a reward or None, and whether the episode is over."""
        state["turns"] += 1
        right = message["content"].strip() == state["label"]
        if right or state["turns"] == 3:
            return [], float(right), True
        return [{"role": "user", "content": "Not yet. Try again."}], None, False
''',
    (
        ("Serve it", "myxo env run {module}:{name}"),
        ("Check it", "myxo env check http://127.0.0.1:8080"),
        ("Train on its episodes", "--episode-url http://127.0.0.1:8080"),
        ("Train on its scores", "--rm-type environment --environment-url http://127.0.0.1:8080"),
    ),
)

_PLAY = '''
TURNS = 3


async def play(data, base_url, api_key):
    """Plays one rollout. Returns its reward: a number, or named ones with "reward"."""
    messages = list(data["messages"])
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=8) as client:
        for turn in range(1, TURNS + 1):
            completion = await client.chat.completions.create(model=data["model"], messages=messages)
            answer = completion.choices[0].message
            if (answer.content or "").strip() == data["label"]:
                return {"reward": 1.0, "turns": turn}
            messages.append(answer.model_dump(exclude_none=True))  # as it came: then the next turn carries its very tokens on
            messages.append({"role": "user", "content": "Not yet. Try again."})
    return {"reward": 0.0, "turns": TURNS}
'''

AGENT = Skeleton(
    "an agent that is a function",
    "An agent of yours: what it has the model write is trained. It runs in the rollout services.",
    f"""
from openai import AsyncOpenAI
{_PLAY}""",
    (("Check it", "myxo env check {module}:play"), ("Train it", "--agent {module}:play")),
)

COMMAND = Skeleton(
    "an agent that is a command",
    "An agent of yours that is a command: data on its standard input, URL and key in the environment, the reward as its last line.",
    f"""
import asyncio
import json
import os
import sys

from openai import AsyncOpenAI
{_PLAY}

if __name__ == "__main__":
    given = json.load(sys.stdin)
    print(json.dumps(asyncio.run(play(given, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]))))
""",
    (("Check it", "myxo env check --agent-command 'python {module}.py'"), ("Train it", "--agent-command 'python {module}.py'")),
)

SERVICE = Skeleton(
    "an agent behind a URL, with packages of its own",
    "An agent of yours behind a URL: it may have a virtual environment, a container or a machine of its own.",
    f"""
import uvicorn
from fastapi import Body, FastAPI
from fastapi.responses import JSONResponse
from openai import AsyncOpenAI
{_PLAY}

app = FastAPI()


@app.post("/")
async def rollout(given: dict = Body()):
    \"\"\"Answers {{"reward": ...}} once a rollout has ended, or {{"error": ...}}, by which it is lost.\"\"\"
    try:
        return {{"reward": await play(given["data"], given["base_url"], given["api_key"])}}
    except Exception as error:
        return JSONResponse({{"error": f"{{type(error).__name__}}: {{error}}"}}, 500)


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=8090)
""",
    (
        ("Serve it", "python {module}.py"),
        ("Check it", "myxo env check http://127.0.0.1:8090/ --agent"),
        ("Train it", '--agent shared.agents.http_agent:play --agent-options \'{"url": "http://127.0.0.1:8090/"}\''),
        ("And have it started", "--agent-service 'python {module}.py'"),
    ),
)

_SERVERS = '--agent-options \'{"servers": {"{module}": ["python", "{module}.py"]}}\''

TOOLS = Skeleton(
    "tools of an MCP server, for the agent that comes with Myxo",
    "Tools of yours as an MCP server: Myxo's own agent offers them to the model. The run's reward scores its last answer.",
    '''
from mcp.server import MCPServer


def add(a: float, b: float) -> str:
    """Adds two numbers."""
    return f"{a + b:g}"


if __name__ == "__main__":
    server = MCPServer("{module}")
    server.add_tool(add)
    server.run("stdio")
''',
    (
        ("Check it", f"myxo env check shared.agents.mcp_agent:play {_SERVERS}"),
        ("Train it", f"--agent shared.agents.mcp_agent:play {_SERVERS}"),
    ),
)

# By the names that the command line has.
SKELETONS = {"environment": ENVIRONMENT, "agent": AGENT, "command": COMMAND, "service": SERVICE, "tools": TOOLS}
