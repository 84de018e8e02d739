"""``myxo flags``."""

import io
import re

import pytest
from rich.console import Console

from myxo.commands.flag_list import completion, flag_list, lines_of, meanings
from shared.config import flag_table
from shared.runtime.errors import ConfigError


def test_every_flag_that_is_taken_has_a_line() -> None:
    out = io.StringIO()
    assert flag_list(None, Console(file=out)) == 0
    named = [line.split()[0].rstrip(",") for line in out.getvalue().splitlines()]
    assert named == [flag.command_line[0] for flag in flag_table.catalogue().values() if not flag.refused]


def test_a_line_tells_kind_default_and_what_megatron_says() -> None:
    (line,) = lines_of("moe-router-dtype")
    assert "fp32|fp64, default fp32: " in line
    assert meanings()["moe_router_dtype"] in line
    (line,) = lines_of("--hidden_dropout")
    assert "float, always 0.0: log-probs must be" in line
    (line,) = lines_of("norm-epsilon")
    assert "float, compared with the checkpoint's: " in line


def test_a_pattern_finds_fields_of_the_config_and_refused_flags() -> None:
    lines = lines_of("warmup")
    assert any(line.split()[0] == "--lr-warmup-iters" and "steps of linear warm-up" in line for line in lines)
    assert any(line.split()[0] == "--lr-warmup-samples" and "not taken: use lr" in line for line in lines)
    assert len({line.split()[0] for line in lines}) == len(lines)


def test_each_command_that_takes_the_configs_flags_completes_them() -> None:
    pytest.importorskip("shtab")
    out = io.StringIO()
    assert completion("bash", Console(file=out)) == 0
    with_flags = re.findall(r"^_shtab_myxo_(\w+)_option_strings=.* --rollout-batch-size ", out.getvalue(), re.MULTILINE)
    assert {"up", "train", "submit", "eval", "doctor", "serve", "try", "plan", "bisect", "quickstart"} == set(with_flags)


def test_a_pattern_that_finds_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="PATTERN = 'qqq': no flag's name holds it"):
        flag_list("qqq", Console(file=io.StringIO()))
