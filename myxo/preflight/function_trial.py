"""Calls a config's own functions on two prompts, in the worker processes that call them in a run, with a canned engine.

Each function gets what a run would give it, made of known answers: the label alone, the label in a sentence, and a wrong one. What it gives
back is read as a run reads it. ``breakpoint()`` opens the debugger on this terminal, and no deadline runs from then on.
"""

import asyncio
import contextlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np
from aiohttp import web

from myxo.commands.agent_check import AgentConformance, Said, ScriptedModel, function_agent
from myxo.preflight.inspection import Inspection
from shared.config.reward_section import WEIGHTED
from shared.data.data_source import FIELD as SOURCE
from shared.data.prompts import Prompt, PromptReader
from shared.data.rows import RowEntry
from shared.data.source_process import RENDERED, SourceProcess
from shared.data.tokenizer import Tokenizer
from shared.environment.conformance import Check, CheckSuite, CheckWarned, Example
from shared.hooks import Arguments, HookSample, paths
from shared.hooks.loading import AGENT, GENERATE, PLAIN, SAMPLE_HOOKS
from shared.hooks.sample_agreement import compared
from shared.hooks.sample_conversion import Served, packed, to_stored, unpacked
from shared.hooks.slime.rollout_loop import sampling_params
from shared.process.call_server import DEBUGGED, TERMINAL, debug
from shared.process.worker_pool import WorkerPool
from shared.rewards.names import RUNS_CODE, VERIFIERS, base, pattern_of
from shared.rewards.reference import Reference
from shared.runtime.errors import ConfigError, DeadlineExceeded
from shared.schema.ledger import group_id
from shared.schema.sample import Sample, SampleLimits, Score, encode

SECONDS = 60.0  # default deadline of one call
DAY = 86400.0  # seconds for which a function may stand in the debugger
PROMPTS, GENERATED = 2, 3  # prompts that are tried, and how many rollouts of each a function generates; the others are copies
ANSWERS = ("{0}", "I do not know.", "Let me think.</think> The answer is \\boxed{{{0}}}.\nAnswer: {0}")
NO_LABEL = "42"  # stands for the label of a prompt that has none
REWARD, VERIFIER, REWARD_SERVICE = "reward.custom_rm_path", "reward.rm_type", "services.reward.worker"
FILTERS = ("rollout.dynamic_sampling_filter_path", "rollout.rollout_sample_filter_path", "rollout.rollout_all_samples_process_path")

# Field → how a run calls its function, and what that is to give: the end of what is said of one that fails.
SIGNATURES = {
    SOURCE: "make(config), whose plain get_samples(n) gives n prompts",
    GENERATE: "async f(args, sample, sampling_params), which gives the sample or a list of samples",
    AGENT: "f(data, base_url, api_key), which gives a number, a dict of numbers or None",
    REWARD: "f(args, sample), which gives a number or a dict with 'reward' (with group_rm: f(args, samples), a list)",
    FILTERS[0]: "f(args, group), which gives a bool or DynamicFilterOutput(keep, reason)",
    FILTERS[1]: "f(args, groups), which sets sample.remove_sample",
    FILTERS[2]: "f(args, all_groups, data_source)",
    "algorithm.custom_reward_post_process_path": "f(args, samples), which gives (raw_rewards, rewards)",
    "algorithm.custom_advantage_function_path": "f(args, rollout_data), which sets rollout_data['advantages'], a tensor [R] a sample",
    "algorithm.custom_tis_function_path": "f(*, args, pg_loss, train_log_probs, …), which gives (pg_loss, masks, metrics)",
    "algorithm.custom_pg_loss_reducer_function_path": "f(total_lengths, response_lengths, loss_masks, per_token), which gives a function",
    "algorithm.custom_loss_function_path": "f(args, batch, logits, sum_of_sample_mean), which gives (loss, metrics)",
}


class CannedEngine(ScriptedModel):
    """An engine that gives one answer to every request; or, with ``url``, hands requests on to a real one. ``answers``: the ids of the
    prompts of `/generate`, those that were sampled, and their log-probs. ``served``: the versions that it may name."""

    def __init__(self, tokenizer: Tokenizer, url: str | None) -> None:
        super().__init__()
        self._tokenizer, self._url, self._text = tokenizer, url, ""
        self.answers: list[tuple[list[int], list[int], list[float]]] = []
        self.served = Served(0, 0 if url is None else (1 << 31) - 1)

    def say(self, text: str) -> None:
        """Sets the answer, and forgets those that were given."""
        self._text, self.answers = text, []
        self.script("", Said(text))

    def sampled(self, most: int) -> tuple[list[int], list[float], str]:
        """Returns the answer's ids, at most so many, log-probs that differ from token to token, and why it ends."""
        ids = [*self._tokenizer.encode(self._text).tolist(), *self._tokenizer.stop_ids[:1]]
        return ids[:most], [-0.2 - 0.1 * (at % 7) for at in range(len(ids[:most]))], "stop" if len(ids) <= most else "length"

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        script = self.script_of(request) if request.path == "/v1/chat/completions" and self._url is not None else None
        if request.path != "/generate" and script is None:
            return await super()._answer(request)
        asked: dict[str, Any] = await request.json()
        prompt = asked.get("input_ids") or self._tokenizer.encode(str(asked.get("text", ""))).tolist()
        if self._url is not None:
            async with aiohttp.request("POST", self._url.rstrip("/") + request.path, json=asked) as answer:
                body, status, kind = await answer.read(), answer.status, answer.content_type
            if script is not None:
                script.asked += 1
                return web.Response(body=body, status=status, content_type=kind)
            given = json.loads(body)
        else:
            ids, log_probs, finish = self.sampled(int((asked.get("sampling_params") or {}).get("max_new_tokens", 1 << 20)))
            meta = {"finish_reason": {"type": finish}, "prompt_tokens": len(prompt), "completion_tokens": len(ids), "cached_tokens": 0}
            meta["output_token_logprobs"] = [[log_prob, token, None] for log_prob, token in zip(log_probs, ids, strict=True)]
            given, status = {"text": self._tokenizer.decode(ids), "output_ids": ids, "meta_info": meta}, 200
        if request.path == "/generate" and status == 200:
            entries = given["meta_info"].get("output_token_logprobs") or []
            self.answers.append((prompt, [entry[1] for entry in entries], [entry[0] for entry in entries]))
        return web.json_response(given, status=status)


class FunctionTrial(CheckSuite):
    """The trial of a config that has passed its checks.

    Args:
        engine: it is entered. seconds: deadline of one call. scratch: what the functions write into the run's directory lies there.
        verifiers: they are called, too.
    """

    def __init__(self, inspection: Inspection, engine: CannedEngine, seconds: float, scratch: Path, verifiers: bool) -> None:
        config, variables, limits = inspection.config, list(inspection.config.reward.worker_environment), {}
        self._inspection, self._engine, self._seconds, self._verifiers = inspection, engine, seconds, verifiers
        self._asleep = (scratch / "debugged").exists
        if sys.stdin is not None and sys.stdin.isatty():
            os.environ.setdefault("PYTHONBREAKPOINT", f"{debug.__module__}.{debug.__name__}")
            os.environ |= {TERMINAL: os.ttyname(sys.stdin.fileno()), DEBUGGED: str(scratch / "debugged")}
            variables += ["PYTHONBREAKPOINT", TERMINAL, DEBUGGED]
            limits = {"generate_timeout": DAY, "agent_timeout": DAY}
        self._config = config.with_fields(run={"dir": scratch}, reward={"worker_environment": variables}, rollout=limits)
        self._named = paths(config)
        # agents of `shared` need services
        self._own = {name for name, path in self._named.items() if name in SIGNATURES and not path.startswith("shared.")}
        if seen := {name for name in self._named if name.startswith(SAMPLE_HOOKS)}:
            self._named.setdefault(GENERATE, PLAIN)
            self._own |= {GENERATE, *seen}
        self._pools: dict[tuple[str, ...], WorkerPool] = {}
        self._prompts: list[Prompt] = []
        self._samples: list[list[Sample]] = []
        self._scores: list[list[dict[str, Any]]] = []

    async def checks(self) -> AsyncIterator[Check]:
        """Yields the result of each function."""
        if self._inspection.training is not None:
            self._prompts = [self._inspection.training.at(index) for index in range(min(PROMPTS, len(self._inspection.training)))]
        elif SOURCE in self._named:
            yield await self._tried(SOURCE, self._call_source)
        if self._prompts:
            self._samples = [[self._canned(group, index) for index in range(self._each)] for group in range(len(self._prompts))]
            self._scores = [[asdict(Score(reward=0.0)) for _ in samples] for samples in self._samples]
            for name, step in self._steps():
                yield await self._tried(name, step)
        if rest := self._named.keys() - self._own - {SOURCE}:
            yield Check("not called", "ok", f"{', '.join(sorted(rest))}: imported, and called in a run alone")

    def _steps(self) -> list[tuple[str, Callable[[], Any]]]:
        """Returns what is called after the data source, in a run's order."""
        verifier = base(environment := self._prompts[0].environment)
        if self._verifiers and verifier in VERIFIERS and verifier not in RUNS_CODE:
            self._named[VERIFIER] = environment
            self._own.add(VERIFIER)
        called = {GENERATE: self._generate, AGENT: self._play, REWARD: self._score, VERIFIER: self._score}
        filters = [name for name in FILTERS if name in self._own][-1:]  # one call makes them all
        objective = [name for name in SIGNATURES if name.startswith("algorithm.") and name in self._own]
        steps = [(name, step) for name, step in called.items() if name in self._own]
        return steps + [(name, self._select) for name in filters] + [(name, partial(self._train, name)) for name in objective]

    @property
    def _each(self) -> int:
        return self._config.rollout.n_samples_per_prompt

    async def _tried(self, name: str, step: Callable[[], Any]) -> Check:
        self._field = name
        return await self.check(f"{name} = {self._named[name]}", step)

    def failure(self, error: Exception) -> str:
        """Returns what is wrong, and how the function is called."""
        head = f"{self._field} = {self._named[self._field]}: "
        said = error.expected if isinstance(error, ConfigError) else str(error).removeprefix(head)
        if isinstance(error, DeadlineExceeded | TimeoutError):
            seconds, more = self._deadline(self._field == REWARD)
            said = f"it did not answer within {seconds:g} s ({more} gives it more)"
        return f"{said}; a run calls {SIGNATURES.get(self._field, 'it')}"

    async def _ask(self, module: str, request: dict[str, Any], **setup: Any) -> dict[str, Any]:
        """Returns the answer of a service's worker process, which is started with the first call. Raises as `WorkerPool.ask`."""
        setup = setup or {"config": self._config.model_dump_json(), "verb": request["verb"]}
        if (module, *setup) not in self._pools:
            pool = WorkerPool(self._named[self._field], 1, setup, module, self._config.reward.worker_environment, self._asleep)
            await pool.start()
            self._pools[module, *setup] = pool
        seconds, _ = self._deadline(module == REWARD_SERVICE)
        return await self._pools[module, *setup].ask(request, "an answer", self._named[self._field], seconds)

    def _deadline(self, scores: bool) -> tuple[float, str]:
        """Returns the seconds that a call may take, and what sets them."""
        given = self._config.reward.reward_timeout
        return (given, "reward.reward_timeout") if scores and given < self._seconds else (self._seconds, "--timeout S")

    async def aclose(self) -> None:
        """Ends the processes."""
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))

    async def _call_source(self) -> str:
        self._prompts = await asyncio.to_thread(self._source_prompts)
        return "gave " + "; ".join(f"{str(prompt.content)[:60]!r} with label {prompt.label!r}" for prompt in self._prompts)

    def _source_prompts(self) -> list[Prompt]:
        config, tokenizer, prompts = self._config, self._inspection.tokenizer, list[Prompt]()
        assert tokenizer is not None
        with contextlib.closing(SourceProcess(config)) as source:
            for number in range(PROMPTS):
                row, _ = source.draw()
                as_it_is = {"apply_chat_template": False, "add_special_tokens": False} if RENDERED in row else {}
                entry = RowEntry(row, SOURCE, lambda number=number: f"{config.data.data_source}: prompt {number}")  # type: ignore[misc]
                prompts.append(PromptReader(config.with_fields(data=as_it_is), tokenizer).read(entry))
        return prompts

    def _right(self, group: int) -> object:
        """Returns the right answer: the label, or of an object what verl calls so, or its first entry."""
        prompt = self._prompts[group]
        value = Reference(prompt.label, prompt.label_json).value
        value = value.get("ground_truth", next(iter(value.values()), None)) if isinstance(value, dict) else value
        return (next(iter(value), None) if isinstance(value, list) else value) or prompt.label or NO_LABEL

    def _say(self, group: int, index: int) -> None:
        self._engine.say(ANSWERS[index % len(ANSWERS)].format(self._right(group)))

    def _canned(self, group: int, index: int) -> Sample:
        """Returns a sample as the engine gives it."""
        self._say(group, group + index)
        ids, log_probs, finish = self._engine.sampled(self._config.rollout.rollout_max_response_len)
        prompt, tokenizer = self._prompts[group], self._inspection.tokenizer
        assert tokenizer is not None
        return Sample(
            group=group_id(group),
            index=index,
            prompt=prompt.tokens,
            response=np.array(ids, np.int32),
            log_probs=np.array(log_probs, np.float32),
            mask=np.ones(len(ids), np.uint8),
            segments=[(0, len(ids), 0)],
            finish="stop" if finish == "stop" else "length",
            text=tokenizer.decode(ids),
            prompt_text=prompt.content,
            label=prompt.label,
            label_json=prompt.label_json,
            metadata=prompt.metadata,
        )

    async def _generate(self) -> str:
        lengths, doubts = list[int](), dict[str, str]()
        for group in range(len(self._prompts)):
            made = [one for index in range(min(GENERATED, self._each)) for one in await self._rollout(group, index, doubts)]
            lengths += [len(sample.response) for sample in made]
            if not any(lengths):
                raise ValueError("gave no response token: it adds nothing to sample.tokens and sample.response; a run has nothing to train")
            count = max(self._each, len(made))
            self._samples[group] = [replace(made[index % len(made)], index=index) for index in range(count)]
        detail = f"gave samples with {', '.join(map(str, lengths))} response tokens"
        if doubts:
            raise CheckWarned("; ".join([detail, *(f"{field}: {why}" for field, why in doubts.items())]))
        return detail

    async def _rollout(self, group: int, index: int, doubts: dict[str, str]) -> list[Sample]:
        """Returns the samples of one call, checked as in a run. Raises ValueError for one that does not fit."""
        prompt, config, address, found = self._prompts[group], self._config, urlsplit(self._engine.base_url), list[Sample]()
        tokenizer, shape = self._inspection.tokenizer, self._inspection.architecture
        assert tokenizer is not None
        text = tokenizer.decode(prompt.tokens, False) if config.data.apply_chat_template else prompt.content
        label = Reference(prompt.label, prompt.label_json).value
        begun = HookSample(index=index, rollout_id=index, prompt=text, tokens=prompt.tokens.tolist(), label=label, metadata=prompt.metadata)
        self._say(group, group + index)
        call: dict[str, Any] = {"verb": "generate", "field": GENERATE, "path": self._named[GENERATE], "sample": packed(begun)}
        call |= {"token": "try", "sampling_params": sampling_params(Arguments(config)), "evaluation": False, "seconds": self._seconds}
        answer = await self._ask("services.rollout.function_worker", {**call, "engine": [address.hostname, address.port]})
        limits = SampleLimits(shape.vocab_size if shape else 1 << 31, log_probs_reader=config.log_probs_reader)
        for position, fields in enumerate(answer["samples"]):
            try:
                sample = to_stored(unpacked(dict(fields)), group_id(group), position, index, self._engine.served, limits)
                whole = np.concatenate([sample.prompt, sample.response]).tolist()
                begins = [one for one in self._engine.answers if whole[: len(one[0])] == one[0]]
                answers = [(len(start), np.array(ids, np.int32), np.array(logs, np.float32)) for start, ids, logs in begins]
                given = prompt.tokens if sample.prompt_text == text else None
                _, refused, more = compared(sample, given, answers, tokenizer.decode, tokenizer.special_tokens)
            except Exception as error:
                raise ValueError(f"{error}{answer['defined_at']}") from None
            if refused is not None:
                raise ValueError(f"{refused}{answer['defined_at']}")
            doubts |= more
            found.append(sample)
        return found

    async def _play(self) -> str:
        prompt, rollout = self._prompts[0], self._config.rollout
        if rollout.agent_roles:
            raise CheckWarned("not called: it plays several roles")
        sys.path.insert(0, os.getcwd())
        example = Example(str(prompt.content), prompt.label, [ANSWERS[2].format(self._right(0))])
        play = function_agent(self._named[AGENT])
        result = await AgentConformance(play, self._engine, example, rollout.agent_options, self._seconds).one_rollout()
        if result.result == "FAILED":
            raise ValueError(result.detail)
        return result.detail

    async def _score(self) -> str:
        verifier, path, key = self._field != REWARD, self._named[self._field], self._config.reward.reward_key
        request: dict[str, Any]
        for group, samples in enumerate(self._samples):
            if verifier:
                texts, references = [sample.text for sample in samples], [asdict(samples[0].reference)]
                request = {"name": path, "responses": texts, "references": references, "pattern": pattern_of(self._config.reward, path)}
                answer = await self._ask(REWARD_SERVICE, {**request, "seconds": self._seconds, "key": key}, verifiers=[path])
            else:
                request = {"verb": "score", "samples": encode(samples, self._config.store.blob_bytes), "key": key}
                answer = await self._ask(REWARD_SERVICE, request)
            self._scores[group] = [asdict(Score(**score)) for score in answer["scores"]]
        rewards = [score["reward"] for scores in self._scores for score in scores]
        shown = f"gave {', '.join(f'{reward:g}' for reward in rewards[:12])}{', …' if len(rewards) > 12 else ''}"
        if len(rewards) > 1 and len(set(rewards)) == 1 and self._config.reward.rm_type != WEIGHTED:
            alike = f"{shown} to right and wrong answers alike, {self._right(0)!r} and {ANSWERS[1]!r} among them"
            raise CheckWarned(f"{alike}: a run would learn nothing; check what it compares (breakpoint() works in it), and the label")
        return shown

    async def _select(self) -> str:
        results = list[str]()
        for samples, scores in zip(self._samples, self._scores, strict=True):
            request = {"verb": "select", "samples": encode(samples, self._config.store.blob_bytes), "scores": scores}
            answer = await self._ask(REWARD_SERVICE, request)
            results.append(f"dropped: {answer['filtered']}" if answer["filtered"] else "kept")
        return f"two groups {' and '.join(results)}"

    async def _train(self, name: str) -> str:
        if importlib.util.find_spec("torch") is None:
            raise CheckWarned("not called: torch is not installed here")
        samples = encode([sample for several in self._samples for sample in several], self._config.store.blob_bytes)
        rewards = [score["reward"] for scores in self._scores for score in scores]
        answer = await self._ask("services.trainer.objective.trial", {"verb": name, "samples": samples, "rewards": rewards})
        return str(answer["gave"])


async def tried(
    inspection: Inspection, report: Callable[[Check], object], *, seconds: float = SECONDS, url: str | None = None, verifiers: bool = False
) -> list[Check]:
    """Returns the results of `FunctionTrial`, each of which is reported at once. ``url``: of a real engine."""
    results, tokenizer = list[Check](), inspection.tokenizer
    if tokenizer is not None and not inspection.config.debug.trains_only and (verifiers or paths(inspection.config)):
        with tempfile.TemporaryDirectory(prefix="myxo-try-") as scratch, CannedEngine(tokenizer, url) as engine:
            async with contextlib.aclosing(FunctionTrial(inspection, engine, seconds, Path(scratch), verifiers)) as trial:
                async for result in trial.checks():
                    results.append(result)
                    report(result)
    return results
