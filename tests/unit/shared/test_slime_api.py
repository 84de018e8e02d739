"""slime's names, fields and parameters as users' files have them (`tests/support/slime_api.json`), and what stands behind them here."""

import importlib
import inspect
import json
from dataclasses import fields
from typing import Any

from shared.hooks import import_names
from tests.support.service_process import ROOT
from tests.support.tables import table

API: dict[str, dict[str, Any]] = json.loads((ROOT / "tests" / "support" / "slime_api.json").read_text())

NAMES = [(module, name) for module, names in API.items() for name in names]


def accepts(function: Any, parameters: list[str]) -> bool:
    """Whether a function takes these parameters in this order, and by name."""
    found = inspect.signature(function).parameters
    own = [name for name, one in found.items() if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL) and name not in ("self", "cls")]
    return own[: len(parameters)] == parameters


@table(("module", "name"), NAMES)
def test_a_name_of_slimes_has_its_fields_and_parameters(module: str, name: str) -> None:
    import_names.install_slime_names()
    found, expected = getattr(importlib.import_module(module), name), API[module][name]
    if isinstance(expected, list):
        assert accepts(found, expected), inspect.signature(found)
    elif expected is not None:
        if expected["fields"]:
            assert {*expected["fields"]} <= {one.name for one in fields(found)}
        for method, parameters in expected["methods"].items():
            assert accepts(getattr(found, method), parameters), method
        assert all(hasattr(found, other) for other in expected["others"])


def test_fields_of_a_sample_stand_in_slimes_order() -> None:
    import_names.install_slime_names()
    found = [one.name for one in fields(importlib.import_module("slime.utils.types").Sample)]
    assert found == API["slime.utils.types"]["Sample"]["fields"]
