"""SGLang's entry point: it calls `load` by its dotted name (``--custom-weight-loader``) with the model, on the scheduler's thread.

The first call also adds to SGLang's check, after each token of a request, whether it has ended:

An aborted request whose last token ends it has ended: SGLang checks only requests that are not aborted, and would hand out an end token or
a whole stop string as if more were to follow, and whoever continues from there would write beyond the end.

The weight version of each token is reported: SGLang before 0.5.20 reports that of a request's end alone, so a sample that was generated
across pushes would count as wholly of the version that it began under, and be too old as a whole.
"""

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from services.rollout.engine import quantized_layers
from services.rollout.engine.private_endpoints import DIRECTORY_VARIABLE
from services.rollout.engine.receiver.command_session import CommandSession, SchedulerGate
from services.rollout.engine.receiver.receiver import Receiver
from shared.runtime import tasks
from shared.schema.versions import TOKEN_VERSIONS

log = logging.getLogger(__name__)

# The scheduler's attribute by which it is known: the stream of its forward passes, which wait for all others that they use.
FORWARD_STREAM = "forward_stream"


def calling_scheduler() -> Any:
    """Returns the scheduler that has called, however indirectly; None where there is none."""
    found = next((owner for owner in _callers() if hasattr(owner, FORWARD_STREAM) and hasattr(owner, "process_input_requests")), None)
    if found is None:
        log.warning("no scheduler with a %s has called: pushes begin once the engine is paused", FORWARD_STREAM)
    return found


def computing_streams(scheduler: Any) -> Callable[[], list[torch.cuda.Stream]] | None:
    """Returns a function that returns a scheduler's streams; None where that of its forward passes is not among them."""
    if not isinstance(getattr(scheduler, FORWARD_STREAM, None), torch.cuda.Stream):
        return None
    return lambda: [value for value in vars(scheduler).values() if isinstance(value, torch.cuda.Stream)]


def _callers() -> Iterator[Any]:
    """Yields the objects whose methods are under way on this thread, from the innermost outwards."""
    frame = sys._getframe(1)
    while frame is not None:
        if (owner := frame.f_locals.get("self")) is not None:
            yield owner
        frame = frame.f_back  # type: ignore[assignment]


def load_stages_together(scheduler: Any) -> None:
    """Has the stages of a pipeline load at once: SGLang's pass a request on once they have processed it, and a push needs all ranks.

    A request to load waits until no earlier batch is on its way between stages, and is passed on before it is processed. What a later stage
    fails to read from disk ends the engine: the first one alone answers."""
    if not hasattr(scheduler, "pp_group") or scheduler.pp_group.world_size == 1:
        return
    process, send, worker = scheduler.process_input_requests, scheduler._pp_send_pyobj_to_next_stage, scheduler.tp_worker
    read, held, passed_on = worker.update_weights_from_disk, list[Any](), list[Any]()

    def processed(requests: list[Any]) -> Any:
        requests[:0], held[:] = held, []
        loads = [at for at, request in enumerate(requests) if type(request).__name__.startswith("UpdateWeightsFromTensor")]
        if loads and (scheduler.pp_outputs is not None or any(batch is not None for batch in scheduler.mbs)):
            held[:], requests[loads[0] :] = requests[loads[0] :], []  # what comes after them stays behind them
        elif loads and not scheduler.pp_group.is_last_rank:
            scheduler._pp_commit_comm_work(scheduler.send_req_work)
            scheduler.send_req_work = send(requests, async_send=True)
            passed_on[:] = [requests]
        return process(requests)

    def sent(data: Any, *arguments: Any, **options: Any) -> Any:
        if passed_on and data is passed_on.pop():
            return []
        return send(data, *arguments, **options)

    def read_or_ended(request: Any) -> Any:
        success, message = read(request)
        if not success:
            raise RuntimeError(f"a later stage of the engine could not read the weights: {message}")
        return success, message

    scheduler.process_input_requests, scheduler._pp_send_pyobj_to_next_stage = processed, sent
    if not scheduler.pp_group.is_first_rank:
        worker.update_weights_from_disk = read_or_ended


CHECK = "update_finish_state"  # What SGLang looks by, after each token, whether a request has ended


def find_ends_of_aborted(request: type[Any]) -> bool:
    """Makes SGLang's class of requests look for the end of aborted ones, too. Returns whether it could be; once is enough."""

    def find(self: Any, check: Callable[[], Any]) -> Any:
        abort = getattr(self, "to_finish", None)
        if abort is not None and self.output_ids and not self.finished():
            self.to_finish = None
            check()
            if self.finished():
                return None
            self.to_finish = abort
        return check()

    return _around_check(request, find)


def report_token_versions(request: type[Any], version: Callable[[], int]) -> bool:
    """Makes SGLang's class of requests note each token's version in the per-token fields it hands out. ``version``: returns that of the
    weights that the engine holds; negative where it is unknown. Returns whether it could be; once is enough."""

    def note(self: Any, check: Callable[[], Any]) -> Any:
        self.customized_info = getattr(self, "customized_info", None) or {}
        known, held = self.customized_info.setdefault(TOKEN_VERSIONS, []), version()
        known.extend([held if held >= 0 else None] * (len(self.output_ids) - len(known)))
        return check()

    return _around_check(request, note)


def _around_check(request: type[Any], around: Callable[[Any, Callable[[], Any]], Any]) -> bool:
    if (check := getattr(request, CHECK, None)) is None:
        return False

    @functools.wraps(check)
    def checked(self: Any, *arguments: Any, **options: Any) -> Any:
        return around(self, functools.partial(check, self, *arguments, **options))

    setattr(request, CHECK, checked)
    return True


def forget_pictures() -> None:
    """Has SGLang compute pictures anew: it keeps what a model has seen in them by their content alone, whatever the weights are now.

    The cache is replaced, not emptied: the scheduler's thread may be reading it."""
    for name in ("mm_schedule", "mm_utils"):  # in 0.5.20, and before
        module: Any = sys.modules.get(f"sglang.srt.managers.{name}")
        cache = vars(module).get("embedding_cache") if module is not None else None
        if cache is not None:
            module.embedding_cache = type(cache)(cache.max_size)


def norm_as_trained(model: torch.nn.Module) -> None:
    """Gives the layer norm behind GLM-4.1V's tower the epsilon of its trainer: SGLang adds a tenth of it to the variance."""
    for module in model.modules():
        if type(module).__name__ == "Glm4vPatchMerger":
            norm: Any = module.post_projection_norm
            norm.variance_epsilon = 1e-5


def hear_as_trained(model: Any) -> None:
    """Has Qwen2-Audio's encoder attend to a sound's frames alone, as its trainer's does: SGLang's attends to the silence behind them, too.
    A second sound in a request would end SGLang's scheduler."""
    if type(model).__name__ != "Qwen2AudioForConditionalGeneration":
        return
    tower, plain, embed = model.audio_tower, model.audio_tower.forward, model.get_audio_feature

    def embed_sounds(items: list[Any]) -> torch.Tensor:
        weight, frames = tower.conv1.weight, [(item.feature_attention_mask.sum(1) - 1) // 2 + 1 for item in items]
        for item, count in zip(items, frames, strict=True):
            item.audio_feature_lens = count // 2  # which a request's first sound has alone
        counts = torch.cat(frames).to(weight.device)[:, None, None, None]
        behind = torch.arange(tower.max_source_positions, device=weight.device) >= counts
        mask = torch.zeros(behind.shape, dtype=weight.dtype, device=weight.device).masked_fill(behind, torch.finfo(weight.dtype).min)
        tower.forward = functools.partial(plain, attention_mask=mask)
        return embed(items)

    model.get_audio_feature = embed_sounds


def watch_as_trained(model: Any) -> None:
    """Has the layers of Qwen2.5-VL's tower that attend to a whole picture attend to one moment of a video, as its trainer's do: SGLang's
    attend to all of it."""
    if type(model).__name__ != "Qwen2_5_VLForConditionalGeneration":
        return
    tower, plain = model.visual, model.visual.forward

    def by_moments(x: torch.Tensor, grid_thw: torch.Tensor) -> Any:
        moments = grid_thw.repeat_interleave(grid_thw[:, 0], 0)
        return plain(x, grid_thw=moments.where(torch.arange(3, device=moments.device) > 0, 1))

    tower.forward = by_moments


def add_as_trained(model: Any) -> None:
    """Has Gemma's first model add one to copies of its norms: SGLang's adds it to what has come, which is hashed afterwards, and which may
    be the trainer's own memory."""
    if type(model).__name__ == "GemmaForCausalLM":
        load = model.load_weights
        model.load_weights = lambda given: load((name, one.clone() if "norm.weight" in name else one) for name, one in given)


# The interpreter's switch interval. The scheduler's thread spins, or computes, and delays the receiver's by several intervals for each
# command; at Python's default of 5 ms, commands took 10 to 90 ms on a GPU.
SWITCH_SECONDS = 2e-5

# The exceptions of looking up a name that a release of SGLang has elsewhere.
MOVED = (ImportError, AttributeError, KeyError, RuntimeError, ValueError)


class WithDraft(torch.nn.Module):
    """A model and the draft model that is made of layers of its own checkpoint; both load a push, each what it has."""

    def __init__(self, *models: Any) -> None:
        super().__init__()
        self.models: Any = torch.nn.ModuleList(models)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Loads tensors by their names in the checkpoint."""
        given = list(weights)
        for model in self.models:
            model.load_weights(iter(given))


def draft_of(scheduler: Any) -> tuple[Any, bool]:
    """Returns the model that drafts for a scheduler's own, None where there is none; and whether it is of the same checkpoint."""
    worker = getattr(scheduler, "draft_worker", None)
    inner = getattr(worker, "_draft_worker", None)
    runner = getattr(inner, "draft_runner", None) or getattr(worker, "draft_model_runner", None)
    model, path = getattr(runner, "model", None), getattr(getattr(runner, "model_config", None), "model_path", None)
    return model, path is not None and str(path) == _model_path()


def leave_draft(scheduler: Any, own: bool) -> None:
    """Has a load from disk leave a draft as it is that is not of the same checkpoint (``own``). SGLang would give it the policy's weights,
    and end where they do not fit, or where there is no model that drafts."""
    if (worker := getattr(scheduler, "draft_worker", None)) is not None and not own:
        worker.update_weights_from_disk = lambda _: (True, "the draft stays as it is")


_session: CommandSession | None = None


def load(model: Any, tensors: Iterable[object]) -> None:
    """Runs the next queued command with this model; the first call opens the socket instead. ``tensors``: ignored. Never raises, since that
    would end SGLang's scheduler; errors are in the answer to the command. A draft that is of its checkpoint is loaded with it."""
    global _session
    try:
        if _session is None:
            scheduler, gate = calling_scheduler(), SchedulerGate()
            draft, own = draft_of(scheduler)
            leave_draft(scheduler, own)
            tasks.arm()  # an engine without a receiver would serve old weights for ever
            device = next(model.parameters()).device
            loaded = WithDraft(model, draft) if own else model
            receiver = Receiver(loaded, _rank(), device, _model_path(), computing_streams(scheduler), gate.closed, forget_pictures)
            for change in (norm_as_trained, hear_as_trained, watch_as_trained, add_as_trained, quantized_layers.keep_beside_weights):
                change(model)
            load_stages_together(scheduler)
            gate.install(scheduler)
            if not find_ends_of_aborted(_request_class()):
                log.warning("aborted requests may continue beyond their ends; samples may count as wholly of their oldest version")
            if not hasattr(scheduler, "record_weight_version_change"):  # from 0.5.20 on SGLang does it
                report_token_versions(_request_class(), lambda: receiver.version)
            _session = CommandSession(Path(os.environ[DIRECTORY_VARIABLE]), receiver, gate)
            _session.open()
            sys.setswitchinterval(SWITCH_SECONDS)
        else:
            _session.work()
    except Exception:
        log.exception("the receiver of weights failed")


def _request_class() -> type[Any]:
    from sglang.srt.managers.schedule_batch import Req

    return Req


def _rank() -> int:
    """Returns the rank in the engine: stage by stage, each with the ranks that hold its tensors together."""
    try:
        from sglang.srt.runtime_context import get_parallel

        own = get_parallel()
        return int(own.pp_rank * own.tp_size + own.tp_rank)
    except MOVED:
        from sglang.srt import distributed as groups

        stage, size = groups.get_pp_group().rank_in_group, groups.get_tensor_model_parallel_world_size()
        return int(stage * size + groups.get_tensor_model_parallel_rank())


def _model_path() -> str | None:
    """Returns the checkpoint that the engine was launched with; None where it is unknown."""
    try:
        from sglang.srt.runtime_context import get_model

        return str(get_model().model_path)
    except MOVED:
        pass
    try:
        from sglang.srt.server_args import get_global_server_args

        return str(get_global_server_args().model_path)
    except MOVED:
        return None
