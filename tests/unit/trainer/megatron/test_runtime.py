"""What ranks say to one another, and errors that name what was waited for."""

import contextlib
import re
from pathlib import Path

import pytest
import torch.distributed as dist

from services.trainer.parallel import runtime
from shared.runtime.errors import DeadlineExceeded
from tests.support.tables import table
from tests.unit.trainer.megatron import rank_steps
from tests.unit.trainer.megatron.test_grouped_experts import ALLGATHER


@pytest.mark.extra  # which error becomes a deadline is told below
def test_a_rank_that_does_not_come_is_a_named_deadline(hf, fresh_world, tmp_path):
    waiting, _ = fresh_world(2).run(rank_steps.wait_for_a_sleeper, hf("qwen3"), tmp_path / "woken")
    kind, text = waiting
    assert kind == "DeadlineExceeded"
    assert "forward and backward passes" in text and "within 6 s" in text and "restart" in text


def test_a_rank_that_dies_is_named_at_once(hf, fresh_world, tmp_path):
    world = fresh_world(2)
    with pytest.raises(Exception, match=r"died|PeerLost"):
        world.run(rank_steps.outlive_a_peer, hf("qwen3"), tmp_path / "seen")
    kind, text = (tmp_path / "seen").read_text().split(":", 1)
    assert kind == "PeerLost"
    assert "forward and backward passes" in text and "restart" in text


def test_a_failure_on_one_rank_is_an_error_on_all(hf, two_ranks):
    other, failing = two_ranks.run(rank_steps.fail_together, hf("qwen3"))
    assert failing == ("ValueError", "mine")
    assert other[0] == "PeerFailed" and "the test" in other[1]


def test_json_of_every_rank_reaches_every_rank(hf, two_ranks):
    for everyone in two_ranks.run(rank_steps.exchange, hf("qwen3")):
        assert everyone == [{"rank": 0, "text": ""}, {"rank": 1, "text": "ü" * 70}]


@table(
    ("message", "error"),
    [
        ("[gloo] Timed out waiting 4000ms for recv operation to complete", DeadlineExceeded),
        ("Watchdog caught collective operation timeout: WorkNCCL", DeadlineExceeded),
        ("Connection closed by peer [127.0.0.1]:1234", runtime.PeerLost),
        ("NCCL Error 6: remote process exited", runtime.PeerLost),
        ("size mismatch", RuntimeError),
    ],
)
def test_errors_of_collectives_are_told_apart(message, error):
    with pytest.raises(error, match=re.escape(message) if error is RuntimeError else "the test"), runtime.deadline("the test"):
        raise RuntimeError(message)


def test_models_of_one_layout_share_the_groups(make_actor):
    first = make_actor("qwen3")
    before = rank_steps.exported(first)
    second = make_actor("qwen2")
    assert rank_steps.steps(first, 1)[0].skipped is None
    assert rank_steps.steps(second, 1)[0].skipped is None
    assert len(rank_steps.exported(first)) == len(before)


def test_leaving_and_joining_again(make_actor):
    make_actor("qwen3").close()
    assert not dist.is_initialized()
    assert rank_steps.steps(make_actor("qwen3"), 1)[0].skipped is None


def polling_threads():
    """The threads of gloo's, which wake up a hundred times a second: one for each group that something holds."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it ends just now
            names.append((task / "comm").read_text().strip())
    return names.count("gloo_tcp_loop")


@pytest.mark.parametrize(
    "kind, config",
    [
        ("qwen3_moe", {}),
        *(pytest.param(*case, marks=pytest.mark.extra) for case in (("qwen3", {}), ("qwen3_moe", ALLGATHER), ("deepseek_v3", {}))),
    ],
)
def test_a_model_that_was_trained_leaves_no_group_behind(hf, kind, config):
    runtime.stop()
    before = max(polling_threads(), 1)  # torch keeps the newest mesh of a test that has used FSDP2
    for _ in range(2):
        rank_steps.steps(rank_steps.actor(hf(kind), **config), 1)
        assert polling_threads() > 5
        runtime.stop()
    assert polling_threads() <= before
