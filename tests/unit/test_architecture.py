"""The layers of the design, read from the imports. A failure names the arrow that is wrong."""
import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Lowest first; a module may import its own layer and those below. Names are prefixes of module names.
JOBS = [
    ("jobs.spec",),
    ("jobs.mesh", "jobs.runtime", "jobs.model", "jobs.tokens", "jobs.data", "jobs.loader", "jobs.loss", "jobs.recorder",
     "jobs.report", "jobs.process", "jobs.node", "jobs.listener", "jobs.faults", "jobs.safetensors", "jobs.weights",
     "jobs.hub_config", "jobs.pretended"),
    ("jobs.parallel", "jobs.optim", "jobs.checkpoint", "jobs.metrics", "jobs.export"),
    ("jobs.own",),
    ("jobs.trainer", "jobs.validation"),
    ("jobs.train",),
    ("jobs.verify",),
    ("jobs.rank_process",),
    ("jobs.forkserver",),
    ("jobs.ranks",),
    ("jobs.agent",),
]
ORCHESTRATOR = [
    ("jobs.spec",),
    ("orchestrator.cluster",),
    ("orchestrator.checks", "orchestrator.datasets", "orchestrator.request"),
    ("orchestrator.config",),
    ("orchestrator.layers",),
    ("orchestrator.load",),
    ("orchestrator.planner",),
    ("orchestrator.validation",),
    ("orchestrator.placement", "orchestrator.dialects", "orchestrator.export", "orchestrator.foreign",
     "orchestrator.planning_own", "orchestrator.planning"),
    ("orchestrator.submission",),
    ("orchestrator.verification",),
    ("orchestrator.monitoring",),
    ("orchestrator.supervision",),
    ("orchestrator.runs",),
    ("orchestrator.cli",),
]
# The one arrow upwards: what Slurm starts in the batch step.
UPWARDS = {("orchestrator.submission.entry", "orchestrator.supervision.supervisor")}

MAY_IMPORT = {  # package → top-level modules that it must not import
    "jobs.spec": {"torch", "numpy", "psutil", "submitit", "wandb", "orchestrator"},
    "jobs": {"orchestrator", "submitit", "wandb"},
    "orchestrator": {"torch"},
}


def modules() -> dict[str, Path]:
    found = {}
    for package in ("jobs", "orchestrator"):
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__").removesuffix(".__main__")] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Everything a module imports, inside functions too, as full module names."""
    wanted = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            wanted |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                wanted.add(full if full in known else node.module)
    return wanted


MODULES = modules()
ARROWS = {(name, target) for name, path in MODULES.items() for target in imports(name, path, MODULES)}


def layer(name: str, layers: list[tuple[str, ...]]) -> int | None:
    for index, prefixes in enumerate(layers):
        if any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes):
            return index
    return None


@pytest.mark.parametrize("package, layers", [("jobs", JOBS), ("orchestrator", ORCHESTRATOR)])
def test_imports_go_down_the_layers(package: str, layers: list) -> None:
    wrong = [f"{a} → {b}" for a, b in sorted(ARROWS)
             if a.startswith(package + ".") and (b.startswith(package + ".") or b.startswith("jobs"))
             and (a, b) not in UPWARDS and not (layer(a, layers) or 0) >= (layer(b, layers) or 0)]
    assert not wrong, "arrows against the layers: " + "; ".join(wrong)


@pytest.mark.parametrize("package, layers", [("jobs", JOBS), ("orchestrator", ORCHESTRATOR)])
def test_every_module_has_its_layer(package: str, layers: list) -> None:
    homeless = [name for name in MODULES if name.startswith(package + ".") and layer(name, layers) is None]
    assert not homeless


def test_the_orchestrator_knows_only_the_jobs_contract() -> None:
    wrong = [f"{a} → {b}" for a, b in sorted(ARROWS)
             if a.startswith("orchestrator") and b.startswith("jobs") and not b.startswith("jobs.spec")]
    assert not wrong, "; ".join(wrong)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_forbidden_imports(package: str) -> None:
    wrong = [f"{a} → {b}" for a, b in sorted(ARROWS)
             if (a == package or a.startswith(package + ".")) and b.partition(".")[0] in MAY_IMPORT[package]]
    assert not wrong, "; ".join(wrong)


def test_there_are_no_import_cycles() -> None:
    graph = {name: {b for a, b in ARROWS if a == name and b in MODULES and b != name} for name in MODULES}
    for arrow in UPWARDS:
        graph[arrow[0]].discard(arrow[1])
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " → ".join((*path[path.index(name):], name))
        if name not in done:
            for target in graph[name]:
                visit(target, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_model_files_contain_no_parallel_code() -> None:
    wrong = [f"{a} → {b}" for a, b in sorted(ARROWS) if a.startswith("jobs.model")
             and (b.startswith(("jobs.parallel", "jobs.mesh")) or "distributed" in b)]
    assert not wrong, "; ".join(wrong)


@pytest.mark.parametrize("module", ["orchestrator.cli", "orchestrator.supervision.supervisor", "jobs.agent",
                                    "orchestrator.submission.entry", "jobs.forkserver"])
def test_torch_is_not_loaded_by(module: str) -> None:
    check = f"import sys, {module}; assert 'torch' not in sys.modules, 'torch is loaded'"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_no_line_is_longer_than_120_characters() -> None:
    long = [f"{path.relative_to(ROOT)}:{number}" for folder in ("jobs", "orchestrator", "configs", "deploy", "tests")
            for path in (ROOT / folder).rglob("*.py")
            for number, line in enumerate(path.read_text().splitlines(), start=1) if len(line) > 120]
    assert not long
