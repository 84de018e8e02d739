"""Whatever a service, an environment or a model says: it is shown, and neither steers the terminal nor ends the command."""

import io
import json
import math
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from myxo.commands import logs
from myxo.display import SafeConsole
from myxo.display.progress_display import Display, panel
from shared.config.run_config import RunConfig
from shared.runtime import telemetry
from shared.runtime.safe_text import json_text, number, printable, printable_line
from shared.schema.service_messages import ServiceStatus
from shared.view.live_services import InstanceStatus
from shared.view.run_view import ServiceError, run_view
from tests.support.run_config import run_config
from tests.support.tables import table

EVIL = "\x1b]0;owned\x07\x1b[2J[/bold][link=x]\ud800\u202e\r\nsecond\x9b31m\u2028[red"
"""Moves the cursor, sets the title, breaks markup, cannot be encoded, turns the writing and begins a new line."""

GAUGES = ("trained_steps", "live_version", "in_flight", "ready", "dead", "dead_per_minute", "eval_failed", "queue_task", "queue_task_held")
GAUGES += ("eval_heldout", "eval_heldout_version", "followed", "eval_pending", "step", "reward", "loss", "staleness_mean", "staleness_max")
GAUGES += ("train_tokens_per_s", "train_compute_tokens_per_s", "sft_step", "sft_steps", "sft_loss", "sft_seconds_left", "scoring")
GAUGES += ("generated_tokens_per_s", "running_groups", "running_samples")

NUMBERS = (math.nan, math.inf, -math.inf, 1e308, -1e308, -1.0, 0.0)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return run_config(tmp_path_factory.mktemp("config"))


def status(service: str, text: str, gauges: dict[str, float], at: float = 1e12) -> ServiceStatus:
    fields = {"instance": text, "host": text, "http": text, "state": text, "detail": text, "last_error": text}
    return ServiceStatus.model_construct(service=service, pid=1, version=3, gauges=gauges, last_error_at=at, at=at, **fields)


def shown_everywhere(config: RunConfig, statuses: list[ServiceStatus], text: str) -> str:
    """Returns what the panel, the live panel and the plain line print of these, as bytes that a terminal would get."""
    instance = InstanceStatus("trainer", text, 1, 2, True, math.inf, 0.0, None, 1, last_error=text)
    view = run_view(config, statuses, [instance], [ServiceError(text, 1, text)], disk=text)
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, "utf-8")
    SafeConsole(file=out, width=120).print(panel(view, math.nan, math.inf))
    Console(file=out, width=120, markup=True).print(panel(run_view(config, statuses)))  # what came over the bus is safe on any console
    plain = Display(SafeConsole(file=out), started=0.0)
    plain.show(view, 1.0)
    live = Display(SafeConsole(file=io.StringIO(), force_terminal=True, width=100), started=0.0)
    live.show(view, 1.0)
    live.close()
    out.write(json_text({"view": view.troubles.dead, "text": text}))
    out.flush()
    return raw.getvalue().decode()


def is_safe(output: str) -> bool:
    return printable(output) == output


@table("value", NUMBERS)
def test_any_number_in_any_gauge_is_shown(config: RunConfig, value: float) -> None:
    for service in ("buffer", "trainer", "rollout", "reward", "critic", "environment"):
        out = shown_everywhere(config, [status(service, "ready", dict.fromkeys(GAUGES, value))], "x")
        assert is_safe(out) and max(map(len, out.splitlines())) < 2000
    assert number(value) in out if service == "rollout" else True


def test_a_figure_that_is_not_finite_is_shown_as_such(config: RunConfig) -> None:
    gauges = {"reward": math.nan, "train_tokens_per_s": math.inf, "trained_steps": math.nan}
    out = shown_everywhere(config, [status("trainer", "ready", gauges)], "x")
    assert "reward nan" in out and "train inf tokens/s" in out
    assert "step 0/" in out, "a step count that is none counts for nothing"


def test_no_text_of_a_service_steers_the_terminal_or_ends_the_display(config: RunConfig) -> None:
    statuses = [
        status(service, EVIL, {EVIL: 1.0, f"eval_{EVIL}": 1.0, f"eval_{EVIL}_version": 1.0}) for service in ("buffer", "rollout", EVIL)
    ]
    out = shown_everywhere(config, statuses, EVIL)
    assert is_safe(out)
    assert "\\x1b]0;owned" in out and "[/bold]" in out, "it is shown as it is, spelled out"
    assert not [line for line in out.splitlines() if line.startswith("second")], "one text stays one line"


@given(st.text(st.characters(codec=None), max_size=60))
def test_any_text(config: RunConfig, text: str) -> None:
    assert is_safe(shown_everywhere(config, [status("buffer", text, {text: 1.0})], text))


@given(st.text(st.characters(codec=None), max_size=200))
def test_what_is_printable_can_be_encoded_and_stays(text: str) -> None:
    safe = printable(text)
    safe.encode()
    assert printable(safe) == safe and "\x1b" not in safe
    assert len(printable_line(text, 20)) <= 20 and "\n" not in printable_line(text, 20)


def test_ordinary_text_of_any_language_stays() -> None:
    for text in ("naïve – “quoted”", "日本語", "𝔐yxo 👩‍🔬 ∑x²\n\tindented", "سلام", "[not markup]"):
        assert printable(text) == text


def test_a_console_keeps_its_own_codes_and_none_of_others() -> None:
    out = io.StringIO()
    console = SafeConsole(file=out, force_terminal=True, width=100)
    console.print(Text("\x1b[2Jred", style="bold red"))
    console.print("[bold]no markup[/nothing]")
    assert "\x1b[1;31m" in out.getvalue() and "\x1b[2J" not in out.getvalue()
    assert "[bold]no markup[/nothing]" in out.getvalue()


def test_a_log_line_with_any_text_is_written_and_read(tmp_path: Path) -> None:
    """From structlog through the file to ``myxo logs``; and a line that is no JSON."""
    path = tmp_path / "rollout-0.log"
    with path.open("w") as stream:
        telemetry.configure_logs("r", "rollout", "rollout-0", stream=stream)
        try:
            raise ValueError(EVIL)
        except ValueError as error:
            structlog.get_logger().error("failed", error=EVIL, value=math.nan, exc_info=error, **{EVIL: {"deep": EVIL}})
        stream.write(f"{EVIL.encode('ascii', 'ignore').decode()}\n")
        stream.write('[1, 2]\n{"timestamp": 5, "event": [3]}\n')
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, "utf-8")
    for line in logs.Tail(path).last(50, "debug"):
        logs.show(SafeConsole(file=out, width=200), line)
    out.flush()
    assert is_safe(raw.getvalue().decode())
    assert "\\ud800" in raw.getvalue().decode() and "failed" in raw.getvalue().decode()
    assert telemetry.last_error.text and json.loads(json_text(telemetry.last_error.text))
