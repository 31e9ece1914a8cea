"""An installed wheel stands beside another package called ``datasets``, and trains."""

import sys
from pathlib import Path

from tests.launching import run


def test_a_wheel_s_files_train_beside_another_datasets(tmp_path: Path) -> None:
    build = tmp_path / "site"
    words = f"setup.py -q build --build-base {tmp_path / 'base'} --build-lib {build}"
    run([sys.executable, *words.split()], 60)
    assert {path.name for path in build.iterdir()} == {"maml", "train_maml.py"}
    (build / "datasets.py").write_text("theirs = True\n")
    (tmp_path / "own.py").write_text(
        "from datasets import theirs\n"
        "from maml.datasets import Episodes\n"
        "from torch import nn\n"
        "def net(shape, ways): return nn.Sequential(nn.Flatten(), nn.Linear(784, ways))\n"
    )
    flags = "maml-glyphs-5way-1shot --network own:net --iterations 2 --eval-every 2"
    flags += " --eval-tasks 2 --test-tasks 2 --logger none --run-dir run"
    command = [sys.executable, "-m", "maml", "train", *flags.split()]
    run(command, 60, env={"PYTHONPATH": str(build), "PATH": ""}, cwd=tmp_path)
    assert (tmp_path / "run" / "result.json").is_file()
