"""A wheel is what could be published: the library alone needs torch and numpy, and it trains."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.launching import REPO, run

# What only the extras bring, by the names that are imported.
EXTRA = (
    *("torchvision", "torchopt", "setproctitle", "psutil", "tqdm", "matplotlib", "scipy", "yaml"),
    *("PIL", "wandb", "tensorboard", "optuna", "safetensors", "huggingface_hub"),
)
ALONE = f"""
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *given: (
    None if name.partition(".")[0] in {EXTRA} else find(name, *given)
)
"""
ASKED = """
import maml
for call in (
    lambda: maml.load("run"), lambda: maml.episodes("omniglot", "test"), lambda: maml.distributed,
    lambda: learner.save("a.safetensors"), lambda: maml.from_pretrained("owl"),
):
    try:
        call()
    except maml.UserError as error:
        print("refused:", error)
from maml.__main__ import entry
entry("train")
"""


def built(hook: str, source: Path, there: Path) -> Path:
    """Return what ``python -m build`` makes by a hook of PEP 517."""
    there.mkdir(exist_ok=True)
    code = f"from setuptools import build_meta as b; print(b.{hook}({str(there)!r}))"
    said = subprocess.check_output([sys.executable, "-c", code], cwd=source, text=True, timeout=300)
    return there / said.splitlines()[-1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of a wheel that is built from a source distribution."""
    made = tmp_path_factory.mktemp("made")
    (made / "source").mkdir()
    for name in ("maml", "datasets", "launch", "benchmarks"):
        few = shutil.ignore_patterns("__pycache__", "records", "results")
        shutil.copytree(REPO / name, made / "source" / name, ignore=few)
    for name in ("train_maml.py", "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPO / name, made / "source")
    with tarfile.open(built("build_sdist", made / "source", made / "sdist")) as archive:
        archive.extractall(made, filter="data")
    (unpacked,) = made.glob("maml_research-*")
    with zipfile.ZipFile(built("build_wheel", unpacked, made / "wheel")) as archive:
        archive.extractall(made / "site")
    return made / "site"


def test_its_metadata_may_be_published(site: Path) -> None:
    names = {path.name.partition("-")[0] for path in site.iterdir()}
    assert names == {"maml", "train_maml.py", "maml_research"}
    assert (site / "maml" / "py.typed").is_file() and [*site.glob("maml/kernels/src/**/*.cpp")]
    (info,) = site.glob("*.dist-info")
    made: Any = importlib.metadata.Distribution.at(info)
    needs = [*map(Requirement, made.requires)]
    assert [need.name for need in needs if not need.marker] == ["torch", "numpy"]
    assert {*made.metadata.get_all("Provides-Extra")} == {"train", "sweeps", "hf"}
    assert "Private" not in str(made.metadata) and made.metadata["License-Expression"]
    assert made.version in (REPO / "docs" / "changes.md").read_text()


def test_the_library_alone_needs_torch_and_numpy(site: Path, tmp_path: Path) -> None:
    """README's example runs, without a compiler; what more is asked for is refused in a line."""
    (example, *_) = re.findall(r"```python\n(.*?)```", (REPO / "README.md").read_text(), re.DOTALL)
    ours = f"import maml\nassert maml.__file__.startswith({str(site)!r})\n"
    (tmp_path / "alone.py").write_text(ALONE + ours + example + ASKED)
    (tmp_path / "run").mkdir()
    done = run(
        [sys.executable, "alone.py"], 120, env={"PYTHONPATH": str(site), "PATH": ""}, cwd=tmp_path,
        expect=2,
    )  # fmt: skip
    printed, *refused = done.stdout.splitlines()
    assert re.fullmatch(r"loss 1\.\d, answers \[25, 5\]", printed)
    assert [line.removeprefix("refused: ") for line in refused] == [
        "to read run/config.yaml needs yaml: pip install 'maml-research[train]'",
        "omniglot needs PIL: pip install 'maml-research[train]'",
        "maml.distributed needs psutil: pip install 'maml-research[train]'",
        "to write a.safetensors needs safetensors: pip install 'maml-research[hf]'",
        "the hub needs huggingface_hub: pip install 'maml-research[hf]'",
    ]
    assert "error: maml train needs psutil: pip install 'maml-research[train]'" in done.stderr


def test_an_older_torch_is_refused(site: Path) -> None:
    code = "import torch; torch.__version__ = '2.7.1+cpu'; import maml; maml.MAML"
    done = run([sys.executable, "-c", code], 120, env={"PYTHONPATH": str(site)}, expect=1)
    line = "ImportError: maml needs torch 2.8 or newer; this one is 2.7.1+cpu"
    assert done.stderr.splitlines()[-1] == line


def test_its_files_train_beside_another_datasets(site: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "datasets.py").write_text("theirs = True\n")
    (tmp_path / "own.py").write_text(
        "from datasets import theirs\n"
        "from maml.datasets import Episodes\n"
        "from torch import nn\n"
        "def net(shape, ways): return nn.Sequential(nn.Flatten(), nn.Linear(784, ways))\n"
    )
    flags = "maml-glyphs-5way-1shot --network own:net --iterations 2 --eval-every 2"
    flags += " --eval-tasks 2 --test-tasks 2 --logger none --run-dir run"
    command = [sys.executable, "-m", "maml", "train", *flags.split()]
    run(command, 60, env={"PYTHONPATH": f"{site}:{theirs}", "PATH": ""}, cwd=tmp_path)
    assert (tmp_path / "run" / "result.json").is_file()
