"""The import graph: what may import what."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = [
    *("table", "errors", "engine", "requests", "events", "request_log", "weights", "sleep", "core"),
    *("audit.format", "audit.file", "audit.log", "blocking"),
    *("audit.reading", "audit.replay", "cli"),
    *("testing.faults", "testing.recorder", "testing.contract", "testing.plugin"),
]
SOLE_IMPORTERS = {
    "transitions": {"lifecycle/core.py"},
    "structlog": {"lifecycle/events.py"},
    "prometheus_client": {"lifecycle/exporters/prometheus.py"},
    "opentelemetry": {"lifecycle/exporters/opentelemetry.py"},
    "vllm": {"engine_adapter/vllm_inprocess.py", "engine_adapter/vllm_async.py"},
}


def imports(path, *, runtime_only=True):
    """Modules imported by a file, at any depth; those for type checkers only are left out."""
    tree = ast.parse(path.read_text())
    hidden = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and runtime_only:
            hidden |= {id(child) for child in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sources():
    return sorted([*ROOT.glob("lifecycle/**/*.py"), *ROOT.glob("engine_adapter/*.py")])


@pytest.mark.parametrize("name", ORDER)
def test_each_module_imports_only_earlier_ones(name):
    """The modules of `lifecycle` stand in an order, and none imports a later one."""
    later = {f"lifecycle.{module}" for module in ORDER[ORDER.index(name) :]}
    assert not later & set(imports(ROOT / "lifecycle" / f"{name.replace('.', '/')}.py"))


@pytest.mark.parametrize(
    "path", [path for path in sources() if "engine_adapter" not in path.parts], ids=lambda p: p.name
)
def test_lifecycle_imports_no_engine(path):
    """Nothing in `lifecycle` imports an adapter, vLLM or torch."""
    roots = {module.split(".")[0] for module in imports(path)}
    assert not roots & {"engine_adapter", "vllm", "torch", "transformers"}


@pytest.mark.parametrize("package", SOLE_IMPORTERS)
def test_each_foreign_package_has_its_importers(package):
    """Each is known to one module, vLLM to its two adapters."""
    found = {
        str(path.relative_to(ROOT))
        for path in sources()
        if any(module.split(".")[0] == package for module in imports(path))
    }
    found -= (
        {"engine_adapter/demo_stage.py"} if package == "vllm" else set()
    )  # it builds the caller's SamplingParams
    assert found == SOLE_IMPORTERS[package]


def test_importing_the_packages_loads_no_engine():
    """`import lifecycle, engine_adapter` and the simulated engine load neither vLLM nor torch."""
    code = (
        "import sys, lifecycle, engine_adapter; engine_adapter.SimulatedEngine();"
        "sys.exit(bool({'vllm', 'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("lifecycle", {"structlog", "transitions"}),
        ("lifecycle.testing", {"structlog", "transitions", "pytest", "hypothesis"}),
        ("lifecycle.testing.plugin", {"structlog", "transitions", "hypothesis"}),
    ],
)
def test_what_comes_with_every_run_of_pytest_is_light(module, unwanted):
    """The plugin is imported at the start of every run: it and the packages around it load nothing else."""
    code = (
        f"import sys, {module}; found = {unwanted | {'engine_adapter', 'vllm', 'torch'}} & set(sys.modules);"
        "sys.exit(str(found) if found else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
