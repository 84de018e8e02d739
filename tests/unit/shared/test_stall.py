"""What a run waits for, in words, in every kind of stall; and who is silent, by the reader's own clock."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shared.config.run_config import RunConfig
from shared.schema.service_messages import Doing, ServiceStatus
from shared.view.live_services import Heartbeats, InstanceStatus
from shared.view.stall import Away, Cause, PendingWork, RunSituation, Stall, StallWatch, as_doing, reported_wait, run_stall
from tests.support.run_config import SERVED, run_config
from tests.support.tables import table

NOW = 1_700_000_000.0


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return run_config(tmp_path)


def service(kind: str, state: str = "ready", *, number: int = 0, doing: Sequence[Doing] = (), **fields: Any) -> ServiceStatus:
    known = {"version": 1} if kind == "rollout" else {}
    common = {"host": "h", "pid": 1, "http": "", "at": NOW, "state_since": NOW - 40, "doing": list(doing)}
    return ServiceStatus(service=kind, instance=f"{kind}-{number}", state=state, **common, **{**known, **fields})


def does(part: str, what: str, awaited_from: Sequence[str] = (), next_action: str = "", *, stuck: bool = False) -> Doing:
    return Doing(part=part, what=what, since=NOW - 25, awaited_from=list(awaited_from), next_action=next_action, stuck=stuck)


def environment(name: str, state: str = "ready", detail: str = "") -> ServiceStatus:
    return ServiceStatus(service="environment", instance=name, host="", pid=0, http="", state=state, detail=detail, at=NOW)


def process(kind: str, *, due_in: float | None = None, error: str = "") -> InstanceStatus:
    return InstanceStatus(kind, f"{kind}-0", 1, 1, False, 30.0, NOW - 30, due_in, None, error, ended_at=NOW - 6)


def everybody(**instead: ServiceStatus) -> list[ServiceStatus]:
    """A run that continues, but for these."""
    gauges = {"live_version": 1.0, "ready": 1.0}
    usual = {kind: service(kind) for kind in ("reward", "rollout", "trainer")} | {"buffer": service("buffer", gauges=gauges)}
    return list((usual | instead).values())


def without(kind: str) -> list[ServiceStatus]:
    return [status for status in everybody() if status.service != kind]


def trainer(*doing: Doing, state: str = "ready", **fields: Any) -> list[ServiceStatus]:
    return everybody(trainer=service("trainer", state, doing=doing, **fields))


WAITS = does("loop", "the batch of step 3", ["buffer"])


@table(
    ("statuses", "known", "cause", "words"),
    [
        ([], {"disk": "No space left on device: 3 MB are free"}, Cause.DISK, ["room on the disk (No space left", "3 MB are free"]),
        ([], {"away": {"NATS": Away(NOW - 12, "no answer")}}, Cause.BUS, ["NATS, which is away: no answer, for 12s (since", "asks again"]),
        (
            everybody(),
            {"away": {"Redis": Away(NOW - 8, "killed", "starts again in 2 s")}},
            Cause.STORE,
            ["Redis, which is away: killed, for 8s", "; starts again in 2 s"],
        ),
        (everybody(), {"failure": "8 groups in a row failed"}, Cause.FAILED, ["the run has failed (8 groups in a row failed)"]),
        (
            everybody(),
            {"instances": [process("trainer", due_in=3.0, error="exit code 1: out of memory")]},
            Cause.DOWN,
            ["trainer-0, which ended with exit code 1: out of memory, for 6s", "starts again in 3 s, from its newest checkpoint"],
        ),
        (
            everybody(),
            {"silent": {"trainer-0": NOW - 20}, "instances": [process("trainer")]},
            Cause.SILENT,
            ["trainer-0, whose heartbeat is missing, for 20s", "killed and started again 60 s after its last one"],
        ),
        (everybody(), {"silent": {"rollout-0": NOW - 7}}, Cause.SILENT, ["rollout-0, whose heartbeat is missing", "taken for gone 10 s"]),
        (
            without("rollout"),
            {"instances": [process("rollout", error="signal 9")]},
            Cause.STARTING,
            ["rollout-0 to start, after signal 9, for 30s"],
        ),
        ([], {"instances": [process("buffer"), process("trainer")]}, Cause.STARTING, ["buffer-0, trainer-0 to start"]),
        ([environment("trainer-0")], {"instances": [process("trainer")]}, Cause.STARTING, ["trainer-0 to start"]),
        ([environment("buffer")], {}, Cause.ABSENT, ["a buffer service"]),
        (without("reward"), {"errors": {"reward-0": "signal 9"}}, Cause.ABSENT, ["a reward service; the last one: reward-0 (signal 9)"]),
        (
            everybody(buffer=service("buffer", "standby", number=1)),
            {},
            Cause.ABSENT,
            ["a buffer service", "buffer-1 takes over once the lease has run out (5 s)"],
        ),
        (
            everybody(rollout=service("rollout", "starting", version=-1)),
            {"errors": {"rollout-0": "the engine died"}},
            Cause.LOADING,
            ["engine of rollout-0 starting, after the engine died, for 40s", "given up after 600 s"],
        ),
        (
            [],  # of a finished run, whose trainer alone is needed
            {"owed": PendingWork("the final weights in /runs/a/hf", NOW - 20, "given up 660 s after the trainer's start"), "instances": []},
            Cause.FINAL_WEIGHTS,
            ["the final weights in /runs/a/hf, for 20s", "given up 660 s after"],
        ),
        (
            [],
            {
                "owed": PendingWork("the final weights in /hf", NOW - 20, ""),
                "instances": [process("trainer", due_in=1.0, error="signal 9")],
            },
            Cause.FINAL_WEIGHTS,
            ["the final weights in /hf from trainer-0, which ended with signal 9, for 20s"],
        ),
        (trainer(state="loading the checkpoint"), {}, Cause.LOADING, ["trainer-0 loading the checkpoint, for 40s"]),
        (trainer(state="warm start", gauges={"sft_step": 3, "sft_steps": 9}), {}, Cause.LOADING, ["SFT step 3/9, for 40s"]),
        (
            everybody(
                rollout=service("rollout", "starting", version=-1),
                trainer=service("trainer", "warm start", gauges={"sft_step": 3, "sft_steps": 10}),
            ),
            {},
            Cause.LOADING,
            ["engine of rollout-0 starting; SFT step 3/10"],
        ),
        (
            everybody(buffer=service("buffer", held_back="the store is 90% full; no new group is admitted")),
            {},
            Cause.ROOM,
            ["room: buffer-0 holds back (the store is 90% full"],
        ),
        (
            trainer(does("loop", "saving the checkpoint of 4 steps")),
            {},
            Cause.TRAINING,
            ["trainer-0, saving the checkpoint of 4 steps, for 25s"],
        ),
        (
            trainer(does("loop", "training step 3", (), "the others end after 600 s")),
            {},
            Cause.TRAINING,
            ["trainer-0, training step 3, for 25s", "; the others end after 600 s"],
        ),
        (
            trainer(does("loop", "the values of step 3", ["critic"])),
            {},
            Cause.TRAINING,
            ["the values of step 3 from the critic, for trainer-0, for 25s"],
        ),
        (
            trainer(WAITS, does("push", "push of version 3 (receive)", ["rollout-1", "rollout-2"], "left out after 120 s")),
            {},
            Cause.PUSH,
            ["rollout-1, rollout-2 to answer the push of version 3 (receive), for 25s", "; left out after 120 s"],
        ),
        (trainer(WAITS, does("push", "push of version 3 (commit)")), {}, Cause.PUSH, ["the push of version 3 (commit) by trainer-0"]),
        (
            everybody(rollout=service("rollout", "fenced", version=-1)),
            {},
            Cause.WEIGHTS,
            ["weights to be served (rollout-0 fenced, trainer-0 ready)", "for 40s"],
        ),
        (everybody(buffer=service("buffer", gauges={"live_version": -1})), {}, Cause.WEIGHTS, ["(rollout-0 ready, trainer-0 ready)"]),
        (
            everybody(
                rollout=service("rollout", doing=[does("work", "generates 2 groups, but its engine generates no token", stuck=True)])
            ),
            {},
            Cause.STUCK,
            ["a batch (1 of 2 groups ready): rollout-0, generates 2 groups, but its engine generates no token, for 25s"],
        ),
        (
            [*everybody(), service("rollout", number=1)],
            {"silent": {"rollout-1": NOW - 9}},
            Cause.STUCK,
            ["a batch (1 of 2 groups ready): rollout-1, whose heartbeat is missing", "for 9s"],
        ),
        (
            everybody(reward=service("reward", doing=[does("work", "scores 1 group by math", (), "given up after 30 s")])),
            {},
            Cause.BATCH,
            ["a batch (1 of 2 groups ready): reward-0 scores 1 group by math", "; given up after 30 s"],
        ),
        (
            everybody(buffer=service("buffer", gauges={"live_version": 1, "ready": 0, "queue_generated": 4})),
            {},
            Cause.BATCH,
            ["4 groups to score are not taken by any service (reward-0 ready)"],
        ),
        (
            everybody(
                buffer=service(
                    "buffer", gauges={"live_version": 1, "ready": 1}, doing=[does("batch", "step 3 waits for newer weights than version 1")]
                )
            ),
            {},
            Cause.BATCH,
            ["a batch (1 of 2 groups ready): step 3 waits for newer weights than version 1, for 25s"],
        ),
        (
            everybody(buffer=service("buffer", gauges={"live_version": 1, "ready": 2, "eval_pending": 7})),
            {},
            Cause.EVALUATION,
            ["evaluations (7 prompts outstanding)", "eval.eval_timeout"],
        ),
        (everybody(buffer=service("buffer", gauges={"live_version": 1, "ready": 2})), {}, Cause.STEP, ["a training step"]),
        (
            everybody(
                buffer=service("buffer", gauges={"live_version": 1, "ready": 2}),
                trainer=service("trainer", doing=[does("loop", "the batch of step 3", ["buffer"])]),
            ),
            {},
            Cause.STEP,
            ["trainer-0, which waits for the batch of step 3, for 25s"],
        ),
    ],
)
def test_every_stall_is_named(
    config: RunConfig, statuses: Sequence[ServiceStatus], known: dict[str, Any], cause: Cause, words: Sequence[str]
) -> None:
    found = run_stall(RunSituation.of(config, statuses, known.pop("instances", ()), **known))
    assert found.cause is cause, found
    for part in words:
        assert part in found.words(NOW), found.words(NOW)


def test_groups_from_outside_alone_are_not_waited_for_of_a_service(tmp_path: Path) -> None:
    config = run_config(tmp_path, ingest={"ingest_groups": "alone"})
    statuses = [*everybody(buffer=service("buffer", gauges={"live_version": 1, "ready": 1, "queue_task": 1})), service("gateway")]
    words = run_stall(RunSituation.of(config, statuses, ())).words(NOW)
    assert "1 groups are to be handed in from outside (POST /groups at a gateway)" in words and "not taken" not in words


def test_who_has_somebody_to_stand_in_is_not_waited_for(config: RunConfig) -> None:
    """The trainer trains, and another replica generates."""
    two = [*trainer(does("loop", "training step 3")), service("rollout", number=1)]
    found = run_stall(RunSituation.of(config, two, [process("rollout", due_in=2.0)], silent={"rollout-1": NOW}))
    assert found.cause is Cause.DOWN, "none of them is there"
    assert run_stall(RunSituation.of(config, two, [process("rollout", due_in=2.0)])).cause is Cause.TRAINING


def test_a_missing_environment_is_named(config: RunConfig) -> None:
    found = run_stall(RunSituation.of(config, [*everybody(), environment("judge", "away", "refused")]))
    assert (found.cause, found.awaited) == (Cause.ENVIRONMENT, "environment judge (away: refused)")


def test_a_missing_gateway_is_named(tmp_path: Path) -> None:
    found = run_stall(RunSituation.of(run_config(tmp_path, gateway={"gateway_replicas": 1}), everybody()))
    assert (found.cause, found.awaited) == (Cause.ABSENT, "a gateway service")


def test_a_run_of_myxo_serve_waits_for_its_clients(tmp_path: Path) -> None:
    config = run_config(tmp_path, **SERVED)
    serving = [service("rollout", version=-1), service("trainer"), service("gateway")]
    found = run_stall(RunSituation.of(config, serving))
    assert found.awaited == "commands of clients" and not StallWatch().follow(found, NOW).worth_a_line(NOW + 9000)
    busy = service("gateway", gauges={"commands_waiting": 2})
    assert run_stall(RunSituation.of(config, [*serving[:2], busy])).awaited == "2 commands of clients to be carried out"
    assert run_stall(RunSituation.of(config, serving, silent={"trainer-0": NOW})).cause is Cause.SILENT
    assert run_stall(RunSituation.of(config, serving[:2])).awaited == "a gateway service"


def test_the_launchers_words_are_everybodys(config: RunConfig) -> None:
    """But for what one sees better oneself: that the bus is away."""
    wait = Stall(Cause.DOWN, "trainer-0, which ended with signal 9", NOW - 4, "starts again in 2 s")
    common = {"host": "h", "pid": 1, "http": "", "at": NOW}
    launcher = ServiceStatus(service="launcher", instance="launcher", state=wait.cause.name, doing=[as_doing(wait)], **common)
    assert reported_wait(launcher) == wait and reported_wait(None) is None
    assert run_stall(RunSituation.of(config, everybody(), reported=reported_wait(launcher))) == wait
    gone = {"NATS": Away(NOW, "x")}
    assert run_stall(RunSituation.of(config, (), reported=wait, away=gone)).cause is Cause.BUS


def test_a_wait_keeps_its_beginning_while_its_numbers_change() -> None:
    watch = StallWatch()
    first = watch.follow(Stall(Cause.BATCH, "a batch (1 of 8 groups ready)"), NOW)
    assert first.since == NOW and not first.worth_a_line(NOW + 9) and first.worth_a_line(NOW + 10)
    assert watch.follow(Stall(Cause.BATCH, "a batch (2 of 8 groups ready)"), NOW + 5).since == NOW
    assert watch.follow(Stall(Cause.STEP, "a training step"), NOW + 6).since == NOW + 6
    assert Stall(Cause.SILENT, "x").worth_a_line(NOW), "no healthy run has this"


def test_waits_that_follow_each_other_without_a_step_are_worth_a_line() -> None:
    watch, flips = StallWatch(), [Stall(Cause.BATCH, "a batch"), Stall(Cause.STEP, "trainer-0, which waits for the batch of step 3")]
    seen = [watch.follow(flips[at % 2], NOW + at, steps=3) for at in range(12)]
    assert [wait.worth_a_line(NOW + at) for at, wait in enumerate(seen)] == [False] * 10 + [True] * 2
    assert ", for 0s (since " in seen[10].words(NOW + 10) and "no new step for 10s" in seen[10].words(NOW + 10)
    away = watch.follow(Stall(Cause.LOADING, "trainer-0 starting"), NOW + 12, steps=-1)
    assert away.worth_a_line(NOW + 12), "a trainer that is away has not made a step"
    assert not watch.follow(flips[0], NOW + 13, steps=4).worth_a_line(NOW + 13)


def beat(at: float, number: int = 0) -> list[ServiceStatus]:
    return [service("reward", number=number).model_copy(update={"at": at})]


def test_silence_is_counted_while_somebody_listens() -> None:
    heard = Heartbeats()
    for second in range(4):
        heard.observe(beat(NOW + second), second, NOW + second)
    assert heard.silent(0.5) == {}
    for second in range(4, 12):
        heard.observe(beat(NOW + 3), second, NOW + second)
    assert heard.silent(7.5) == {"reward-0": NOW + 3} and heard.silent(8.5) == {}, "eight seconds"
    heard.observe([], 12.0, NOW + 12)
    assert "reward-0" in heard.silent(8.5), "its status has expired meanwhile"
    heard.forget("reward-0")
    assert heard.silent(0.0) == {}


@pytest.mark.parametrize("suspended", [False, True])
def test_nobody_is_silent_while_nobody_can_be_heard(*, suspended: bool) -> None:
    """The bus is away for an hour, or the machine was suspended."""
    heard = Heartbeats()
    heard.observe(beat(NOW), 0.0, NOW)
    if not suspended:
        heard.pause()
    heard.observe(beat(NOW), 3600.0, NOW + 3600)
    assert heard.silent(5.0) == {}


def test_who_was_late_before_the_bus_went_away_has_its_whole_patience_after() -> None:
    heard = Heartbeats()
    for second in range(5):
        heard.observe(beat(NOW), second, NOW + second)
    heard.pause()
    for second in range(9, 15):
        heard.observe(beat(NOW), second, NOW + second)
    assert heard.silent(5.5) == {} and heard.silent(4.5) == {"reward-0": NOW}


def test_the_words_tell_the_time_of_day() -> None:
    assert f"(since {time.strftime('%H:%M:%S', time.localtime(NOW))})" in Stall(Cause.STEP, "a step", NOW).words(NOW + 61)
