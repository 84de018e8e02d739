"""The files of the repository that `myxo quickstart` needs: a wheel has them inside the package, a checkout beside it."""

from pathlib import Path

import myxo

CONSTRAINTS = "constraints.txt"
ARITHMETIC = "examples/arithmetic"


def bundled(name: str) -> Path:
    """Returns the path of a file or folder of the repository's."""
    package = Path(myxo.__file__).parent
    return next((path for path in (package / name, package.parent / name) if path.exists()), package / name)


def pinned(package: str) -> str:
    """Returns ``package==version``, of the version that this Myxo is tested with."""
    lines = bundled(CONSTRAINTS).read_text().splitlines()
    return next(line.strip() for line in lines if line.startswith(f"{package}=="))
