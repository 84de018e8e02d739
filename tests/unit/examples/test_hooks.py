"""The example's functions, called as the reward service calls them."""

import json
from pathlib import Path

import numpy as np

from examples.hooks import arithmetic
from services.reward.custom_functions import KEEP, REMOVE, SCORE, SEE, Functions
from shared.schema.sample import Sample
from tests.support.run_config import run_config
from tests.support.tables import table

MODULE = "examples.hooks.arithmetic"


def sample(index: int, text: str, **changes: object) -> Sample:
    fields = {"finish": "stop", "metadata": {}, **changes}
    return Sample(
        group="g00000003",
        index=index,
        prompt=np.array([1], np.int32),
        response=np.array([2, 3], np.int32),
        log_probs=np.zeros(2, np.float32),
        mask=np.ones(2, np.uint8),
        segments=[(0, 2, 0)],
        text=text,
        prompt_text="40+2=",
        label="42",
        **fields,  # type: ignore[arg-type]
    )


@table(("text", "number"), [("42", "42"), ("(02 04)42", "42"), ("41 no. 40+2=42", "42"), ("no. 40+2=", "2"), ("", None), ("(", None)])
def test_the_last_number_is_the_answer(text: str, number: str | None) -> None:
    assert arithmetic.answer(text) == number


async def test_all_functions_on_one_group(tmp_path: Path) -> None:
    fields = {SCORE: "score", KEEP: "mixed", REMOVE: "without_truncated", SEE: "write_down"}
    sections: dict[str, dict[str, str]] = {"reward": {}, "rollout": {}}
    for field, name in fields.items():
        section, _, key = field.partition(".")
        sections[section][key] = f"{MODULE}:{name}"
    functions = Functions(run_config(tmp_path, **sections))
    group = [sample(0, "42"), sample(1, "41 no. 40+2=42", metadata={"tries": 2}), sample(2, "4", finish="length")]
    scores = await functions.score(group, None)
    assert [(score.reward, score.parts) for score in scores] == [(1.0, {"right": 1.0}), (0.9, {"right": 1.0}), (0.0, {"right": 0.0})]
    verdict = await functions.select(group, scores)
    assert verdict.filtered is None
    assert [score.removed for score in verdict.scores] == [False, False, True]
    assert [(score.reward, score.parts) for score in verdict.scores] == [(score.reward, score.parts) for score in scores]
    for texts, reason in ((["42", "42"], "all_right"), (["1", "2"], "all_wrong")):
        same = [sample(index, text) for index, text in enumerate(texts)]
        assert (await functions.select(same, await functions.score(same, None))).filtered == reason
    lines = [json.loads(line) for line in (tmp_path / "runs" / "test" / "groups.jsonl").read_text().splitlines()]
    assert [line["rewards"] for line in lines] == [[1.0, 0.9, 0.0], [1.0, 1.0], [0.0, 0.0]]
    assert {line["prompt"] for line in lines} == {"40+2="}
