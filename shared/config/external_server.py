"""What an external engine says of itself, compared with the run's config.

The launcher asks before anything starts, and the engine's rollout service each time that the engine comes.
"""

import contextlib
import http.client
import itertools
import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shared.config.engine_limits import Capabilities, longest_sequence
from shared.config.run_config import RunConfig
from shared.config.sglang_flags import unfit_for_pushes
from shared.config.speculation import OF_THE_MODEL
from shared.runtime.addresses import address_towards
from shared.runtime.errors import INFRASTRUCTURE, ConfigError, MyxoError
from shared.runtime.safe_files import parse_json

FIELD = "rollout.external_engines"
ASK_SECONDS = 10.0  # the deadline for one answer of an external engine about itself

# SGLang's routes that every external engine must have, and those by which it takes weights.
ROUTES = ("/pause_generation", "/continue_generation", "/abort_request")
WEIGHT_ROUTES = {
    "disk": ("/update_weights_from_disk",),
    "nccl": ("/init_weights_update_group", "/update_weights_from_distributed", "/destroy_weights_update_group"),
}

# SGLang's flags that change what is sampled, by its names for them → the values that change nothing. The run has to have the same.
CHANGING: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("preferred_sampling_params", "torchao_config", "enable_deterministic_inference", "rl_on_policy_target"), ()),
    **{"speculative_algorithm": ("NONE",), "quantization": ("unquant",), "json_model_override_args": ("{}",), "enable_strict_thinking": ()},
    **dict.fromkeys(("speculative_accept_threshold_single", "speculative_accept_threshold_acc"), (1,)),
    **{"dtype": ("auto", "bfloat16", "float32", "float"), "kv_cache_dtype": ("auto", "bf16", "bfloat16")},
}
STAYING: Any = type("Staying", (urllib.request.HTTPRedirectHandler,), {"redirect_request": lambda *_: None})  # the key would go along

# Keys of ``config.json`` by which two checkpoints of one architecture differ.
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_experts")


class EngineAway(MyxoError):
    """An external engine does not answer. ``late``: it was asked, and only the answer did not come in time."""

    fault = INFRASTRUCTURE

    def __init__(self, url: str, error: Exception) -> None:
        reason = getattr(error, "reason", error)
        self.late = isinstance(reason, TimeoutError)
        super().__init__(f"{url} does not answer: {reason or type(error).__name__}")


class ExternalServer:
    """Asks an external engine about itself; it blocks. ``url``: ``http://host:port``. Raises ConfigError where its key is not set."""

    def __init__(self, config: RunConfig, url: str) -> None:
        self.url, self._config = url, config
        variable = config.rollout.external_engine_key_variable
        self.key = "" if variable is None else os.environ.get(variable, "")
        if variable is not None and not self.key:
            raise ConfigError("rollout.external_engine_key_variable", variable, "a variable that is set where rollout services start")
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), STAYING)

    def ask(self, path: str, body: Any = None, seconds: float = ASK_SECONDS) -> Any:
        """Returns the answer to a GET, or to a POST of ``body``. Raises EngineAway; ConfigError where it has no such route, or refuses."""
        status, answer = self._asked(path, body, seconds)
        if status != HTTPStatus.OK:
            raise ConfigError(FIELD, self.url, f"{path} was answered with {status} {answer!s:.300}")
        return answer

    def describe(self) -> Capabilities:
        """Returns what it can do. Raises EngineAway; ConfigError for an engine that the run cannot use."""
        info, model = self.described("server_info"), self.described("model_info")
        own = parse_json(Path(self._config.model.hf_checkpoint, "config.json").read_bytes())
        try:
            tokens = int(info["max_total_num_tokens"])
            context = int(self.ask("/v1/models")["data"][0]["max_model_len"])
            found = Capabilities(
                release=str(info["version"]),
                vocab_size=int((own if "vocab_size" in own else own["text_config"])["vocab_size"]),
                max_sequence=longest_sequence(context, tokens, int(info.get("page_size") or 1)),
                weight_sessions=self._has("/begin_weight_update"),
                overlaps=not info.get("disable_overlap_schedule", False),
                ranks=int(info["tp_size"]),
                kept_tokens=0 if info.get("disable_radix_cache") else tokens,
                device=str(info.get("device") or "cuda"),
                speculates=(info.get("speculative_algorithm") or "NONE") != "NONE",
            )
            model["weight_version"], model["model_path"]
            for problem in (*self._model_problems(model, own), *self._problems(info, found, own)):
                raise ConfigError(FIELD, self.url, problem)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ConfigError(FIELD, self.url, f"its description lacks {error} or has another form: it is no SGLang server") from error
        return found

    def _problems(self, info: Mapping[str, Any], found: Capabilities, own: Mapping[str, Any]) -> Iterator[str]:
        """Yields what the run needs and the engine has not, or has otherwise."""
        rollout, part = self._config.rollout, "embeddings" if info.get("is_embedding") else info.get("disaggregation_mode") or "null"
        if part != "null":
            yield f"it does {part} alone; give an engine that generates by itself"
        transport = self._config.weights.update_weight_transport
        needed = (*ROUTES, *(() if self._config.debug.debug_rollout_only else WEIGHT_ROUTES[transport]))
        for path in itertools.filterfalse(self._has, needed):
            others = [name for name in WEIGHT_ROUTES.keys() - {transport} if all(map(self._has, WEIGHT_ROUTES[name]))]
            instead = f"; update_weight_transport = {others[0]} would do" if others and path not in ROUTES else ""
            yield f"SGLang {found.release} there has no {path}, which update_weight_transport = {transport} needs{instead}"
        yield from self._size_problems(info)
        longest = rollout.rollout_max_context_len or rollout.rollout_max_response_len + 1
        if found.max_sequence < longest:
            yield f"it holds sequences of {found.max_sequence} tokens, and the run's have up to {longest}"
        if rollout.in_flight_on_push == "retract" and found.kept_tokens:
            yield "it keeps prefixes of older weights, and in_flight_on_push = retract needs --disable-radix-cache; or take in_place"
        yield from self._training_problems(info, own)
        yield from self._other_flags(info, "quantization_config" in own)

    def _size_problems(self, info: Mapping[str, Any]) -> Iterator[str]:
        pipeline, replicas = (int(info.get(name) or 1) for name in ("pp_size", "dp_size"))
        apart = pipeline > 1 or (replicas > 1 and not info.get("enable_dp_attention"))
        if apart and self._config.weights.update_weight_transport == "nccl":
            sizes = f"pp_size = {pipeline} and dp_size = {replicas}"
            yield f"SGLang's weight groups do not reach engines of {sizes}: update_weight_transport = disk does"
        if pipeline > 1 and self._config.rollout.in_flight_on_push != "abort":
            yield f"its stages (pp_size = {pipeline}) generate on in any pause but one: in_flight_on_push = abort"

    def _training_problems(self, info: Mapping[str, Any], entries: Mapping[str, Any]) -> Iterator[str]:
        most, algorithm, needed = info.get("sampling_mask_max_tokens"), info.get("speculative_algorithm"), self._config.rollout.most_kept
        if self._config.kept_top_k and (algorithm or int(most or 0) < needed):
            yield f"it has sampling_mask_max_tokens = {most}, speculative_algorithm = {algorithm}: support_replay needs {needed} and none"
        pushes, draft = self._config.pushes, info.get("speculative_draft_model_path")  # versions change the model's path alone
        flags, transport = {name.replace("_", "-"): value for name, value in info.items()}, self._config.weights.update_weight_transport
        drafts = transport == "disk" and self._config.trainer.enable_mtp_training  # over a group the draft stays
        for name, why in unfit_for_pushes(flags if pushes else {}, entries, transport, drafts):
            yield f"it runs with {name} = {flags[name]}, which it must not where it gets pushes: {why}"
        own = str(algorithm).upper() in OF_THE_MODEL and draft in (None, info.get("model_path"), info.get("tokenizer_path"))
        if pushes and not own and algorithm not in (None, "NONE") and transport == "disk":
            yield f"with speculative_algorithm = {algorithm} it ends, or loads the policy as its draft, at a version from disk: take nccl"

    def _other_flags(self, info: Mapping[str, Any], quantized: bool) -> Iterator[str]:
        routed = {"enable-return-routed-experts": True} if self._config.trainer.use_rollout_routing_replay else {}
        flags = self._config.rollout.engine_flags | routed
        for name, value in flags.items():
            if str(has := info.get(name.replace("-", "_"), value)) != str(value):
                yield f"it runs with {name} = {has}, and the run needs {value}"
        known = {*flags, *(["quantization"] if quantized else [])}
        for name, neutral in CHANGING.items():
            if (has := info.get(name)) and has not in neutral and name.replace("_", "-") not in known:
                yield f"it runs with {name} = {has}, which changes what is sampled: start it without, or give rollout.sglang.{name}, too"

    def _model_problems(self, model: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
        """Yields how its model is not the run's: by its architecture, and where the engine is on this machine by its ``config.json``."""
        ours = f"the run's ({self._config.model.hf_checkpoint})"
        if (named := model.get("architectures")) and own.get("architectures") and named != own["architectures"]:
            yield f"it serves {named[0]} ({model['model_path']}), not {own['architectures'][0]}, {ours}"
        host, theirs = urlsplit(self.url).hostname or "", {}
        with contextlib.suppress(OSError, ValueError):
            if socket.gethostbyname(host) == address_towards(host):
                theirs = parse_json(Path(str(model["model_path"]), "config.json").read_bytes())
        for key in SIZES:
            if key in theirs and key in own and theirs[key] != own[key]:
                yield f"it serves {model['model_path']} with {key} = {theirs[key]}; {ours} has {own[key]}"

    def described(self, name: str, seconds: float = ASK_SECONDS) -> dict[str, Any]:
        """Returns ``server_info`` or ``model_info``, which has the version of its weights. Raises as `ask`."""
        try:
            found = self.ask(f"/{name}", None, seconds)
        except ConfigError:  # older releases have another name for it
            found = self.ask(f"/get_{name}", None, seconds)
        if not isinstance(found, dict):
            raise ConfigError(FIELD, self.url, f"/{name} was answered with {found!s:.80}: it is no SGLang server")
        return found

    def _has(self, path: str) -> bool:
        """Returns whether it has a route that takes POST alone: a GET does nothing, and is answered with 404 only where there is none."""
        return self._asked(path, None, ASK_SECONDS)[0] != HTTPStatus.NOT_FOUND

    def _asked(self, path: str, body: Any, seconds: float) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        data = None if body is None else json.dumps(body).encode()
        try:
            with self._opener.open(urllib.request.Request(self.url + path, data, headers), timeout=seconds) as answer:
                return answer.status, _value(answer, time.monotonic() + seconds)
        except urllib.error.HTTPError as error:
            with error:
                if error.code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                    expected = f"{path} wants another API key than that of rollout.external_engine_key_variable"
                    raise ConfigError(FIELD, self.url, expected) from error
                return error.code, error.read(1000).decode(errors="replace")
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise EngineAway(self.url, error) from error


def _value(answer: http.client.HTTPResponse, end: float) -> Any:
    data = bytearray()
    while chunk := answer.read1(1 << 16):
        data += chunk
        if len(data) > 1 << 24 or time.monotonic() > end:
            raise TimeoutError(f"its answer has not ended after {len(data)} bytes")
    try:
        return parse_json(bytes(data) or b"null")
    except ValueError:
        return data.decode(errors="replace")
