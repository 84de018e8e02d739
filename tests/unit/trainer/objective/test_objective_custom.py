"""Functions of the user's own: given what slime gives them, and what they give back is checked."""

import math

import pytest
import torch

from services.trainer.objective.custom_objective import ADVANTAGE, LOSS, REDUCER, REWARDS, TIS, CustomFunctions, CustomLoss, Responses
from services.trainer.objective.loss import PolicyLoss, SftLoss
from shared.config.algorithm import AlgorithmSection
from shared.hooks import HookFailed, HookSample, import_names
from tests.support.tables import table

from . import batches

ARGS = object()
PATHS = dict.fromkeys((ADVANTAGE, LOSS, REDUCER, REWARDS, TIS), "my.hooks:f")


def drawn(config=None, seed=3):
    sequences = batches.draw_sequences(seed, count=6, scale=0.3, proximal=True)
    return sequences, batches.packed(sequences, batches.weights_of(sequences, config or AlgorithmSection()))


def functions(name, function):
    return CustomFunctions(args=ARGS, paths=PATHS, functions={name: function})


def test_responses_begin_with_their_first_trained_token():
    sequences, batch = drawn()
    responses = Responses(batch)
    values = torch.arange(batch.tokens.numel(), dtype=torch.float64, requires_grad=True)
    assert responses.total_lengths == [s.prompt + len(s.mask) for s in sequences]
    assert responses.response_lengths == [len(s.mask) - s.mask.index(1) if 1 in s.mask else 0 for s in sequences]
    assert [mask.tolist() for mask in responses.loss_masks] == [s.mask[s.mask.index(1) :] if 1 in s.mask else [] for s in sequences]
    flat = responses.flat(values)
    assert flat.shape == (responses.size,) == (sum(responses.response_lengths),)
    assert torch.equal(torch.cat(responses.lists(values)), flat)
    back = responses.packed(flat)
    trained = batch.loss_mask > 0
    assert torch.equal(back[trained], values[trained])
    back.sum().backward()
    assert torch.equal(values.grad > 0, back != 0) or values[0] == 0


def own_tis(args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths):
    assert args is ARGS
    assert len(train_log_probs) == len(rollout_log_probs) == len(loss_masks) == len(total_lengths) == len(response_lengths)
    assert pg_loss.shape == (sum(response_lengths),)
    ratio = torch.exp(torch.cat(train_log_probs) - torch.cat(rollout_log_probs))
    masks = [mask * (own >= 0.9) for mask, own in zip(loss_masks, ratio.split(response_lengths), strict=True)]
    return pg_loss * ratio.clamp(max=2.0), masks, {"tis": ratio, "one": 1.0}


def tis_in_slimes_manner(args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths):
    from slime.backends.megatron_utils.cp_utils import all_gather_with_cp, slice_log_prob_with_cp

    lengths = list(zip(total_lengths, response_lengths, strict=True))
    train = [all_gather_with_cp(values, *of) for values, of in zip(train_log_probs, lengths, strict=True)]
    rollout = [all_gather_with_cp(values, *of) for values, of in zip(rollout_log_probs, lengths, strict=True)]
    ratios = [torch.exp(a - b) for a, b in zip(train, rollout, strict=True)]
    ratio = torch.cat([slice_log_prob_with_cp(values, *of) for values, of in zip(ratios, lengths, strict=True)])
    masks = [mask * (own >= 0.9) for mask, own in zip(loss_masks, ratios, strict=True)]
    return pg_loss * ratio.clamp(max=2.0), masks, {"tis": ratio}


def test_a_weight_that_gathers_as_with_slime_gets_whole_responses():
    import_names.install_slime_names()
    sequences, batch = drawn()
    losses = [
        PolicyLoss(AlgorithmSection(), custom=functions(TIS, weight))(batches.currents(sequences), None, batch)[0]
        for weight in (own_tis, tis_in_slimes_manner)
    ]
    assert torch.equal(*losses)


def test_a_weight_of_ones_own_equals_the_one_it_is_written_as():
    config = AlgorithmSection(tis_mode="mask", tis_clip_low=0.9, tis_clip=2.0)
    sequences, batch = drawn(config)
    batch.fields["proximal_log_probs"] = batch.fields["proximal_log_probs"].clamp(max=batch.fields["rollout_log_probs"] + math.log(2))
    current, again = batches.currents(sequences), batches.currents(sequences)
    loss, metrics = PolicyLoss(config)(current, None, batch)
    own, own_metrics = PolicyLoss(AlgorithmSection(), custom=functions(TIS, own_tis))(again, None, batch)
    loss.backward()
    own.backward()
    assert own.item() == pytest.approx(loss.item(), rel=1e-9)
    assert loss.item() != 0.0
    torch.testing.assert_close(again.grad, current.grad)
    assert own_metrics["tis"].item() == pytest.approx(metrics["tis"].item(), rel=1e-9)
    assert own_metrics["one"].item() == pytest.approx(batch.fields["weights"].sum().item())
    assert metrics["tis_clipfrac"] > 0  # the masks of the function left something out
    assert "tis_clipfrac" not in own_metrics


def by_length(total_lengths, response_lengths, loss_masks, per_token):
    assert per_token is False

    def reduce(values):
        parts = values.split(response_lengths)
        return sum((x * m).sum() / 10 for x, m in zip(parts, loss_masks, strict=True))

    return reduce


def test_a_reducer_of_ones_own_equals_the_one_it_is_written_as():
    config = AlgorithmSection(loss_divisor=10)
    sequences, batch = drawn(config)
    rollouts = len({s.rollout_id for s in sequences})
    current, again = batches.currents(sequences), batches.currents(sequences)
    loss = PolicyLoss(config)(current, None, batch)[0]
    own = PolicyLoss(AlgorithmSection(), custom=functions(REDUCER, by_length), denominator=float(rollouts))(again, None, batch)[0]
    loss.backward()
    own.backward()
    assert own.item() == pytest.approx(loss.item(), rel=1e-9)
    torch.testing.assert_close(again.grad, current.grad)


def likelihood(args, batch, logits, sum_of_sample_mean):
    """SFT from logits, by slime's signature."""
    assert logits.shape[0] == 1
    log_probs = torch.log_softmax(logits[0].double(), -1).gather(-1, batch["labels"][:, None])[:, 0]
    assert len(batch["loss_masks"]) == len(batch["advantages"]) == len(batch["response_lengths"])
    assert batch["log_probs"] is batch["proximal_log_probs"]
    return sum_of_sample_mean(-log_probs), {"ones": sum_of_sample_mean(torch.ones(sum(batch["response_lengths"]), dtype=torch.float64))}


def test_a_loss_of_ones_own_gets_logits_and_the_batchs_mean():
    _, batch = drawn()
    torch.manual_seed(0)
    logits = torch.randn(batch.tokens.numel(), 64, dtype=torch.float64, requires_grad=True)
    log_probs = torch.log_softmax(logits, -1).gather(-1, batch.labels[:, None])[:, 0]
    loss, metrics = CustomLoss(functions(LOSS, likelihood))(logits, batch)
    assert loss.item() == pytest.approx(SftLoss()(log_probs, None, batch)[0].item(), rel=1e-6)  # the weights are float32 here
    assert metrics["loss"].item() == loss.item()
    assert metrics["ones"].item() == pytest.approx(batch.fields["weights"].sum().item())
    loss.backward()
    assert torch.all(logits.grad[batch.loss_mask == 0] == 0)
    assert torch.any(logits.grad != 0)


def test_a_loss_that_depends_on_nothing_has_a_graph():
    _, batch = drawn()
    logits = torch.randn(batch.tokens.numel(), 8, requires_grad=True)
    loss, _ = CustomLoss(functions(LOSS, lambda *_: (torch.tensor(1.0), {})))(logits, batch)
    assert loss.requires_grad


def doubled(args, rollout_data):
    assert args is ARGS
    assert rollout_data["response_lengths"] == [2, 0]
    pairs = zip(rollout_data["rewards"], rollout_data["loss_masks"], strict=True)
    rollout_data["advantages"] = [2 * reward * mask for reward, mask in pairs]


def test_advantages_of_ones_own():
    masks = [torch.tensor([True, False]), torch.zeros(0, dtype=torch.bool)]
    found = functions(ADVANTAGE, doubled).advantages(masks, {"rewards": [1.5, 2.0]})
    assert [one.tolist() for one in found.advantages] == [[3.0, 0.0], []]
    assert found.returns is None


def test_rewards_of_ones_own():
    samples = [HookSample(reward=1.0), HookSample(reward=3.0)]

    def centred(args, samples):
        raw = [sample.reward for sample in samples]
        return raw, [reward - sum(raw) / len(raw) for reward in raw]

    assert functions(REWARDS, centred).post_processed(samples) == ([1.0, 3.0], [-1.0, 1.0])


def call(field, given):
    """Calls the function of a field that gives ``given`` (or raises it)."""

    def function(*args, **keywords):
        if isinstance(given, Exception):
            raise given
        if field == ADVANTAGE:
            args[1].update(given)
        return given

    sequences, batch = drawn()
    current = batches.currents(sequences)
    if field == TIS:
        PolicyLoss(AlgorithmSection(), custom=functions(TIS, function))(current, None, batch)
    elif field == REDUCER:
        PolicyLoss(AlgorithmSection(), custom=functions(REDUCER, function))(current, None, batch)
    elif field == LOSS:
        CustomLoss(functions(LOSS, function))(torch.zeros(batch.tokens.numel(), 8, requires_grad=True), batch)
    elif field == ADVANTAGE:
        functions(ADVANTAGE, function).advantages([torch.ones(2, dtype=torch.bool)], {"rewards": [1.0]})
    else:
        functions(REWARDS, function).post_processed([HookSample(), HookSample()])


@table(
    ("field", "given", "words"),
    [
        *[(field, KeyError("logits"), "KeyError: 'logits'") for field in PATHS],
        (TIS, None, "gave a NoneType; expected"),
        (TIS, (torch.zeros(1), [torch.zeros(1)], {}), r"pg_loss is a Tensor of shape \(1,\); expected a tensor \["),
        (REDUCER, 3, "gave a int; expected a function"),
        (REDUCER, lambda values: values, "expected a tensor of one number"),
        (LOSS, torch.zeros(2), r"expected \(loss, metrics\)"),
        (ADVANTAGE, {}, r"set no rollout_data\['advantages'\]"),
        (ADVANTAGE, {"advantages": []}, "0 arrays for 1 samples"),
        (ADVANTAGE, {"advantages": [[1.0]]}, r"advantages of sample 0: shape \(1,\) for 2 response tokens"),
        (ADVANTAGE, {"advantages": [[1.0, math.nan]]}, "not finite"),
        (REWARDS, [1.0, 2.0], r"expected \(raw_rewards, rewards\)"),
        (REWARDS, ([1.0, 2.0], [1.0]), "rewards: 1 for 2 samples"),
        (REWARDS, ([1.0, 2.0], [1.0, math.inf]), "some are not finite"),
        (REWARDS, ([1.0, 2.0], 3.0), "expected two lists"),
    ],
)
def test_what_does_not_fit_is_refused_by_field_and_path(field, given, words):
    with pytest.raises(HookFailed, match=words) as error:
        call(field, given)
    assert (error.value.field, error.value.path) == (field, "my.hooks:f")
