"""The rights that are derived from the code's names are those that are meant, and no more."""

import itertools

from shared.accounts.permissions import ROLES, Rights, rights
from shared.bus.subjects import Subjects
from tests.support import intended_rights as intended
from tests.support.intended_rights import allowed, covers
from tests.support.tables import table

RUN, OTHER = "demo", "demo-2"
TABLE = intended.everything(RUN, OTHER)
CHANGES = ("CREATE", "UPDATE", "DELETE", "PURGE", "MSG.DELETE", "RESTORE", "SNAPSHOT")


def of(role: str) -> Rights:
    return next(one for one in rights(RUN) if one.role == role)


@table("subject", TABLE)
def test_a_subject_has_exactly_the_publishers_and_listeners_that_are_meant(subject: str) -> None:
    publishers, listeners = TABLE[subject]
    assert {one.role for one in rights(RUN) if allowed(one.bus.publish, subject)} == publishers
    assert {one.role for one in rights(RUN) if allowed(one.bus.subscribe, subject)} == listeners


def test_the_table_speaks_of_every_name_that_the_code_has() -> None:
    names = Subjects(RUN)
    held = {member: value for member, value in vars(names).items() if member != "run" and not member.endswith("_keys")}
    for member, name in held.items():
        assert any(name in subject for subject in TABLE), f"Subjects.{member} is not in tests/support/intended_rights.py"
    built = {"task", "generated", "scored", "ledger", "event", "replica_weights", "environment", "inbox"}
    built |= {"payload_prefix", "payload_key", "picture_keys", "exchange_key", "session_key", "ingest_key", "node_lease", "attempt"}
    built |= {"trainer_nodes", "engine_nodes", "command", "command_key"}
    assert {member for member, kind in vars(Subjects).items() if callable(kind) and not member.startswith("_")} == built


@table("role", [role for role in ROLES if role != "operator"])
@table("change", CHANGES)
def test_no_service_changes_a_stream(role: str, change: str) -> None:
    for stream in intended.every_stream(RUN):
        assert not allowed(of(role).bus.publish, f"$JS.API.STREAM.{change}.{stream}")
        read = change in ("RESTORE", "SNAPSHOT") and stream == f"KV_{Subjects(RUN).secrets_bucket}"  # a snapshot holds what a stream stores
        assert allowed(of("operator").bus.publish, f"$JS.API.STREAM.{change}.{stream}") is not read


@table("role", [role for role in ROLES if role != "operator"])
def test_no_right_of_a_service_is_wider_than_its_run(role: str) -> None:
    for pattern in {*of(role).bus.publish, *of(role).bus.subscribe} - {"$JS.API.INFO"}:
        tokens = [token.removeprefix("KV_") for token in pattern.split(".")]
        assert any(token == RUN or token.startswith(f"{RUN}-") for token in tokens), pattern


def test_two_roles_share_a_right_to_publish_only_where_the_flow_has_two_sources() -> None:
    names = Subjects(RUN)
    shared = set()
    for one, another in itertools.combinations([of(role) for role in ROLES if role != "operator"], 2):
        shared |= set(one.bus.publish) & set(another.bus.publish)
    tasks = f"{names.task_stream}.train"  # a gateway hands groups from outside in, in the place of tasks
    taking = {f"$JS.API.CONSUMER.MSG.NEXT.{tasks}", f"$JS.ACK.{tasks}.>"}
    flow = {subject for subject in shared if not subject.startswith("$JS.API.")} - taking
    described = names.environment("*", "describe")  # one that scores, and one that plays episodes
    assert flow == {names.event("service", "*"), names.generated("*"), described, names.command("outcome", "*", "*")}
    changing = {subject for subject in shared if ("CONSUMER" in subject and "CONSUMER.INFO" not in subject) or "$JS.ACK" in subject}
    assert changing == taking


READING = ("$JS.API.INFO", "$JS.API.STREAM.INFO.", "$JS.API.STREAM.MSG.GET.", "$JS.API.DIRECT.GET.", "$JS.API.CONSUMER.INFO.")


def test_the_console_asks_jetstream_and_publishes_nothing() -> None:
    console = of("console")
    assert console.bus.answer_seconds is None
    assert all(subject.startswith(READING) for subject in console.bus.publish)
    assert console.store is not None and not any(part.write for part in (console.store, *console.store.further))


def test_only_those_who_are_asked_may_answer() -> None:
    assert {one.role for one in rights(RUN) if one.bus.answer_seconds} == {"buffer", "rollout", "trainer", "environment"}


def test_the_store_is_for_the_run_only_and_for_nothing_dangerous() -> None:
    for one in rights(RUN):
        if one.store is None:
            assert one.role == "environment"
            continue
        commands = {command.upper() for command in one.store.commands}
        sessions = intended.SESSIONS.get(one.role, set())
        further_rights = list(one.store.further)
        if one.role in intended.COMMANDED:
            commanded = further_rights.pop()
            assert {command.upper() for command in commanded.commands} == intended.COMMANDED[one.role]
            assert commanded.read == commanded.write == (f"{RUN}:command:*",)
        if one.role == "rollout":
            [further] = one.store.further
            assert {command.upper() for command in further.commands} == sessions
            assert further.read == further.write == (f"{RUN}:session:*",)
            sessions = set()
        elif one.role == "gateway":
            payloads, ingested = further_rights
            assert ({command.upper() for command in payloads.commands}, payloads.read) == (intended.STORE["gateway"] - {"PING"}, ())
            assert payloads.write == (f"{RUN}:group:*",)
            assert {command.upper() for command in ingested.commands} == intended.INGESTED
            assert ingested.read == ingested.write == (f"{RUN}:ingest:*",)
            commands |= {command.upper() for command in payloads.commands}
        elif one.role == "console":
            [further] = one.store.further
            assert {command.upper() for command in further.commands} == sessions
            assert (further.read, further.write) == ((f"{RUN}:session:*",), ())
            sessions = set()
        else:
            assert further_rights == []
        assert commands == intended.STORE[one.role] | intended.EXCHANGE.get(one.role, set()) | sessions
        reads, writes = intended.KEYS[one.role]
        assert ({*one.store.read}, {*one.store.write}) == ({f"{RUN}:{keys}" for keys in reads}, {f"{RUN}:{keys}" for keys in writes})


def test_users_of_two_runs_have_different_names() -> None:
    users = [one.user for run in (RUN, OTHER) for one in rights(run)]
    assert len(set(users)) == len(users) == 2 * len(ROLES)


@table(
    ("pattern", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.b.c", False),
        ("a.b.c", "a.b", False),
        ("a.*", "a.b", True),
        ("a.*", "a.*", True),
        ("a.*", "a.>", False),
        ("a.*", "a.b.c", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a.>", True),
        ("a.>", "a", False),
        ("a.b", "a.*", False),
        ("a.*.c", "a.>", False),
        (">", "a", True),
        ("a.>", ">", False),
    ],
)
def test_covering(pattern: str, subject: str, expected: bool) -> None:
    assert covers(pattern, subject) is expected
