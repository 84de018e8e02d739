"""Writes ``docs/coming-from-slime.md`` from the tables of flags; `docs.flags` calls it. The guide at the top stands here."""

from pathlib import Path

from shared.config import flag_table, slime_defaults
from shared.config.flag_table import FlagClass, Kind
from shared.config.flags import is_switch
from shared.config.run_config import field_sections, section_model

PAGE = Path(__file__).with_name("coming-from-slime.md")
NAMES = Path(__file__).with_name("slime_flags.txt")
"""The flags of slime's ``arguments.py``: its own, and those of Megatron's whose defaults it changes."""

TOP = """# Coming from slime

Written by `python -m docs.flags`; do not edit.

A launch script of slime's ends in `python train.py FLAGS`. Here that is

```bash
myxo train FLAGS
```

with the same flags: slime's, Megatron's, and `--sglang-…` for the engines. It checks everything first, starts all services on this machine,
and ends with the audit and the summary. No Ray cluster, no router and no conversion of checkpoints come before it: leave these parts of the
script out, and the quotes of `ray job submit -- python3 train.py` with them.

```bash
myxo train FLAGS --print-config > run.toml    # checks all, starts nothing, prints the TOML that the flags stand for
myxo up run.toml                         # the same run
myxo train run.toml --lr 2e-6            # a file with flags over it
myxo train --run-name NAME               # continues a run, or gives a new one its name
```

`--print-config` needs no GPU, nor does `--dry-run`, which prints ten lines about the run instead. It reports everything at once that would
stop the run: a file that is not there, a shape that does not fit the layout, a package that is missing, a misspelt flag.

## What becomes of a flag

Each flag is in one class, and none is ignored in silence:

- **taken**: the config has a field of its name, which `myxo up --help` explains. In TOML it stands in the field's section, with
  underscores.
- **renamed**: accepted; it sets fields of other names, and that is reported when the run starts.
- **no-op**: accepted and without effect, for a reason that is reported when the run starts.
- **refused**: with the reason, and what to do instead. An unknown flag is refused with the nearest one, and so is a shortened one.

The same words are keys in TOML: `balance_data = true` or `partial_rollout = true` in any section. Megatron's flags have the same classes:
[megatron-flags.md](megatron-flags.md). What comes of several nodes, of Transformer Engine or of another package that is missing here is
reported by the checks before the start: the flags themselves are accepted. An error names the flag that was typed, with the config's field
beside it: `--lr (trainer.lr) = '-1': …`; of `--eval-config` it names the file, the set and the field.

Values are written as for slime: a list as words (`--rollout-stop-token-ids 1 2`, `--sglang-cuda-graph-bs 1 2 4`) or as Megatron has it
(`--moe-layer-freq [0]*3+[1]*58`), names with paths in pairs (`--eval-prompt-data aime a.jsonl gpqa b.jsonl`), a part of a file as
`prompts.jsonl@[-100:]`, a mapping as JSON, a function as `package.module.function` or `package.module:function`. Of a flag that is given
twice the last counts, and that is reported. A switch that is on by default is turned off by `--no-…`.
Switches also take `true` or `false`, `1` or `0`, `yes` or `no`, `on` or `off`. What is renamed and off, as `partial_rollout = false` in a
file over another, takes back what it sets where it is on.

## Where things are

| slime | here |
|---|---|
| `--hf-checkpoint` | The policy and its reference start from it, as it is. |
| `--megatron-config-path FILE` | The actor's values stand over all others; of its own the critic has `lr` and `load`, an HF checkpoint. |
| `--eval-prompt-data PATH` | A single path is a set called `heldout`; slime calls it `aime`. |
| `--ref-load` | An HF checkpoint is the reference policy's; the policy starts from `--hf-checkpoint`, where slime starts both from it. |
| `--ref-load …_torch_dist` | It is taken for a conversion of `--hf-checkpoint` and not read. |
| `--save DIR` | The run's directory is `DIR/NAME`, with the state of every service. Beside a CONFIG file only the trainer writes there. |
| `--load DIR` | The newest run in `DIR` continues, or one begins; `--fresh` begins anew. Beside a CONFIG file or a name it is not read. |
| `--rollout-num-gpus` | By `--rollout-num-gpus-per-engine` it gives the engines; without it they fill the GPUs that there are. \
With `--colocate` at most the trainer's. |
| `--custom-config-path FILE` | Its fields and flags, SGLang's too, stand over all flags; the rest are attributes of `args` for functions. |
| `--sglang-router-request-timeout-secs` | The deadline of a sample, or of a function's call: `--generate-timeout`, 14,400 s here, too. |
| `--num-gpus-per-node` | An engine's GPUs over these are its nodes, `--sglang-nnodes`, where that is not given. |
| `--wandb-key` | `WANDB_API_KEY` in the environment: the config holds no secrets. |
| user functions | The same files, with slime's import names, `args` and `Sample`: [hooks.md](hooks.md). |
| `slime.agent`, `coding_agent_rl` | slime's own, from its checkout on `PYTHONPATH`: [hooks.md](hooks.md#slimes-agents). |
| `--rm-type` | The same names and values: [rewards.md](rewards.md). Without it and `--custom-rm-path`, samples or prompts name their own. |
| `slime.rollout.sft_rollout.generate_rollout` | Supervised training alone: `[sft]` with `--num-rollout 0`. |

## What differs

- **slime's defaults hold for `myxo train` without a file, where they decide what is trained**: DEFAULTS. Batches are made and trained in
  turn (`--max-staleness 0`), without an importance weight (`--no-use-tis`), the KL of the loss is `k1`, that of draft layers weighs
  0.2 (`--mtp-loss-scaling-factor`), and the engines of a colocated run take all its GPUs. Everything else has Myxo's defaults: how many
  ranks and engines, what is kept and what is written. A TOML file has Myxo's own.
- **To overlap generation and training**, as `train_async.py` does, give `--max-staleness 1` or more, or name slime's fully asynchronous
  function. With these, and with `--partial-rollout`, the loss has an importance weight (`--use-tis`) unless you say otherwise, and the
  start says so: [staleness.md](staleness.md). `--mask-offpolicy-in-partial-rollout` keeps to `--max-staleness 0`, and needs none.
- **Router biases** keep the checkpoint's values unless `--moe-router-bias-update-rate` says otherwise; Megatron moves them by 0.001 a step,
  and the start names the difference.
- **What slime refuses at its start is refused** for `myxo train` without a file, too: REINFORCE++ without `--normalize-advantages`, both
  lists of parameters, deltas of weights without `--update-weight-transport disk` or with `--colocate`. A TOML file may have these.
  `--kl-loss-coef` without `--use-kl-loss` changes nothing, as with slime, and that is reported.
- **What slime demands and has a default here**: `--save` (runs lie in `runs`), `--max-tokens-per-gpu`, `--global-batch-size` (one optimizer
  step a rollout), `--update-weight-disk-dir` and `--update-weight-local-checkpoint-dir`, `--ref-load` for a KL.
- **One sample a prompt** is refused with an estimator that compares a group's samples; slime trains on rewards that are all 0 then.
- **Group statistics** are those of a group always, never those of a batch's shape; equal rewards give exactly 0.
- **A sample longer than `--max-tokens-per-gpu`** is trained in a micro-batch of its own, as slime does (`--overlong-samples alone`). TOML
  files have `mask` by default.
- **`--rollout-top-p` below 1** trains each token over the nucleus that it was sampled from, as with slime, and so do `--rollout-top-k`
  and a `min_p` of `--sglang-preferred-sampling-params`, with stock SGLang from 0.5.20 on: [support replay](trainer.md#support-replay).
  The entropy is that of the nucleus as well; slime's is of the whole vocabulary. Where the nuclei are not known (functions of your
  own, unless `--support-replay on`), the start says so, and `train/support_mismatch` is 1; so it is with penalties that
  `--sglang-preferred-sampling-params` sets for all requests. Parameters of the checkpoint's `generation_config.json` are not used
  (`--sglang-sampling-defaults openai`).
- **8-bit and 4-bit rollout** are the checkpoint's to say, as with slime: an FP8 or INT4 `--hf-checkpoint` ([precision](precision.md)).
  `OPEN_TRAINING_INT4_…` in `--train-env-vars` train aware of it, as `--quantization-aware` does; elsewhere they are not read.
- **`--sglang-quantization`** is refused where the trainer pushes weights, and `--sglang-speculative-algorithm` without a draft: layers
  of the checkpoint, or `--sglang-speculative-draft-model-path`.
- **Environment variables** by which slime trains otherwise (`MEGATRON_USE_SGLANG_…`, `DSA_KV_FP8_QAT…`) are not
  read, in the environment or in `--train-env-vars`, and the start says so for each: weights and arithmetic are those of `--train-dtype`.
- **Distillation without labels** is taken, as with slime: a verifier that has nothing to compare with gives 0 to every response, the start
  says so, and the policy learns from the teacher.
- **Logs and metrics** have slime's names where they mean the same: [metrics.md](metrics.md).

"""

_TITLES: dict[Kind, str] = {"taken": "Taken", "renamed": "Renamed", "no-op": "Without effect", "refused": "Refused"}


def classify(name: str) -> FlagClass | None:
    """Returns the class of a flag, its name with underscores; None for one that is unknown."""
    owners = field_sections()
    field = name if name in owners else name.removeprefix("no_")
    if field in owners and (field == name or is_switch(field)):
        return FlagClass("taken", section_model(owners[field]).model_fields[field].description or "")
    if (slimes := flag_table.of_slime(name)) is not None:
        return slimes.outcome
    if name.startswith("sglang_"):
        return FlagClass("taken", "a flag of SGLang's server, passed on")
    known = flag_table.spellings().get(name)
    return None if known is None else known[0].outcome


def page() -> str:
    """The page's text."""
    shown = ", ".join(
        f"`{name} = {'none' if value is None else value}`"
        for section in slime_defaults.DEFAULTS.values()
        for name, value in section.items()
    )
    classes = {name: _class(name) for name in names()}
    lines = [TOP.replace("DEFAULTS", shown).rstrip("\n"), ""]
    for kind, title in _TITLES.items():
        found = {name: known.meaning for name, known in classes.items() if known.kind == kind}
        lines += [f"## {title}: {len(found)}", "", f"| flag | {'field' if kind == 'taken' else 'meaning'} |", "|---|---|"]
        lines += [f"| `{_spelled(name)}` | {_place(name) if kind == 'taken' else meaning} |" for name, meaning in found.items()]
        lines += [""]
    return "\n".join(lines).rstrip("\n") + "\n"


def names() -> list[str]:
    """Returns slime's flags by name, with underscores, and those that its table here has besides."""
    listed = [flag.removeprefix("--").replace("-", "_") for flag in NAMES.read_text().split()]
    return sorted({*listed, *flag_table.SLIME})


def _class(name: str) -> FlagClass:
    found = classify(name)
    assert found is not None, f"--{name.replace('_', '-')} has no class"
    return found


def _spelled(name: str) -> str:
    return "--" + name.replace("_", "-")


def _place(name: str) -> str:
    owners = field_sections()
    if (section := owners.get(name)) is not None:
        return f"`{section}.{name}`"
    return f"`rollout.sglang.{name.removeprefix('sglang_')}`" if name.startswith("sglang_") else f"`trainer.megatron.{name}`"
