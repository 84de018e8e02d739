"""Mistakes of a newcomer: each is told before anything starts, with its place and what to do, and none hides another.

A row says all that must be told, in how many lines: what follows from another mistake is not told. Functions of one's own:
test_function_trial.py.
"""

from collections.abc import Callable

from shared.process.embedded_servers import free_port
from tests.integration.myxo.mistakes import Input, Mistake
from tests.integration.myxo.mistakes_of_data import content, demonstrations, named, rows, without_template
from tests.support.run_config import PROMPTS

Text = Callable[[str], str]


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


MISTAKES = [
    # the config
    Mistake("another project's key", ("trainer.learning_rate = 1e-05", "did you mean lr?"), text=train("learning_rate = 1e-5")),
    Mistake("another project's section", ("training = '…'", "did you mean [trainer]?", "learning_rate", "did you mean lr?"),
            lines=2, text=lambda text: f"{text}\n[training]\nlearning_rate = 1e-5\n"),
    Mistake("another project's key in its section", ("rollout.temperature = 0.7", "did you mean rollout_temperature?"),
            text=under("rollout", "temperature = 0.7")),
    Mistake("another project's key outside of a section", ("learning_rate", "in [trainer], did you mean lr?"),
            text=lambda text: f"learning_rate = 1e-5\n{text}"),
    Mistake("a section with needed fields misspelt", ("rollouts = '…'", "did you mean [rollout]?"),
            text=replaced("[rollout]", "[rollouts]")),
    Mistake("a key in another section", ("rollout.lr = 1e-05", "belongs into the section [trainer]"),
            text=under("rollout", "lr = 1e-5")),
    Mistake("a type, a path and a label", ("trainer.lr = 'fast'", "valid number", "/nowhere", "no such directory", *LABEL),
            lines=3, text=train('lr = "fast"'), sections={"model": {"hf_checkpoint": "/nowhere"}}, change=ONE_UNLABELLED),
    Mistake("sizes that contradict, and a label", ("trainer.global_batch_size = 7", "2 x 2 = 4", *LABEL), lines=2,
            text=train("global_batch_size = 7"), change=ONE_UNLABELLED),
    Mistake("a needed field misspelt, and a label", ("model.hf_checkpont", "did you mean hf_checkpoint?", *LABEL), lines=2,
            text=replaced("hf_checkpoint", "hf_checkpont"), change=ONE_UNLABELLED),
    Mistake("a key twice", ("run.toml", "line 10", "'rollout_top_k = 5'", "twice, leave one out"),
            text=under("rollout", "rollout_top_k = 4\nrollout_top_k = 5")),
    Mistake("a section twice", ("run.toml", "'run'", "twice, leave one out"), text=lambda text: f'{text}\n[run]\ndir = "x"\n'),
    Mistake("Python's truth", ("run.toml", "line 9", "'rollout_top_k = True'"), text=under("rollout", "rollout_top_k = True")),
    Mistake("a base that is not there", ("base = 'model.toml'", "no such file"), text=lambda text: f'base = "model.toml"\n{text}'),
    Mistake("an object where a name belongs", ("data.input_key", "valid string"),
            sections={"data": {"input_key": [f"key {number}" for number in range(400)]}}),
    # the data
    Mistake("one line without its label", LABEL, change=ONE_UNLABELLED),
    Mistake("one line with a null label", ("data.prompt_data:label", "prompts.jsonl:1", "found None"),
            change=rows({**UNLABELLED, "label": None}, *PROMPTS)),
    Mistake("a key twice in a line", ("prompts.jsonl:2", "the key 'label' is there twice; leave one out"),
            change=content(b'{"prompt": "1+1=", "label": "2"}\n{"prompt": "1+2=", "label": "3", "label": "4"}\n')),
    Mistake("an object in the place of a text", ("sft.sft_data:response", "sft.jsonl:1", "expected text", "characters"),
            change=demonstrations({"prompt": "1+1=", "response": ["2"] * 4000})),
    # the model
    Mistake("a file of data and one of the model are missing", ("promts.jsonl", "did you mean", "a directory with *.safetensors"),
            lines=2, change=both(named("data", "prompt_data", "promts.jsonl"), without_weights)),
    Mistake("a name on the hub out of reach, and a label", ("hf:Qwen/Qwen3-0.6B", "HF_HUB_OFFLINE", *LABEL), lines=2,
            environment={"HF_HUB_OFFLINE": "1"}, sections={"model": {"hf_checkpoint": "Qwen/Qwen3-0.6B"}}, change=ONE_UNLABELLED),
    Mistake("no chat template, and a label", ("data.apply_chat_template) = True", "chat_template.jinja", *LABEL), lines=2,
            flags=("--apply-chat-template",), change=both(without_template, ONE_UNLABELLED)),
    Mistake("a tokenizer cut off, and a label", ("tokenizer.json", *LABEL), lines=2,
            change=both(broken_tokenizer, ONE_UNLABELLED)),
    # the environment, and environments
    Mistake("a NATS server that is down, and a type", ("NATS_URL", NO_SERVER, "unset it", "trainer.lr = 'fast'"), lines=2,
            environment={"NATS_URL": f"nats://{NO_SERVER}"}, text=train('lr = "fast"')),
    Mistake("a Redis that is none, and a label", ("REDIS_URL", "redis://[user:password@]host:port", *LABEL), lines=2,
            environment={"REDIS_URL": "localhost"}, change=ONE_UNLABELLED),
    Mistake("an environment without a server", ("reward.environment_url", f"no reply from http://{NO_SERVER}"), runs=True,
            flags=("--rm-type", "environment", "--environment-url", f"http://{NO_SERVER}")),
    Mistake("a reward server that is down", ("reward.rm_url", f"no reply from http://{NO_SERVER}"), runs=True,
            flags=("--rm-type", "remote_rm", "--rm-url", f"http://{NO_SERVER}")),
    Mistake("a file in the place of a module", ("reward.custom_rm_path", "write rewards:right"),
            flags=("--custom-rm-path", "rewards.py:right")),
    Mistake("a method", ("rollout.custom_generate_function_path", "expected package.module:function"),
            flags=("--custom-generate-function-path", "own:Agent.generate")),
    # commands: flags of slime's, of others, and values
    Mistake("another project's flags", ("--learning-rate", "did you mean --lr?", "--num-generations", "did you mean --n-samples"),
            lines=2, flags=("--learning-rate", "1e-5", "--num-generations", "8")),
    Mistake("a needed field's flag misspelt, and a label", ("--rollout-batchsize", "did you mean --rollout-batch-size?", *LABEL),
            lines=2, flags=("--rollout-batchsize", "4"), text=replaced("rollout_batch_size = 2\n", ""), change=ONE_UNLABELLED),
    Mistake("a value of slime's misspelt, and a label", ("--advantage-estimator (algorithm.advantage_estimator) = 'grop'", *LABEL),
            lines=2, flags=("--advantage-estimator", "grop"), change=ONE_UNLABELLED),
    Mistake("a word for a switch that halves the run, and a label", ("debug.debug_train_only = 'perhaps'", "boolean", *LABEL),
            lines=2, sections={"debug": {"debug_train_only": "perhaps"}}, change=ONE_UNLABELLED),
    Mistake("a word for a number, and a label", ("--n-samples-per-prompt (rollout.n_samples_per_prompt) = 'eight'", *LABEL),
            lines=2, flags=("--n-samples-per-prompt", "eight"), change=ONE_UNLABELLED),
]  # fmt: skip
