"""The rooms: imports run downwards only, and some things are never imported or called."""

import ast
import graphlib
import importlib.metadata
import importlib.util
import itertools
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.launching import REPO, run

# From the ground up. A room may import from lower floors and from files of its own.
FLOORS = (
    ("errors", "seeds", "params"),
    ("config",),
    ("processes", "execution"),
    ("kernels", "ops"),
    ("networks",),
    ("metagradient", "nn"),
    ("learners",),
    ("worker",),
    ("strategies", "run"),
    ("evaluation",),
    ("library", "evaluate"),
    ("plots",),
    ("training", "predict"),
    ("trainer", "replay"),
    ("studies", "acting"),
    ("__main__",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
SOURCES = sorted(
    path
    for folder in ("maml", "datasets", "benchmarks", "launch")
    for path in (REPO / folder).rglob("*.py")
) + [REPO / "train_maml.py"]
MAML = [path for path in SOURCES if path.parts[len(REPO.parts)] == "maml"]
IDS = {"ids": lambda path: str(path.relative_to(REPO))}


def module_name(path: Path) -> str:
    parts = path.relative_to(REPO).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path) for path in SOURCES}


def imported(path: Path) -> Iterator[tuple[str, ast.stmt]]:
    """Yield every module that a file imports anywhere, with submodules spelled out."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write absolute imports"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield (submodule if submodule in MODULES else str(node.module)), node


def test_imports_run_downwards() -> None:
    # The package's own file is for users: see `test_what_maml_offers_is_imported_late`.
    modules = {path: module_name(path) for path in MAML}
    assert len(modules) > 15
    for path, module in modules.items():
        room = module.partition(".")[2].partition(".")[0]
        assert room in FLOOR_OF or module == "maml", f"give {room} a floor in FLOORS"
        for name, node in imported(path) if room else ():
            if name.split(".")[0] != "maml":
                assert name.split(".")[0] not in ("train_maml", "tests", "benchmarks", "launch")
                continue
            below = name.split(".")[1]
            where = f"{module} imports {name} (line {node.lineno})"
            assert below == room or FLOOR_OF[below] < FLOOR_OF[room], where


def test_what_maml_offers_is_imported_late() -> None:
    """The package's own file runs before any module of it, in every process."""
    tree = ast.parse((REPO / "maml" / "__init__.py").read_text())
    now = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {ast.unparse(node).split()[1] for node in now}
    assert names == {"__future__", "importlib", "typing"}
    code = """
import json, os, sys
os.environ.pop("GOMP_SPINCOUNT", None)
import maml
assert "GOMP_SPINCOUNT" not in os.environ and "maml.run" not in sys.modules
loaded = sorted({"torch", "datasets", "numpy"} & set(sys.modules))
missing = [name for name in maml.__all__ if name not in dir(maml) or not getattr(maml, name)]
print(json.dumps([loaded, missing, hasattr(maml, "nonsense")]))
"""
    done = run([sys.executable, "-c", code], timeout=60)
    assert json.loads(done.stdout.splitlines()[-1]) == [[], [], False]


def test_no_import_cycle() -> None:
    graph = {
        module_name(path): {name for name, _ in imported(path) if name in MODULES}
        for path in SOURCES
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_what_is_imported_is_declared() -> None:
    """An editable install brings everything that its packages import, at a tested version."""
    settings = tomllib.loads((REPO / "pyproject.toml").read_text())
    project = settings["project"]
    assert [Requirement(each).name for each in project["dependencies"]] == ["torch", "numpy"]
    extras = itertools.chain.from_iterable(project["optional-dependencies"].values())
    least = {
        canonicalize_name(declared.name): declared.specifier
        for declared in map(Requirement, [*project["dependencies"], *extras])
        if declared.name != project["name"]  # an extra that contains another
    }
    lines = (REPO / "requirements.txt").read_text().splitlines()
    pins = {line.split()[0].split("==")[0]: line.split()[0] for line in lines if "==" in line}
    tested = {canonicalize_name(name): pin.split("==")[1] for name, pin in pins.items()}
    assert all(tested[name] in bound for name, bound in least.items())

    installed = ("maml", "datasets", "launch", "benchmarks")
    packages = settings["tool"]["setuptools"]["packages"]["find"]["include"]
    assert packages == [f"{name}*" for name in installed]
    # Only for this layout does setuptools put the folder on the path, instead of its own finder.
    assert settings["tool"]["setuptools"]["package-dir"] == {"": "."}
    imports = {
        name.split(".")[0]
        for path in SOURCES
        # Benchmarks need what they compare with, from requirements.txt.
        if path.relative_to(REPO).parts[0] in installed[:3]
        for name, _ in imported(path)
    }
    distributions = importlib.metadata.packages_distributions()
    needed = {
        canonicalize_name(distributions[name][0]) for name in imports if name in distributions
    }
    assert needed - {"maml-research"} <= least.keys()


def test_what_is_loaded_only_where_it_is_needed(tmp_path: Path) -> None:
    """Help and mistakes load no torch, which would take seconds.

    A run on kernels loads no compiler, which would add two seconds to every process's start.
    """
    flags = ["--iterations=1", "--test-tasks=1", "--logger=none", f"--run-dir={tmp_path / 'run'}"]
    code = f"""
import json, runpy, sys
codes = []
for arguments in (["--help"], ["no-such-preset"], ["maml-glyphs-5way-1shot", "--ways", "0"]):
    sys.argv = ["train_maml.py", *arguments]
    try:
        runpy.run_path("train_maml.py", run_name="__main__")
    except SystemExit as stop:
        codes.append(stop.code)
loaded = {{"torch", "wandb", "learn2learn"}} & set(sys.modules)
import train_maml
train_maml.main({["maml-glyphs-5way-1shot", *flags]})
loaded |= {{"torch._dynamo", "torch._inductor", "torchvision"}} & set(sys.modules)
print(json.dumps([codes, sorted(loaded)]))
"""
    done = run([sys.executable, "-c", code], timeout=300)
    assert json.loads(done.stdout.splitlines()[-1]) == [[0, 2, 2], []]


@pytest.mark.parametrize("path", SOURCES, **IDS)
def test_a_file_keeps_the_rules(path: Path) -> None:
    """A file unpickles nothing, imports learn2learn late (it prints notices), and is short."""
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    tree = ast.parse(text)
    names = [name for name, node in imported(path) if not node.col_offset]
    assert not any(name.split(".")[0] == "learn2learn" for name in names)
    if path.relative_to(REPO).parts[0] == "datasets":
        assert {name.split(".")[0] for name, _ in imported(path)}.isdisjoint({"maml", "train_maml"})
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= 60, f"{node.name} has {lines} lines"
        if not isinstance(node, ast.Call):
            continue
        function = ast.unparse(node.func)
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if function == "torch.load":
            assert options.get("weights_only") == "True", f"line {node.lineno}"
        if function in ("np.load", "numpy.load"):
            assert options.get("allow_pickle", "False") == "False", f"line {node.lineno}"
        assert function not in (
            "pickle.load", "pickle.loads", "pickle.Unpickler", "torch.jit.load", "joblib.load",
            "yaml.load", "yaml.unsafe_load", "eval", "exec",
        ), f"line {node.lineno}"  # fmt: skip


def test_scripts_name_modules_that_exist() -> None:
    scripts = [
        path for path in (REPO / "launch").iterdir() if path.suffix in ("", ".sh", ".sbatch")
    ]
    text = "\n".join(path.read_text() for path in scripts if path.is_file())
    names = re.findall(r"(?:-m|from|import) ((?:maml|launch)\b[\w.]*)", text)
    assert {"maml.processes.world", "launch.sweep"} <= {*names}
    assert all(map(importlib.util.find_spec, names))
