"""`[run]`: name and place of the run."""

from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from shared.bus.subjects import RUN_ID
from shared.config.section import MUTABLE, Rule, Section


class RunSection(Section):
    """Name and place of the run."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "name",
            lambda _, given: not RUN_ID.match(given),
            "use 1 to 63 lower-case letters, digits, '-' and '_', starting with a letter or digit",
        ),
    )

    name: str = Field(description="the run's id: lower-case letters, digits, '-' and '_'")
    dir: Path = Field(
        default=Path("runs"), description="where runs keep their files; this run's lie in DIR/NAME (`myxo move` takes them away)", **MUTABLE
    )
    dir_mode: str = Field(
        default="700",
        pattern=r"^0?7[057]{2}$",
        description="permissions of this run's directory, octal: prompts, responses, weights and credentials are its owner's alone; 750 "
        "lets its group in, 755 everybody",
        **MUTABLE,
    )
    buffer_replicas: int = Field(default=1, gt=0, description="buffers that `myxo up` starts: one works, the others stand by", **MUTABLE)

    custom_config_path: Path | None = Field(
        default=None,
        description="YAML file of values that stand over all others: fields of any section, the rest goes into custom_args",
        **MUTABLE,
    )
    custom_args: dict[str, Any] = Field(
        default={}, description="attributes that your own functions find in args, besides the config's fields"
    )

    @property
    def root(self) -> Path:
        """Returns the run's own directory."""
        return self.dir / self.name
