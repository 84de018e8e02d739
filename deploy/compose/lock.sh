#!/usr/bin/env bash
# Writes the lock files anew: every package that an image installs, at the version of constraints.txt, with the hashes of its files.
# requirements.lock is for all images; uv.lock has what installs the rest; torch-cpu.lock has torch's builds for CPUs. Needed when constraints.txt or pyproject.toml have changed; `tests/unit/install/test_release.py` notices. Needs network and uv, whose own
# version for the images is named here:  UV=uv deploy/compose/lock.sh
#
# torch has two builds of one version: PyPI's, for CUDA, in requirements.lock, and those of TORCH_INDEX.
set -euo pipefail
cd "$(dirname "$0")/../.."

UV=${UV:-uv}
UV_VERSION=0.13.9
TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
HERE=deploy/compose
EXTRAS=(buffer reward rollout gateway trainer engine-cpu parquet media hub report accounts router traces wandb)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
compile=("$UV" pip compile --quiet --no-header --no-annotate --generate-hashes -c constraints.txt --universal --python-version 3.11)

"${compile[@]}" pyproject.toml "${EXTRAS[@]/#/--extra=}" > "$work/services"
# installed without dependencies, as the Dockerfile says
printf 'sglang\nxgrammar\ntorchvision\nuv==%s\n' "$UV_VERSION" | "${compile[@]}" --no-deps - > "$work/alone"

torch=$(grep '^torch==' constraints.txt)
{ echo "# Made by lock.sh: torch for CPUs, of $TORCH_INDEX"
  echo "$torch+cpu" | "$UV" pip compile --quiet --no-header --no-annotate --generate-hashes --no-deps --python-version 3.11 \
    --default-index "$TORCH_INDEX" -; } > "$HERE/torch-cpu.lock"

python3 - "$work" > "$HERE/requirements.lock" <<'PY'
import re, sys
from pathlib import Path

work = Path(sys.argv[1])
print("# Made by lock.sh: what the images install, to the byte.")
entries = re.split(r"\n(?=\S)", "\n".join((work / name).read_text().strip() for name in ("services", "alone")))
known = {}
for entry in entries:
    known.setdefault(entry.split("==")[0], entry)
for name in sorted(known):
    print(known[name])
PY
sed -n '/^uv==/,/[^\\]$/p' "$HERE/requirements.lock" > "$HERE/uv.lock" # what installs the rest is installed by pip
echo "$(grep -c '==' "$HERE/requirements.lock") packages in $HERE/requirements.lock"
