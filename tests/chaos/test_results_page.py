"""The page's tables are those of the results that they are made from, of several runs joined."""

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.results_page import SEEDS, joined, put, summary, table, write

MARKS = f"before\n<!-- {SEEDS}: written by python -m tests.chaos --page -->\nold\n<!-- end of {SEEDS} -->\nafter\n"


def result(seed: int, recovery_s: float | None = 2.0, *problems: str, **fields: Any) -> dict[str, Any]:
    fault = {"kind": "kill -9", "targets": ["rollout-1"], "reached": 1, "recovery_s": recovery_s}
    return {"seed": seed, "problems": list(problems), "faults": [fault], "cpu_s": 3.0, "seconds": 10.0, "commit": "abc", **fields}


def test_the_last_result_of_a_seed_counts():
    found = joined([result(3, 1.0, "lost"), result(2), result(3, 4.0), result(3, variant="real")])
    assert [(item.get("variant", "fast"), item["seed"], item["problems"]) for item in found] == [
        ("fast", 2, []),
        ("fast", 3, []),
        ("real", 3, []),
    ]


def test_figures_are_by_fault_and_process():
    rows = table([result(0, 1.0), result(1, 5.0), result(2, None)]).splitlines()
    assert rows[2:] == ["| kill -9 | rollout | 3 | 3.0 s | 5.0 s |"]
    words = summary([result(0), result(1), result(2, 2.0, "g1 is lost"), result(7)])
    assert "4 seeds (0 to 2, 7) with 4 faults" in words and "at commit abc (4): 1 failed. Seed 2: g1 is lost." in words


def test_a_page_keeps_what_stands_outside_of_its_marks(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(MARKS)
    write([result(0), result(1, variant="real")], page)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert text.count("| kill -9 | rollout | 1 | 2.0 s | 2.0 s |") == 2
    with pytest.raises(ValueError, match="lacks the lines"):
        put("other", "text", page)
