"""The GPUs of the engines that a benchmark starts by itself."""

import pytest

from benchmarks.agents.site import Machine


def test_replicas_have_the_gpus_that_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [Machine("cuda", 2, "bfloat16").environment(replica) for replica in (0, 3)] == [
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": "1"},
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 1")
    assert [Machine("cuda", 1, "bfloat16").environment(replica) for replica in (0, 1)] == [{"CUDA_VISIBLE_DEVICES": "3"}] * 2
    assert Machine("cpu", 1, "float32").environment(0) == {}
