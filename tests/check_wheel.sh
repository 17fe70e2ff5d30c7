#!/usr/bin/env bash
# The wheel as a user gets it: it holds the two packages and nothing else, imports with its two base
# dependencies alone, its command works without an engine, and pytest finds its fixtures. PYTHON names one that
# has `build` and hatchling.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD

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

# The kit for tests imports without pytest; with pytest, and nothing said about plugins, its fixtures are there.
"$work/venv/bin/python" -c "import lifecycle.testing, lifecycle.testing.faults, lifecycle.testing.recorder"
grep -E '^(pytest|pluggy|iniconfig|packaging|pygments)==' "$root/requirements/dev.txt" >"$work/pytest.txt"
"$work/venv/bin/python" -m pip --disable-pip-version-check install --quiet --quiet --no-deps -r "$work/pytest.txt"
cat >"$work/test_kit.py" <<'PYTHON'
import pytest

from engine_adapter.simulated import OutputKind, SamplingParams
from lifecycle.testing.contract import Bench, EngineContract


def test_my_trainer(simulated_llm):
    assert len(simulated_llm.generate(["a", "b"])) == 2


def params(tokens, kind=0, n=1):
    return SamplingParams(max_tokens=tokens, seed=7, n=n, output_kind=OutputKind(kind))


class TestContract(EngineContract):
    @pytest.fixture
    def bench(self, simulated_engine):
        simulated_engine.max_num_seqs = 4
        yield Bench(simulated_engine, params)
        simulated_engine.misuse.clear()  # one rule steps while paused
PYTHON
"$work/venv/bin/python" -m pytest -q -p no:cacheprovider "$work/test_kit.py" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
echo "the wheel is good: $(basename "$wheel")"
