#!/usr/bin/env bash
# The wheel as a user gets it: it holds the two packages and nothing else, imports with its two base
# dependencies alone, and its command works without an engine. PYTHON names one that has `build`, hatchling.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m build --wheel --no-isolation --outdir "$work/dist" . >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
wheel=$(echo "$work"/dist/*.whl)

"$python" - "$wheel" <<'PYTHON'
import sys
import zipfile

names = zipfile.ZipFile(sys.argv[1]).namelist()
strays = [n for n in names if not n.startswith(("lifecycle/", "engine_adapter/", "engine_lifecycle-"))]
missing = {"lifecycle/py.typed", "engine_adapter/py.typed"} - set(names)
if strays or missing:
    sys.exit(f"the wheel holds {strays} and lacks {sorted(missing)}")
PYTHON

"$python" -m venv "$work/venv"
grep -E '^(transitions|structlog|six)==' requirements/lock.txt >"$work/base.txt"
"$work/venv/bin/python" -m pip --disable-pip-version-check install --quiet --quiet --no-deps -r "$work/base.txt" "$wheel"

cd "$work" # away from the sources, so that only what was installed is found
"$work/venv/bin/python" -c "import lifecycle, engine_adapter"
"$work/venv/bin/lifecycle" demo --simulated >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
echo "the wheel is good: $(basename "$wheel")"
