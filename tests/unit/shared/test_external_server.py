"""Servers that are no external engine, or one that samples otherwise than the run is told: each is refused by name, and in time."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.rollout.engine.external_engine import ExternalClient, ExternalEngine
from services.rollout.engine_proxy import EngineProxy
from services.rollout.served_version import ServedVersion
from shared.config.engine_limits import Capabilities
from shared.config.external_server import EngineAway, ExternalServer
from shared.config.run_config import RunConfig
from shared.runtime.addresses import LOOPBACK
from shared.runtime.errors import ConfigError
from shared.runtime.telemetry import Metrics
from tests.support.run_config import run_config
from tests.support.tables import table

INFO = {"version": "0.5.20", "max_total_num_tokens": 4096, "tp_size": 1}
KEEPING = INFO | {"sampling_mask_max_tokens": 4096}
WHOLE = {
    "/server_info": INFO,
    "/model_info": {"weight_version": "default", "model_path": "/there"},
    "/v1/models": {"data": [{"max_model_len": 2048}]},
}
BY_DISK = {"update_weight_transport": "disk"}
answers: dict[str, Any] = {}
asked: list[str] = []


class Server(BaseHTTPRequestHandler):
    """Answers each path with a value as JSON, bytes as they are, or what a function writes."""

    def do_GET(self) -> None:
        given = answers.get(self.path, {})
        self.send_response(302 if self.path == "/moved" else 200)
        self.send_header("Location", str(given))
        self.end_headers()
        if callable(given):
            with contextlib.suppress(OSError):
                given(self.wfile)
        else:
            self.wfile.write(given if isinstance(given, bytes) else json.dumps(given).encode())

    def do_POST(self) -> None:
        asked.append(self.path)
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def config_of(directory: Path, url: str, **rollout: Any) -> RunConfig:
    (directory / "config.json").write_text('{"vocab_size": 100, "architectures": ["Own"]}')
    return run_config(directory, model={"hf_checkpoint": str(directory)}, rollout={"external_engines": [url], **rollout}, weights=BY_DISK)


def endless(out: Any) -> None:
    while True:
        out.write(b" " * 2**20)


def in_pieces(*pieces: bytes) -> Any:
    def write(out: Any) -> None:
        for piece in pieces:
            out.write(piece)
            out.flush()
            time.sleep(0.05)

    return write


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("/server_info was answered with <html>", {"/server_info": b"<html>hello</html>"}, {}),
    (r"/server_info was answered with \[1\]", {"/server_info": [1]}, {}),
    ("/model_info was answered with None", {"/model_info": None}, {}),
    ("has another form", {"/v1/models": "none"}, {}),
    ("has another form", {"/model_info": {"weight_version": "1", "model_path": "/m", "architectures": 5}}, {}),
    ("has another form", {"/server_info": INFO | {"max_total_num_tokens": float("inf")}}, {}),
    ("not ended after .* bytes", {"/server_info": endless}, {}),
    ("preferred_sampling_params = .*rollout.sglang", {"/server_info": INFO | {"preferred_sampling_params": {"min_p": 0.1}}}, {}),
    ("enable_deterministic_inference", {"/server_info": INFO | {"enable_deterministic_inference": True}}, {}),
    ("quantization = fp8", {"/server_info": INFO | {"quantization": "fp8"}}, {}),
    ("kv_cache_dtype = fp8_e5m2", {"/server_info": INFO | {"kv_cache_dtype": "fp8_e5m2"}}, {}),
    ("keeps prefixes", {}, {"in_flight_on_push": "retract"}),
    ("max_tokens = None, spec.* needs 4096 and none", {}, {"rollout_top_p": 0.9}),  # SGLang before 0.5.20
    ("enable-lmcache = True, which it must not", {"/server_info": INFO | {"enable_lmcache": True}}, {}),
    ("offload-group-size = 4, which it must not", {"/server_info": INFO | {"offload_group_size": 4}}, {}),
    ("= NGRAM it ends", {"/server_info": INFO | {"speculative_algorithm": "NGRAM"}}, {}),
    ("= EAGLE: support_replay", {"/server_info": KEEPING | {"speculative_algorithm": "EAGLE"}}, {"rollout_top_k": 9}),
]


@table(("expected", "change", "settings"), REFUSED)
def test_what_cannot_be_used_is_refused(expected: str, change: dict[str, Any], settings: dict[str, Any], url: str, tmp_path: Path) -> None:
    answers.clear()
    answers.update(WHOLE | change)
    with pytest.raises((ConfigError, EngineAway), match=expected):
        ExternalServer(config_of(tmp_path, url, **settings), url).describe()


def test_what_the_run_has_too_is_taken(url: str, tmp_path: Path) -> None:
    answers.clear()
    flags = {"enable_deterministic_inference": True, "quantization": "fp8", "kv_cache_dtype": "auto", "dtype": "bfloat16"}
    answers.update(WHOLE | {"/server_info": INFO | flags | {"disable_radix_cache": True}})
    named = {"enable_deterministic_inference": True, "quantization": "fp8"}
    ExternalServer(config_of(tmp_path, url, sglang=named, in_flight_on_push="retract"), url).describe()
    answers.update({"/server_info": KEEPING})
    ExternalServer(config_of(tmp_path, url, rollout_top_p=0.9), url).describe()
    drafting = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "/there", "model_path": "/there"}
    for info in (drafting, drafting | {"model_path": "/version", "tokenizer_path": "/there"}):
        answers.update({"/server_info": INFO | info})
        ExternalServer(config_of(tmp_path, url, sglang={"speculative_algorithm": "EAGLE"}), url).describe()
    answers.update({"/server_info": INFO | {"speculative_algorithm": "NGRAM", "enable_lmcache": True}})
    loaded_by_nobody = config_of(tmp_path, url, sglang={"speculative_algorithm": "NGRAM"}).with_fields(debug={"debug_rollout_only": True})
    ExternalServer(loaded_by_nobody, url).describe()


@table(
    ("runs", "entries", "transport", "refused"),
    [
        ({"moe_runner_backend": "flashinfer_trtllm"}, {"num_experts": 8}, "nccl", "flashinfer_trtllm, .* --moe-runner-backend triton"),
        ({"moe_runner_backend": "flashinfer_trtllm"}, {"num_experts": 8}, "disk", "flashinfer_trtllm, "),
        (
            {"moe_runner_backend": "flashinfer_trtllm_routed"},
            {"text_config": {"n_routed_experts": 8}},
            "nccl",
            "flashinfer_trtllm_routed, ",
        ),
        ({"moe_runner_backend": "flashinfer_trtllm_routed"}, {"num_experts": 8}, "disk", ""),
        ({"moe_runner_backend": "flashinfer_trtllm"}, {"num_experts": None}, "nccl", ""),  # as SGLang reports of a dense Qwen3.5, too
        ({"moe_runner_backend": "flashinfer_trtllm"}, {"num_experts": 8, "quantization_config": {"quant_method": "fp8"}}, "nccl", ""),
        (
            {"moe_a2a_backend": "megamoe"},
            {"num_experts": 8, "quantization_config": {"quant_method": "fp8"}},
            "disk",
            "moe-a2a-backend = megamoe, which it must not",
        ),
        ({"moe_a2a_backend": "megamoe"}, {"num_experts": 8}, "disk", ""),
        ({"speculative_moe_runner_backend": "flashinfer_trtllm"}, {"num_experts": 8}, "disk", ""),  # its draft is not trained
        ({"moe_runner_backend": "triton", "offload_group_size": -1, "enable_cp_decode_attn_tp": False}, {"num_experts": 8}, "nccl", ""),
    ],
)
def test_experts_of_a_stock_engine_lie_as_they_come(
    runs: dict[str, Any], entries: dict[str, Any], transport: str, refused: str, url: str, tmp_path: Path
) -> None:
    answers.clear()
    answers.update(WHOLE | {"/server_info": INFO | runs})
    config = config_of(tmp_path, url).with_fields(weights={"update_weight_transport": transport})
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100, "architectures": ["Own"]} | entries))
    with pytest.raises(ConfigError, match=refused) if refused else contextlib.nullcontext():
        ExternalServer(config, url).describe()
    ExternalServer(config.with_fields(debug={"debug_rollout_only": True}), url).describe()


def test_no_answer_is_awaited_or_followed_for_ever(url: str, tmp_path: Path) -> None:
    def slow(out: Any) -> None:
        while True:
            out.write(b" ")
            time.sleep(0.05)

    answers.clear()
    answers.update({"/slow": slow, "/moved": f"{url}/server_info"})
    server = ExternalServer(config_of(tmp_path, url), url)
    with pytest.raises(EngineAway, match="has not ended") as raised:
        server.ask("/slow", None, 0.5)
    assert raised.value.late
    with pytest.raises(ConfigError, match="answered with 302"):  # the key would go there, too
        server.ask("/moved")


async def test_a_first_answer_that_is_none_is_reported(url: str, tmp_path: Path) -> None:
    answers.clear()
    answers.update(WHOLE | {"/generate": ["?"]})
    reports: list[str] = []

    class Reported(Exception):
        pass

    async def report(reason: str, _late: bool) -> None:
        reports.append(reason)
        raise Reported

    engine = ExternalEngine(config_of(tmp_path, url), url, report)
    with pytest.raises(Reported):
        await engine.ready(60)
    assert "lacks id, finish_reason" in reports[0]
    answers["/model_info"] = b"<html>"
    assert "is no SGLang server" in engine.fault()


async def test_others_get_nothing_by_weights_of_somebody_else(url: str, tmp_path: Path) -> None:
    """Functions and routers ask by the proxy; at the end the engine is left as it would be without the run."""

    async def report(_reason: str, _late: bool) -> None:
        pass

    engine = ExternalEngine(config_of(tmp_path, url), url, report)
    engine.can = Capabilities("0.5.21", 100, 2048, weight_sessions=True, overlaps=True)
    client = ExternalClient(engine)
    asked.clear()
    await client.open_receivers()
    assert asked == ["/abort_request", "/end_weight_update"]
    proxy = EngineProxy(ServedVersion(version=3, engine_is_up=True), lambda: client, Metrics("run", "rollout-0"), 8, 60, 60)
    await proxy.open(LOOPBACK)
    own = f"3@{client.cache_key.partition('.')[0]}"
    try:
        async with aiohttp.ClientSession(proxy.url) as session:
            for named, status in [(own, 200), (None, 200), ("3@abcdef", 502), ("default", 502), (3, 502)]:
                for meta in [{"weight_version": named}, {"weight_versions": [{"start": 0, "end": 1, "version": named}]}]:
                    answers["/generate"] = {"text": '"version": "1"', "output_ids": [1], "meta_info": meta}
                    async with session.post("/generate", json={"input_ids": [1], "sampling_params": {}}) as answer:
                        assert answer.status == status, (meta, await answer.text())
            for name, whole in [(own, True), ("3@abcdef", False), (None, True)]:
                given = json.dumps({"text": '"version": "1"', "meta_info": {"weight_version": name}}).encode()
                for ending in (b"\n\n", b""):
                    for cut in (given.index(b"_version"), given.index(b"version") + len('version": "3@a'), len(given) - 2):
                        answers["/generate"] = in_pieces(b"data: " + given[:cut], given[cut:] + ending)
                        async with session.post("/generate", json={"input_ids": [1], "sampling_params": {}, "stream": True}) as answer:
                            with contextlib.nullcontext() if whole else pytest.raises(aiohttp.ClientPayloadError):
                                assert (await answer.read() == b"data: " + given + ending) and whole
    finally:
        await proxy.close()
        await client.close()
    assert "/continue_generation" in asked
