"""One object store for the suite; each test has a run's prefix of its own."""

from collections.abc import Iterator

import pytest

from tests.support.object_store import RunningObjectStore, running_object_store


@pytest.fixture(scope="session")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningObjectStore]:
    with running_object_store(tmp_path_factory.mktemp("object-store")) as store:
        yield store
