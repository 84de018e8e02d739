"""Groups from outside: what they say of their tokens, and what does not go with them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from myxo.preflight.inspection import Inspection, Note
from myxo.preflight.machine_checks import check_ingest
from services.gateway.ingest import FinishedGroup, GroupLimits, parse_group
from shared.config.engine_limits import longest_trained
from shared.config.run_config import RunConfig
from shared.config.service_sections import KEY_VARIABLE
from shared.formats.request import TurnRefused
from shared.runtime.errors import BadInput, ConfigError
from shared.schema import sample as sample_codec
from shared.schema.sample import SampleLimits
from tests.support.run_config import run_config, write_jsonl
from tests.support.tables import table

VOCABULARY, LIVE = 50, 9
SMALL: dict[str, Any] = {
    "id": "one",
    "tokens": [[1, 2, 3, 4, 5, 6], [1, 2, 6, 7, 8, 9]],
    "masks": [[0, 0, 1, 0, 0, 1], [0, 1, 1, 1, 1, 1]],
    "log_probs": [[0, 0, -0.5, 7, 7, -1], [0, -1, -1, -1, -1, -1]],
    "versions": [[0, 0, 8, 0, 99999, 9], [0, 8, 8, 8, 8, 8]],
    "scores": [1.0, 0.5],
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    directory = tmp_path_factory.mktemp("ingest")
    write_jsonl(directory / "prompts.jsonl")
    return run_config(directory, ingest={"ingest_groups": "beside"}, rollout={"max_staleness": 2, "min_rollouts": 2})


def read(body: dict[str, Any], config: RunConfig) -> FinishedGroup:
    return parse_group(json.dumps(body).encode(), GroupLimits(config, VOCABULARY, LIVE, longest_trained(config)), str)


def test_what_comes_before_the_first_trained_token_is_the_prompt(config: RunConfig) -> None:
    group = read(SMALL, config)
    one, other = group.samples
    assert (one.prompt.tolist(), one.response.tolist(), other.prompt.tolist()) == ([1, 2], [3, 4, 5, 6], [1])
    assert one.segments == [(0, 3, 8), (3, 4, 9)], "a token that nobody drew has the version of the trained one before it"
    assert (group.oldest, other.segments) == (8, [(0, 5, 8)])
    assert (one.text, one.prompt_text, one.finish, one.given_reward) == ("[3 4 5 6]", "[1 2]", "stop", 1.0)
    assert np.isclose(one.log_probs, [-0.5, 7, 7, -1]).all()


def test_what_is_scored_is_the_text_of_the_tokens_that_were_sampled(config: RunConfig) -> None:
    one, other = read(SMALL, config).samples
    assert (one.turns, other.turns) == (["[3]", "[6]"], [])  # by default those that are trained; the other sample is one turn
    sampled = [[0, 0, 1, 1, 0, 1], [0, 1, 1, 0, 1, 1]]  # of the first one a token more than is trained
    one, other = read(SMALL | {"sampled": sampled}, config).samples
    assert (one.turns, other.turns) == (["[3 4]", "[6]"], ["[2 6]", "[8 9]"])
    stated = ["[3 4  5 6]", "what the producer says"]  # the first is the text of its tokens, and a part of it is a tool's
    assert [one.turns for one in read(SMALL | {"texts": stated}, config).samples] == [["[3]", "[6]"], []]
    ended = json.dumps(SMALL | {"texts": ["[3<|end|> 4 5 6]<|end|>", "?"]}).encode()  # of the first, special tokens are there
    group = parse_group(ended, GroupLimits(config, VOCABULARY, LIVE, longest_trained(config)), str, ["<|end|>"])
    assert [one.turns for one in group.samples] == [["[3]", "[6]"], []]
    with pytest.raises(TurnRefused, match="3 entries for 6 tokens"):
        read(SMALL | {"sampled": [[0, 0, 1], [1] * 6]}, config)


@table(
    ("changes", "field", "status"),
    [
        ({"versions": 10}, "versions", 400),
        ({"scores": None, "environment": "f1", "metadata": {"rm_type": "math"}}, "metadata", 400),
        ({"versions": [[9, 9, 9, 9, 9, 10], [9] * 6]}, "versions", 400),
        ({"versions": 6}, "versions", 409),
        ({"versions": [9, 6]}, "versions", 409),
        ({"tokens": [[1, 2, 3, 4, 5, 50], [1] * 6]}, "tokens[0][5]", 400),
        ({"rollouts": [0, 0]}, "rollouts", 400),
        ({"label": 5}, "label", 400),
        ({"metadata": []}, "metadata", 400),
        ({"id": "x" * 129}, "id", 400),
        ({"scores": [{"reward": 1.0}, {"style": 1.0}]}, "scores[1]", 400),
    ],
)
def test_a_group_that_the_run_would_not_train_is_refused(config: RunConfig, changes: dict[str, Any], field: str, status: int) -> None:
    with pytest.raises(TurnRefused) as refused:
        read(SMALL | changes, config)
    assert (refused.value.field, refused.value.status) == (field, status)


def test_the_bound_itself_may_be_reached(config: RunConfig) -> None:
    assert read(SMALL | {"versions": LIVE - 2}, config).oldest == LIVE - 2


def test_stale_tokens_may_come_where_the_run_masks_them(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "prompts.jsonl")
    masking = run_config(tmp_path, rollout={"max_staleness": 2, "staleness_policy": "mask"})
    assert read(SMALL | {"versions": [9, 6]}, masking).oldest == 6
    with pytest.raises(TurnRefused, match="version 6"):
        read(SMALL | {"versions": 6}, masking)


def test_a_sample_of_more_versions_than_a_reference_lists_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "prompts.jsonl")
    wide = run_config(tmp_path, rollout={"max_staleness": 5000}, trainer={"max_tokens_per_gpu": 8192})
    length = 1200
    row = {"tokens": [1] * length, "masks": [0] + [1] * (length - 1), "log_probs": [-1.0] * length, "versions": list(range(length))}
    body = {"id": "wide", "scores": [0, 1], **{name: [column] * 2 for name, column in row.items()}}
    with pytest.raises(TurnRefused, match="1199 weight versions"):
        parse_group(json.dumps(body).encode(), GroupLimits(wide, VOCABULARY, length, longest_trained(wide)), str)


SCALARS = st.none() | st.booleans() | st.integers(-2, 60) | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
VALUES = st.recursive(SCALARS, lambda values: st.lists(values, max_size=6), max_leaves=12)


@given(data=st.data())
def test_anything_anywhere_is_a_valid_group_or_a_refusal(config: RunConfig, data: st.DataObject) -> None:
    body = json.loads(json.dumps(SMALL))
    for _ in range(data.draw(st.integers(1, 2))):
        name = data.draw(st.sampled_from([*SMALL, "rollouts", "finish", "texts", "environment", "label", "metadata", "more"]))
        column = body.get(name)
        if isinstance(column, list) and column and data.draw(st.booleans()):
            at = data.draw(st.integers(0, len(column) - 1))
            if isinstance(column[at], list) and column[at] and data.draw(st.booleans()):
                column[at][data.draw(st.integers(0, len(column[at]) - 1))] = data.draw(SCALARS)
            else:
                column[at] = data.draw(VALUES)
        else:
            body[name] = data.draw(VALUES)
    try:
        group = read(body, config)
    except TurnRefused as error:
        assert error.status in (400, 409)
        return
    assert len(group.samples) == 2
    sample_codec.decode(sample_codec.encode(group.samples, 1 << 20), SampleLimits(VOCABULARY, LIVE))


@given(body=st.binary(max_size=30))
def test_any_bytes_are_refused(config: RunConfig, body: bytes) -> None:
    with pytest.raises(TurnRefused):
        parse_group(body, GroupLimits(config, VOCABULARY, LIVE, longest_trained(config)), str)


# --- what does not go with groups from outside


@pytest.fixture(autouse=True)
def prompts(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "prompts.jsonl")


@pytest.mark.parametrize("mode", ["beside", "alone"])
def test_groups_from_outside_lack_the_log_probs_of_teachers(tmp_path: Path, mode: str) -> None:
    with pytest.raises(BadInput, match=r"ingest.ingest_groups.*opd_teachers"):
        run_config(
            tmp_path,
            ingest={"ingest_groups": mode},
            algorithm={"use_opd": True, "opd_type": "sglang", "opd_teachers": {"math": "http://127.0.0.1:1"}},
        )


def test_who_generates_alone_is_alone(tmp_path: Path) -> None:
    function = {"rollout_function_path": "tests.support.rollout_functions:generate"}
    with pytest.raises(BadInput, match="rollout_function_path generates training groups as well"):
        run_config(tmp_path, ingest={"ingest_groups": "alone"}, rollout=function)
    assert run_config(tmp_path, ingest={"ingest_groups": "beside"}, rollout=function).ingest.ingest_groups == "beside"


def test_nothing_comes_in_unless_it_is_told(tmp_path: Path) -> None:
    assert run_config(tmp_path).ingest.ingest_groups == "off"
    with pytest.raises(BadInput, match="ingest_groups"):
        run_config(tmp_path, ingest={"ingest_groups": "on"})


def test_the_producers_key_is_missed_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(mode: str, starts: bool = True, **gateway: int) -> list[str]:
        config = run_config(tmp_path, ingest={"ingest_groups": mode}, gateway=gateway)
        return [one.text if isinstance(one, Note) else str(one) for one in check_ingest(Inspection(config, starts=starts))]

    monkeypatch.setenv(KEY_VARIABLE, "too short")
    with pytest.raises(ConfigError, match=rf"{KEY_VARIABLE} = '\*{{9}}': required with ingest.ingest_groups"):
        found("beside")
    assert found("off") == found("beside", starts=False) == []
    [note] = found("alone", gateway_replicas=0)
    assert "started elsewhere" in note
    monkeypatch.setenv(KEY_VARIABLE, "x" * 16)
    assert found("alone") == []


def test_what_torch_has_no_attention_for_is_too_long(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "prompts.jsonl")
    for backend, longest in (("torch", 5), ("megatron", 64)):
        trainer = {"trainer_backend": backend, "max_tokens_per_gpu": 64}
        config = run_config(tmp_path, ingest={"ingest_groups": "beside"}, rollout={"overlong_samples": "truncate"}, trainer=trainer)
        config.model.hf_checkpoint.mkdir(exist_ok=True)
        (config.model.hf_checkpoint / "config.json").write_text('{"index_topk": 5}')
        assert longest_trained(config) == longest
        assert [sample.length for sample in read(SMALL | {"versions": [[9] * 6] * 2}, config).samples] == [min(6, longest)] * 2
