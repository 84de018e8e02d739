"""Names on the bus: apart between runs, and legal."""

import re

from shared.bus.subjects import RUN_ID, Subjects
from tests.support.tables import table


def names(run: str) -> list[str]:
    of = Subjects(run)
    plain = [value for name, value in vars(of).items() if name != "run"]
    built = [of.task("train"), of.generated("math"), of.scored("reward"), of.ledger("x"), of.event("weights", "live")]
    built += [of.replica_weights("r", "commit")]
    return [*plain, *built, of.payload_key("g", 0, 0)]


def test_names_of_two_runs_never_meet() -> None:
    assert not set(names("a")) & set(names("a-b"))
    assert len(set(names("a"))) == len(names("a"))


def test_streams_and_buckets_have_no_dots_and_subjects_start_with_the_run() -> None:
    of = Subjects("my_run-1")
    for name in (of.task_stream, of.ledger_stream, of.events_stream, of.config_bucket, of.services_bucket, of.weights_bucket):
        assert re.fullmatch(r"[A-Za-z0-9_-]+", name)
    for subject in (of.task("train"), of.scored("reward"), of.batch, of.ledger("x"), of.replica_weights("r", "v")):
        assert subject.startswith("my_run-1.")


@table("run", ["a", "0", "a-b_c", "a" * 63])
def test_legal_run_ids(run: str) -> None:
    assert RUN_ID.match(run)


@table("run", ["", "A", "-a", "_a", "a.b", "a b", "a*", "a>", "a\n", "a" * 64, "ä"])
def test_illegal_run_ids(run: str) -> None:
    assert not RUN_ID.match(run)
