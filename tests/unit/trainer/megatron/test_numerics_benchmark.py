"""The benchmark of bfloat16 against float32: it measures rounding where there is rounding alone, and says when a layout has more."""

import pytest

from benchmarks import gpu_numerics

LENGTHS = (23, 17, 2)


@pytest.fixture
def checkpoint(tmp_path):
    gpu_numerics.write_checkpoint(gpu_numerics.MODELS["dense"] | gpu_numerics.SMALLER["dense"], tmp_path)
    return tmp_path


@pytest.mark.extra
def test_a_layout_is_as_far_from_float32_as_one_process(alone, checkpoint, two_ranks):
    exact, rounded = (gpu_numerics.rank_numerics(checkpoint, {"train_dtype": dtype}, LENGTHS, 2) for dtype in ("float32", "bfloat16"))
    config = {"context_parallel_size": 2, "train_dtype": "bfloat16"}
    shared = two_ranks.run(gpu_numerics.rank_numerics, checkpoint, config, LENGTHS, 2)[0]
    theirs = {**exact, **gpu_numerics.transformers_numerics(checkpoint, LENGTHS)}
    rows = [gpu_numerics.numerics_row("dense", 1, name, "", found, exact) for name, found in (("", rounded), ("", shared), ("", theirs))]
    assert len(exact["log_probs"]) == sum(LENGTHS) - len(LENGTHS)
    assert all(1e-3 < row["mean"] < 0.05 for row in rows)
    assert rows[1]["mean"] < 2 * rows[0]["mean"]
    assert 0 < rows[0]["grad_norm"] < 0.05
    assert not any(gpu_numerics.numerics_row("dense", 1, "", "", exact, exact)[name] for name in ("mean", "max", "loss", "grad_norm"))


def test_a_row_says_when_a_layout_rounds_more_than_one_gpu():
    exact = {"log_probs": [-1.0, -2.0], "loss": 2.0, "grad_norm": 4.0, "device": "CPU"}
    found = {"log_probs": [-1.5, -2.0], "loss": 2.1, "grad_norm": 3.0}
    row = gpu_numerics.numerics_row("dense", 2, "CP2", "bfloat16", found, exact)
    assert (row["mean"], row["max"], row["grad_norm"]) == (0.25, 0.5, 0.25)
    assert row["loss"] == pytest.approx(0.05)
    assert gpu_numerics.within_rounding(row)
    assert gpu_numerics.within_rounding(row | {"ratio": 1.1}) and not gpu_numerics.within_rounding(row | {"ratio": 1.3})
    assert gpu_numerics.numerics_line(row | {"ratio": 1.3}).endswith("TOO FAR")
    table = gpu_numerics.numerics_table([row | {"ratio": 1.3}])
    assert "| 1.30 |" in table and "Measured on: CPU." in table


def test_every_rank_has_a_micro_batch_of_a_step():
    """Also where experts alone are shared: the ranks are copies of everything else, and one without a batch would be waited for."""
    assert [gpu_numerics.step_batches(gpus) for gpus in (1, 2, 4)] == [2, 2, 4]
