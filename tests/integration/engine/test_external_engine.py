"""A stock SGLang server as an external engine: what it says of itself, its updates by group and by disk, and that others change it."""

import asyncio
import http.server
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.rollout.engine.external_engine import ExternalClient, ExternalEngine
from services.rollout.engine.generation import GenerationRequest, Span
from services.rollout.engine.transport import EngineError
from services.rollout.rollout_service import Rollout
from services.trainer.weights.snapshot_writer import WeightCheckpointWriter
from shared.bus import runs
from shared.bus.connection import Bus
from shared.bus.streams import generated_consumer, scored_consumer
from shared.bus.subjects import EVAL, TRAIN
from shared.bus.work_queue import WorkQueue
from shared.config.external_server import ExternalServer
from shared.config.run_config import RunConfig
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.runtime.errors import ConfigError
from shared.schema.ledger import is_evaluation
from shared.schema.messages import Generated, Interrupted, Outcome, Sampling, Task
from shared.schema.weight_messages import WeightsSnapshot
from shared.service.service_base import Service
from shared.transfer.weight_checkpoint import WeightCheckpoint, WeightCheckpoints
from tests.integration.engine.conftest import Checkpoint, Checkpoints
from tests.integration.engine.reference import log_probs, log_probs_over_pushes
from tests.support.run_config import run_config
from tests.support.service_process import ROOT
from tests.support.stock_engine import START_SECONDS, StockEngine
from tests.support.tables import table
from tests.support.tiny_model import TinyModelShape, write_tiny_model
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(900)

PROMPT, TOKENS = np.arange(10, 20, dtype=np.int32), 1500
SAMPLING = Sampling(temperature=1.0, max_new_tokens=TOKENS)


@pytest.fixture(scope="module")
def stock(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StockEngine]:
    with StockEngine(checkpoint(0).path, tmp_path_factory.mktemp("stock") / "engine.log") as engine:
        engine.wait_ready()
        yield engine


def config_of(
    directory: Path, model: Path, url: str, transport: str = "nccl", run: dict[str, Any] | None = None, **rollout: Any
) -> RunConfig:
    return run_config(
        directory,
        run=run or {},
        model={"hf_checkpoint": str(model)},
        rollout={"external_engines": [url], **rollout},
        weights={
            "update_weight_transport": transport,
            "update_weight_disk_dir": str(directory / "weights"),
            "update_weight_buffer_size": 65536,
        },
    )


def written(config: RunConfig, version: int, model: Checkpoint) -> WeightCheckpoint:
    """The model as a version that the trainer has written."""
    tensors = {
        name: (str(one.dtype).removeprefix("torch."), tuple(one.shape), one.detach().numpy().reshape(-1).view(np.uint8))
        for name, one in model.model.named_parameters()
    }

    def beside(directory: Path) -> None:
        (directory / "config.json").write_bytes((model.path / "config.json").read_bytes())

    return WeightCheckpointWriter(WeightCheckpoints.of_run(config), version).add(tensors).publish(beside)


async def connected(config: RunConfig, reasons: list[str]) -> tuple[ExternalEngine, ExternalClient]:
    async def report(reason: str, late: bool) -> None:
        reasons.append(f"{reason} {late}")

    engine = ExternalEngine(config, config.rollout.external_engines[0], report)
    await engine.ready(240)
    client = ExternalClient(engine)
    await client.open_receivers()
    return engine, client


async def load(client: ExternalClient, saved: WeightCheckpoint) -> None:
    """As `WeightCatchUp` does, once the checkpoint was prepared."""
    await client.pause("in_place")
    await client.update_weights_from_disk(str(saved.path.absolute()), saved.version)
    assert await client.adopt(saved.version, saved.tensors) == saved.digest
    await client.set_weight_version(saved.version)
    await client.resume()


@pytest.mark.parametrize("transport", ["nccl", pytest.param("disk", marks=pytest.mark.extra)])
async def test_updates_in_the_middle_of_requests(transport: str, stock: StockEngine, checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Each token is of the version that the engine says, by the log-probs of the models; what others load is refused."""
    config = config_of(tmp_path, checkpoint(0).path, stock.url, transport)
    engine, client = await connected(config, [])
    first, second = (written(config, version, checkpoint(version)) for version in (1, 2))
    try:
        await client.prepare_load(first)
        await load(client, first)
        await client.prepare_load(second)
        running = asyncio.create_task(client.generate_group([GenerationRequest(PROMPT, TOKENS, ignore_eos=True)], SAMPLING))
        before = await client.generated_tokens() or 0

        async def drawn() -> bool:
            return (await client.generated_tokens() or 0) > before + 10

        await until(drawn, "tokens of the first version", pause=0.01)
        await load(client, second)
        [across] = await running
        assert [span.version for span in across.spans] == [1, 2] and len(across.tokens) == TOKENS
        models, ends = (checkpoint(1).model, checkpoint(2).model), [span.end for span in across.spans]
        expected = log_probs_over_pushes(list(zip(models, ends, strict=True)), PROMPT, across.tokens)
        np.testing.assert_allclose(across.log_probs, expected, atol=1e-4)
        [after] = await client.generate_group([GenerationRequest(PROMPT, 20, ignore_eos=True)], SAMPLING)
        np.testing.assert_allclose(after.log_probs, log_probs(checkpoint(2).model, PROMPT, after.tokens), atol=2e-5)
        assert (after.cached_tokens, engine.fault()) == (0, "")
        pieces = [piece async for piece in client.generate_live(GenerationRequest(PROMPT, 20, ignore_eos=True), SAMPLING)]
        assert {span.version for piece in pieces for span in piece.spans} == {2}
        body = {"model_path": str(checkpoint(0).path), "weight_version": "2", "load_format": "auto"}
        await client.transport.post("/update_weights_from_disk", body, 60, "")  # as another run would
        assert "not '2@" in engine.fault()
        with pytest.raises(EngineError, match="which this replica has not loaded"):
            await client.generate_group([GenerationRequest(PROMPT, 4)], SAMPLING)
    finally:
        await client.close()


@pytest.mark.extra
async def test_an_older_engine_names_one_version_for_an_answer(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens of a request that ran across an update count as the older version's."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests/support/older_engine"))
    with StockEngine(checkpoint(0).path, tmp_path / "engine.log") as stock:
        stock.wait_ready()
        monkeypatch.undo()
        config = config_of(tmp_path, checkpoint(0).path, stock.url, "disk")
        _, client = await connected(config, [])
        try:
            await load(client, written(config, 1, checkpoint(1)))
            second = written(config, 2, checkpoint(2))
            running = asyncio.create_task(client.generate_group([GenerationRequest(PROMPT, TOKENS, ignore_eos=True)], SAMPLING))
            await until(lambda: client.generating, "a request on its way")
            await load(client, second)
            [across] = await running
            assert not client.capabilities.token_versions
            assert across.spans == (Span(0, TOKENS, 1),)
        finally:
            await client.close()


class Altered(http.server.BaseHTTPRequestHandler):
    """A proxy before the stock engine that changes one thing of its answers. change: path → fields, None for none; or the status."""

    engine = ""
    change: dict[str, Any] = {}

    def do_GET(self) -> None:
        status, answer = asked(self.engine + self.path)
        changed = self.change.get(self.path, self.change.get("*", {}))
        status = changed if isinstance(changed, int) else status
        if isinstance(answer, dict) and isinstance(changed, dict):
            answer = {key: value for key, value in {**answer, **changed}.items() if value is not None}
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def altered(stock: StockEngine) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Altered)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Altered.engine = stock.url
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("serves LlamaForCausalLM .* not Qwen3ForCausalLM, the run's", {}, {"/model_info": {"architectures": ["LlamaForCausalLM"]}}),
    ("with hidden_size = 64; the run's .* has 96", {"hidden_size": 96}, {}),
    ("no /init_weights_update_group, .* = disk would do", {}, {"/init_weights_update_group": 404}),
    ("no /update_weights_from_disk", {"transport": "disk"}, {"/update_weights_from_disk": 404}),
    ("no /pause_generation", {}, {"/pause_generation": 404}),
    ("pp_size = 2 and dp_size = 1", {}, {"/server_info": {"pp_size": 2}}),
    ("stages .pp_size = 2. generate on .* in_flight_on_push = abort", {"transport": "disk"}, {"/server_info": {"pp_size": 2}}),
    ("lacks 'tp_size'", {}, {"/server_info": {"tp_size": None}}),
    ("does prefill", {}, {"/server_info": {"disaggregation_mode": "prefill"}}),
    ("sequences of 2046 tokens, and the run's have up to 3001", {"rollout_max_response_len": 3000}, {}),
    ("runs with page-size = 1, and the run needs 16", {"sglang": {"page_size": 16}}, {}),
    ("wants another API key", {}, {"*": 401}),
]


@table(("expected", "settings", "change"), REFUSED)
def test_an_engine_that_cannot_be_used_is_refused_by_name(
    expected: str, settings: dict[str, Any], change: dict[str, Any], altered: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    settings, model = dict(settings), checkpoint(0).path
    if hidden := settings.pop("hidden_size", None):
        model = tmp_path / "other"
        write_tiny_model(model, shape=TinyModelShape(hidden_size=hidden))
    Altered.change = change
    with pytest.raises(ConfigError, match=expected):
        ExternalServer(config_of(tmp_path, model, altered, **settings), altered).describe()


def test_unknown_fields_and_older_names_are_taken(altered: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    Altered.change = {"/server_info": 404, "/model_info": {"novelty": 1, "architectures": None}, "/get_server_info": {"device": None}}
    found = ExternalServer(config_of(tmp_path, checkpoint(0).path, altered), altered).describe()
    assert (found.vocab_size, found.max_sequence, found.ranks, found.device) == (100, 2046, 1, "cuda")


@pytest.mark.extra
async def test_its_death_costs_no_group(
    stock: StockEngine, checkpoint: Checkpoints, nats: EmbeddedNats, valkey: EmbeddedValkey, run_name: str, tmp_path: Path
) -> None:
    """A group in its hands goes back to the buffer as interrupted, not as failed, a held-out prompt to the queue."""
    config = config_of(tmp_path, checkpoint(0).path, stock.url, run={"name": run_name})
    bus = await Bus.connect(nats.url, "test")
    await runs.create(bus, config, valkey.url)
    service = Service("rollout", "rollout-0", run_name, bus, config, valkey.url)
    rollout = Rollout(service)
    outcomes = WorkQueue(bus, scored_consumer(run_name, config.bus), Outcome)
    finished = WorkQueue(bus, generated_consumer(run_name, config.bus, "math"), Generated)

    async def task(group: str, tokens: int) -> None:
        sampling = Sampling(temperature=1.0, max_new_tokens=tokens, min_new_tokens=tokens)
        given = Task(group=group, n=2, prompt="40+2=", prompt_tokens=PROMPT, environment="math", sampling=sampling, min_version=0)
        await bus.publish(service.subjects.task(EVAL if is_evaluation(group) else TRAIN), given)

    working = asyncio.create_task(rollout.run())
    try:
        saved = written(config, 3, checkpoint(1))
        about = {"form": "full", "path": str(saved.path), "bytes": saved.bytes, "seconds": 1.0, "at": saved.at}
        snapshot = WeightsSnapshot(version=3, digest=saved.digest, **about)
        await bus.put(service.subjects.weights_bucket, "snapshot", snapshot.encode(), deadline=10)
        await until(lambda: rollout.replica.serving, "the version", 120)
        await task("g00000001", 1900)
        await task("eval.sums.3.0", 1000)
        await until(lambda: rollout.replica.client is not None and rollout.replica.client.generating == 2, "both on their way", 60)
        await asyncio.to_thread(stock.kill)
        [lease] = await until(lambda: outcomes.fetch(1), "the group's return", 60)
        assert isinstance(lease.message, Interrupted) and not lease.message.stale
        assert not rollout.replica.serving
        stock.start()
        await until(lambda: rollout.replica.serving and rollout.replica.version == 3, "its return", START_SECONDS)
        await task("g00000002", 8)
        names = set[str]()
        for _ in range(2):
            [made] = await until(lambda: finished.fetch(1), "both after it", 120)
            await made.ack()
            names.add(made.message.group)
            assert {(sample.oldest, sample.newest) for sample in made.message.samples} == {(3, 3)}
        assert names == {"g00000002", "eval.sums.3.0"}
    finally:
        service.stopping.set()
        await working
        await service.store.close()
        await bus.close()


def asked(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, None
