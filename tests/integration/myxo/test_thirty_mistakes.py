"""Thirty mistakes of a newcomer: each is told before anything starts, with its place and what to do, and none hides another.

A row says all that must be told, in how many lines (what follows from another mistake is not told), and its grade, which the test derives
from what was told (`grade`). Functions of one's own: test_function_trial.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from myxo.commands import up
from myxo.main import main
from shared.process.embedded_servers import free_port
from tests.integration.myxo.mistakes import Input, Mistake, grade
from tests.integration.myxo.mistakes_of_data import content, demonstrations, named, rows, without_template
from tests.support.run_config import PROMPTS
from tests.support.tables import table

LONGEST_LINE = 700
"""Characters of a line that is told: a mistake is not found in a whole object."""

Text = Callable[[str], str]


@dataclass(frozen=True)
class NewcomersMistake(Mistake):
    """``text``: takes the text of the config and returns that which is written. ``runs``: whether it is told and runs all the same.
    ``grade``: of each line that is told."""

    text: Text = str
    runs: bool = False
    grade: str = "A"

    def prepare(self, given: Input) -> list[str]:
        words = super().prepare(given)
        path = Path(words[1])
        path.write_text(self.text(path.read_text()))
        return [*words, *["--dry-run"] * self.runs]


def replaced(old: str, new: str) -> Text:
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new, 1)

    return change


def under(section: str, line: str) -> Text:
    """One more line at the head of a section."""
    return replaced(f"[{section}]\n", f"[{section}]\n{line}\n")


def train(line: str) -> Text:
    return lambda text: f"{text}\n[trainer]\n{line}\n"


UNLABELLED = {"prompt": "1+1="}
LABEL = ("data.prompt_data:label", "prompts.jsonl:3", "has no key 'label'", "add it to the line")
ONE_UNLABELLED = rows(*PROMPTS[:2], UNLABELLED, *PROMPTS[2:])
NO_SERVER = f"127.0.0.1:{free_port()}"


def both(*changes: Callable[[Input], object]) -> Callable[[Input], object]:
    return lambda given: [change(given) for change in changes]


def broken_tokenizer(given: Input) -> None:
    (given.model / "tokenizer.json").write_text('{"version": ')


def without_weights(given: Input) -> None:
    given.weights.unlink()


ROWS = [
    # the config
    NewcomersMistake("another project's key", ("trainer.learning_rate = 1e-05", "did you mean lr?"), text=train("learning_rate = 1e-5")),
    NewcomersMistake("another project's section", ("training = '…'", "did you mean [trainer]?", "learning_rate", "did you mean lr?"),
                     lines=2, text=lambda text: f"{text}\n[training]\nlearning_rate = 1e-5\n"),
    NewcomersMistake("another project's key in its section", ("rollout.temperature = 0.7", "did you mean rollout_temperature?"),
                     text=under("rollout", "temperature = 0.7")),
    NewcomersMistake("another project's key outside of a section", ("learning_rate", "in [trainer], did you mean lr?"),
                     text=lambda text: f"learning_rate = 1e-5\n{text}"),
    NewcomersMistake("a section with needed fields misspelt", ("rollouts = '…'", "did you mean [rollout]?"),
                     text=replaced("[rollout]", "[rollouts]")),
    NewcomersMistake("a key in another section", ("rollout.lr = 1e-05", "belongs into the section [trainer]"),
                     text=under("rollout", "lr = 1e-5")),
    NewcomersMistake("a type, a path and a label", ("trainer.lr = 'fast'", "valid number", "/nowhere", "no such directory", *LABEL),
                     lines=3, text=train('lr = "fast"'), sections={"model": {"hf_checkpoint": "/nowhere"}}, change=ONE_UNLABELLED),
    NewcomersMistake("sizes that contradict, and a label", ("trainer.global_batch_size = 7", "2 x 2 = 4", *LABEL), lines=2,
                     text=train("global_batch_size = 7"), change=ONE_UNLABELLED),
    NewcomersMistake("a needed field misspelt, and a label", ("model.hf_checkpont", "did you mean hf_checkpoint?", *LABEL), lines=2,
                     text=replaced("hf_checkpoint", "hf_checkpont"), change=ONE_UNLABELLED),
    NewcomersMistake("a key twice", ("run.toml", "line 10", "'rollout_top_k = 5'", "twice, leave one out"),
                     text=under("rollout", "rollout_top_k = 4\nrollout_top_k = 5")),
    NewcomersMistake("a section twice", ("run.toml", "'run'", "twice, leave one out"), text=lambda text: f'{text}\n[run]\ndir = "x"\n'),
    NewcomersMistake("Python's truth", ("run.toml", "line 9", "'rollout_top_k = True'"), text=under("rollout", "rollout_top_k = True")),
    NewcomersMistake("a base that is not there", ("base = 'model.toml'", "no such file"), text=lambda text: f'base = "model.toml"\n{text}'),
    NewcomersMistake("an object where a name belongs", ("data.input_key", "valid string"),
                     sections={"data": {"input_key": [f"key {number}" for number in range(400)]}}),
    # the data
    NewcomersMistake("one line without its label", LABEL, change=ONE_UNLABELLED),
    NewcomersMistake("one line with a null label", ("data.prompt_data:label", "prompts.jsonl:1", "found None"),
                     change=rows({**UNLABELLED, "label": None}, *PROMPTS)),
    NewcomersMistake("a key twice in a line", ("prompts.jsonl:2", "the key 'label' is there twice; leave one out"),
                     change=content(b'{"prompt": "1+1=", "label": "2"}\n{"prompt": "1+2=", "label": "3", "label": "4"}\n')),
    NewcomersMistake("one long prompt", ("rollout_max_response_len) = 200", "at most 122", "prompts.jsonl:2: 900 tokens"),
                     flags=("--rollout-max-response-len", "200"), change=rows(PROMPTS[0], {"prompt": "1" * 900, "label": "2"})),
    NewcomersMistake("a prompt longer than the context", ("prompts.jsonl:1: a prompt of 1500 tokens", "overlong_prompts = filter"),
                     change=rows({"prompt": "1" * 1500, "label": "2"})),
    NewcomersMistake("an object in the place of a text", ("sft.sft_data:response", "sft.jsonl:1", "expected text", "characters"),
                     change=demonstrations({"prompt": "1+1=", "response": ["2"] * 4000})),
    # the model
    NewcomersMistake("a file of data and one of the model are missing", ("promts.jsonl", "did you mean", "a directory with *.safetensors"),
                     lines=2, change=both(named("data", "prompt_data", "promts.jsonl"), without_weights)),
    NewcomersMistake("a name on the hub out of reach, and a label", ("hf:Qwen/Qwen3-0.6B", "HF_HUB_OFFLINE", *LABEL), lines=2,
                     environment={"HF_HUB_OFFLINE": "1"}, sections={"model": {"hf_checkpoint": "Qwen/Qwen3-0.6B"}}, change=ONE_UNLABELLED),
    NewcomersMistake("no chat template, and a label", ("data.apply_chat_template) = True", "chat_template.jinja", *LABEL), lines=2,
                     flags=("--apply-chat-template",), change=both(without_template, ONE_UNLABELLED)),
    NewcomersMistake("a tokenizer cut off, and a label", ("tokenizer.json", *LABEL), lines=2,
                     change=both(broken_tokenizer, ONE_UNLABELLED)),
    # the environment, and environments
    NewcomersMistake("a NATS server that is down, and a type", ("NATS_URL", NO_SERVER, "unset it", "trainer.lr = 'fast'"), lines=2,
                     environment={"NATS_URL": f"nats://{NO_SERVER}"}, text=train('lr = "fast"')),
    NewcomersMistake("a Redis that is none, and a label", ("REDIS_URL", "redis://[user:password@]host:port", *LABEL), lines=2,
                     environment={"REDIS_URL": "localhost"}, change=ONE_UNLABELLED),
    NewcomersMistake("an environment without a server", ("reward.environment_url", f"no reply from http://{NO_SERVER}"), runs=True,
                     flags=("--rm-type", "environment", "--environment-url", f"http://{NO_SERVER}")),
    NewcomersMistake("a reward server that is down", ("reward.rm_url", f"no reply from http://{NO_SERVER}"), runs=True,
                     flags=("--rm-type", "remote_rm", "--rm-url", f"http://{NO_SERVER}")),
    NewcomersMistake("a file in the place of a module", ("reward.custom_rm_path", "write rewards:right"),
                     flags=("--custom-rm-path", "rewards.py:right")),
    NewcomersMistake("a method", ("rollout.custom_generate_function_path", "expected package.module:function"),
                     flags=("--custom-generate-function-path", "own:Agent.generate")),
    # commands: flags of slime's, of others, and values
    NewcomersMistake("another project's flags", ("--learning-rate", "did you mean --lr?", "--num-generations", "did you mean --n-samples"),
                     lines=2, flags=("--learning-rate", "1e-5", "--num-generations", "8")),
    NewcomersMistake("a needed field's flag misspelt, and a label", ("--rollout-batchsize", "did you mean --rollout-batch-size?", *LABEL),
                     lines=2, flags=("--rollout-batchsize", "4"), text=replaced("rollout_batch_size = 2\n", ""), change=ONE_UNLABELLED),
    NewcomersMistake("a value of slime's misspelt, and a label", ("--advantage-estimator (algorithm.advantage_estimator) = 'grop'", *LABEL),
                     lines=2, flags=("--advantage-estimator", "grop"), change=ONE_UNLABELLED),
    NewcomersMistake("a word for a switch that halves the run, and a label", ("debug.debug_train_only = 'perhaps'", "boolean", *LABEL),
                     lines=2, sections={"debug": {"debug_train_only": "perhaps"}}, change=ONE_UNLABELLED),
    NewcomersMistake("a word for a number, and a label", ("--n-samples-per-prompt (rollout.n_samples_per_prompt) = 'eight'", *LABEL),
                     lines=2, flags=("--n-samples-per-prompt", "eight"), change=ONE_UNLABELLED),
]  # fmt: skip


@pytest.mark.extra
@table("row", ROWS)
def test_a_newcomers_mistake_is_told_with_its_place_and_remedy(
    row: NewcomersMistake, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = Input.make(tmp_path, tiny_model)
    with monkeypatch.context() as patch:
        patch.setattr(up, "Launch", lambda *_, **__: pytest.fail("the run would have started"))
        for name in ("NATS_URL", "REDIS_URL"):
            patch.delenv(name, raising=False)
        for name, value in row.environment.items():
            patch.setenv(name, value)
        code = main(words := row.prepare(given))
    out, err = capsys.readouterr()
    assert code == (0 if row.runs else 2), err
    assert [word for word in row.says if word not in err] == [], err
    assert len(err.splitlines()) == row.lines, err
    assert all(line.startswith("myxo: ") and len(line) < LONGEST_LINE for line in err.splitlines()), err
    assert bool(out) == row.runs
    grades = {line: grade(line, given, [*words, *row.environment]) for line in err.splitlines()}
    assert set(grades.values()) == {row.grade}, grades


def test_the_table_has_thirty_rows() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS) >= 30


def test_a_grade_needs_a_place_that_is_there_and_a_remedy(tmp_path: Path, tiny_model: Path) -> None:
    given = Input.make(tmp_path, tiny_model)
    given.write()
    good = "myxo: data.prompt_data = 'prompts.jsonl:3': expected text"
    assert [grade(good, given, (), told_after) for told_after in (None, 2.0)] == ["A", "B"]
    assert grade(good, given, (), 100.0).startswith("no ")
    for worse in (
        "myxo: it failed; give text",
        "myxo: data.promts = 1: expected text",
        good.replace(":3", ":300"),
        good.partition(": exp")[0],
    ):
        assert grade(worse, given, ()).startswith("no "), worse
