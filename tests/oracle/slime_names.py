"""A plugin of pytest's that puts Myxo's rewards under slime's names, so that slime's own tests run against them."""

import sys
from types import ModuleType

from shared.rewards import boxed_math, text_rewards
from shared.rewards import boxed_math as boxed
from shared.rewards import boxed_math as hendrycks
from shared.rewards import boxed_math as symbolic

_MATH = {
    **{name: getattr(boxed, name) for name in ("extract_answer", "extract_boxed_answer", "last_boxed_only_string", "remove_boxed")},
    "grade_answer_mathd": hendrycks.grade_answer_mathd,
    "mathd_normalize_answer": hendrycks.mathd_normalize_answer,
    "_strip_string": hendrycks.strip_string,
    "grade_answer_sympy": symbolic.grade_answer_sympy,
    "grade_answer_verl": boxed_math.grade_answer_verl,
}
_HUB = {
    "math_utils": _MATH,
    "math_dapo_utils": vars(text_rewards),
    "deepscaler": vars(boxed_math),
    "f1": vars(text_rewards),
    "gpqa": {
        **vars(text_rewards),
        "DEFAULT_VALID_LETTERS": text_rewards.LETTERS,
        "_extract_letter_from_response": text_rewards.extract_letter,
    },
}

for package in ("slime", "slime.rollout", "slime.rollout.rm_hub"):
    sys.modules[package] = ModuleType(package)
    sys.modules[package].__path__ = []
for name, functions in _HUB.items():
    module = sys.modules[f"slime.rollout.rm_hub.{name}"] = ModuleType(f"slime.rollout.rm_hub.{name}")
    vars(module).update({key: value for key, value in functions.items() if key == "_strip_string" or not key.startswith("__")})
