"""`[console]`: the run in a browser."""

from pydantic import Field

from shared.config.section import MUTABLE, Section


class ConsoleSection(Section):
    """The console that `myxo up` starts beside a run."""

    console: bool = Field(default=True, description="serve the console: the run in a browser, read-only", **MUTABLE)
    console_host: str = Field(
        default="127.0.0.1", min_length=1, description="where it listens; its token crosses the network in clear", **MUTABLE
    )
    console_port: int = Field(
        default=8770, ge=0, le=65535, description="of the console; the next free one where it is taken; 0: any", **MUTABLE
    )
    console_hosts: list[str] = Field(
        default=[], description="further names by which browsers ask for it, such as that of a proxy before it", **MUTABLE
    )
