"""The trainer of the training endpoint, on every rank: carries out clients' commands from the log, each once, in each client's order.

Rank 0 follows the log and broadcasts what is next. After a death each client goes back to its newest checkpoint, and the commands after it
are carried out again; those whose outcome the log has are not answered again.
"""

import asyncio
import contextlib
import json
import queue
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.trainer.actor import Actor
from services.trainer.backend import TrainerSettings, model_directory
from services.trainer.client_states import ClientRefused, ClientStates, newest_checkpoint, publish_marked, read_marker
from services.trainer.commands import CommandBroadcast, Execute, Leave, Wait
from services.trainer.control_client import ControlClient
from services.trainer.objective.policy_gradient import ClientLoss
from services.trainer.packing import PackedBatch
from services.trainer.parallel import runtime
from services.trainer.parallel.loss_function import MicroBatchesFailed
from services.trainer.partition import balance
from shared.bus.command_log import CommandLog
from shared.config.run_config import RunConfig
from shared.runtime.errors import MyxoError
from shared.runtime.safe_files import replace_file, scratch
from shared.runtime.tasks import describe
from shared.runtime.telemetry import declare_metrics
from shared.schema import codec
from shared.schema.messages import TRAINED, Command, CommandOutcome, LogEntry, is_expired, weights_directory
from shared.store.payload_store import BlockingStore

declare_metrics("""
    clients | models | of clients that the trainer holds
    client_commands_total | commands | that it has carried out
    client_commands_replayed_total | commands | of them, that a client's newest checkpoint did not hold after a start
    client_tokens_total | tokens | of them, forward or forward and backward
""")

POLL_SECONDS = 0.5  # the longest time until the other ranks hear of rank 0
LOOK_SECONDS = 0.1  # the longest time between two looks at whether to stop
BUS_SECONDS = 120.0  # the time that an outcome may take to be written
BURST = 8  # commands of one client in a row while others wait
MOST_ENTRIES = 4096  # of the log that are read ahead of the loop; further ones stay in the log
# attempts at one command that each ended the trainer, after which it is answered as failed; one that ended by an error counts as
# OF_ERROR: the launcher gives up what dies three times of the same
FATAL, OF_ERROR = 5, 3


class ClientQueues:
    """The commands of all clients that wait, and whose turn it is. Pure.

    Args:
        first: returns the number of a client's first command that may have to be carried out.
    """

    def __init__(self, first: Callable[[str], int]) -> None:
        self._first, self._next = first, dict[str, int]()
        self._waiting: dict[str, dict[int, Command]] = {}
        self._turns: deque[str] = deque()  # of clients with commands that wait: there may be many others
        self._taken = 0

    def add(self, command: Command) -> None:
        """Takes a command, in any order."""
        client = command.client
        if client not in self._next:
            self._next[client] = self._first(client)
        if command.number >= self._next[client]:
            if client not in self._waiting:
                self._turns.append(client)
            self._waiting.setdefault(client, {})[command.number] = command

    def next(self) -> Command | None:
        """Returns the next command: of the last one's client, up to `BURST` and up to its optimizer step, then of the others in turn."""
        for _ in range(len(self._turns) + bool(self._turns)):  # once more: the last one's turn is over, and no other may wait
            client = self._turns[0]
            command = self._waiting[client].pop(self._next[client], None) if self._taken < BURST else None
            if command is not None:
                self._next[client] += 1
                self._taken += 1
                if not self._waiting[client]:
                    del self._waiting[self._turns.popleft()]
                    self._taken = 0
                elif command.verb == "optim_step":
                    self._rotate()
                return command
            self._rotate()
        return None

    def _rotate(self) -> None:
        self._turns.rotate(-1)
        self._taken = 0


class CommandWorker:
    """One rank. ``control``: rank 0's connection to the bus; None on the other ranks."""

    def __init__(self, config: RunConfig, store: BlockingStore, control: ControlClient | None) -> None:
        self._config, self._store, self._control, self._log = config, store, control, structlog.get_logger()
        if control is not None:
            control.set_state("loading the model")
        # sequences are not shared: a client's targets need not be the tokens that follow
        plain = {"prefix_sharing": "off", "lr_decay_style": "constant"}
        settings = replace(TrainerSettings.from_run(config), trainer=config.trainer.model_copy(update=plain))
        self._actor = Actor.create(settings, model_directory(config, "actor"))
        self._broadcast = CommandBroadcast(config.trainer.collective_timeout)
        self._states, self._root = ClientStates(self._actor), config.trained
        self._clients = self._root / "clients"
        # the newest checkpoint's own command may have no outcome yet
        self._queues = ClientQueues(lambda client: max(0, self._newest(client)))
        self._unfreed: dict[str, dict[int, list[str]]] = {}  # keys of payloads that a replay still needs, by client and number
        # rank 0's: what it has read of the log
        self._entries: queue.Queue[LogEntry | None] = queue.Queue(MOST_ENTRIES)
        self._following: Future[None] | None = None
        self._caught_up = False
        self._known, self._saves = dict[tuple[str, int], CommandOutcome](), dict[str, CommandOutcome]()

    def close(self) -> None:
        """Closes groups and connections."""
        if self._following is not None:
            self._following.cancel()
        self._store.close()
        self._actor.close()

    def run(self) -> None:
        """Carries commands out until a stop is asked for; every client's state is then on disk."""
        if self._control is not None:
            self._following = self._control.begin(self._follow(CommandLog(self._control.service.bus, self._config.run.name)))
            self._control.set_state("ready")
        while True:
            match self._broadcast.receive() if self._control is None else self._broadcast.send(self._next()):
                case Execute(command=command, replayed=replayed):
                    self._carry_out(command, replayed)
                case Leave():
                    return self._leave()

    # --- rank 0: what is next

    async def _follow(self, log: CommandLog) -> None:
        async for entry in log.follow():
            while self._entries.full():  # this is the only one that fills it
                await asyncio.sleep(LOOK_SECONDS)
            self._entries.put_nowait(entry)

    def _read(self, seconds: float) -> None:
        """Takes what has come of the log; waits for so long where nothing has."""
        with contextlib.suppress(queue.Empty):
            while True:
                entry, seconds = self._entries.get(timeout=seconds), 0
                if entry is None:
                    self._caught_up = True
                elif ":train:" not in entry.client:
                    continue
                elif isinstance(entry, Command):
                    self._queues.add(entry)
                elif isinstance(entry, CommandOutcome) and not self._caught_up:  # later ones are this life's own
                    self._known[entry.key] = entry
                    self._note_saved(entry)

    def _next(self) -> Execute | Wait | Leave:
        assert self._control is not None and self._following is not None
        end = time.monotonic() + POLL_SECONDS
        while not self._control.stopping:
            if self._following.done():
                self._following.result()
            self._read(0)
            for path in [path for path, saved in self._saves.items() if is_expired(saved, time.time())]:
                shutil.rmtree(weights_directory(self._root, path), ignore_errors=True)
                del self._saves[path]
            if (command := self._queues.next() if self._caught_up else None) is None:
                if (left := end - time.monotonic()) <= 0:
                    return Wait()
                self._read(min(left, LOOK_SECONDS))
            elif self._is_due(command):
                return Execute(command, command.key in self._known)
        return Leave(done=False)

    def _note_saved(self, outcome: CommandOutcome) -> None:
        if path := json.loads(outcome.result).get("path"):
            self._saves[path] = outcome

    def _is_due(self, command: Command) -> bool:
        """Returns whether a command has to be carried out; one that is not to be is answered."""
        if (known := self._known.get(command.key)) is not None:
            # a step that was refused may have dropped its gradients, and does so again
            changed = not known.error or (command.verb == "optim_step" and known.category == "user" and not command.refused)
            if changed and command.verb in TRAINED and command.number > self._newest(command.client):
                return True
            self._free(command)
        elif refused := command.refused or self._over_quota(command):
            self._answer(failed(command, refused, "user"))
        elif self._attempts(command) > FATAL:
            self._answer(failed(command, f"{command.verb}: the trainer ended at each attempt at it; its log has the reason", "server"))
        else:
            return True
        return False

    def _over_quota(self, command: Command) -> str:
        given, tenant = json.loads(command.arguments), command.client.partition("-")[0]
        if (quota := given.get("quota")) is None:
            return ""
        paths = (path for path in self._saves if path.startswith(f"tinker://{tenant}-") and path != given["path"])
        stored = sum(self._saves[path].bytes for path in paths)
        return f"bytes: {stored} of saved weights of {tenant} are there; its quota is {quota}" if stored >= quota else ""

    def _attempts(self, command: Command, count: int = 1) -> int:
        path = self._clients / "attempt"
        path.parent.mkdir(parents=True, exist_ok=True)
        name, _, before = path.read_text().partition(" ") if path.is_file() else ("", "", "0")
        own = f"{command.client}/{command.number}"
        count += int(before) if name == own and before.isdecimal() else 0
        replace_file(path, f"{own} {count}".encode())
        return count

    def _answer(self, outcome: CommandOutcome, blob: bytes | None = None) -> None:
        assert self._control is not None
        service, call = self._control.service, self._control.call
        log = CommandLog(service.bus, service.run)
        if blob is not None:
            outcome = call(log.with_payload(outcome, blob, service.store), BUS_SECONDS)
        self._note_saved(call(log.append(outcome), BUS_SECONDS))

    # --- all ranks: one command

    def _tried(self, command: Command) -> tuple[CommandOutcome, bytes | None]:
        try:
            self._restore(command.client)
            if command.number and command.verb != "unload_model" and command.client not in self._states.held:
                raise ClientRefused(f"{command.verb}: {command.client} is not there: it was unloaded, or was not made")
            found = getattr(self, f"_{command.verb}")(command, json.loads(command.arguments))
            blob = found.pop("blob", None)
            return failed(command, "", "").model_copy(update=found), blob
        except ClientRefused as error:
            return failed(command, str(error), "user"), None
        except (MicroBatchesFailed, OSError, runtime.PeerFailed) as error:
            if not isinstance(error, MicroBatchesFailed) and not command.verb.startswith("save_weights"):
                raise  # all ranks fail to write together, and a state that is saved has not changed
            return failed(command, f"{command.verb}: {describe(error)}", "server"), None

    def _carry_out(self, command: Command, replayed: bool) -> None:
        started = time.monotonic()
        try:
            outcome, blob = self._tried(command)
        except Exception:
            if self._control is not None and not replayed:
                self._attempts(command, OF_ERROR - 1)
            raise
        if self._control is not None:
            seconds = time.monotonic() - started
            outcome = outcome.model_copy(update={"at": time.time(), "figures": {**outcome.figures, "seconds": seconds}})
            self._note(command, outcome, replayed)
            if not replayed:
                self._answer(outcome, blob)
        state = self._states.held.get(command.client)
        if outcome.error or command.verb not in TRAINED or state is None:
            return self._free(command)
        if command.payload is not None:
            self._unfreed.setdefault(command.client, {})[command.number] = command.payload.keys
        if command.verb != "forward_backward":
            state.number = command.number
            if state.updates - state.saved >= self._config.tinker.tinker_checkpoint_steps:
                self._checkpoint(command.client)

    def _note(self, command: Command, outcome: CommandOutcome, replayed: bool) -> None:
        assert self._control is not None
        metrics = self._control.service.metrics
        metrics.set("clients", len(self._states.held))
        metrics.add("client_commands")
        metrics.add("client_tokens", command.tokens)
        if replayed:
            metrics.add("client_commands_replayed")
            if outcome.error != (known := self._known.pop(command.key)).error:
                raise MyxoError(f"{command.client} {command.number}: its error was {known.error!r}, by its replay {outcome.error!r}")
            if known.state != outcome.state:
                detail = f"update {outcome.figures.get('updates', 0):g} of {command.client} came to other weights than before the restart"
                self._control.publish_event("replay_differs", detail)
                self._log.error("replay_differs", client=command.client, number=command.number)
        self._log.info("command", client=command.client, number=command.number, verb=command.verb, replayed=replayed, error=outcome.error)

    def _restore(self, client: str) -> None:
        root, newest = self._clients / client, -1 if client in self._states.held else self._newest(client)
        if newest >= 0 and not (read_marker(root / str(newest)) or {}).get("unloaded"):
            self._states.read(client, root / str(newest))

    def _newest(self, client: str) -> int:
        return newest_checkpoint(self._clients / client)

    def _checkpoint(self, client: str) -> None:
        """Writes a client's state as it was after its last step; what only its replay needed is removed."""
        state, root = self._states.held[client], self._clients / client
        self._states.write(client, root / str(state.number), state.number)
        state.saved = state.updates
        self._forget_before(client, state.number)

    def _forget_before(self, client: str, number: int) -> None:
        keys = self._unfreed.get(client, {})
        done = [key for known in sorted(keys) if known <= number for key in keys.pop(known)]
        if self._control is not None:
            for path in (self._clients / client).iterdir():
                if path.name.isdecimal() and int(path.name) < number:
                    shutil.rmtree(path)
            self._control.call(self._control.service.store.free(done), BUS_SECONDS)

    def _free(self, command: Command) -> None:
        if self._control is not None and command.payload is not None:
            self._control.call(self._control.service.store.free(command.payload.keys), BUS_SECONDS)

    def _leave(self) -> None:
        for client, state in self._states.held.items():
            if state.updates > state.saved:
                self._checkpoint(client)

    # --- the commands: each returns fields of its outcome, and a blob for the store

    def _create_model(self, command: Command, given: Mapping[str, Any]) -> dict[str, Any]:
        self._states.create(command.client, given["seed"], given["rank"], given["parts"])
        return {"figures": {"updates": 0}}

    def _unload_model(self, command: Command, given: Mapping[str, Any]) -> dict[str, Any]:
        self._states.forget(command.client)
        with runtime.together(f"the end of {command.client}"):
            if runtime.rank() == 0:
                target = self._clients / command.client / str(command.number)
                scratch(target)
                publish_marked(target, {"unloaded": True})
        self._forget_before(command.client, command.number)
        return {}

    def _load_weights(self, command: Command, given: Mapping[str, Any]) -> dict[str, Any]:
        if self._newest(command.client) < command.number:  # else a death came between its checkpoint and its outcome
            self._states.read(command.client, weights_directory(self._root, given["path"]), given["optimizer"])
            self._states.held[command.client].number = command.number
            self._checkpoint(command.client)  # what it has loaded may be overwritten before a replay
        return {"figures": {"updates": self._states.held[command.client].updates}}

    def _save_weights(self, command: Command, given: Mapping[str, Any]) -> dict[str, Any]:
        return self._saved(given, self._states.write(command.client, weights_directory(self._root, given["path"]), command.number))

    def _save_weights_for_sampler(self, command: Command, given: Mapping[str, Any]) -> dict[str, Any]:
        self._states.enter(command.client)
        target = weights_directory(self._root, given["path"])
        if self._actor.model.lora is None:
            self._actor.save_hf(target)
        else:
            self._actor.save_adapters(target)
        return self._saved(given, sum(path.stat().st_size for path in target.iterdir()) if runtime.rank() == 0 else 0)

    def _saved(self, given: Mapping[str, Any], size: int) -> dict[str, Any]:
        ttl = given.get("ttl")
        return {"bytes": size, "result": json.dumps({"path": given["path"]}), "figures": {"expires": time.time() + ttl} if ttl else {}}

    def _optim_step(self, command: Command, given: Mapping[str, Any]) -> dict[str, Any]:
        norm, skipped = self._states.step(command.client, dict(given))
        if skipped is not None:
            raise ClientRefused(f"optim_step: {skipped}; weights and moments are as they were, the gradients are gone")
        state = self._states.held[command.client]
        metrics = {"grad_norm:l2": norm, "updates": state.updates}
        return {"result": json.dumps({"metrics": metrics}), "figures": metrics, "state": self._states.digest(command.client)}

    def _forward(self, command: Command, given: Mapping[str, Any]) -> dict[str, Any]:
        assert command.payload is not None
        self._states.enter(command.client)
        datums = codec.unpack(self._store.read(command.payload)[0])
        lengths, actor, most = [len(datum["tokens"]) for datum in datums], self._actor, self._config.trainer.micro_batch_tokens
        placement = balance([min(length, most) for length in lengths], actor.data_parallel_size, most)[actor.data_parallel_rank]
        batches = [packed([datums[index] for index in indices]) for indices in placement]
        loss, passes, model = ClientLoss(given["loss_fn"], given["loss_fn_config"]), actor.backend.passes, actor.model
        if command.verb == "forward_backward":
            model.zero_gradients()
            actor.optimizer.zero_gradients()
            with runtime.deadline("the forward and backward passes"):
                total, _ = passes.forward_backward(model, batches, loss, 1.0, False)
            self._states.add_gradients(command.client)
        else:
            with runtime.deadline("the forward passes"):
                found = passes.log_probs(model, batches, 1.0)
            mine = sum(float(loss(each, None, batch.to(each.device))[0]) for each, batch in zip(found, batches, strict=True))
            total = float(runtime.sum_over_data_parallel(np.array([mine]))[0])
        log_probs = self._gathered(placement, lengths, loss.found)
        metrics = {"loss:sum": total}
        return {"blob": codec.pack({"log_probs": log_probs, "metrics": metrics}), "figures": {**metrics, "tokens": sum(lengths)}}

    _forward_backward = _forward

    def _gathered(self, placement: Sequence[Sequence[int]], lengths: Sequence[int], found: Sequence[Tensor]) -> list[NDArray[np.float32]]:
        """Returns every datum's log-probs, in the request's order, of all data-parallel ranks."""
        own = dict[int, NDArray[np.float32]]()
        for indices, values in zip(placement, found, strict=True):
            split = values.float().cpu().split([lengths[index] for index in indices] if indices else [len(values)])
            own |= {index: part.numpy() for index, part in zip(indices, split, strict=bool(indices))}
        if self._actor.data_parallel_size > 1:  # Python's JSON gives every float32 back, those that are not finite, too
            everyone = runtime.gather_json([[index, values.tolist()] for index, values in own.items()])
            own = {index: np.array(values, np.float32) for each in everyone for index, values in each}
        return [own[index] for index in range(len(lengths))]


def failed(command: Command, error: str, category: Literal["", "user", "server"]) -> CommandOutcome:
    """Returns the outcome of a command that is not carried out."""
    return CommandOutcome(client=command.client, number=command.number, at=time.time(), error=error, category=category)


def packed(datums: Sequence[Mapping[str, NDArray[Any]]]) -> PackedBatch:
    """Lays datums end to end as one micro-batch; without any, a filler of which nothing is trained.

    A datum: ``tokens`` and ``target_tokens``, int32 [N], and float32 [N] for each further field; target n is predicted after token n.
    """
    given = datums or [dict.fromkeys(("tokens", "target_tokens", "weights", "advantages", "logprobs"), np.zeros(2, np.float32))]
    columns = {name: torch.from_numpy(np.concatenate([datum[name] for datum in given])) for name in given[0]}
    lengths = [len(datum["tokens"]) for datum in given]
    tokens, labels = columns.pop("tokens").long(), columns.pop("target_tokens").long()
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    return PackedBatch(tokens, labels, torch.full((len(tokens),), float(bool(datums))), starts, max(lengths), columns)
