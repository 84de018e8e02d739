"""The buffer's traces over its deaths and a receiver that is away, and the lag that it tells of each queue."""

import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shared.bus.registry import Registry
from shared.bus.streams import generated_consumer, task_consumer
from shared.bus.subjects import EVAL, TRAIN
from shared.process.embedded_servers import free_port
from shared.schema.ledger import GroupsAdmitted
from tests.integration.buffer.conftest import NewRun
from tests.integration.buffer.player import Player
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.waiting import until

VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
CLOCK_S = 0.01


async def metric(player: Player, name: str, **labels: str) -> float | None:
    """A sample of the buffer's, by its name and what labels it has besides those that every sample has; None: there is none yet."""
    (buffer,) = await Registry(player.bus, player.names.run).alive("buffer")
    wanted = {"instance": buffer.instance, "run": player.names.run, **labels}
    with urllib.request.urlopen(f"http://{buffer.http}/metrics", timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return next((one.value for family in families for one in family.samples if one.name == name and one.labels == wanted), None)


@pytest.mark.extra
async def test_a_buffers_successor_ends_the_traces_that_it_began(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows from the ledger when its groups were admitted, and tells nothing of those that had ended before."""
    with OtlpReceiver() as receiver:
        monkeypatch.setenv(VARIABLE, receiver.url)
        player = await new_run(rollout={"max_staleness": 3, "num_rollout": 4})
        with player.launch() as first:
            await player.ready(first)
            await player.live(0)
            await player.work_until(8)
            before, later = await player.batch(0), await player.batch(1)
            await player.trained(0)
            await until(lambda: len(receiver.named("group")) == len(before.groups), "the traces of step 0")
            first.kill()
        with player.launch() as second:
            await player.ready(second)
            assert await player.batch(1) == later
            await player.trained(1)
            await until(lambda: len(receiver.named("group")) == len(before.groups + later.groups), "those of step 1")
            assert second.stop() == 0, second.words()
        roots = {span.attributes["group"]: span for span in receiver.named("group")}
        admitted = next(record.at for record in await player.records() if isinstance(record, GroupsAdmitted))
    assert roots.keys() == {group.group for group in before.groups + later.groups}
    for root in roots.values():
        assert abs(root.started - admitted) < CLOCK_S and root.attributes["end"] == "trained"
    waits = receiver.named("wait for a batch")
    assert len({span.trace for span in waits}) == len(waits), "the first buffer's spans are not told again"
    assert not receiver.malformed


@pytest.mark.extra(each=True)
async def test_a_receiver_that_is_away_costs_the_run_nothing(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer works, says once what is lost, has no error to show for it, and stops in order."""
    monkeypatch.setenv(VARIABLE, f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    player = await new_run(rollout={"max_staleness": 3, "num_rollout": 4})
    with player.launch() as buffer:
        await player.ready(buffer)
        await player.live(0)
        await player.work_until(8)
        for step in range(2):
            await player.batch(step)
            await player.trained(step)
        await until(lambda: metric(player, "myxo_spans_lost_total"), "the count of lost spans")
        (status,) = await Registry(player.bus, player.names.run).alive("buffer")
        assert not status.last_error
        assert buffer.stop() == 0, buffer.words()
        assert buffer.words().count("traces_not_exported") == 1


async def test_the_lag_counts_what_waits_and_what_workers_have(new_run: NewRun) -> None:
    player = await new_run(rollout={"max_staleness": 0})
    train, evaluate = (task_consumer(player.names.run, player.config.bus, kind).name for kind in (TRAIN, EVAL))
    scoring = generated_consumer(player.names.run, player.config.bus, next(iter(player.config.queues()))).name
    with player.launch() as buffer:
        await player.ready(buffer)
        await player.live(0)
        held = await player.all_tasks(1)
        waiting = player.config.rollout.rollout_batch_size - 1
        assert waiting > 0

        async def lag(kind: str, consumer: str) -> float | None:
            return await metric(player, "myxo_queue_lag", queue=kind, consumer=consumer)

        async def counted(tasks: int) -> bool:
            return await lag("task", train) == tasks

        await until(lambda: counted(waiting + 1), "the lag of the tasks")
        assert (await lag("eval", evaluate), await lag("generated", scoring), await lag("scored", "buffer")) == (0, 0, 0)
        await held[0].ack()
        await until(lambda: counted(waiting), "a smaller lag")
