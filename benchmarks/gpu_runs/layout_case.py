"""The layouts that are run, and which of them run beside each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LayoutCase:
    """A run of the example.

    Args:
        words: the layout, as the table has it. gpus: that it takes. flags: of the run. prepared, on_gpus: options of the example's
            ``prepare.py`` and further flags of the run where it has GPUs. killed: an engine that is killed inside pushes, by its service's
            instance. adapters: adapters alone train, beside a model that a run of its own has trained on the demonstrations, and pushes
            carry nothing else. critic: a critic trains beside the actor. block: rows and columns of the blocks of 8-bit floats in which the
            engines' checkpoint, and so every version, is; 0: it is not.
    """

    words: str
    gpus: int
    flags: tuple[str, ...]
    prepared: tuple[str, ...] = ()
    on_gpus: tuple[str, ...] = ()
    killed: str = ""
    adapters: bool = False
    critic: bool = False
    block: int = 0


NO_WARM_START = ("--sft-steps", "1", "--sft-lr", "1e-9")
"""The least that there is, for a model that has had one."""

LAYOUT_CASES: Mapping[str, LayoutCase] = {
    "ppo": LayoutCase(
        "actor, critic and engine on a GPU each",
        3,
        (
            *("--advantage-estimator", "ppo", "--critic-lr", "1e-3", "--kl-coef", "0.01"),
            *("--gamma", "0.99", "--lambd", "0.95", "--num-steps-per-rollout", "2"),
        ),
        critic=True,
    ),
    "lora": LayoutCase(
        "trainer 1, engine 1; adapters alone are pushed",
        2,
        ("--lora-rank", "16", "--lora-alpha", "32", "--target-modules", "all-linear", "--lr", "1e-3", *NO_WARM_START),
        adapters=True,
    ),
    "tp2": LayoutCase(
        "trainer TP2, two engines of 1",
        4,
        ("--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2", "--rollout-replicas", "2"),
    ),
    "pp2-tp2": LayoutCase(
        "trainer PP2, one engine of TP2",
        4,
        ("--actor-num-gpus-per-node", "2", "--pipeline-model-parallel-size", "2", "--rollout-num-gpus-per-engine", "2"),
    ),
    "engine-pp2": LayoutCase(
        "trainer 1, one engine of two stages",
        3,
        ("--rollout-num-gpus-per-engine", "2", "--sglang-pp-size", "2", "--in-flight-on-push", "abort"),
    ),
    "colocated-pp2": LayoutCase(
        "trainer of two ranks and an engine of two stages, on the same GPUs",
        2,
        (
            *("--colocate", "--actor-num-gpus-per-node", "2", "--rollout-num-gpus-per-engine", "2"),
            *("--sglang-pp-size", "2", "--in-flight-on-push", "abort"),
        ),
    ),
    "eight-bits": LayoutCase(
        "trainer 1, engine 1 with 8-bit weights",
        2,
        (),
        prepared=("--layers", "4", "--hidden-size", "512"),  # whole blocks of keys and values
        on_gpus=("--sft-steps", "600", "--sft-lr", "5e-4", "--lr", "2e-5", "--sglang-dtype", "bfloat16"),
        block=128,
    ),
    "offload": LayoutCase("PyTorch backend with CPU offload, engine 1", 2, ("--trainer-backend", "torch", "--fsdp-cpu-offload")),
    "death": LayoutCase(
        "trainer 1, two engines of 1; one is killed inside pushes",
        3,
        # it is told to end when the engines have come back; the bonus keeps weights moving where rewards are all alike
        (
            *("--rollout-replicas", "2", "--join-from", "peer", "--num-rollout", "100000", "--skip-eval-before-train"),
            *("--entropy-coef", "0.001", "--save-interval", "1000000", "--snapshot-interval", "0"),
        ),
        prepared=("--layers", "12", "--hidden-size", "512"),  # 0.1 GB: a push that takes long enough for a death inside it
        on_gpus=("--sft-steps", "150", "--sft-lr", "5e-4", "--lr", "2e-5"),
        killed="rollout-1",
    ),
}
"""By name."""

SMALL_DATA = ("--train", "256", "--heldout", "16", "--demonstrations", "1024")
SMALL_RUN = (
    *("--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--sft-steps", "30", "--sft-batch-size", "32"),
    *(
        "--entropy-coef",
        "0.001",
    ),
)
"""What a CPU has: its model has learned too little for rewards that differ, so a bonus moves the weights."""


def waves(cases: Sequence[str], gpus: int, at_once: bool) -> list[list[str]]:
    """Returns which cases run beside each other, one group after another.

    Args:
        gpus: that there are. at_once: whether several cases may share them.

    Raises ValueError for a case that takes more than there are.
    """
    found: list[list[str]] = []
    for name in cases:
        if LAYOUT_CASES[name].gpus > gpus:
            raise ValueError(f"case {name} takes {LAYOUT_CASES[name].gpus} GPUs, and CUDA_VISIBLE_DEVICES shows {gpus}")
        fit = (wave for wave in found if sum(LAYOUT_CASES[other].gpus for other in [*wave, name]) <= gpus)
        wave = next(fit, None) if at_once else None
        if wave is None:
            found.append([name])
        else:
            wave.append(name)
    return found


def shares(wave: Sequence[str], visible: Sequence[str]) -> dict[str, str]:
    """Returns ``CUDA_VISIBLE_DEVICES`` of each case of a wave: no GPU is in two of them."""
    found, first = dict[str, str](), 0
    for name in wave:
        found[name] = ",".join(visible[first : first + LAYOUT_CASES[name].gpus])
        first += LAYOUT_CASES[name].gpus
    return found
