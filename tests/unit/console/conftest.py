from pathlib import Path

import pytest

from shared.config.run_config import RunConfig
from tests.support.run_config import run_config as config_of


@pytest.fixture
def run_config(tmp_path: Path) -> RunConfig:
    return config_of(tmp_path)
