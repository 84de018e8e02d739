"""Values that can run and are hardly meant: each is noted by a dry run, which ends in ten lines, and none is refused."""

from pathlib import Path

import pytest

from myxo.main import main
from tests.integration.myxo.mistakes import Input

ODD = [
    (
        "--answer-pattern x --rm-type environment --environment-url http://127.0.0.1:1",
        "reward.answer_pattern: without effect, as this needs a verifier",
    ),
    ("--lr 2e-3", "trainer.lr = 0.002: above 1e-3"),
    ("--eps-clip 1.5", "algorithm.eps_clip = 1.5: above 1"),
    ("--use-kl-loss --kl-loss-coef 20", "algorithm.kl_loss_coef = 20: above 10"),
    ("--reward-timeout 90000", "reward.reward_timeout = 90000: seconds, more than a day"),
    ("--rollout-batch-size 12", "rollout.rollout_batch_size = 12: more than there are prompts"),
    ("--apply-chat-template --rollout-max-response-len 1", "rollout.rollout_max_response_len = 1: fewer tokens than the chat template"),
    ("--rollout-temperature 3", "rollout.rollout_temperature = 3: above 2"),
    ("--lr-warmup-iters 4", "trainer.lr_warmup_iters = 4: as many optimizer steps as the run has"),
]


@pytest.mark.parametrize(("flags", "said"), ODD)
def test_an_odd_value_is_noted(
    flags: str, said: str, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Input.make(tmp_path, tiny_model)
    (given.model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}+{{ m.content }}=={% endfor %}{% if add_generation_prompt %}assistant+{% endif %}"
    )
    for name in ("NATS_URL", "REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    assert main(["up", str(given.write()), "--dry-run", *flags.split()]) == 0, capsys.readouterr().err
    out, err = capsys.readouterr()
    assert said in err
    heads = [line.split()[0] for line in out.splitlines()]
    assert heads == ["run", "model", "layout", "memory", "data", "a", "reward", "functions", "guessed", "problems"], out
    assert f"none; notes above: {err.count('myxo: ')}" in out
    assert "at most" in out and "samples" in out
    assert not (tmp_path / "runs").exists()
