"""Attempts of a trainer over several nodes: when they begin, when and why they are over, and who is named."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.nodes.node_decisions import HEALTHY_SECONDS
from shared.runtime import exit_codes
from tests.unit.trainer.simulated_nodes import DURATION, TICK, SimulatedCluster

NODES = 3


@pytest.fixture
def cluster() -> SimulatedCluster:
    """Three nodes whose ranks run in attempt 1."""
    made = started()
    made.until(lambda: made.running() == [1, 1, 1])
    return made


def started() -> SimulatedCluster:
    made = SimulatedCluster(NODES)
    for rank in range(NODES):
        made.start(rank)
    return made


def test_no_attempt_begins_before_all_nodes_are_there() -> None:
    cluster = SimulatedCluster(NODES)
    for rank in (0, 2):
        cluster.start(rank)
    for _ in range(50):
        cluster.tick()
    assert cluster.begun == []
    assert cluster.node(0).shown.detail == "for node 1 (not there), of 3 nodes"
    cluster.start(1)
    cluster.until(lambda: cluster.running() == [1, 1, 1])
    assert [status.node.address for _, status in cluster.leases.values()] == ["10.0.0.1", "10.0.0.3", "10.0.0.2"]


@pytest.mark.parametrize("victim", range(NODES))
def test_a_dead_node_ends_the_attempt_everywhere_within_seconds(victim: int, cluster: SimulatedCluster) -> None:
    cluster.kill(victim)
    died = cluster.now
    cluster.until(lambda: not any(cluster.running()))
    assert cluster.now - died <= DURATION + 3
    others = [rank for rank in range(NODES) if rank != victim]
    namers = [0] if victim else others
    for rank in namers:
        assert cluster.said(rank, "node_lost") == [
            f"node {victim} (host-{victim}, 10.0.0.{victim + 1}) is lost: its lease was not renewed in time"
        ]
    cluster.start(victim)
    cluster.until(lambda: cluster.running() == [2, 2, 2])


@pytest.mark.parametrize("victim", range(NODES))
def test_a_node_that_was_cut_off_goes_on_with_the_others(victim: int, cluster: SimulatedCluster) -> None:
    cluster.node(victim).cut = True
    others = [rank for rank in range(NODES) if rank != victim]
    cluster.until(lambda: not any(cluster.running()[rank] for rank in others))
    assert cluster.running()[victim] == 1, "it cannot know whether it alone is cut off"
    cluster.node(victim).cut = False
    cluster.until(lambda: cluster.running() == [2, 2, 2])
    assert len(cluster.begun) == 2 * NODES


@pytest.mark.parametrize(("lower", "rank", "names"), [(0, 2, ["node 0 (10.0.0.1)", "node 2"]), (1, 2, ["node 1", "node 2"])])
def test_nodes_that_do_not_reach_each_other_are_named_and_wait_until_they_do(
    lower: int, rank: int, names: list[str], cluster: SimulatedCluster
) -> None:
    cluster.node(rank).deaf_to = {lower}
    cluster.until(lambda: not any(cluster.running()), 10)
    (told,) = cluster.said(0, "link_lost")
    assert told.startswith("the link between ") and all(name in told for name in names) and cluster.said(0, "node_lost") == []
    for _ in range(50):
        cluster.tick()
    assert not any(cluster.running()) and cluster.attempt.over == "lost"
    shown = cluster.node(0).shown.detail
    assert shown.startswith("for the link between ") and all(name in shown for name in names)
    cluster.node(rank).deaf_to = set()
    cluster.until(lambda: cluster.running() == [2, 2, 2])


def test_a_dead_node_is_lost_and_not_its_links(cluster: SimulatedCluster) -> None:
    cluster.kill(0)
    cluster.kill(1)
    cluster.node(2).deaf_to = {0, 1}
    cluster.until(lambda: not any(cluster.running()))
    for rank in (0, 1):
        cluster.start(rank)
    cluster.until(lambda: cluster.running()[:2] == [2, 2])  # it asked those in vain that are gone
    assert cluster.said(0, "link_lost") == []


def test_a_link_that_stays_down_fails_in_the_end_by_its_name(cluster: SimulatedCluster) -> None:
    cluster.node(2).deaf_to = {1}
    cluster.until(lambda: cluster.node(0).left is not None, 2000)
    assert cluster.node(0).left == exit_codes.FAILED and "the link between node 1" in cluster.node(0).reason


def test_nothing_ends_while_the_bus_is_away_for_all(cluster: SimulatedCluster) -> None:
    for rank in range(NODES):
        cluster.node(rank).cut = True
    for _ in range(100):
        cluster.tick()
    for rank in range(NODES):
        cluster.node(rank).cut = False
    for _ in range(20):
        cluster.tick()
    assert cluster.running() == [1, 1, 1] and cluster.said(0, "node_lost") == []


def test_a_node_that_is_started_anew_at_once_is_noticed(cluster: SimulatedCluster) -> None:
    cluster.kill(2)
    cluster.start(2)
    cluster.until(lambda: cluster.running() == [2, 2, 2])
    assert cluster.said(0, "node_lost") == ["node 2 (host-2, 10.0.0.3) was started anew"]


@pytest.mark.parametrize("asked", range(NODES))
def test_a_node_that_is_asked_to_stop_ends_the_attempt_in_order(asked: int, cluster: SimulatedCluster) -> None:
    cluster.node(asked).stopping = True
    cluster.until(lambda: cluster.node(0).stop_asked)
    assert cluster.running() == [1, 1, 1], "ranks leave by themselves"
    for rank in (2, 1, 0):
        cluster.end(rank, 0)
    cluster.until(lambda: cluster.node(asked).left is not None)
    assert cluster.node(asked).left == 0 and cluster.said(0, "node_lost") == []
    assert f"node {asked}" in cluster.said(0, "attempt_stopping")[0] and cluster.attempt.over == "stopped"
    assert all(cluster.node(rank).works for rank in range(NODES) if rank != asked)
    cluster.start(asked)
    cluster.until(lambda: cluster.running() == [2, 2, 2])


def test_a_finished_run_ends_all_nodes(cluster: SimulatedCluster) -> None:
    for rank in (1, 0, 2):
        cluster.end(rank, 0)
        cluster.tick()
    cluster.until(lambda: not any(agent.works for agent in cluster.agents))
    assert [agent.left for agent in cluster.agents] == [0, 0, 0]


@pytest.mark.parametrize(("failed", "code"), [(0, 1), (2, 1), (2, 2)])
def test_a_failure_is_that_of_the_node_that_caused_it(failed: int, code: int, cluster: SimulatedCluster) -> None:
    first = 0 if failed else 1
    cluster.end(first, 1, "rank 0: PeerLost", True)
    cluster.end(failed, code, "rank 5: KeyError: 'what it died of'")
    cluster.until(lambda: not any(agent.works for agent in cluster.agents))
    assert [agent.left for agent in cluster.agents] == [code] * NODES
    assert cluster.node(1).reason == f"node {failed}: rank 5: KeyError: 'what it died of'"


def test_ranks_that_only_lost_each_other_are_started_again_a_few_times(cluster: SimulatedCluster) -> None:
    for attempt in range(1, 4):
        cluster.end(1, 1, "rank 2: PeerLost", True)
        cluster.until(lambda number=attempt: cluster.running() == [number + 1] * NODES)
    cluster.end(1, 1, "rank 2: PeerLost", True)
    cluster.until(lambda: not any(agent.works for agent in cluster.agents))
    assert [agent.left for agent in cluster.agents] == [1, 1, 1]
    assert cluster.node(0).reason == "node 1: rank 2: PeerLost", "what its own ranks were killed for"


def test_an_attempt_that_lived_long_is_no_reason_to_give_up_after_it(cluster: SimulatedCluster) -> None:
    """Three attempts in vain, a long one, then three in vain again: only the one after these ends the nodes."""
    for attempt in range(1, 8):
        if attempt == 4:
            for _ in range(int(HEALTHY_SECONDS / TICK) + 1):
                cluster.tick()
        cluster.end(1, 1, "rank 2: PeerLost", True)
        if attempt < 7:
            cluster.until(lambda number=attempt: cluster.running() == [number + 1] * NODES)
    cluster.until(lambda: not any(agent.works for agent in cluster.agents))
    assert [agent.left for agent in cluster.agents] == [1, 1, 1]


def test_a_missing_node_is_waited_for_and_named_at_the_end() -> None:
    cluster = SimulatedCluster(NODES)
    for rank in (0, 1):
        cluster.start(rank)
    cluster.until(lambda: not cluster.node(0).works, rounds=1300)
    assert cluster.node(0).left == 1 and "from node 2 (not there) within 600 s" in cluster.node(0).reason


FAULTS = st.lists(
    st.tuples(st.sampled_from(["kill", "cut", "mend", "deafen", "start", "fail", "lose"]), st.integers(0, NODES - 1), st.integers(0, 20)),
    max_size=8,
)


@settings(max_examples=40)
@given(FAULTS)
def test_whatever_happens_to_nodes_they_end_up_in_one_attempt(faults: list[tuple[str, int, int]]) -> None:
    cluster = started()
    for fault, rank, rounds in faults:
        agent = cluster.agents[rank]
        if fault == "kill":
            cluster.kill(rank)
        elif fault == "start" and (agent is None or not agent.works):
            cluster.start(rank)
        elif agent is not None and fault in ("cut", "mend"):
            agent.cut = fault == "cut"
        elif agent is not None and fault == "deafen":
            agent.deaf_to = set(range(rank))
        elif agent is not None and fault in ("fail", "lose"):
            cluster.end(rank, 1, fault, fault == "lose")
        for _ in range(rounds):
            cluster.tick()
            numbers = {number for number in cluster.running() if number}
            reached = {number for rank, number in enumerate(cluster.running()) if number and not cluster.node(rank).cut}
            assert len(numbers) <= 2 and len(reached) <= 2
    for _ in range(3):  # whoever has left is started again by its supervisor; the newest may leave with an attempt of before
        for rank, agent in enumerate(cluster.agents):
            if agent is None or not agent.works:
                cluster.start(rank)
            else:
                agent.cut, agent.deaf_to = False, set()
        for _ in range(60):
            cluster.tick()
    assert len(set(cluster.running())) == 1 and cluster.running()[0] > 0
    joined = [begun for begun in cluster.begun if begun[0]]  # the first node may die before it has announced what it began
    assert len(set(joined)) == len(joined), "a node joined an attempt twice"
