"""Compares rewards with those of a checkout of slime: ``python -m tests.oracle.rewards DIRECTORY [--cases N] [--write]``.

For each reward it draws cases (`tests.support.reward_cases`) and has hypothesis search for others, gives both the same input, and compares
what comes out, errors included; `remote_rm` it compares over a server, `random` over many draws. Then it runs slime's own tests of its
rewards, as they are, and with Myxo's functions under slime's names.
``--write`` puts the outcome of the cases into ``tests/unit/rewards/values.json``, by which CI holds the rewards without slime.
"""

import argparse
import asyncio
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.rewards import boxed_math, text_rewards
from shared.rewards.names import BOXED
from shared.rewards.reference import Reference, label_text
from shared.rewards.verifiers import verify
from tests.oracle import remote_reward
from tests.support import reward_cases
from tests.support.reward_cases import Case

VALUES = Path(__file__).parents[1] / "unit" / "rewards" / "values.json"

Reward = Callable[[str, Any, dict[str, Any]], Any]
"""(response, label, metadata) → reward."""


def by_service(name: str) -> Reward:
    """Returns a reward as the reward service computes it."""
    return lambda response, label, metadata: verify(name, response, Reference(*label_text(label), metadata))


OURS: dict[str, Reward] = {
    "dapo": lambda response, label, metadata: text_rewards.compute_score(response, label),
    "deepscaler": lambda response, label, metadata: boxed_math.get_deepscaler_rule_based_reward(response, label),
    "f1": lambda response, label, metadata: text_rewards.f1_score(response, label),
    "gpqa": lambda response, label, metadata: text_rewards.compute_gpqa_reward(response, label, metadata),
    "math": lambda response, label, metadata: boxed_math.grade_answer_verl(response, label),
    **{BOXED + name: by_service(BOXED + name) for name in ("dapo", "deepscaler", "f1", "gpqa", "math")},
}

ANSWERS = st.one_of(
    st.sampled_from(reward_cases.ANSWERS),
    st.lists(st.sampled_from(reward_cases.CHARACTERS), max_size=10).map("".join),
    st.builds("{}{}{}".format, st.sampled_from(reward_cases.ANSWERS), st.sampled_from("+-*/,= "), st.sampled_from(reward_cases.ANSWERS)),
)
MATHEMATICAL = st.tuples(ANSWERS.map("</think>\\boxed{{{}}}".format) | ANSWERS, ANSWERS, st.just({}))
FEW_WORDS = st.lists(st.sampled_from(["the", "a", "cat", "yes", "no", "."]), max_size=6).map(" ".join)
WORDS = st.text(max_size=30) | FEW_WORDS
CHOICES = st.fixed_dictionaries(
    {}, optional={"choices": st.lists(st.text("abc d", max_size=4), max_size=5), "correct_letter": st.sampled_from("ABCDe ")}
)
SEARCHED: dict[str, st.SearchStrategy[Case]] = {
    "dapo": st.tuples(ANSWERS.map("Answer: {}".format), st.integers(-(10**15), 10**15).map(str), st.just({})),
    "deepscaler": MATHEMATICAL,
    "f1": st.tuples(WORDS, WORDS, st.just({})),
    "gpqa": st.tuples(
        st.text("ABCDanswer is:option().\n<think/>", max_size=30),
        st.text("ABCDabc d", max_size=4) | st.integers(-2, 12) | st.none(),
        CHOICES,
    ),
    "math": MATHEMATICAL,
}
SEARCHED |= {
    name: SEARCHED[name.removeprefix(BOXED)].map(lambda case: (f"\\boxed{{{case[0]}}}", *case[1:])) for name in OURS if name not in SEARCHED
}


def slimes(directory: Path) -> dict[str, Reward]:
    """Returns slime's own functions, called in the same way."""
    sys.path.insert(0, str(directory))
    hub = "slime.rollout.rm_hub"
    names = ("math_dapo_utils", "deepscaler", "f1", "gpqa", "math_utils")
    minerva, deepscaler, words, choice, mathematics = (importlib.import_module(f"{hub}.{name}") for name in names)
    async_rm = importlib.import_module(hub).async_rm

    def by_name(name: str) -> Reward:
        def reward(response: str, label: Any, metadata: dict[str, Any]) -> Any:
            sample = SimpleNamespace(response=response, label=label, metadata={**metadata, "rm_type": name}, custom_rm_path=None)
            return asyncio.run(async_rm(SimpleNamespace(custom_rm_path=None, rm_type="random"), sample))

        return reward

    return {
        "dapo": lambda response, label, metadata: minerva.compute_score(response, label),
        "deepscaler": lambda response, label, metadata: deepscaler.get_deepscaler_rule_based_reward(response, label),
        "f1": lambda response, label, metadata: words.f1_score(response, label),
        "gpqa": lambda response, label, metadata: choice.compute_gpqa_reward(response, label, dict(metadata)),
        "math": lambda response, label, metadata: mathematics.grade_answer_verl(response, label),
        **{name: by_name(name) for name in OURS if name.startswith(BOXED)},
    }


def outcome(function: Reward, case: Case) -> Any:
    """Returns what a function says of a case, as JSON has it; that it raises is an outcome, too."""
    try:
        value = function(*case)
    except Exception as error:
        return f"raises {type(error).__name__}"
    return json.loads(json.dumps(value))


def compared(name: str, rows: list[list[Any]]) -> int:
    """Tells how many of the cases differ, and returns that."""
    found = [(case, outcome(OURS[name], tuple(case)), expected) for *case, expected in rows]
    wrong = [entry for entry in found if entry[1] != entry[2]]
    for case, ours, expected in wrong[:5]:
        print(f"{name} {case}: {ours}, slime {expected}")
    rewarded = sum(_rewarded(expected) for *_, expected in rows)
    print(f"{name}: {len(rows)} cases, {rewarded} of them rewarded; {len(wrong)} differ; ", end="", flush=True)
    return len(wrong)


def _rewarded(value: Any) -> bool:
    first = value["score"] if isinstance(value, dict) else value[0] if isinstance(value, list) else value
    return not isinstance(first, str) and first > 0


def searched(name: str, oracle: Reward, examples: int) -> int:
    """Has hypothesis search for a case in which both differ. Returns how many it has tried. Raises AssertionError with the smallest."""
    tried = 0

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(SEARCHED[name])
    def search(case: Case) -> None:
        nonlocal tried
        tried += 1
        assert outcome(OURS[name], case) == outcome(oracle, case), case

    search()
    return tried


def own_tests(directory: Path, names: bool) -> str:
    """Returns the last line of slime's own tests of its rewards. ``names``: with Myxo's functions under slime's names."""
    tests = sorted(map(str, (directory / "tests").glob("test_rm_*.py")))
    plugin = ["-p", "tests.oracle.slime_names"] if names else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, *plugin, *tests]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (directory, Path.cwd())))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    return (done.stdout.strip().splitlines() or [done.stderr])[-1]


def main() -> int:
    """The command line. Returns 1 where anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="a checkout of slime")
    parser.add_argument("--cases", type=int, default=400, help="cases of each reward (default 400)")
    parser.add_argument("--examples", type=int, default=400, help="cases that hypothesis tries (default 400)")
    parser.add_argument("--write", action="store_true", help=f"write {VALUES.name}")
    options = parser.parse_args()
    values, differ = dict[str, list[list[Any]]](), 0
    for name, oracle in slimes(options.directory).items():
        values[name] = [[*case, outcome(oracle, case)] for case in reward_cases.cases(name, options.cases)]
        differ += compared(name, values[name])
        print(f"hypothesis: {searched(name, oracle, options.examples)} cases, none differs")
    differ += remote_reward.random_differs() + asyncio.run(remote_reward.remote_differs(options.cases))
    own, ours = own_tests(options.directory, names=False), own_tests(options.directory, names=True)
    print(f"slime's own tests: {own}; with Myxo's functions: {ours}")
    if options.write:
        VALUES.parent.mkdir(exist_ok=True)
        lines = ",\n".join(f'"{name}": [\n' + ",\n".join(json.dumps(case) for case in rows) + "\n]" for name, rows in values.items())
        VALUES.write_text("{\n" + lines + "\n}\n")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
