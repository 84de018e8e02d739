"""The fast variant: forked processes, a scripted engine and optimizer step, proxies before the servers."""

import sys
from pathlib import Path

from tests.chaos.fast.fast_config import write_run
from tests.chaos.fast.processes import ForkedProcesses
from tests.chaos.fast.remains import problems_of_responses, problems_of_weights
from tests.chaos.ledger_check import LedgerFindings
from tests.chaos.link_proxy import ADDRESSES, LinkProxy, ProxiedAddresses
from tests.chaos.schedule import DISK_FULL, Schedule
from tests.chaos.variant import Limits, Processes, Start, Variant


class FastVariant(Variant):
    limits = Limits(hang=90.0, recovery=45.0, whole=400.0)

    def prepare(self, directory: Path, schedule: Schedule) -> Start:
        (directory / "processes").mkdir()
        config, addresses = write_run(directory, self.model, schedule.shape), ProxiedAddresses.fresh(directory)
        links = {
            "nats": LinkProxy(("127.0.0.1", addresses.nats_port), ("127.0.0.1", addresses.own_nats_port)),
            "valkey": LinkProxy(addresses.valkey_path, addresses.own_valkey_path),
        }
        own = {"MYXO_CHAOS_PROCESSES": str(directory / "processes"), ADDRESSES: addresses.as_text()}
        return Start([sys.executable, "-m", "tests.chaos.fast.fast_myxo", "up", str(config)], own, addresses, links)

    def processes(self, directory: Path, launcher: int) -> Processes:
        return ForkedProcesses(directory / "processes", launcher)

    def problems(self, root: Path, schedule: Schedule, found: LedgerFindings) -> list[str]:
        full = any(fault.kind == DISK_FULL for fault in schedule.faults)
        problems = problems_of_responses(root, found, lossy=schedule.lossy, full=full)
        return problems + (problems_of_weights(root / "hf", found) if found.finished else [])
