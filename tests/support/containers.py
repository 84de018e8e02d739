"""NATS and Redis from the images that the compose file names, in containers of testcontainers."""

import shutil
import subprocess

import pytest
from testcontainers.community.nats import NatsContainer
from testcontainers.community.redis import RedisContainer
from testcontainers.core.container import DockerContainer

from shared.process.embedded_servers import FILE_STORE_BYTES, free_port
from tests.support.images import base_image

ENGINE_SECONDS = 60


def needs_engine() -> None:
    """Skips the asking test where no Docker engine with Compose v2 answers, and says what is missing."""
    if shutil.which("docker") is None:
        pytest.skip("no docker command on PATH")
    for command in (["docker", "info"], ["docker", "compose", "version"]):
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ENGINE_SECONDS, check=False)
        if answer.returncode:
            pytest.skip(f"`{' '.join(command)}` fails, so no engine with Compose v2 is at work: {answer.stderr.strip()[-200:]}")


class ServerContainer:
    """A server in a container, at an address that outlives its restarts. As an embedded server: `start`, `stop`, `alive`, ``url``."""

    def __init__(self, container: DockerContainer, url: str) -> None:
        self._container, self.url = container, url
        self._made = False

    def start(self) -> None:
        """Makes the container and waits until the server answers; later, starts the stopped or killed one again."""
        if self._made:
            self._container.get_wrapped_container().start()
        else:
            self._container.start()
            self._made = True

    def stop(self) -> None:
        self._container.get_wrapped_container().stop(timeout=10)

    def kill(self) -> None:
        """kill -9, and the server gone."""
        self._container.get_wrapped_container().kill()
        self._container.get_wrapped_container().wait(timeout=ENGINE_SECONDS)

    def alive(self) -> bool:
        self._container.get_wrapped_container().reload()
        return str(self._container.get_wrapped_container().status) == "running"

    def remove(self) -> None:
        """Takes the container and what it stored away."""
        self._container.stop()


def nats_container() -> ServerContainer:
    """NATS with JetStream on file, as the embedded one: the reservations of many runs' streams need not fit the disk."""
    port = free_port()
    container = NatsContainer(base_image("NATS_IMAGE")).with_command(["-c", "/nats.conf"]).with_bind_ports(4222, port)
    container.with_copy_into_container(f"jetstream {{ store_dir: /data, max_file_store: {FILE_STORE_BYTES} }}\n".encode(), "/nats.conf")
    return ServerContainer(container, f"nats://127.0.0.1:{port}")


def redis_container() -> ServerContainer:
    """Redis with an append-only log that is synced at every write."""
    port = free_port()
    command = ["redis-server", "--bind", "0.0.0.0", "--protected-mode", "no", "--appendonly", "yes", "--appendfsync", "always"]
    container = RedisContainer(base_image("REDIS_IMAGE")).with_command(command).with_bind_ports(6379, port)
    return ServerContainer(container, f"redis://127.0.0.1:{port}/0")
