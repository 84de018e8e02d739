"""`[sandbox]`: where code runs that a model wrote, and within which limits."""

from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from shared.config.section import MUTABLE, Section
from shared.sandbox.program import SandboxKind, SandboxLimits, SandboxSettings

_NEVER = ("/proc", "/sys", "/dev", "/run")


class SandboxSection(Section):
    """Where code runs that a model wrote, and within which limits; each holds for one program with all that it starts."""

    sandbox: SandboxKind = Field(
        default="bwrap",
        description="bwrap: isolated by bubblewrap; docker or podman: in a container of sandbox_image; where that cannot be, nothing runs. "
        "none: as the service itself, with its files and its network, which is for code that you trust",
    )
    sandbox_image: str | None = Field(
        default=None, pattern=r"^[^-\s]\S*$", description="image of these containers: one with python3, which is there already"
    )
    sandbox_wall_time: float = Field(default=10, gt=0, description="seconds by the clock", **MUTABLE)
    sandbox_cpu_time: float = Field(default=3, gt=0, description="seconds of processor time, of all processes together", **MUTABLE)
    sandbox_memory_bytes: int = Field(
        default=512 << 20,
        ge=32 << 20,
        description="bytes of memory, of all processes together, with what lies in the work folder",
        **MUTABLE,
    )
    sandbox_processes: int = Field(default=64, ge=1, description="processes and threads at once", **MUTABLE)
    sandbox_output_bytes: int = Field(
        default=1 << 20,
        ge=1024,
        le=64 << 20,
        description="bytes of standard output and standard error, each; more is cut off and ends it",
        **MUTABLE,
    )
    sandbox_disk_bytes: int = Field(
        default=64 << 20, ge=1 << 20, description="bytes of the work folder and of /tmp, each; both are in memory"
    )
    sandbox_packages: bool = Field(default=False, description="the packages of the service's own environment can be imported: numpy, say")
    sandbox_paths: list[Path] = Field(default=[], description="files and folders that can be read inside, under the same path")

    def _misfits(self) -> Iterator[str]:
        contained = self.sandbox in ("docker", "podman")
        if contained != (self.sandbox_image is not None):
            expected = "required: an image with python3" if contained else "belongs to sandbox = docker or podman"
            yield f"sandbox.sandbox_image: {expected}, with sandbox = {self.sandbox}"
        for path in self.sandbox_paths:
            if contained and "," in str(path):
                yield f"sandbox.sandbox_paths: {path}: {self.sandbox} takes no path with a comma"
            if str(path) == "/" or str(path).startswith(_NEVER):
                yield f"sandbox.sandbox_paths: {path}: would show what a sandbox hides; name the folder that is needed"

    def settings(self) -> SandboxSettings:
        """Returns what sandboxes are made of."""
        limits = SandboxLimits(
            wall_s=self.sandbox_wall_time,
            cpu_s=self.sandbox_cpu_time,
            memory_bytes=self.sandbox_memory_bytes,
            processes=self.sandbox_processes,
            output_bytes=self.sandbox_output_bytes,
            disk_bytes=self.sandbox_disk_bytes,
        )
        return SandboxSettings(
            self.sandbox, self.sandbox_image or "", limits, packages=self.sandbox_packages, paths=tuple(self.sandbox_paths)
        )
