"""SGLang's flags are checked against the parser of the SGLang that is installed, before a run and when a rollout service starts."""

import json
import sys
from pathlib import Path

import pytest

from myxo.preflight import model_checks
from myxo.preflight.inspection import Inspection, Note
from shared.bus import runs
from shared.bus.connection import Bus
from shared.config import sglang_flags
from shared.config.sglang_flags import EngineFlag, EngineFlags
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from tests.support.run_config import run_config
from tests.support.service_process import ServiceProcess
from tests.support.waiting import until


def problems(**flags: object) -> list[str]:
    known = sglang_flags.of_installed()
    assert known is not None
    return [str(problem) for problem in known.problems({name.replace("_", "-"): value for name, value in flags.items()})]


def test_what_engines_are_given_is_taken() -> None:
    assert problems(mem_fraction_static="0.7", disable_cuda_graph=True, sleep_on_idle=False, dtype="bfloat16", page_size=16) == []
    assert problems(json_model_override_args='{"a": 1}', cuda_graph_bs_decode=[1, 2, 4], max_total_tokens=None) == []
    assert problems(tensor_parallel_size=2) != [], "an alias of what has a field of its own"
    assert problems(mem_fraction="0.7") == [], "SGLang takes the beginning of a name, too"


def test_each_mistake_is_named() -> None:
    found = problems(mem_fraction_statc=0.5, dtype="fp7", page_size="big", sleep_on_idle="yes", cuda_graph_bs_decode=[1, "x"], tp_size=2)
    words = ["did you mean mem-fraction-static?", "one of auto, bfloat16", "a whole number", "it is a switch", "or several"]
    words += ["rollout_num_gpus_per_engine"]
    assert len(found) == len(words)
    assert [word for word, problem in zip(words, found, strict=True) if word not in problem] == [], found


def test_another_version_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    listed = json.dumps({"sglang": "0.0.1", "flags": [{"spellings": ["of-tomorrow"], "kind": "int"}]})
    (tmp_path / "listing.py").write_text(f"print('a warning of a library')\nprint({listed!r})\n")  # importing SGLang takes seconds
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("MYXO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sglang_flags, "installed", lambda: "0.0.1")
    monkeypatch.setattr(sglang_flags, "LISTING", "listing")
    assert sglang_flags.of_installed() == EngineFlags.of_json(listed)
    monkeypatch.setattr(sglang_flags, "LISTING", "no.such.module")
    assert sglang_flags.of_installed() == EngineFlags.of_json(listed), "the second time it is read from the cache"
    monkeypatch.setenv("MYXO_CACHE", str(tmp_path / "none"))
    with pytest.raises(sglang_flags.NoCatalogue, match="could not be asked for its flags"):
        sglang_flags.of_installed()


def test_a_parser_that_somebody_changed_is_asked_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the same version: images of others patch SGLang, and give it flags of their own."""
    package = tmp_path / "sglang" / "srt"
    package.mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").touch()
    (package / "server_args.py").write_text("flags = 1")
    version = sglang_flags.installed()
    listed = json.dumps({"sglang": version, "flags": [{"spellings": ["of-a-patch"], "kind": "int"}]})
    (tmp_path / "listing.py").write_text(f"print({listed!r})\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("MYXO_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    monkeypatch.setattr(sglang_flags, "LISTING", "listing")
    before = sglang_flags.fingerprint()
    assert problems(of_a_patch=1) == []
    assert "unknown flag" in problems(of_another_patch=1)[0]
    (package / "server_args.py").write_text("flags = 2")
    assert sglang_flags.fingerprint() != before
    monkeypatch.setattr(sglang_flags, "LISTING", "no.such.module")
    with pytest.raises(sglang_flags.NoCatalogue):
        problems(of_a_patch=1)


def test_what_one_engine_cannot_be_divided_into_is_refused() -> None:
    """SGLang takes these, but each copy of a model is an engine of its own here."""
    assert "rollout_num_gpus" in problems(data_parallel_size=2)[0]
    assert "a whole number, 1 or more" in problems(pp_size=0)[0] and "1 or more" in problems(nnodes="-1")[0]
    assert problems(pp_size="2", dp_size=1) == problems(dp_size=2, enable_dp_attention=True) == []


def test_former_names_go_by_what_is_installed() -> None:
    given = {"cuda-graph-bs": ["1", "2"], "nsa_decode_backend": "flashmla_kv", "page-size": 16}
    assert problems(**{name.replace("-", "_"): value for name, value in given.items()}) == []
    assert sglang_flags.present_names(given) == {"cuda-graph-bs-decode": ["1", "2"], "dsa-decode-backend": "flashmla_kv", "page-size": 16}
    old = EngineFlags("0.5.9", (EngineFlag(("cuda-graph-bs",), "int", several=True),))
    assert old.present_name("cuda-graph-bs") == "cuda-graph-bs" and list(old.problems({"cuda-graph-bs": [1]})) == []
    assert "given twice" in problems(cuda_graph_bs=[1], cuda_graph_bs_decode=[1])[0]


def test_a_machine_without_sglang_says_that_it_cannot_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sglang_flags, "installed", lambda: None)
    [note] = model_checks.check_engine_flags(Inspection(run_config(tmp_path, rollout={"sglang": {"typo": 1}})))
    assert note == Note("SGLang is not installed here; [rollout.sglang] is checked where the rollout service starts")


def test_values_of_flags() -> None:
    assert EngineFlag(("a",), "json").problem("{") == "JSON in a string"
    assert [sglang_flags.count(text) for text in ("4096", "25.6k", "32Ki", "1M")] == [4096, 25_600, 32_768, 1_000_000]
    assert EngineFlag(("a",), "count").problem("1.5Ki") == "a whole number"
    assert EngineFlag(("a",), bare=True).problem(True) is None
    assert EngineFlag(("a",)).problem(["x", "y"]) == "one value: text"
    assert EngineFlag(("a",), "int", several=True).problem([]) == "a whole number, or several"


async def test_a_rollout_service_refuses_a_flag_when_it_starts(
    bus: Bus, nats: EmbeddedNats, valkey: EmbeddedValkey, run_name: str, tmp_path: Path, tiny_model: Path
) -> None:
    config = run_config(
        tmp_path,
        run={"name": run_name},
        model={"hf_checkpoint": str(tiny_model)},
        rollout={"rollout_device": "cpu", "sglang": {"mem-fraction-statc": 0.5, "page-size": "big"}},
    )
    await runs.create(bus, config, valkey.url)
    with ServiceProcess("rollout", tmp_path / "log", {"NATS_URL": nats.url, "MYXO_RUN": run_name}) as service:
        await until(lambda: service.process.poll() is not None, "the end of the service")
        assert service.process.returncode == 2
    last = service.words().splitlines()[-1]
    assert last.startswith("rollout: rollout.sglang.mem-fraction-statc = 0.5: unknown flag of SGLang")
    assert "rollout.sglang.page-size" in last
