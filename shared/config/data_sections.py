"""The run's [model], [data], [curriculum] and [sft]: the policy, and what it learns from."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, PlainValidator

from shared.config.section import FROM_TEXT, LARGEST_SEED, MUTABLE, Rule, Section, Table, hook, read_where
from shared.config.trainer_section import DecayStyle, LearningRateSchedule
from shared.data import data_files
from shared.data.data_files import DataFile
from shared.hub import hub_names


class ModelSection(Section):
    """The policy."""

    hf_checkpoint: Annotated[Path, AfterValidator(hub_names.checked_model)] = Field(
        description="the initial policy: a directory with config.json, safetensors and tokenizer.json, or a name on the Hugging Face hub, "
        "ORG/NAME or ORG/NAME@REVISION"
    )
    ref_load: Path | None = Field(
        default=None,
        description="HF checkpoint of the reference policy, of the policy's shape; default: the policy as the run's steps find it. A "
        "torch_dist directory, as slime has it, is taken for a conversion of hf_checkpoint",
    )
    trust_remote_code: bool = Field(
        default=False,
        description="run the Python code that a checkpoint brings (`auto_map`), in engines and in your own functions' tokenizers: only for "
        "a checkpoint whose code you have read",
    )

    @property
    def own_reference(self) -> Path | None:
        """Returns the HF checkpoint of a reference policy that does not start as the policy does; None where it does."""
        given = self.ref_load
        if given is None or given.resolve() == self.hf_checkpoint.resolve() or not (given / "config.json").is_file():
            return None
        return given


_AsText = PlainSerializer(lambda files: files and [str(file) for file in files], return_type=list[str] | None)

WeightedFiles = Annotated[list[DataFile] | None, PlainValidator(data_files.weighted), _AsText]
Files = Annotated[list[DataFile] | None, PlainValidator(data_files.unweighted), _AsText]


class DataSection(Section):
    """Prompts and how they are read."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "multimodal_keys",
            lambda section, given: given is not None and (set(given) not in ({"image"}, {"audio"}, {"video"}) or not all(given.values())),
            "one entry, image = KEY, audio = KEY or video = KEY",
        ),
        Rule(
            "multimodal_keys",
            lambda section, given: given is not None and not section.apply_chat_template,
            "apply_chat_template = true beside it: the model's own template writes what stands for a picture",
        ),
    )

    @property
    def shows(self) -> str:
        """The kind of what prompts show beside text; empty where they are text."""
        return next(iter(self.multimodal_keys or {}), "")

    prompt_data: WeightedFiles = Field(
        default=None,
        description="JSONL or Parquet files of prompts: PATH, PATH@[start:stop] for a part of its rows, PATH@[start:stop]*WEIGHT to draw "
        "from it more or less often; hf:ORG/NAME:SPLIT in the place of PATH is a split of a data set on the Hugging Face hub; needed "
        "unless data_source or reasoning_gym is given",
    )
    data_source: str | None = hook("that makes a source of prompts")
    input_key: str = Field(default="prompt", description="key of the prompt: text, or a list of chat messages")
    label_key: Annotated[str | None, BeforeValidator(lambda given: None if given == "" else given)] = Field(
        default="label", description='key of the reference answer; none, or "" in TOML: prompts have none'
    )
    metadata_key: str = Field(default="metadata", description="key of an object handed on to the environment")
    tool_key: str = Field(default="tools", description="key of a list of tools, handed to the chat template; a prompt may have none")
    apply_chat_template: bool = Field(default=False, description="render the prompt through the model's chat template")
    apply_chat_template_kwargs: Table = Field(default={}, description="extra variables for the chat template")
    multimodal_keys: dict[str, str] | None = Field(
        default=None,
        description='kind of what a prompt shows → key of it in the row, as `{image = "images"}`: a picture or a list of them, each of '
        "which takes the place of the next `<image>` in the prompt; messages may also hold pictures as parts; `audio` and `video` "
        "likewise, of sounds and videos; default: prompts are text",
    )
    max_pictures: int = Field(default=16, gt=0, le=256, description="the most pictures, sounds or videos of one prompt")
    max_picture_bytes: int = Field(default=20 << 20, gt=0, le=64 << 20, description="the most bytes of each of them in the data")
    max_picture_pixels: int = Field(default=1 << 26, gt=0, le=1 << 28, description="the most pixels of a picture or of all a video shows")
    max_video_frames: int = Field(default=64, gt=0, le=1024, description="the most frames that a video shows, two a second")
    max_sound_seconds: float = Field(default=30.0, gt=0, le=3600, description="the longest sound")
    add_special_tokens: bool = Field(
        default=True,
        description="begin text that no chat template renders, of prompts and of demonstrations, with what the checkpoint's tokenizer puts "
        "before a text: BOS, for most",
    )
    overlong_prompts: Literal["refuse", "filter"] = Field(
        default="refuse", description="prompts over rollout_max_prompt_len: refuse the run, or leave them out and count them"
    )
    bad_prompts: Literal["refuse", "skip"] = Field(
        default="refuse", description="lines that are no prompt: refuse the run, or leave them out and count them"
    )
    accept_changed_data: bool = Field(
        default=False, description="continue where a file of prompts is another than when the run began", **MUTABLE
    )
    rollout_shuffle: bool = Field(default=False, description="shuffle each epoch with rollout_seed + epoch")
    rollout_seed: int = Field(default=42, ge=0, le=LARGEST_SEED, description="seed of the prompt order and of the engines")


REASONING_GYM_SOURCE = "shared.data.reasoning_gym_source:make"  # The source of prompts of ``reasoning_gym``

_TASK = re.compile(r"(?P<name>[A-Za-z]\w*)(?:\*(?P<weight>\d+(?:\.\d*)?))?", re.ASCII)


class WeightedTask(NamedTuple):
    """A generator of tasks, and how often it is drawn from compared with the others."""

    name: str
    weight: float


class CurriculumSection(Section):
    """Tasks that are made as they are needed, and get harder and easier."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "lower_below",
            lambda section, given: given >= section.raise_above,
            "expected less than raise_above = {0.raise_above}, else a level would be raised and lowered by the same rewards",
        ),
    )

    reasoning_gym: list[str] = Field(
        default=[],
        description="generators of the package reasoning-gym that prompts come from, in place of prompt_data: NAME, or NAME*WEIGHT to draw "
        "from it more or less often; its own verifier scores",
    )
    reasoning_gym_parameters: Annotated[dict[str, dict[str, Any]], FROM_TEXT] = Field(
        default={}, description="fixed parameters of a generator, over those of its level: NAME = {parameter = value}"
    )
    reasoning_gym_instruction: str = Field(
        default="\nGive the answer between <answer> and </answer>.",
        description="what stands behind each question; where a response has no <answer>, the whole of it is the answer",
    )
    start_level: int = Field(default=0, ge=0, description="the level at which tasks begin, from 0")
    max_level: int | None = Field(default=None, ge=0, description="the highest level; default: the generator's own")
    level_spread: int = Field(default=1, gt=0, description="levels that prompts are drawn from: the highest so far, and those below it")
    level_groups: int = Field(default=32, gt=0, description="groups of the highest level that are scored before it moves")
    raise_above: float = Field(default=0.8, ge=0, le=1, description="the pass rate over which the level rises")
    lower_below: float = Field(default=0.2, ge=0, le=1, description="the pass rate under which it falls")

    @property
    def tasks(self) -> list[WeightedTask]:
        """Returns the generators of ``reasoning_gym``."""
        found = (_TASK.fullmatch(text) for text in self.reasoning_gym)
        return [WeightedTask(match["name"], float(match["weight"] or 1)) for match in found if match is not None]

    def _misfits(self) -> Iterator[str]:
        for text in self.reasoning_gym:
            match = _TASK.fullmatch(text)
            if match is None or (match["weight"] is not None and float(match["weight"]) <= 0):
                yield f"curriculum.reasoning_gym: {text!r}: expected NAME, or NAME*WEIGHT with a weight over 0"
        names = [task.name for task in self.tasks]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"curriculum.reasoning_gym: {name} is there twice; give it a weight: {name}*2"
        for name in sorted(set(self.reasoning_gym_parameters) - set(names)):
            yield f"curriculum.reasoning_gym_parameters: {name} is not among reasoning_gym"
        if self.max_level is not None and self.max_level < self.start_level:
            yield f"curriculum.max_level: expected at least start_level = {self.start_level}"


class SftSection(Section):
    """Supervised warm start before the first rollout."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *read_where(lambda sft: not sft.sft_warmup_iters, "none beside sft_warmup_iters = {0.sft_warmup_iters}", "sft_warmup_fraction"),
    )

    sft_data: Files = Field(default=None, description="files of demonstrations, named as in eval_prompt_data; none = no warm start")
    sft_prompt_key: str = Field(default="prompt", description="key of the prompt, as in [data]")
    sft_response_key: str = Field(default="response", description="key of the demonstrated response (text)")
    sft_messages_key: str = Field(
        default="messages", description="key of a chat, in place of prompt and response: the assistant's turns are trained"
    )
    sft_num_epoch: int | None = Field(
        default=None, gt=0, description="passes over the demonstrations, in the place of sft_steps: each has len // sft_batch_size steps"
    )
    sft_steps: int = Field(default=100, gt=0, description="optimizer steps")
    sft_batch_size: int = Field(default=64, gt=0, description="demonstrations a step")
    sft_lr: float = Field(default=1e-5, ge=0, description="peak learning rate")
    sft_min_lr: float = Field(default=0.0, ge=0, description="floor of the decay")
    sft_warmup_iters: int = Field(default=0, ge=0, description="steps of linear warm-up")
    sft_warmup_fraction: float | None = Field(
        default=None, ge=0, lt=1, description="the warm-up as a share of the steps, in the place of sft_warmup_iters"
    )
    sft_lr_decay_style: DecayStyle = Field(default="constant", description="decay over sft_steps")

    @property
    def warmup_steps(self) -> int:
        """Returns the steps of the warm-up."""
        return self.sft_warmup_iters if self.sft_warmup_fraction is None else int(self.sft_warmup_fraction * self.sft_steps)

    @property
    def schedule(self) -> LearningRateSchedule:
        """Returns the learning-rate schedule. Raises ConfigError where there are too few steps for it."""
        return LearningRateSchedule(self.sft_lr, self.sft_min_lr, self.warmup_steps, self.sft_steps, self.sft_lr_decay_style)
