"""Mistakes with files, keys, labels and the machine, as newcomers make them."""

import gzip
import json
from collections.abc import Callable

import pyarrow
import pyarrow.parquet

from tests.integration.myxo.mistakes import Input, Mistake
from tests.support.run_config import PROMPTS, write_jsonl

Change = Callable[[Input], object]

GOOD = b"".join(json.dumps(row).encode() + b"\n" for row in PROMPTS)
RATIONALE = "He has three baskets with a dozen eggs each and sells half of them on the market in the morning, so he keeps some."
SHAREGPT = {"messages": [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}]}
MATH = ("--rm-type", "math_verify")


def rows(*entries: object, name: str = "prompts.jsonl") -> Change:
    """These are the rows of a file."""
    return lambda given: write_jsonl(given.directory / name, entries)


def content(data: bytes, name: str = "prompts.jsonl") -> Change:
    """This is all that a file holds."""
    return lambda given: (given.directory / name).write_bytes(data)


def labels(*texts: str) -> Change:
    """Prompts with these labels."""
    return rows(*({"prompt": f"{number}+0=", "label": text} for number, text in enumerate(texts)))


def demonstrations(entry: object) -> Change:
    """A warm start with one demonstration."""

    def change(given: Input) -> None:
        write_jsonl(given.directory / "sft.jsonl", [entry])
        given.sections["sft"] = {"sft_data": str(given.directory / "sft.jsonl")}

    return change


def named(section: str, field: str, path: str, *, file: bool = False) -> Change:
    """A field names this path in the input's directory. ``file``: there is a file."""

    def change(given: Input) -> None:
        given.sections[section][field] = str(given.directory / path)
        if file:
            (given.directory / path).write_text("")

    return change


def parquet_by_another_name(given: Input) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1+1="], "label": ["2"]}), given.directory / "prompts.jsonl")


def without_template(given: Input) -> None:
    (given.model / "chat_template.jinja").unlink(missing_ok=True)
    path = given.model / "tokenizer_config.json"
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "chat_template"}))


MISTAKES = [
    # files
    Mistake("a file's name misspelt", ("data.prompt_data", "no such file", "did you mean", "prompts.jsonl?"),
            change=named("data", "prompt_data", "promts.jsonl")),
    Mistake("a directory in place of a file", ("data.prompt_data", "a directory", "did you mean", "heldout.jsonl?"),
            change=named("data", "prompt_data", "")),
    Mistake("an empty file", ("data.prompt_data", "holds no line"), change=content(b"")),
    Mistake("a file as it was downloaded, compressed", ("data.prompt_data", "compressed with gzip", "gunzip -k"),
            change=content(gzip.compress(GOOD))),
    Mistake("Parquet by another name", ("data.prompt_data", "ends in .parquet"), change=parquet_by_another_name),
    Mistake("a JSON array", ("data.prompt_data", "not one object a line", "jq -c '.[]'"), change=content(json.dumps(PROMPTS).encode())),
    Mistake("a JSON array with indents", ("data.prompt_data", "jq -c '.[]'"), change=content(json.dumps(PROMPTS, indent=2).encode())),
    Mistake("a JSON object with indents", ("not one object a line",), change=content(json.dumps({"data": PROMPTS}, indent=2).encode())),
    Mistake("a table of comma-separated values", ("eval.eval_prompt_data", "a table ('prompt,label')", "csv.DictReader"),
            change=content(b"prompt,label\n1+1=,2\n", "heldout.jsonl")),
    Mistake("a web page", ("a web page", "download the file itself"), change=content(b"<!DOCTYPE html>\n<html>Sign in</html>\n")),
    Mistake("a Git LFS pointer", ("git lfs pull",), change=content(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n")),
    Mistake("UTF-16", ("data.prompt_data", "iconv -f UTF-16"), change=content(GOOD.decode().encode("utf-16"))),
    Mistake("Latin-1", ("prompts.jsonl:2", "not UTF-8", "iconv -f LATIN1"),
            change=content(GOOD.splitlines()[0] + b'\n{"prompt": "caf\xe9"}\n')),
    Mistake("a prompt larger than a message", ("data.prompt_data:prompt", "prompts.jsonl:2", "at most 917504 bytes"),
            change=rows(PROMPTS[0], {**PROMPTS[1], "metadata": {"document": "x" * (1 << 20)}})),
    Mistake("half a surrogate pair", ("eval.eval_prompt_data:prompt", "heldout.jsonl:1", "surrogates not allowed"),
            change=rows({**PROMPTS[1], "metadata": {"name": "\ud800"}}, name="heldout.jsonl")),
    # keys
    Mistake("another key for prompts", ("data.prompt_data:prompt", "prompts.jsonl:1", "did you mean data.input_key = 'question'?"),
            change=rows({"question": "1+1=", "answer": "2"})),
    Mistake("another key for labels", ("data.prompt_data:label", "did you mean data.label_key = 'answer'?"),
            change=rows({"prompt": "1+1=", "answer": "2"})),
    Mistake("another key for responses", ("sft.sft_data:response", "did you mean sft.sft_response_key = 'completion'?"),
            change=demonstrations({"prompt": "1+1=", "completion": "2"})),
    Mistake("ShareGPT's prompts", ("data.prompt_data:messages", "from and value", "rename"), ("--input-key", "messages"),
            change=rows({**SHAREGPT, "label": "2"}, name="prompts.jsonl"), lines=2),
    Mistake("ShareGPT's chats", ("sft.sft_data:messages", "sft.jsonl:1", "rename"), change=demonstrations(SHAREGPT)),
    Mistake("a model without a chat template", ("data.apply_chat_template = True", "chat_template.jinja"), ("--apply-chat-template",),
            change=without_template),
    # labels
    Mistake("labels that math cannot read",
            ("data.prompt_data:label", "prompts.jsonl:2", "3 of 4 labels", "can never be matched", "no number, expression or word"), MATH,
            change=labels("1", "٤", "٥", "٦")),
    Mistake("empty labels", ("data.prompt_data:label", "prompts.jsonl:1", "3 of 3 labels", "is empty"), MATH, change=labels("", " ", "\n")),
    Mistake("rationales for math", ("3 of 3 labels", "words and no number", "the final answer alone"), MATH,
            change=labels(*[RATIONALE] * 3)),
    Mistake("labels that dapo would cut off",
            ("data.prompt_data:label", "prompts.jsonl:1", "3 of 4 labels", "'12.5' is no integer that dapo can compare"),
            ("--rm-type", "dapo"), change=labels("12.5", "2 1/2", "1e-05", "7")),
    Mistake("labels that are longer than a response",
            ("eval.eval_prompt_data:label", "exact compares all of a response", "rollout_max_response_len = 20"),
            ("--rollout-max-response-len", "20"), change=rows({"prompt": "9+9=", "label": RATIONALE}, name="heldout.jsonl")),
    # the machine
    Mistake("a file where runs should lie", ("run.dir", "taken is a file"), change=named("run", "dir", "taken", file=True)),
    Mistake("a directory that takes nothing", ("run.dir = '/proc/runs/test'", "cannot be written"), ("--dir", "/proc/runs")),
]  # fmt: skip
