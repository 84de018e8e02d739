"""What `myxo samples` makes of a ledger: every group's group, the list's filters and orders, one group's provenance, a sample's page."""

import io
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from myxo import main as command_line
from myxo.commands.samples import ORDERS, group_named, target
from myxo.display.sample_page import Pieces, ShownGroup, as_plain, json_line, page, prompt_text, table, token_lines
from shared.data.rollout_files import RolloutRecord
from shared.runtime.errors import ConfigError
from shared.runtime.safe_text import printable
from shared.schema.ledger import (
    BatchFormed,
    BatchTrained,
    CheckpointDurable,
    EvalScored,
    EvalStarted,
    GroupDead,
    GroupRequeued,
    GroupsAdmitted,
    GroupsDropped,
    GroupsScored,
    LedgerRecord,
    RunFinished,
    VersionLive,
    eval_group_id,
    group_id,
)
from shared.schema.messages import Payload, SampleMeta, ScoredGroup
from shared.schema.sample import Sample
from shared.view.group_history import STATUSES, GroupHistory, GroupRecord, ProvenanceStep, kept_group
from shared.view.group_index import GroupIndex, GroupQuery
from tests.support import tables
from tests.support.valid_messages import example


def names(*numbers: int) -> list[str]:
    return [group_id(number) for number in numbers]


def test_files_alone_give_no_reward_to_a_group_that_was_never_scored() -> None:
    response = {"finish": "stop", "prompt_length": 1, "length": 2, "response": "x"}
    for reward, known in ((None, False), (0.5, True)):
        samples = [{"index": 0, "reward": 0.5, "parts": {"a": 1.0, "b": None}, **response}, {"index": 1, "reward": reward, **response}]
        record = RolloutRecord.model_validate({"group": group_id(1), "attempt": 0, "status": "dead", "at": 1.0, "samples": samples})
        group = kept_group(1, record)
        assert (group.rewards, group.parts) == (((0.5, 0.5), ({"a": 1.0}, {})) if known else ((), ())) and group.tokens == (2, 2)


def scored(number: int, rewards: tuple[float, ...], versions: tuple[int, int] = (0, 0), tokens: int = 5, attempt: int = 0) -> ScoredGroup:
    lengths = range(tokens, tokens + len(rewards))
    samples = [SampleMeta(tokens=of, trained=of, oldest=versions[0], newest=versions[1], finish="stop") for of in lengths]
    fields = {"samples": samples, "rewards": list(rewards), "replica": "rollout-0", "started": 100.0, "ended": 103.5}
    return ScoredGroup(group=group_id(number), attempt=attempt, payload=Payload(keys=[f"k{number}.{attempt}"], bytes=1), **fields)


# 0, 1 trained and durable; 2, 3 in the batch of step 1; 4 dropped; 5 dead; 6 ready in its second attempt; 7 requeued; 8 outstanding
LEDGER: list[LedgerRecord] = [
    VersionLive(version=0, at=100.0),
    GroupsAdmitted(first=0, count=8, version=0, at=100.0),
    GroupsScored(groups=[scored(0, (0.0, 1.0)), scored(1, (1.0, 1.0), tokens=50)], at=104.0),
    BatchFormed(step=0, version=0, groups=names(0, 1), at=105.0),
    GroupsScored(groups=[scored(n, (0.25, 0.25), (0, 1)) for n in (2, 3, 4, 6, 7)], at=106.0),
    GroupRequeued(group=group_id(6), attempt=1, reason="payload lost", at=107.0),
    BatchTrained(step=0, version=1, started=105.0, ended=108.0, at=108.0),
    VersionLive(version=1, at=108.0),
    GroupsDropped(groups=names(4), reason="stale", at=109.0),
    BatchFormed(step=1, version=1, groups=names(2, 3), at=109.0),
    GroupDead(group=group_id(5), reason="reward-0: the verifier hung", at=110.0),
    GroupsScored(groups=[scored(6, (0.5, -1.0), (1, 1), attempt=1)], at=111.0),
    GroupRequeued(group=group_id(7), attempt=1, reason="payload lost", at=112.0),
    CheckpointDurable(steps=1, at=113.0),
    GroupsAdmitted(first=8, count=1, version=1, at=114.0),
]


def folded(ledger: Iterable[LedgerRecord] = LEDGER) -> GroupIndex:
    found = GroupIndex()
    found.apply(list(enumerate(ledger, 1)))
    return found


def listed(ledger: Iterable[LedgerRecord] = LEDGER, **wanted: Any) -> list[GroupRecord]:
    """The wanted groups, the last in order last, as the command lists them."""
    return folded(ledger).page(GroupQuery(**wanted))[0][::-1]


@dataclass
class Life:
    """A group of a ledger, and what the ledger tells of it."""

    record: GroupRecord
    steps: list[ProvenanceStep]
    history: GroupHistory


def life(group: int | str, ledger: Iterable[LedgerRecord] = LEDGER) -> Life:
    index = folded(ledger)
    record = index.group(group if isinstance(group, str) else group_id(group))
    assert record is not None
    return Life(record, index.provenance(record), index.history)


# --- folding


def test_where_every_group_is() -> None:
    where = {int(group.group[1:]): group.where() for group in listed()}
    assert where == {
        0: "trained at step 0",
        1: "trained at step 0",
        2: "in batch of step 1",
        3: "in batch of step 1",
        4: "dropped (stale)",
        5: "dead (reward-0: the verifier hung)",
        6: "ready",
        7: "requeued (payload lost)",
        8: "outstanding",
    }


def test_the_facts_of_a_group_are_those_of_its_latest_attempt() -> None:
    (group,) = listed(group=group_id(6))
    assert (group.attempt, group.rewards, group.tokens, group.oldest, group.newest) == (1, (0.5, -1.0), (5, 6), (1, 1), (1, 1))
    assert (group.replica, group.seconds, group.reward, group.at) == ("rollout-0", 3.5, -0.25, 111.0)
    (given_up,) = listed(group=group_id(7))
    assert (given_up.attempt, given_up.rewards, given_up.reward, given_up.seconds) == (1, (), None, None)


def test_a_ledger_that_breaks_its_rules_can_be_looked_at() -> None:
    odd = [
        BatchTrained(step=9, version=1, started=0, ended=1, at=1),
        GroupDead(group="g99", reason="x", at=1),
        RunFinished(steps=1, at=1),
        GroupsScored(groups=[scored(0, (9.0, 9.0))], at=2.0),
    ]
    assert [group.where() for group in listed([*LEDGER, *odd])] == [group.where() for group in listed()]


def test_the_table_shows_each_group_in_a_line() -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    rows, of = folded().page(GroupQuery(limit=3))
    console.print(table("r", rows[::-1], of))
    lines = console.export_text().splitlines()
    assert "3 of 9 groups" in lines[0]
    assert lines[2].split() == ["g00000006", "1", "ready", "0.5", "-1", "5–6", "1", "rollout-0", "3.5"]
    assert lines[3].split()[:5] == ["g00000007", "1", "requeued", "(payload", "lost)"]
    assert lines[4].split() == ["g00000008", "0", "outstanding", "–", "–", "–", "–", "–"]


# --- one group


def test_the_provenance_of_a_trained_group() -> None:
    found = life(0)
    assert [(step.sequence, step.event) for step in found.steps] == [
        (2, "groups_admitted"),
        (3, "groups_scored"),
        (4, "batch_formed"),
        (7, "batch_trained"),
        (14, "checkpoint_durable"),
    ]
    assert "rewards 0 1" in found.steps[1].what
    assert gone(found) == "its samples were freed: step 0 is trained and in a durable checkpoint"


def test_the_provenance_of_a_group_that_was_made_twice() -> None:
    found = life(6)
    assert [step.what for step in found.steps] == [
        "admitted while version 0 was live",
        "attempt 0 back from rollout-0 after 3.5 s, rewards 0.25 0.25",
        "to be generated anew as attempt 1: payload lost",
        "attempt 1 back from rollout-0 after 3.5 s, rewards 0.5 -1",
    ]
    assert found.record.payload is not None and found.record.payload.keys == ["k6.1"]
    assert gone(found) is None


@tables.table(("number", "why"), [(4, "dropped"), (5, "given up"), (7, "still with"), (8, "still with")])
def test_why_a_group_has_no_samples(number: int, why: str) -> None:
    reason = gone(life(number))
    assert reason is not None and why in reason


def test_a_group_in_a_batch_and_one_trained_but_not_durable_have_their_samples() -> None:
    assert gone(life(2)) is None
    assert gone(life(0, LEDGER[:13])) is None


# --- pages


def sample(index: int = 0, **changes: object) -> Sample:
    of_tokens = {"log_probs": [-0.5, -1.25, np.nan, -2.0, -0.125], "mask": [1, 1, 0, 1, 1], "segments": [(0, 3, 0), (3, 5, 1)]}
    fields = {"group": group_id(2), "prompt": [7, 8], "response": [11, 12, 13, 14, 15], **of_tokens, "text": "fünf\x1b[2J", "label": "5"}
    metadata = {"level": 2, "odd": float("inf"), "array": np.array([1, 2])}
    return example(Sample, **{**fields, "index": index, "prompt_text": "2+3=", "metadata": metadata, **changes})


def printed(number: int, samples: list[Sample], index: int | None, absent: str | None = None) -> str:
    return shown(life(number), samples, index, absent)


def found_of(life: Life, samples: list[Sample], absent: str | None = None) -> ShownGroup:
    return ShownGroup("r", life.record, samples, absent, life.history.durable(life.record), life.steps)


def shown(life: Life, samples: list[Sample], index: int | None, absent: str | None = None) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(page(found_of(life, samples, absent), index, 100))
    return console.export_text()


def plain_of(life: Life, samples: list[Sample], index: int | None = None, pieces: Pieces | None = None) -> dict[str, Any]:
    """The JSON of a group, read back."""
    return json.loads(json_line(as_plain(found_of(life, samples), index, pieces)))


def gone(life: Life) -> str | None:
    return life.history.gone(life.record)


def test_a_samples_page_has_all_of_it() -> None:
    text = printed(2, [sample(), sample(1, turn_rewards=[(0, 2, 0.5), (3, 5, 0.0)])], 0)
    for part in ("g00000002/0 of run r", "2+3=", "in batch of step 1", "reward", "level"):
        assert part in text
    assert "rewards of turns" not in text
    text = printed(2, [sample(turn_rewards=[(0, 2, 0.5), (2, 3, 0.0), (3, 5, -1.25)]), sample(1)], 0)
    assert " ".join(text.split()).count("rewards of turns 0.5 (tokens 0–1), -1.25 (tokens 3–4)") == 1
    assert "tokens 0–2 under version 0, tokens 3–4 under version 1" in text
    assert "admitted while version 0 was live" in text
    assert "fünf\\x1b[2J" in text
    assert "\x1b" not in text


def test_tokens_stand_in_columns_with_their_mask_version_and_log_prob() -> None:
    lines = [line.split() for line in token_lines(sample(), width=40)]
    assert lines[:6] == [
        ["position", "0", "1", "2"],
        ["token", "11", "12", "13"],
        ["mask", "1", "1", "0"],
        ["version", "0", "0", "0"],
        ["log-prob", "-0.500", "-1.250", "nan"],
        [],
    ]
    assert lines[6] == ["position", "3", "4"]
    assert lines[9] == ["version", "1", "1"]
    assert len(list(token_lines(sample(), width=1))) == 5 * 6  # the narrowest terminal shows one token a block


def test_tokens_have_their_text_where_there_is_a_tokenizer() -> None:
    def pieces(tokens: list[int]) -> list[str]:
        return [{11: " a\n", 12: "\x1b", 13: "a longer one"}.get(token, "x") for token in tokens]

    lines = [line.split() for line in token_lines(sample(), 40, pieces)]
    assert lines[2] == ["text", "␣a\\n", "\\x1b", "a␣longe…"]
    plain = plain_of(life(2), [sample(), sample(1)], 0, pieces)
    assert plain["samples"][0]["response_pieces"] == [" a\n", "\x1b", "a longer one", "x", "x"]


# --- held-out prompts


def evaluated(row: int, rewards: list[float], **fields: object) -> EvalScored:
    values = {"dataset": "heldout", "version": 2, "oldest": 2, "newest": 3, "at": 120.0 + row, **fields}
    return EvalScored(group=eval_group_id("heldout", 2, row), rewards=rewards, **values)  # type: ignore[arg-type]


EVALUATION: list[LedgerRecord] = [
    *LEDGER,
    EvalStarted(dataset="heldout", version=2, prompts=3, at=119.0),
    evaluated(1, [1.0], parts=({"form": 0.5},)),
    evaluated(0, [], reason="rollout-0: too long"),
]


def test_held_out_prompts_are_listed_by_themselves() -> None:
    assert len(listed(EVALUATION)) == 9, "training groups only"
    rows = listed(EVALUATION, evaluation=True)
    assert [(group.group, group.where()) for group in rows] == [
        ("eval.heldout.2.1", "evaluated at version 2"),
        ("eval.heldout.2.0", "failed (rollout-0: too long)"),
    ]
    assert (rows[0].rewards, rows[0].parts, rows[0].seconds) == ((1.0,), ({"form": 0.5},), None)
    for wanted, count in (({"version": 2}, 2), ({"version": 3}, 0), ({"dataset": "other"}, 0), ({"min_reward": 0.5}, 1)):
        assert len(listed(EVALUATION, evaluation=True, **wanted)) == count


def test_the_page_of_a_held_out_prompt() -> None:
    found = life(eval_group_id("heldout", 2, 1), EVALUATION)
    assert [step.what for step in found.steps] == ["sent out for the evaluation of version 2", "scored, rewards 1"]
    assert gone(found) == "its samples were freed when it was evaluated"
    kept = sample(group=found.record.group, prompt=np.array([], np.int32), response=np.array([], np.int32), text="sieben")
    assert "sieben" in shown(found, [kept], None)
    text = shown(found, [kept], 0)
    assert "sieben" in text and "5 response" in text and "keep_rollouts_tokens" in text
    (plain,) = plain_of(found, [kept])["samples"]
    assert (plain["response"], plain["mask"], plain["text"], plain["reward_parts"]) == (None, None, "sieben", {"form": 0.5})


def test_what_was_masked_and_removed_and_the_parts_of_a_reward_are_shown() -> None:
    back = scored(0, (1.5, 0.5), (0, 3))
    back.parts, back.removed = ({"format": 0.5, "answer": 1.0}, {"format": 0.5, "answer": 0.0}), (1,)
    ledger: list[LedgerRecord] = [
        GroupsAdmitted(first=0, count=1, version=0, at=100.0),
        GroupRequeued(group=group_id(0), attempt=1, reason="rollout-1 did not end it", partial=Payload(keys=["p"], bytes=1), at=101.0),
        GroupsScored(groups=[back], at=104.0),
        BatchFormed(step=0, version=3, groups=names(0), mask_below=2, at=105.0),
    ]
    found = life(0, ledger)
    told = [step.what for step in found.steps]
    assert told[1] == "to continue from what it has as attempt 1: rollout-1 did not end it"
    assert told[3] == "in the batch of step 0, on version 3, tokens older than version 2 masked"
    samples = [sample(0, segments=[(0, 3, 1), (3, 5, 2)]), sample(1)]
    assert "reward answer" in shown(found, samples, 0) and "5 response, 2 of them trained" in shown(found, samples, 0)
    assert "0 of them trained" in shown(found, samples, 1) and "0.5 (removed)" in shown(found, samples, None)
    plain = plain_of(found, samples)
    assert plain["mask_below"] == 2
    assert [(one["reward_parts"]["answer"], one["removed"]) for one in plain["samples"]] == [(1.0, False), (0.0, True)]


def test_the_page_of_a_group_lists_its_samples() -> None:
    text = printed(2, [sample(), sample(1, text="sechs")], None)
    assert "sechs" in text and "myxo samples r g00000002/0" in text
    text = printed(0, [], 1, "its samples were freed")
    assert "No samples to show: its samples were freed." in text and "trained in step 0" in text


def test_json_has_whole_arrays_and_no_number_that_is_none() -> None:
    plain = plain_of(life(2), [sample(), sample(1)], 0)
    assert (plain["status"], plain["step"], plain["durable"], plain["rewards"]) == ("batched", 1, False, [0.25, 0.25])
    (only,) = plain["samples"]
    assert only["log_probs"] == [-0.5, -1.25, None, -2.0, -0.125]
    assert (only["response"], only["mask"], only["versions"]) == ([11, 12, 13, 14, 15], [1, 1, 0, 1, 1], [0, 0, 0, 1, 1])
    assert only["metadata"] == {"level": 2, "odd": None, "array": [1, 2]}
    assert [step["event"] for step in plain["provenance"]][-1] == "batch_formed"
    assert len(plain_of(life(2), [sample(), sample(1)])["samples"]) == 2


def test_prompts_of_messages_are_shown_under_their_roles() -> None:
    assert prompt_text([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]) == "system: s\nuser: u"


@tables.table(("text", "shown"), [("a\tb\nc", "a\tb\nc"), ("\x1b]0;t\x07", "\\x1b]0;t\\x07"), ("\r", "\\r"), ("a\u202eb", "a\\u202eb")])
def test_what_a_model_wrote_cannot_steer_the_terminal(text: str, shown: str) -> None:
    assert printable(text) == shown


# --- what a person types


@tables.table(
    ("text", "expected"),
    [
        ("g00000012", (group_id(12), None)),
        ("g12/3", (group_id(12), 3)),
        ("12", (group_id(12), None)),
        ("0/0", (group_id(0), 0)),
        ("eval.a-b.0.1/2", ("eval.a-b.0.1", 2)),
    ],
)
def test_a_group_can_be_named_in_short(text: str, expected: tuple[str, int | None]) -> None:
    assert target(text) == expected


@tables.table("text", ["", "x", "g", "g1/", "g1/x", "-1", "g1/2/3", "1" * 40, "eval.heldout.0", "eval.a b.0.1", "٣"])
def test_what_is_no_group_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="GROUP"):
        target(text)


def test_a_filter_takes_whole_groups() -> None:
    assert group_named("g7") == group_id(7)
    with pytest.raises(ConfigError, match="--group"):
        group_named("g7/1")


def test_the_command_line_knows_every_status_and_order(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line.main(["samples", "--help"])
    text = "".join(capsys.readouterr().out.split())
    assert "{" + ",".join(STATUSES) + "}" in text
    assert "{" + ",".join(ORDERS) + "}" in text


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("r", "--status", "gone"), "--status"),
        (("r", "--step", "-1"), "--step"),
        (("r", "--step", "99999999999999999999"), "from 0 to 2147483647"),
        (("r", "--min-reward", "nan"), "--min-reward"),
        (("r", "--limit", "many"), "--limit"),
        (("r", "g1", "--status", "dead", "--limit", "3"), "--limit, --status is for the list"),
        (("r", "what"), "GROUP = 'what'"),
        (("r", "--group", "g1/2"), "--group = 'g1/2'"),
        (("no-such-run",), "RUN = 'no-such-run'"),
    ],
)
def test_wrong_use_is_told_in_a_line(words: tuple[str, ...], part: str, capsys: pytest.CaptureFixture[str], monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("NATS_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    try:
        code = command_line.main(["samples", *words])
    except SystemExit as exit_:
        code = exit_.code
    err = capsys.readouterr().err
    assert code == 2
    assert part in err and len(err.splitlines()) == 1
