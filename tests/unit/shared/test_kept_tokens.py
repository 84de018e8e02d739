"""What travels with samples besides tokens: those that the sampler kept, and experts."""

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.engine.generation import GenerationRequest, first_tokens, group_body, parse_group, parse_piece, with_nuclei
from services.rollout.engine.public_requests import GenerateRequest, engine_body, parse_request
from services.rollout.engine.transport import EngineError, InvalidRequest
from services.rollout.in_flight import Partial
from services.rollout.producer_process import _continue
from services.trainer.packing import pack
from shared.config.engine_limits import Capabilities
from shared.hooks import HookSample
from shared.hooks.sample_conversion import Served, from_stored, packed, to_stored, unpacked
from shared.runtime.errors import BadMessage
from shared.schema import sample as samples
from shared.schema.kept_tokens import Kept
from shared.schema.messages import Sampling
from shared.schema.sample import ExpertChoices, InvalidSample, Sample, SampleLimits, fitted
from shared.sessions.session import TurnGeneration
from tests.support.run_config import run_config
from tests.support.tables import table
from tests.support.valid_messages import example

LIMITS = SampleLimits(vocabulary=20, kept=True)
ROWS = [[4, 9], [5], [7, 1, 6]]
ROW_LISTS = st.lists(st.lists(st.integers(0, 19), max_size=5), max_size=8)


def sample(**changes: Any) -> Sample:
    known = {"prompt": [1, 2, 3], "response": [4, 5, 6], "log_probs": -1.0, "kept": Kept.of(ROWS), "text": "abc"}
    return example(Sample, **{"group": "g00000001", **known, **changes})


def rows_of(kept: Kept | None) -> list[list[int]]:
    assert kept is not None
    return [kept.ids[start:end].tolist() for start, end in zip(kept.offsets[:-1], kept.offsets[1:], strict=True)]


@given(ROW_LISTS, ROW_LISTS, st.data())
def test_parts_places_and_sums_are_those_of_lists(rows: list[list[int]], more: list[list[int]], data: st.DataObject) -> None:
    kept = Kept.of(rows)
    assert rows_of(kept) == rows and rows_of(kept.followed_by(Kept.of(more))) == rows + more
    start, end = sorted(data.draw(st.tuples(st.integers(0, len(rows)), st.integers(0, len(rows)))))
    assert rows_of(kept.part(start, end)) == rows[start:end]
    places = data.draw(st.lists(st.integers(-1, len(rows) - 1), max_size=9))
    assert rows_of(kept.at(np.array(places, np.int64))) == [[] if place < 0 else rows[place] for place in places]
    keys = kept.keys().tolist()
    assert all((sorted(a) == sorted(b)) == (keys[i] == keys[j]) for i, a in enumerate(rows) for j, b in enumerate(rows))


def test_they_come_back_from_the_store_as_they_went_and_are_cut_with_the_response() -> None:
    [found, bare] = samples.decode(samples.encode([sample(), sample(kept=None, mask=np.zeros(3, np.uint8))], 1 << 20), LIMITS)
    assert rows_of(found.kept) == ROWS and bare.kept is None
    [cut] = fitted([found], 5, "truncate")
    assert rows_of(cut.kept) == ROWS[:2] and cut.problem(LIMITS) is None


@table(
    ("kept", "reason"),
    [
        (None, "kept is missing: support_replay"),
        (Kept.of(ROWS[:2]), "kept has 3 offsets for 3 response tokens"),
        (Kept.of([[4], [5], [9, 1]]), "kept has 2 tokens at 2, and the sampled token 6 is not among them"),
        (Kept.of([[4], [5], [6, 20]]), r"kept holds tokens 4 to 20, which are not in \[0, 20\)"),
        (Kept.of([[4], [5], [6, -1]]), "kept holds tokens -1 to 6"),
        (Kept(np.array([4, 5, 6], np.int32), np.array([0, 2, 1, 3], np.int32)), "offsets from 0 to 3 for 3 ids; expected ascending"),
        (Kept(np.array([4, 5, 6], np.int32), np.array([0, 1, 2, 4], np.int32)), "offsets from 0 to 4 for 3 ids"),
        (Kept(np.array([4, 5, 6], np.int64), np.array([0, 1, 2, 3], np.int32)), "not two arrays of int32"),
    ],
)
def test_what_does_not_fit_the_tokens_costs_its_sample(kept: Kept | None, reason: str) -> None:
    with pytest.raises(InvalidSample, match=reason):
        samples.decode(samples.encode([sample(kept=kept)], 1 << 20), LIMITS)


def test_hooks_see_and_give_them_and_may_not_change_the_tokens_under_them() -> None:
    seen = unpacked(packed(from_stored(sample())))
    again = to_stored(seen, "g00000001", 0, 0, Served(0, 0), LIMITS)
    assert rows_of(again.kept) == ROWS and not again.attributes.keys() & {"rollout_top_p_token_ids", "rollout_top_p_token_offsets"}
    seen.tokens[-1] = 8
    with pytest.raises(BadMessage, match="the sampled token 8 is not among them"):
        to_stored(seen, "g00000001", 0, 0, Served(0, 0), LIMITS)
    seen.rollout_top_p_token_ids = seen.rollout_top_p_token_offsets = None
    with pytest.raises(BadMessage, match="kept is missing"):
        to_stored(seen, "g00000001", 0, 0, Served(0, 0), LIMITS)


def test_a_function_gets_them_again_with_a_sample_that_it_gave_back() -> None:
    again = HookSample(index=7, session_id="new", tokens=[1, 2])
    _continue(again, sample(attributes={"state": {"a": 1}, "session_id": "old"}, finish="abort"))
    assert (again.index, again.session_id, getattr(again, "state", None), again.status) == (7, "new", {"a": 1}, HookSample.Status.ABORTED)
    assert again.rollout_top_p_token_offsets is not None and len(again.rollout_top_p_token_offsets) == again.response_length + 1


ENGINE = Capabilities("0.5.20", 20, 100, False, False)
REQUEST = GenerationRequest([1, 2], 3, rid="a", kept=8)


def answer(**meta: Any) -> dict[str, Any]:
    told = {
        "id": "a$",
        "finish_reason": {"type": "length"},
        "weight_version": "0",
        "completion_tokens": 3,
        "output_token_logprobs": [[-3.0, token, None] for token in (4, 5, 6)],
        "output_token_sampling_mask": ROWS,
        "output_token_sampling_logprobs": [-1.0, 0.0, -0.5],
    }
    return {"output_ids": [4, 5, 6], "text": "abc", "meta_info": told | meta}


def test_an_engine_is_asked_for_them_and_its_log_probs_are_over_them() -> None:
    body = group_body([REQUEST], Sampling(temperature=1.0, top_p=0.9, max_new_tokens=3), ENGINE, "v0")
    assert body["return_sampling_mask"] == [True] and body["sampling_params"][0]["top_k"] == 8
    assert group_body([REQUEST], Sampling(temperature=1.0, top_k=3, max_new_tokens=3), ENGINE, "v0")["sampling_params"][0]["top_k"] == 3
    plain = group_body([GenerationRequest([1, 2], 3)], Sampling(temperature=1.0, max_new_tokens=3), ENGINE, "v0")
    assert "return_sampling_mask" not in plain and plain["sampling_params"][0]["top_k"] == -1
    [found] = parse_group([answer()], [REQUEST], 0, set(), "engine")
    assert rows_of(found.kept) == ROWS and found.log_probs.tolist() == pytest.approx([-1.0, 0.0, -0.5])
    assert (found.log_probs < 0).all()  # 0 would say that no engine sampled it
    partial = Partial()
    partial.extend(first_tokens(found, 2), 9)
    partial.extend(parse_piece(answer(finish_reason=None), REQUEST, 2, 0, set(), "engine"), 9)
    assert partial.tokens.tolist() == [4, 5, 6] and rows_of(partial.kept) == ROWS


@table(
    ("meta", "reason"),
    [
        ({"output_token_sampling_mask": None}, "at 0 and 3 of 3 places; SGLang returns them from 0.5.20 on"),
        ({"output_token_sampling_mask": [*ROWS[:2], None]}, "at 2 and 3 of 3 places"),
        ({"output_token_sampling_logprobs": [-1.0]}, "at 3 and 1 of 3 places"),
        ({"output_token_sampling_mask": [*ROWS[:2], [7]]}, "the sampled token 6 is not among them"),
        ({"output_token_sampling_mask": [*ROWS[:2], []]}, "no kept token at a sampled place"),
        ({"output_token_sampling_mask": [*ROWS[:2], ["x"]]}, "cannot be read"),
    ],
)
def test_an_answer_with_others_is_refused_and_asked_for_again(meta: dict[str, Any], reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        parse_group([answer(**meta)], [REQUEST], 0, set(), "engine")
    with pytest.raises(EngineError, match=reason):
        with_nuclei(orjson.dumps(answer(**meta)), "engine")


def test_functions_ask_for_them_in_slimes_words() -> None:
    asks = {"custom_params": {"return_top_p_token_ids": True}}

    def body(**fields: Any) -> dict[str, Any]:
        request = parse_request(GenerateRequest, orjson.dumps({"input_ids": [1], **fields}), 20)
        found: dict[str, Any] = orjson.loads(engine_body(request, "r$", "v0", 8))
        return found

    assert body(sampling_params=asks)["sampling_params"]["top_k"] == 8 and body(sampling_params=asks)["return_sampling_mask"] is True
    assert body(sampling_params=asks | {"top_k": 5})["sampling_params"]["top_k"] == 5
    assert "return_sampling_mask" not in body(sampling_params={"custom_params": {"return_top_p_token_ids": False}})
    for refused in (
        {"sampling_params": asks, "stream": True},
        {"sampling_params": [asks]},
        {"sampling_params": {"custom_params": {"x": True}}},
    ):
        with pytest.raises(InvalidRequest, match=r"kept tokens come with whole answers|custom_params"):
            body(**refused)
    meta = orjson.loads(with_nuclei(orjson.dumps(answer()), "engine"))["meta_info"]
    assert (meta["top_p_token_ids"], meta["top_p_token_offsets"]) == ([4, 9, 5, 7, 1, 6], [0, 2, 3, 6])
    assert [log_prob for log_prob, *_ in meta["output_token_logprobs"]] == pytest.approx([-1.0, 0.0, -0.5])


def test_turns_put_theirs_together_and_a_stopped_one_is_cut() -> None:
    first, last = (
        TurnGeneration(completion=tokens, log_probs=np.zeros(len(tokens), np.float32), spans=(), finish="stop", kept=Kept.of(rows).marked())
        for tokens, rows in (([4, 5], ROWS[:2]), ([6], ROWS[2:]))
    )
    whole = TurnGeneration.decode(first.then(last).encode())
    assert rows_of(Kept.unmarked(whole.kept)) == ROWS and rows_of(Kept.unmarked(whole.stopped_at(2).kept)) == ROWS[:2]


TRUNCATES = {"rollout_top_p": 0.9}


@table(
    ("sections", "reason"),
    [
        ({"rollout": {}}, "every token of the vocabulary is kept"),
        ({"rollout": TRUNCATES, "ingest": {"ingest_groups": "beside"}}, "groups from outside"),
        ({"rollout": {**TRUNCATES, "sglang": {"speculative_algorithm": "EAGLE"}}}, "speculative-algorithm = EAGLE verifies drafts"),
        ({"rollout": {**TRUNCATES, "sglang": {"sampling-backend": "ascend"}}}, "sampling-backend = ascend"),
        (
            {"rollout": {"rollout_top_k": 60, "sglang": {"sampling-mask-max-tokens": 50}}},
            "rollout_top_k is more than rollout.sglang.sampling",
        ),
        ({"rollout": {**TRUNCATES, "sglang": {"speculative-algo": "NGRAM"}}}, "speculative-algorithm = NGRAM verifies drafts"),
        ({"rollout": {"rollout_top_k": 1}}, "rollout_top_k = 1 keeps the sampled token alone"),
        ({"rollout": TRUNCATES, "algorithm": {"use_opd": True, "opd_type": "sglang", "opd_teachers": {"a": "http://a:1"}}}, "opd_teachers"),
    ],
)
def test_what_cannot_be_replayed_is_refused_and_left_by_auto(sections: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=f"support_replay.*on, but .*{reason}"):
        run_config(tmp_path, **sections, trainer={"support_replay": "on"})
    left = run_config(tmp_path, **sections)
    assert left.kept_top_k == 0 and left.support_mismatch == left.rollout.truncates


def test_auto_replays_what_is_known_of_all_samples(tmp_path: Path) -> None:
    assert run_config(tmp_path, rollout=TRUNCATES).kept_top_k == 2048
    assert run_config(tmp_path, rollout={**TRUNCATES, "sglang": {"sampling-mask-max-tokens": 100}}).kept_top_k == 50
    small = [
        {"replicas": 1, "sglang": {"sampling-mask-max-tokens": 100}},
        {"replicas": 1, "sglang": {"sampling-mask-max-tokens": 9000}},
        {"replicas": 1},
    ]
    assert run_config(tmp_path, rollout={**TRUNCATES, "engine_groups": small}).kept_top_k == 50, "the smallest of its groups"
    min_p = {"sglang": {"preferred-sampling-params": '{"min_p": 0.05}'}}
    assert run_config(tmp_path, rollout=min_p).kept_top_k == 2048 and run_config(tmp_path, rollout=min_p).support_mismatch == []
    assert run_config(tmp_path, rollout={**TRUNCATES, "agent": "package.module:play"}).kept_top_k == 2048
    function = {**TRUNCATES, "custom_generate_function_path": "package.module.play"}
    assert run_config(tmp_path, rollout=function).kept_top_k == 0  # it may not store them
    assert run_config(tmp_path, rollout=function, trainer={"support_replay": "on"}).kept_top_k == 2048
    off = run_config(tmp_path, rollout=TRUNCATES, trainer={"support_replay": "off"})
    assert off.kept_top_k == 0 and off.support_mismatch == ["rollout_top_p = 0.9"]


def test_the_likeliest_tokens_are_cut_with_the_tokens() -> None:
    [found] = parse_group([answer()], [REQUEST], 0, set(), "engine")
    found = replace(found, top_log_probs=np.arange(12, dtype=np.float32))  # two at each of three places
    assert first_tokens(found, 2).top_log_probs.tolist() == list(range(8))


@pytest.mark.parametrize(
    ("given", "turn"),
    [({"temperature": 0.5, "min_p": 0}, True), *(({name: 0.5}, False) for name in ("min_p", "presence_penalty", "frequency_penalty"))],
)
def test_gateways_answer_only_what_they_can_pass_on(given: dict[str, Any], turn: bool) -> None:
    asked = GenerateRequest.model_validate({"input_ids": [1, 2], "sampling_params": given}, context=100)
    assert asked.is_turn == turn


# --- experts that travel with samples: through the store, to and from hooks, and refused where they do not fit

CHOICES = ExpertChoices(layers=(1, 2), total=3, per_token=2, count=4)
CHOSEN = SampleLimits(choices=CHOICES)
ROUTED = (np.arange(5 * 4) % 4).astype(np.int16).reshape(5, 2, 2)


def routed(**changes: Any) -> Sample:
    return sample(**{"kept": None, "routed_experts": ROUTED, **changes})


def test_they_come_back_from_the_store_as_they_went() -> None:
    (found,) = samples.decode(samples.encode([routed()], 1 << 20), CHOSEN)
    assert found.routed_experts is not None and found.routed_experts.dtype == np.int16
    assert np.array_equal(found.routed_experts, ROUTED)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"routed_experts": None}, "routed_experts are missing"),
        ({"routed_experts": ROUTED[:4]}, r"shape \[4, 2, 2\]; expected \[5, 2, 2\]"),
        ({"routed_experts": ROUTED[..., :1]}, r"shape \[5, 2, 1\]"),
        ({"routed_experts": ROUTED + np.int16(1)}, "1 to 4; the model's experts are 0 to 3"),
        ({"routed_experts": ROUTED.astype(np.int32)}, "not an array of int16"),
    ],
)
def test_experts_that_do_not_fit_the_tokens_cost_their_sample(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidSample, match=reason):
        samples.decode(samples.encode([routed(**changes)], 1 << 20), CHOSEN)


def test_a_sample_that_is_not_trained_needs_none() -> None:
    bare = routed(mask=np.zeros(3, np.uint8), routed_experts=None)
    assert bare.problem(CHOSEN) is None and routed(routed_experts=None).problem() is None


def test_one_that_is_cut_keeps_those_of_what_is_left_and_one_that_is_not_trained_is_packed_without() -> None:
    [shorter] = fitted([routed()], 5, "truncate")
    assert np.array_equal(shorter.routed_experts, ROUTED[:4]) and shorter.problem(CHOSEN) is None
    unreadable = routed(mask=np.zeros(3, np.uint8), routed_experts=ROUTED[:2])
    experts = pack([routed(), unreadable], [1.0, 1.0], CHOICES).experts
    assert experts is not None and np.array_equal(experts[:5], ROUTED) and (experts[5:] == -1).all()


def test_an_engine_tells_all_layers_and_those_with_experts_are_kept() -> None:
    told = (np.arange(5 * 6) % 4).astype("<i4")
    found = CHOICES.read(base64.b64encode(told.tobytes()).decode(), 5)
    assert np.array_equal(found, told.reshape(5, 3, 2)[:, 1:])
    with pytest.raises(ValueError, match="30 experts for 4 tokens"):
        CHOICES.read(base64.b64encode(told.tobytes()).decode(), 4)


def test_hooks_see_and_give_them() -> None:
    seen = from_stored(routed())
    assert np.array_equal(seen.rollout_routed_experts, ROUTED)
    again = to_stored(seen, "g00000001", 0, 0, Served(0, 0), CHOSEN)
    assert np.array_equal(again.routed_experts, ROUTED) and "rollout_routed_experts" not in again.attributes
    seen.rollout_routed_experts = (np.arange(5 * 6) % 4).reshape(5, 3, 2)  # of all layers, as slime's functions keep them
    assert to_stored(seen, "g00000001", 0, 0, Served(0, 0), CHOSEN).routed_experts.shape == (5, 2, 2)
    seen.rollout_routed_experts = ROUTED[:3]
    with pytest.raises(BadMessage, match=r"shape \[3, 2, 2\]; expected \[5, 2, 2\]"):
        to_stored(seen, "g00000001", 0, 0, Served(0, 0), CHOSEN)


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"ingest": {"ingest_groups": "beside"}}, "groups from outside"),
        ({"rollout": {"agent": "package.module:play"}}, "the sessions of agents"),
        ({"rollout": {"sglang": {"enable-hierarchical-cache": True}}}, "have lost their experts"),
    ],
)
def test_what_tells_no_experts_is_refused(sections: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=reason):
        run_config(tmp_path, **sections, trainer={"use_rollout_routing_replay": True})
