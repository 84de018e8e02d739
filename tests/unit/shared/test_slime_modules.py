"""slime's modules, names and parameters, and what stands behind them here."""

import asyncio
import contextlib
import importlib
import inspect
import json
import statistics
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from tokenizers.processors import TemplateProcessing

from shared.hooks import HookSample, import_names, load
from shared.hooks.arguments import Arguments
from shared.hooks.filters import check_reward_nonzero_std, check_reward_nonzero_std_with_fallback
from shared.hooks.loading import SingletonMeta, load_function, split_path
from shared.hooks.returned_output import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn
from shared.hooks.slime import http_requests, model_functions, reward_dispatch, rollout_loop
from shared.hooks.slime import http_requests as background_loop
from shared.hooks.slime.http_requests import HTTPStatusError
from shared.hooks.slime.turn_masks import MultiTurnLossMaskGenerator
from shared.runtime.errors import ConfigError
from tests.support.http_server import http_server, served
from tests.support.run_config import run_config, write_jsonl
from tests.support.service_process import ROOT
from tests.support.tables import table
from tests.support.tiny_model import character_tokenizer

TEMPLATE = Path("tests/support/qwen3_chat_template.jinja")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_requests, "PAUSE_S", 0.01)


@pytest.fixture
async def server() -> AsyncIterator[Any]:
    """A server that answers as its path says, and counts."""
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.path)
        match request.path:
            case "/flaky" if len(seen) < 3:
                return web.Response(status=503)
            case "/wrong":
                return web.Response(status=400, text="no such field")
            case "/broken":
                return web.Response(status=500)
            case "/text":
                return web.Response(text="plain")
        given = await request.json() if request.method == "POST" else None
        return web.json_response({"given": given, "header": request.headers.get("X-Own")})

    async with served(web.route("*", "/{path}", answer)) as url:
        yield SimpleNamespace(url=f"{url}/", seen=seen)


async def test_a_request_needs_no_opening_and_is_tried_again(server: Any) -> None:
    assert await http_requests.post(server.url + "flaky", {"a": 1}, headers={"X-Own": "x"}) == {"given": {"a": 1}, "header": "x"}
    assert server.seen == ["/flaky"] * 3
    assert await http_requests.get(server.url + "get") == {"given": None, "header": None}
    assert await http_requests.post(server.url + "text", None) == "plain"


@pytest.mark.parametrize(("path", "tries"), [("wrong", 1), ("broken", 4)])
async def test_only_what_may_change_is_tried_again(server: Any, path: str, tries: int) -> None:
    with pytest.raises(HTTPStatusError, match="answered (400: no such field|500)"):
        await http_requests.post(server.url + path, {}, max_retries=4)
    assert len(server.seen) == tries


async def test_requests_work_from_the_background_loop_too(server: Any) -> None:
    assert await http_requests.get(server.url + "a")
    assert await asyncio.to_thread(lambda: background_loop.run(http_requests.get(server.url + "b"))) == {"given": None, "header": None}
    assert background_loop.get_async_loop() is background_loop.get_async_loop()


def test_functions_by_path_and_single_objects() -> None:
    assert load_function("statistics.mean") is load_function("statistics:mean") is statistics.mean

    class Counted(metaclass=SingletonMeta):
        def __init__(self, number: int) -> None:
            self.number = number

    assert Counted(3) is Counted(4) and Counted(5).number == 3
    Counted.clear_instances()
    assert Counted(6).number == 6


def test_engines_behind_the_address() -> None:
    count = http_requests.get_rollout_num_engines
    assert count(SimpleNamespace(rollout_num_engines=3)) == 3
    assert [count(SimpleNamespace(rollout_num_gpus=gpus, rollout_num_gpus_per_engine=4)) for gpus in (None, 2, 8)] == [0, 1, 2]


def test_outputs_of_rollout_functions() -> None:
    train, held_out = RolloutFnTrainOutput([[HookSample()]], {"a": 1}), RolloutFnEvalOutput({"set": {"rewards": [1.0]}})
    for given, evaluation, expected in ((train, False, train), (held_out, True, held_out), ([[]], False, RolloutFnTrainOutput([[]]))):
        assert call_rollout_fn(lambda *_, evaluation, given=given: given, 1, 2, evaluation=evaluation) == expected
    assert call_rollout_fn(lambda *_, evaluation: {}, evaluation=True) == RolloutFnEvalOutput({})


@pytest.mark.parametrize(
    ("name", "response", "label", "reward"),
    [
        ("math", r"so \boxed{42}", "42", 1),
        ("math", "I guess 42.", "42", 0),
        ("f1", "the cat", "cat", 1.0),
        ("boxed_f1", r"dog \boxed{cat}", "cat", 1.0),
        ("deepscaler", r"<think>…</think> \boxed{42}", "42", 1),
        ("exact", " 42\n", "42", 1.0),
        ("exact", "42.", "42", 0.0),
        ("exact", "42", 42, 1.0),
        ("boxed_exact", r"it is \boxed{42}.", 42, 1.0),
        ("math_verify", "I guess 42.", "42", 1.0),
        ("boxed_math_verify", r"\boxed{\frac{1}{2}} 42", "0.5", 1.0),
        ("math", r"\boxed{0}", 0, 1.0),
        ("math", r"\boxed{5}", "5 km/h", 1.0),
        ("math", r"\boxed{21/2}", "2 1/2", 0.0),
        ("f1", "42", 42, 1.0),
    ],
)
async def test_rewards_by_name(name: str, response: str, label: Any, reward: float) -> None:
    args = SimpleNamespace(custom_rm_path=None, rm_type=name, rm_url=None)
    sample = HookSample(response=response, label=label)
    assert await reward_dispatch.async_rm(args, sample) == reward
    assert await reward_dispatch.batched_async_rm(args, [sample, sample]) == [reward, reward]
    named = HookSample(response=response, label=label, metadata={"rm_type": name})
    assert await reward_dispatch.async_rm(SimpleNamespace(custom_rm_path=None, rm_type="none"), named) == reward


async def test_a_functions_own_attribute_of_the_name_turns_is_not_scored() -> None:
    args = SimpleNamespace(custom_rm_path=None, rm_type="exact", rm_url=None, scored_text="own")
    sample = HookSample(response="42", label="42")
    setattr(sample, "turns", 2)  # noqa: B010
    assert await reward_dispatch.async_rm(args, sample) == 1.0


@pytest.mark.parametrize("own", [{}, {"custom_rm": -1.0}])
async def test_rewards_with_weights_are_their_sum_and_each_by_its_name(own: dict[str, float]) -> None:
    args = SimpleNamespace(custom_rm_path=f"{__name__}.half_of_it" if own else None, rm_type="weighted", rm_url=None, reward_key=None)
    args.reward_weights, args.environments = {"math": 0.5, "dapo": 2.0, "exact": 1.0, **own}, {}
    sample = HookSample(response=r"\boxed{42} Answer: 42", label="42")
    assert not reward_dispatch.scored_later(args, sample)
    sample.reward = await reward_dispatch.async_rm(args, sample)
    total = 2.5 - 0.5 * len(own)
    assert sample.reward == {"reward": total, "math": 1.0, "dapo": 1.0, "exact": 0.0, **dict.fromkeys(own, 0.5)}
    assert sample.get_reward_value(args) == total and await reward_dispatch.batched_async_rm(args, [sample]) == [sample.reward]
    sample.custom_rm_path = f"{__name__}.half_of_it"
    assert await reward_dispatch.async_rm(args, sample) == {"reward": 0.5, "length": 21}, "its own goes before the weights"


async def half_of_it(args: Any, sample: HookSample) -> dict[str, float]:
    return {"reward": 0.5, "length": len(sample.response)}


@pytest.mark.parametrize(
    ("name", "later"),
    [
        *dict.fromkeys(("judge", "tournament", "environment", "mine", "weighted", "unit_tests", "boxed_unit_tests"), True).items(),
        ("exact", False),
        ("nobody", False),
    ],
)
async def test_what_the_reward_service_alone_can_ask_is_left_to_it(name: str, later: bool) -> None:
    weights = {"exact": 1.0, "mine": 1.0}
    args = SimpleNamespace(custom_rm_path=None, rm_type=name, reward_weights=weights, environments={"mine": "http://127.0.0.1:1"})
    assert reward_dispatch.scored_later(args, HookSample()) is later
    assert not reward_dispatch.scored_later(args, HookSample(metadata={"rm_type": "exact"}))
    if later and name != "weighted":
        with pytest.raises(NotImplementedError, match=f"no reward is named '{name}' outside of the reward service"):
            await reward_dispatch.async_rm(args, HookSample(response="x"))


async def test_rewards_by_functions_and_by_no_name() -> None:
    own = f"{__name__}.twice_its_length"
    sample, args = HookSample(response="four"), SimpleNamespace(custom_rm_path=own, rm_type=None)
    assert await reward_dispatch.async_rm(args, sample, times=2) == 8
    assert await reward_dispatch.batched_async_rm(args, [sample], times=3) == [12]
    sample.custom_rm_path = own
    assert await reward_dispatch.async_rm(SimpleNamespace(custom_rm_path=None, rm_type="math"), sample, times=1) == 4
    plain = SimpleNamespace(custom_rm_path=f"{__name__}.plain_length", rm_type="weighted", reward_weights={"custom_rm": 2.0})
    assert (await reward_dispatch.async_rm(plain, HookSample(response="four")))["reward"] == 8
    plain.rm_type = "math"
    assert await reward_dispatch.batched_async_rm(plain, [sample]) == [4]
    with pytest.raises(ValueError, match=r"the label '12\.5' is no integer"):
        await reward_dispatch.async_rm(
            SimpleNamespace(custom_rm_path=None, rm_type="dapo"), HookSample(response="Answer: 12", label="12.5")
        )
    with pytest.raises(NotImplementedError, match="no reward is named 'good'"):
        await reward_dispatch.async_rm(SimpleNamespace(custom_rm_path=None, rm_type="good"), HookSample())


async def test_groups_that_a_function_scores_as_a_whole_among_weights_are_left_to_the_reward_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollout_loop, "GenerateState", lambda args: SimpleNamespace(aborted=False))
    args = SimpleNamespace(group_rm=True, custom_rm_path=f"{__name__}:lengths", reward_weights={"custom_rm": 0.5, "exact": 0.5})
    args.partial_rollout = args.sglang_enable_deterministic_inference = False
    for args.rm_type, rewards in (("exact", [1, 2]), ("weighted", [None, None])):
        group = [HookSample(response=response, status=HookSample.Status.COMPLETED) for response in ("a", "ab")]
        assert [sample.reward for sample in await rollout_loop.generate_and_rm_group(args, group, {})] == rewards


async def lengths(args: Any, samples: list[HookSample]) -> list[int]:
    return [len(sample.response) for sample in samples]


def plain_length(args: Any, given: Any) -> Any:
    return [len(one.response) for one in given] if isinstance(given, list) else len(given.response)


async def twice_its_length(args: Any, given: Any, times: int) -> Any:
    return [len(one.response) * times for one in given] if isinstance(given, list) else len(given.response) * times


@pytest.mark.parametrize(
    ("rewards", "kept", "reason"),
    [
        ([1.0, 0.0], True, None),
        ([0.5, 0.5], False, "zero_std_0.5"),
        ([1.0], False, "zero_std_1.0"),
        ([1.0, 1.0 + 1e-7], False, "zero_std_1.0"),
    ],
)
def test_slimes_filters(rewards: list[float], kept: bool, reason: str | None) -> None:
    args, samples = SimpleNamespace(reward_key=None), [HookSample(reward=reward) for reward in rewards]
    output, other = check_reward_nonzero_std(args, samples), check_reward_nonzero_std_with_fallback(args, samples)
    assert (output.keep, output.reason, output.keep_when_insufficient) == (kept, reason, False)
    assert (other.keep, other.keep_when_insufficient) == (kept, True)


CHAT = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "let me ask"},
    {"role": "tool", "content": "2"},
    {"role": "tool", "content": "two"},
    {"role": "assistant", "content": "it is 2"},
    {"role": "user", "content": "thanks"},
    {"role": "assistant", "content": "good bye", "step_loss_mask": 0},
]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_masks_of_a_conversation(kind: str) -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE.read_text()
    generator = MultiTurnLossMaskGenerator(tokenizer, kind)
    ids, mask = generator.get_loss_mask(CHAT)
    assert len(ids) == len(mask)
    trained = generator.get_text_from_loss_mask(ids, mask)
    assert [text for text in ("let me ask", "it is 2") if any(text in one for one in trained)] == ["let me ask", "it is 2"]
    assert not any(word in "".join(trained) for word in ("be short", "1+1=", "two", "thanks", "good bye", "assistant"))
    assert generator.get_response_lengths([mask, [0, 0]])[1] == 0


def test_a_conversations_mask_of_no_such_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="tokenizer_type is 'llama'; expected qwen, qwen3"):
        MultiTurnLossMaskGenerator(character_tokenizer(), "llama").get_loss_mask(CHAT)


async def test_held_out_prompts_are_read_and_bounded_as_their_sets_say_and_experts_are_asked_for(tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    begin = ("<|im_start|>", 2)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    tokenizer.save_pretrained(tmp_path / "model")
    rows = write_jsonl(tmp_path / "held.jsonl", [{"prompt": "1+1=", "label": "2"}, {"prompt": "100+100=", "label": "200"}])
    bounds = {"plain": {}, "short": {"max_prompt_len": 6}, "close": {"max_context_len": 12}, "chat": {"apply_chat_template": True}}
    bounds["full"] = {"max_context_len": 9}  # 100+100= has 9 tokens with the BOS: there is no room for a response
    bounds["seeds"] = {"max_prompt_len": 6, "n_samples_per_eval_prompt": 3}
    sets = [{"name": name, "path": str(rows), **more} for name, more in bounds.items()]
    reward = {"rm_type": "weighted", "reward_weights": {"exact": 1.0}}
    rollout = {"rollout_max_response_len": 5, "alignment": "close"}
    replay = {"use_routing_replay": True, "use_rollout_routing_replay": True}
    config = run_config(tmp_path, rollout=rollout, eval={"sets": sets}, reward=reward, trainer=replay)
    chosen = {"output_token_logprobs": [[-0.5, 54, None]], "finish_reason": {"type": "stop"}}

    def answer(asked: dict[str, Any], number: int) -> Any:
        return {"text": "2", "meta_info": {**chosen, "routed_experts": [1, 0] * len(asked["input_ids"])}}

    rollout_loop.GenerateState.clear_instances()
    async with http_server(answer) as engine:
        args = Arguments(config, num_layers=1, moe_router_topk=2)
        host, port = engine.url.removeprefix("http://").split(":")
        args.point_at(host, int(port))
        wanted = {
            "plain": [(5, 5), (9, 5)],
            "short": [(5, 5)],
            "close": [(5, 5), (9, 3)],
            "chat": [(23, 5), (27, 5)],
            "full": [(5, 4)],
            "seeds": [(5, 5)] * 3,
        }
        for name, asked in wanted.items():
            engine.asked.clear()
            [one] = [one for one in args.eval_datasets if one.name == name]
            found = (await rollout_loop.eval_rollout_single_dataset(args, 0, one))[name]
            bodies = sorted(engine.asked, key=lambda body: len(body["input_ids"]))
            assert [(len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]) for body in bodies] == asked, name
            assert all(body["input_ids"][:1] == [2] and body["return_routed_experts"] for body in bodies)
            assert found["rewards"] == ([1.0] * 3 if name == "seeds" else [1.0, 0.0])[: len(asked)]
            assert [len(sample.rollout_routed_experts) for sample in found["samples"]] == [count for count, _ in asked]
        assert sorted(body["sampling_params"]["sampling_seed"] for body in engine.asked) == [42, 43, 44], "as in Myxo's own loop"
        engine.asked.clear()
        group = [HookSample(prompt="1+1=", label="2", tokens=[5]) for _ in range(2)]
        await rollout_loop.generate_and_rm_group(args, group, rollout_loop.sampling_params(args))
        assert sorted(body["sampling_params"]["sampling_seed"] for body in engine.asked) == [42, 43]
    rollout_loop.GenerateState.clear_instances()


def test_one_name_is_enough() -> None:
    import_names.install_slime_names()
    from slime.rollout.rm_hub import batched_async_rm  # type: ignore[import-not-found]
    from slime.utils.misc import load_function as found  # type: ignore[import-not-found]

    assert (batched_async_rm, found) == (reward_dispatch.batched_async_rm, load_function)
    assert threading.current_thread() is threading.main_thread()


@pytest.mark.parametrize("trusted", [False, True])
def test_a_checkpoints_own_code_runs_only_where_the_run_trusts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["mine.Mine", null]}, "tokenizer_class": "Mine"}')
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    Arguments(run_config(tmp_path, model={"trust_remote_code": trusted}))
    with contextlib.suppress(Exception):  # what it makes of the rest of this checkpoint is not the point
        model_functions.load_tokenizer(str(tmp_path), trust_remote_code=True)
    assert (tmp_path / "ran").exists() is trusted


# --- slime's import names: Myxo's own objects, and in a checkout of slime its own modules beside them


@table(
    ("path", "parts"),
    [
        ("package.module:function", ("package.module", "function")),
        ("package.module.function", ("package.module", "function")),
        ("module.function", ("module", "function")),
        ("module:function", ("module", "function")),
    ],
)
def test_a_path_has_a_colon_or_a_dot_before_its_function(path: str, parts: tuple[str, str]) -> None:
    assert split_path(path) == parts


def test_functions_are_found_by_slimes_paths_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_slimes_user.py").write_text(
        "from slime.utils.types import Sample\nimport slime.utils.types as types\n"
        "def f(args):\n    return Sample, types.Sample.Status.COMPLETED\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load("a.b", "of_slimes_user.f")(None) == (HookSample, HookSample.Status.COMPLETED)
    assert load("a.b", "of_slimes_user:f") is load("a.b", "of_slimes_user.f")


@table("name", sorted(import_names.MODULES))
def test_every_name_is_one_object_under_both_names(name: str) -> None:
    import_names.install_slime_names()
    found, ours = importlib.import_module(name), import_names.MODULES[name]
    assert found.__name__ == name if ours == "shared.hooks.slime" else found is importlib.import_module(ours)
    parent, _, member = name.rpartition(".")
    assert not parent or getattr(importlib.import_module(parent), member) is found


def test_a_module_that_is_not_there_is_refused_with_those_that_are() -> None:
    import_names.install_slime_names()
    words = r"No module named 'slime.ray': slime is not installed, and Myxo has of its modules .*slime.utils.types"
    with pytest.raises(ModuleNotFoundError, match=words):
        importlib.import_module("slime.ray.actor")
    with pytest.raises(ConfigError, match=r"cannot be imported: No module named 'slime.plugins'.*slime.utils.types"):
        load("a.b", "slime.plugins.f")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("from slime.agent.adapters import AnthropicAdapter", r"No module named 'slime.agent'.*nothing of it.*rollout\.agent"),
        ("from slime.observability.trace_utils import trace_span", r"No module named 'slime.observability'.*docs/metrics.md"),
        ("from slime.utils.processing_utils import encode_image_for_rollout_engine", "is for images: Myxo's prompts and models are text"),
    ],
)
def test_what_there_is_nothing_of_is_refused_with_what_there_is(
    line: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_another.py").write_text(line)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "of_another", raising=False)
    with pytest.raises(ConfigError, match=words):
        load("a.b", "of_another.f")


CHECKOUT = {
    "slime/__init__.py": "",
    "slime/utils/__init__.py": "",
    "slime/utils/types.py": "import ray\n",
    "slime/utils/lengths.py": "from slime.utils.types import Sample\nlongest = max\n",
    "slime/rollout/__init__.py": "",
    "slime/rollout/rm_hub/__init__.py": "import ray\n",
    "slime/rollout/rm_hub/own_grader.py": "from slime.rollout.rm_hub.f1 import f1_score\ndef grade(args, sample): return 1.0\n",
    "slime/ray/__init__.py": "",
    "slime/ray/actor_group.py": "import ray\n",
    "slime/ray/inner.py": "import slime.ray.actor_group\n",
    "slime/agent/parsing.py": "def parsed(text): return text\n",
}
"""A checkout of slime, whose types and rewards want Ray."""


EDITED = """import sys
from importlib.util import spec_from_file_location
class Edited:
    find_spec = staticmethod(lambda name, *_: spec_from_file_location(name, FILE) if name == "slime" else None)
sys.meta_path.append(Edited)
"""
"""How setuptools finds a package that is installed to be edited."""


@pytest.mark.parametrize("place", ["", "..", "../.."], ids=["inside", "beside", "installed to be edited"])
def test_from_a_checkout_of_slime_our_names_win_and_its_helpers_load(place: str, tmp_path: Path) -> None:
    for name, text in CHECKOUT.items():
        file = tmp_path / "slime" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    program = (
        "import importlib\nfrom shared.hooks import HookSample, load\n"
        "load('a.b', 'slime.rollout.rm_hub.own_grader.grade'); load('a.b', 'slime.agent.parsing:parsed')\n"
        "from slime.utils.types import Sample\nassert Sample is HookSample\n"
        "from slime.utils import lengths\nassert (lengths.Sample, lengths.longest) == (HookSample, max), lengths\n"
        "for name in ('slime.ray.inner', 'slime.ray.absent'):\n"
        "    try: importlib.import_module(name)\n"
        "    except ModuleNotFoundError as error: print(error)\n"
    )
    if place == "../..":
        program = EDITED.replace("FILE", repr(str(tmp_path / "slime" / "slime" / "__init__.py"))) + program
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path / "slime" / place, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    needs, absent = done.stdout.splitlines()
    assert needs.startswith("No module named 'ray'; slime's own slime.ray.actor_group (")
    assert "needs it, and Myxo has of its modules" in needs
    assert absent.startswith("No module named 'slime.ray.absent': slime's own package has none, and Myxo has of its modules slime.")


def test_the_names_are_there_without_torch() -> None:
    program = (
        "import sys, importlib\nfrom shared.hooks.import_names import MODULES, install_slime_names; install_slime_names()\n"
        "for name in MODULES: importlib.import_module(name)\n"
        "print(sorted({'torch', 'transformers', 'sglang'} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


# --- slime's names, fields and parameters as users' files have them (`tests/support/slime_api.json`), and what stands behind them here

API: dict[str, dict[str, Any]] = json.loads((ROOT / "tests" / "support" / "slime_api.json").read_text())

NAMES = [(module, name) for module, names in API.items() for name in names]


def accepts(function: Any, parameters: list[str]) -> bool:
    """Whether a function takes these parameters in this order, and by name."""
    found = inspect.signature(function).parameters
    own = [name for name, one in found.items() if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL) and name not in ("self", "cls")]
    return own[: len(parameters)] == parameters


@table(("module", "name"), NAMES)
def test_a_name_of_slimes_has_its_fields_and_parameters(module: str, name: str) -> None:
    import_names.install_slime_names()
    found, expected = getattr(importlib.import_module(module), name), API[module][name]
    if isinstance(expected, list):
        assert accepts(found, expected), inspect.signature(found)
    elif expected is not None:
        if expected["fields"]:
            assert {*expected["fields"]} <= {one.name for one in fields(found)}
        for method, parameters in expected["methods"].items():
            assert accepts(getattr(found, method), parameters), method
        assert all(hasattr(found, other) for other in expected["others"])


def test_fields_of_a_sample_stand_in_slimes_order() -> None:
    import_names.install_slime_names()
    found = [one.name for one in fields(importlib.import_module("slime.utils.types").Sample)]
    assert found == API["slime.utils.types"]["Sample"]["fields"]
