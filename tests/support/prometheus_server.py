"""Debian's Prometheus with the stack's own config and rules, its targets on loopback."""

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from shared.process.child_process import with_parent
from shared.process.embedded_servers import free_port
from shared.schema.service_messages import ServiceStatus
from tests.support.dashboards import ALERTS, MONITORING

PROMETHEUS = shutil.which("prometheus")
"""None where there is none: apt-get install prometheus."""

SECONDS = 120
"""What Prometheus may take to start, and to scrape, on a busy machine."""


class PrometheusServer:
    """Scrapes services once a second; use as a context manager. ``services``: in the place of those that the stack's DNS would find."""

    def __init__(self, directory: Path, services: Iterable[ServiceStatus]) -> None:
        directory.mkdir()
        self._directory, self._address = directory, f"127.0.0.1:{free_port()}"
        config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(ALERTS)]
        (job,) = config["scrape_configs"]
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": [one.http], "labels": {"__meta_dns_name": one.service}} for one in services]
        self.targets = len(job["static_configs"])
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))

    def __enter__(self) -> "PrometheusServer":
        flags = [f"--config.file={self._directory}/prometheus.yml", f"--storage.tsdb.path={self._directory}/tsdb"]
        with (self._directory / "log").open("wb") as log:
            self._process = subprocess.Popen(
                with_parent([str(PROMETHEUS), *flags, f"--web.listen-address={self._address}"]), stdout=log, stderr=log
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def until_scraped(self) -> None:
        """Waits until every target has been scraped."""
        end = time.monotonic() + SECONDS
        while True:
            up = self._active()
            if len(up) == self.targets and all(target["health"] == "up" for target in up):
                return
            assert self._process.poll() is None and time.monotonic() < end, f"{up}\n{(self._directory / 'log').read_text()[-3000:]}"
            time.sleep(0.2)

    def rules(self) -> dict[str, dict[str, Any]]:
        """The alert rules that it has loaded, as it tells of them: health, last error, state."""
        groups = self.get("rules", {})["groups"]
        return {rule["name"]: rule for group in groups for rule in group["rules"]}

    def evaluated(self, query: str, since: float) -> list[dict[str, Any]]:
        """The series that a query had at any second since then (seconds since the epoch). Raises where it does not evaluate."""
        window = {"start": f"{since:.3f}", "end": f"{time.time():.3f}", "step": "1s"}
        found: list[dict[str, Any]] = self.get("query_range", {"query": query, **window})["result"]
        return found

    def get(self, path: str, words: dict[str, str]) -> dict[str, Any]:
        """What its HTTP API answers."""
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(words)}"
        try:
            with urllib.request.urlopen(url, timeout=SECONDS) as answer:
                content = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{words}: {error.read().decode()}") from None
        assert content["status"] == "success", content
        data: dict[str, Any] = content["data"]
        return data

    def _active(self) -> list[dict[str, Any]]:
        try:
            urllib.request.urlopen(f"http://{self._address}/-/ready", timeout=SECONDS).close()
        except OSError:  # it does not listen yet, or has not read its config
            return []
        found: list[dict[str, Any]] = self.get("targets", {"state": "active"})["activeTargets"]
        return found
