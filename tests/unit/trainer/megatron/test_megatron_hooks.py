"""slime's hooks around Megatron: when they are called, with what, and that what they do counts."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from services.trainer.objective.custom_objective import CustomFunctions
from services.trainer.trainer_hooks import MegatronHooks
from shared.hooks import HookFailed
from tests.support.run_config import run_config
from tests.unit.trainer.megatron.rank_steps import share, weighted_loss

FIELDS = {
    "init": "custom_megatron_init_path",
    "before_log_prob": "custom_megatron_before_log_prob_hook_path",
    "before_train_step": "custom_megatron_before_train_step_hook_path",
}


@pytest.fixture
def hooked(tmp_path, monkeypatch):
    """The hooks of a run whose functions are those given."""

    def made(**functions):
        module = ModuleType("megatron_hooks_of_this_test")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        for name, function in functions.items():
            setattr(module, name, function)
        return MegatronHooks(
            CustomFunctions.of(run_config(tmp_path, trainer={FIELDS[name]: f"{module.__name__}:{name}" for name in functions}))
        )

    return made


def test_a_step_hook_changes_the_step(make_actor, hooked):
    seen = []

    def before_train_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
        gradients = [p.main_grad.abs().sum() for chunk in model for p in chunk.parameters() if p.requires_grad]
        seen.append((rollout_id, step_id, opt_param_scheduler.num_steps, opt_param_scheduler.get_lr(None), float(sum(gradients))))
        assert optimizer.param_groups and args.lr == opt_param_scheduler.get_lr({})
        if rollout_id == 8:
            with torch.no_grad():
                for chunk in model:
                    for parameter in chunk.parameters():
                        parameter.zero_()

    actor, hooks = make_actor("qwen3", lr=1e-6), hooked(before_train_step=before_train_step)
    first = actor.train_step(share(actor, 0), weighted_loss, need_entropy=True, before=lambda: hooks.before_step(actor, 7, 1))
    plain = make_actor("qwen3", lr=1e-6).train_step(share(actor, 0), weighted_loss, need_entropy=True)
    assert first == plain, "a hook that only looks on changes nothing"
    actor.train_step(share(actor, 0), weighted_loss, need_entropy=True, before=lambda: hooks.before_step(actor, 8, 0))
    assert seen == [(7, 1, 0, 1e-6, 0.0), (8, 0, 1, 1e-6, 0.0)], "before any gradient"
    zeros = torch.cat(actor.log_probs(share(actor, 0)))
    assert torch.allclose(zeros, zeros[0].expand_as(zeros)), "the weights that the hook has zeroed: every token is as likely"


def test_a_log_prob_hook_sees_which_weights_are_in_place(make_actor, hooked):
    seen = []

    def before_log_prob(args, model, store_prefix):
        seen.append((store_prefix, len(model), any(chunk.training for chunk in model)))

    actor, hooks = make_actor("qwen3"), hooked(before_log_prob=before_log_prob)
    for prefix in ("", "ref_", "teacher_"):
        hooks.before_log_probs(actor, prefix)
    assert seen == [("", 1, False), ("ref_", 1, False), ("teacher_", 1, False)]


def test_an_init_hook_is_called_once_the_process_groups_are_there(hooked):
    def init(args):
        args_seen.append(args)

    args_seen = []
    hooks = hooked(init=init)
    hooks.initialized()
    (args,) = args_seen
    assert args.rollout_batch_size == 2


def test_what_is_not_named_is_not_called_and_what_fails_is_named(hooked):
    nobody = SimpleNamespace()
    hooks = hooked()
    hooks.initialized()
    hooks.before_log_probs(nobody, "")
    hooks.before_step(nobody, 0, 0)

    def init(args):
        raise RuntimeError("no such device")

    with pytest.raises(HookFailed, match=r"trainer\.custom_megatron_init_path = .*: RuntimeError: no such device"):
        hooked(init=init).initialized()
