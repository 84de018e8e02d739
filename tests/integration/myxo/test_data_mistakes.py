"""Data, labels and the machine before a start: what is refused, what is told only, and what is read."""

import asyncio
import shutil
from collections.abc import Sequence
from typing import Any

import pytest

from myxo.preflight import STARTS, data_checks, inspect, machine_checks
from myxo.preflight.inspection import Inspection, ModelSize, Note
from myxo.run.run_directory import RunDirectory
from shared.bus import runs
from shared.bus.connection import Bus
from shared.config.config_reading import load
from shared.config.run_config import RunConfig
from shared.process.embedded_servers import EmbeddedNats
from shared.runtime.errors import ConfigError
from tests.integration.myxo.command import Myxo
from tests.integration.myxo.mistakes import LIMIT_S, Input, processor_seconds
from tests.integration.myxo.mistakes_of_data import GOOD, MATH, RATIONALE, Change, labels
from tests.support.run_config import write_jsonl


def test_a_model_that_fits_neither_disk_nor_memory(given: Input) -> None:
    size = Inspection(load(given.write())).model_size
    assert size is not None and size.bytes == 4 * size.parameters < given.weights.stat().st_size
    given.sections["trainer"] = {"train_device": "cpu"}
    given.sections["rollout"]["rollout_device"] = "cpu"
    inspection = Inspection(load(given.write()), starts=True)
    inspection.model_size = ModelSize(1 << 40, 4 << 40)
    [disk], [memory] = list(machine_checks.check_disk(inspection)), list(machine_checks.check_memory(inspection))
    assert (disk.field, memory.field) == ("run.dir", "model.hf_checkpoint")
    assert "a checkpoint of this model takes 14336.0 GiB" in disk.expected
    assert "2 lie there at once with keep_checkpoints = 2" in disk.expected
    assert "1.1e+03 billion parameters need 22528.0 GiB" in memory.expected


def test_a_disk_has_room_for_the_checkpoints_that_lie_there_at_once(given: Input, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five steps of a model whose checkpoints take 14 GiB each: one before the first step, one after the last."""
    given.sections["trainer"] = {"train_device": "cpu", "save_interval": 100}
    given.sections["rollout"] |= {"rollout_device": "cpu", "num_rollout": 5}

    def found(free: int, **trainer: object) -> list[str]:
        given.sections["trainer"] |= trainer
        inspection = Inspection(load(given.write()), starts=True)
        inspection.model_size = ModelSize(1 << 30, 4 << 30)
        usage = shutil.disk_usage(given.directory)._replace(free=free << 30)
        monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda _: usage)
        return [one.expected if isinstance(one, ConfigError) else "" for one in machine_checks.check_disk(inspection)]

    checkpoint = machine_checks.checkpoint_bytes(load(given.write()), ModelSize(1 << 30, 4 << 30)) >> 30
    [refused] = found(2 * checkpoint - 1)
    assert "2 lie there at once with keep_checkpoints = 2" in refused
    assert found(2 * checkpoint) == [""], "the final weights and snapshots may not fit"
    assert found(2 * checkpoint - 1, save_at_start=False) == [], "the last one alone"
    assert "3 lie there at once" in found(3 * checkpoint - 1, save_at_start=True, save_interval=1)[0]
    assert "2 lie there at once" in found(2 * checkpoint - 1, keep_checkpoints=1)[0]


def test_this_machine_is_not_asked_where_the_services_start_elsewhere(
    given: Input, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("myxo.preflight.CHECKS", {lambda inspection: iter([Note("this machine")]): STARTS})
    for starts in (True, False):
        assert inspect(Inspection(load(given.write()), starts=starts)) == []
        assert ("this machine" in capsys.readouterr().err) == starts


NOTES: list[tuple[str, Change, Sequence[str], Sequence[str]]] = [
    (
        "a few labels",
        labels(*"12345", ""),
        MATH,
        ["1 of 6 labels that were tried can never be matched; the first,", "prompts.jsonl:6: '': is empty"],
    ),
    (
        "a text with a number",
        labels("1", "2", f"{RATIONALE} That is 18."),
        MATH,
        ["1 of 3 labels", "hardly", "math_verify reads '18' alone"],
    ),
    (
        "overlap",
        lambda given: shutil.copy(given.directory / "heldout.jsonl", given.directory / "prompts.jsonl"),
        (),
        ["4 of 4 held-out prompts are training prompts, too; the first: ", "heldout.jsonl:1"],
    ),
]


@pytest.mark.parametrize(("change", "flags", "words"), [row[1:] for row in NOTES], ids=[row[0] for row in NOTES])
def test_what_may_be_meant_is_told_and_runs(given: Input, myxo: Myxo, change: Change, flags: list[str], words: list[str]) -> None:
    change(given)
    code, err = myxo.dry_run(given.write(), *flags)
    assert code == 0, err
    [line] = err.splitlines()
    for word in words:
        assert word in line


QUESTION = {"role": "user", "content": "1+1="}
ANSWER = {"role": "assistant", "content": "2"}


@pytest.mark.parametrize(
    "trained",
    [
        {"prompt": "1+1=", "label": "2", "metadata": {"split": "train"}},
        {"prompt": [{"content": " 1+1=\n", "role": "user", "name": None}], "label": "3"},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "1+1="}]}], "label": "2"},
        {"prompt": [QUESTION, ANSWER], "label": "2"},
        {"messages": [QUESTION, ANSWER, {"role": "user", "content": "+1="}, ANSWER]},
        {"messages": None, "prompt": "1+1=", "response": "2"},
    ],
    ids=["other metadata", "a chat", "parts", "with its answer", "a demonstration", "a demonstration of text"],
)
def test_a_held_out_prompt_that_is_trained_on_is_found(given: Input, trained: dict[str, Any]) -> None:
    """Whatever the form: a set of two files under a key of its own, with one question of the training file or of the demonstrations."""
    for name, question in (("a", "7+1="), ("b", "1+1=")):
        write_jsonl(given.directory / f"{name}.jsonl", [{"question": question, "label": "2"}])
    files = [str(given.directory / f"{name}.jsonl") for name in "ab"]
    given.sections["eval"] = {"eval_input_key": "question"}
    given.sections["eval.eval_prompt_data"] = {"own": files}
    is_demonstration = "label" not in trained
    write_jsonl(
        given.directory / ("sft.jsonl" if is_demonstration else "prompts.jsonl"), [trained, {**trained, "prompt": "8+8=", "messages": None}]
    )
    if is_demonstration:  # both forms in one table
        given.sections["sft"] = {"sft_data": str(given.directory / "sft.jsonl")}
        write_jsonl(given.directory / "prompts.jsonl", [{"prompt": "5+5=", "label": "10"}])
    inspection = Inspection(load(given.write()))
    [note] = [found.text for found in data_checks.check_contents(inspection) if "held-out" in found.text]
    what = "demonstrations" if is_demonstration else "training prompts"
    assert f"1 of 2 held-out prompts are {what}, too; the first: {given.directory / 'b.jsonl'}:1" in note


def test_a_held_out_set_is_compared_with_all_of_a_long_file_or_the_note_says_with_how_much(
    given: Input, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(given.directory / "prompts.jsonl", [{"prompt": f"{number}+0=", "label": "1"} for number in range(1000)])
    write_jsonl(given.directory / "heldout.jsonl", [{"prompt": f"{number}+0=", "label": "1"} for number in (0, 999, 2000)])
    for rows, seconds, words in (
        (1000, 60.0, "2 of 3 held-out"),
        (50, 60.0, "2 of 3 held-out prompts are training prompts, too (50 of 1,000"),
    ):
        monkeypatch.setattr(data_checks, "COMPARED_ROWS", rows)
        monkeypatch.setattr(data_checks, "COMPARED_SECONDS", seconds)
        [note] = list(data_checks.check_contents(Inspection(load(given.write()))))
        assert words in note.text


def test_prompts_that_end_in_an_answer_are_counted(given: Input) -> None:
    rows = [{"prompt": [QUESTION, ANSWER], "label": "2"}, {"prompt": [QUESTION], "label": "2"}, {"prompt": "2+2=", "label": "4"}]
    write_jsonl(given.directory / "prompts.jsonl", rows)
    write_jsonl(given.directory / "heldout.jsonl", [{"prompt": [{**QUESTION, "content": "9"}, ANSWER], "label": "2"}])
    notes = [found.text for found in data_checks.check_contents(Inspection(load(given.write())))]
    assert len(notes) == 2
    assert notes[0].startswith("data.prompt_data: 1 of 3 prompts end in an assistant's message (a gold answer left in?)")
    assert notes[0].endswith("prompts.jsonl:1")
    assert notes[1].startswith("eval.eval_prompt_data: 1 of 1 prompts end in an assistant's message")


LLAMA = "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}Today: {{ date_string }}"
OWN_SYSTEM = "{% if messages[0].role != 'system' %}Today: {{ strftime_now('%Y') }}{% endif %}"
CHATS = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "variables", "prompt", "words"),
    [
        (LLAMA, {}, [QUESTION], 'apply_chat_template_kwargs = {date_string = "'),
        (LLAMA, {"date_string": "26 Jul 2024"}, [QUESTION], None),
        ("{% set today = strftime_now('%d-%B-%Y') %}{{ today }}", {}, [QUESTION], "a chat_template.jinja that writes none"),
        (OWN_SYSTEM, {}, [QUESTION], "a chat_template.jinja"),
        (OWN_SYSTEM, {}, [{"role": "system", "content": "s"}, QUESTION], None),
        (LLAMA, {}, "1+1=", None),
        ("Today: 26 Jul 2024", {}, [QUESTION], None),
    ],
)
def test_a_template_that_writes_todays_date_is_told_with_how_to_pin_it(
    given: Input, template: str, variables: dict[str, str], prompt: object, words: str | None
) -> None:
    (given.model / "chat_template.jinja").write_text(template + CHATS)
    write_jsonl(given.directory / "prompts.jsonl", [{"prompt": prompt, "label": "2"}])
    given.sections["data.apply_chat_template_kwargs"] = variables
    notes = [found.text for found in data_checks.check_dates(Inspection(load(given.write())))]
    assert len(notes) == (words is not None)
    assert all("data.prompt_data: the chat template writes today's date" in note and str(words) in note for note in notes)


def test_demonstrations_that_are_split_or_dated_are_told(given: Input, myxo: Myxo) -> None:
    template = "{{ strftime_now('%d') }}{% for m in messages %}{{ '=' if loop.last and m.role == 'assistant' }}{{ m.content }}{% endfor %}"
    (given.model / "chat_template.jinja").write_text(template)
    chats = [[QUESTION, ANSWER], [QUESTION, ANSWER, QUESTION, ANSWER], [QUESTION, ANSWER] * 3]
    write_jsonl(given.directory / "sft.jsonl", [*({"messages": chat} for chat in chats), {"prompt": "5+5=", "response": "10"}])
    given.sections["sft"] = {"sft_data": str(given.directory / "sft.jsonl")}
    for _ in range(2):  # the second reads what the first has found
        code, err = myxo.dry_run(given.write())
        assert code == 0, err
        assert "sft.sft_data: 2 of 4 demonstrations are split into 5 lines, because the chat template rewrites earlier turns" in err
        assert "sft.sft_data: the chat template writes today's date" in err


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_byte_order_mark_and_any_line_ends_are_fine(given: Input, myxo: Myxo, end: bytes) -> None:
    (given.directory / "prompts.jsonl").write_bytes(b"\xef\xbb\xbf" + GOOD.replace(b"\n", end))
    assert myxo.dry_run(given.write()) == (0, "")


def test_answers_that_math_can_match_are_not_complained_of(given: Input, myxo: Myxo) -> None:
    labels("42", "-3.5", "1/2", "\\frac{3}{4}", "x^2+1", "#### 72", "3,000", "50%", "(3,4)", "A")(given)
    assert myxo.dry_run(given.write(), *MATH) == (0, "")


def test_what_was_read_beside_a_teacher_is_read_again_without_one(given: Input) -> None:
    write_jsonl(given.directory / "prompts.jsonl", [{"prompt": f"{number}+0=", "label": None} for number in range(9)])
    given.sections["algorithm"] = {"use_opd": True, "opd_type": "megatron", "opd_teacher_load": str(given.directory)}
    assert list(data_checks.check_training_prompts(Inspection(load(given.write())))) == []
    del given.sections["algorithm"]
    with pytest.raises(ConfigError, match="label"):
        list(data_checks.check_training_prompts(Inspection(load(given.write()))))


def test_long_files_are_read_in_part_and_the_same_files_once(given: Input, myxo: Myxo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_checks, "MOST", 50)
    rows: list[Any] = [{"prompt": f"{number}+0=", "label": str(number)} for number in range(1000)]
    write_jsonl(given.directory / "prompts.jsonl", rows)
    line = "myxo: data.prompt_data: 50 of 1,000 prompts were read before the start; the buffer tells what is wrong with the others\n"
    assert myxo.dry_run(given.write()) == (0, line)

    def read_again(*words: object) -> None:
        raise AssertionError("read again")

    with monkeypatch.context() as patch:
        patch.setattr("shared.data.prompts.PromptFile.check", read_again)
        assert myxo.dry_run(given.write()) == (0, line)
    write_jsonl(given.directory / "prompts.jsonl", [*rows[:-1], {"question": "1+1="}])
    code, err = myxo.dry_run(given.write())
    assert code == 2
    assert "prompts.jsonl:1000" in err, "the last line is among those that are read"


@pytest.mark.slow
async def put_on_its_bus(config: RunConfig) -> None:
    """Makes the run as a launcher does that was stopped before anything was trained."""
    files = RunDirectory(config.run.root)
    server = EmbeddedNats(files.nats)
    server.start()
    bus = await Bus.connect(server.url, "test")
    await runs.create(bus, config, None)
    runs.freeze(files.root, config)
    await bus.close()
    server.stop()


def test_a_run_of_that_name_with_another_config(given: Input, myxo: Myxo) -> None:
    asyncio.run(put_on_its_bus(load(given.write(), {"rollout": {"num_rollout": 2}})))
    summary = b"{}"
    (given.directory / "runs" / "test" / "summary.json").write_bytes(summary)
    other = ("--num-rollout", "2", "--max-staleness", "3", "--adam-beta1", "0.5", "--lr", "0.0005")
    assert myxo.dry_run(given.write(), "--num-rollout", "2") == (0, "")
    assert myxo.dry_run(given.write(), *other, "--fresh") == (0, "")
    before = processor_seconds()
    code, out, err = myxo.run("up", given.write(), *other, standins=True)
    assert processor_seconds() - before < LIMIT_S
    assert (code, out) == (2, "")
    assert [line.partition(": run test exists")[0] for line in err.splitlines()] == [
        "myxo: --max-staleness (rollout.max_staleness) = '1 → 3'",
        "myxo: --adam-beta1 (trainer.adam_beta1) = '0.9 → 0.5'",
    ]
    assert "use --fresh to start it anew, or another run.name" in err
    (given.directory / "runs" / "test" / "config.json").unlink()  # as a run of an earlier release left it: the bus knows
    code, out, err = myxo.run("up", given.write(), *other, standins=True)
    assert code == 2, f"{out}\n{err}"
    assert "rollout.max_staleness" in err
    assert (given.directory / "runs" / "test" / "summary.json").read_bytes() == summary
