"""A sweep's file is data: its trials run our programs, and import only what the user named."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from maml.errors import UserError
from maml.run.directory import read_config
from maml.studies import sweep
from maml.studies.sweeping import command, file
from tests.launching import REPO
from tests.studies import sweeps

OWN = """
from torch import nn
def net(image_shape, ways, width=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(784, ways))
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with code that would write a file if it were imported."""
    home = tmp_path / "home"
    (home / "run").mkdir(parents=True)
    (home / "run" / "config.yaml").write_text(yaml.dump({"config": {"network": "evil:Net"}}))
    (home / "evil.py").write_text(f"open({str(tmp_path / 'MARK')!r}, 'w')\n")
    (home / "swept_net.py").write_text(OWN)
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return home


OURS = ["${env}", "${interpreter}", "${program}", "maml-glyphs-5way-1shot", "${args}"]


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"program": "evil.py"}, "command: it runs evil.py, which is no training program of this"),
        ({"command": ["${interpreter}", "-m", "evil", "${args}"]}, "command: it runs -m evil, "),
        ({"command": ["${interpreter}", "-m", "launch.record", "${args}"]}, "runs -m launch.re"),
        ({"command": ["${env}", "PYTHONSTARTUP=x", *OURS[1:]]}, "command: it runs PYTHONSTARTUP=x"),
        ({"command": [*OURS, "--trust"]}, "it says --trust to its trials;"),
        ({"command": [*OURS, "--data=x:y", "--network=x:z"]},
         "names code to import: --data=x:y and --network=x:z; if"),
        ({"parameters": {"network": {"values": ["conv4", "x:y"]}}}, "import: --network=x:y; if"),
        ({"command": [*OURS[:3], "--config", "run", "${args}"]}, r"run/config\.yaml: it names co"),
    ],
)  # fmt: skip
def test_a_sweep_runs_what_its_reader_named(
    said: dict[str, Any], says: str, home: Path, tmp_path: Path
) -> None:
    usual = {"parameters": {"seed": {"value": 0}}, "command": OURS}
    path = sweeps.written(tmp_path, **(usual | said))
    with pytest.raises(UserError, match=f"^{path}: .*{says}") as caught:
        sweep.main([str(path), "--folder", str(tmp_path / "there")])
    assert "--trust" in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "there").exists() and not (tmp_path / "MARK").exists()


def test_a_trial_s_program_is_ours_and_not_the_folder_s(home: Path, tmp_path: Path) -> None:
    """The journal of a stranger's sweep may not name code that its file does not name."""
    path = sweeps.written(tmp_path, parameters={"seed": {"value": 0}}, command=OURS)
    described = file.read(path)
    words = command.command_of(described, {"device": "cuda:0"}, Path("a:b"))
    assert words[2:] == [str(REPO / "train_maml.py"), OURS[3], "--device=cuda:0", "--run_dir=a:b"]
    with pytest.raises(UserError, match="names code to import: --network=evil:Net"):
        command.command_of(described, {"network": "evil:Net"}, None)
    (home / "train_maml.py").touch()
    with pytest.raises(UserError, match=r"command: it runs train_maml\.py, which is no training"):
        command.command_of(described, {"seed": 0}, None)
    (home / "train_maml.py").unlink()
    (home / "train_maml.py").symlink_to(REPO / "train_maml.py")
    assert command.command_of(described, {"seed": 0}, None)[2] == "train_maml.py"
    module = sweeps.written(tmp_path, parameters={"workers": {"value": 2}},
                            command=[*OURS[:2], "-m", "launch.workers", "${args}"])  # fmt: skip
    assert command.command_of(file.read(module), {}, None)[2:] == ["-m", "launch.workers"]
    (home / "launch.py").touch()
    with pytest.raises(UserError, match=r"command: it runs -m launch\.workers, which is no"):
        command.command_of(file.read(module), {}, None)
    (home / "launch.py").unlink()
    ready = sorted((REPO / "launch" / "sweeps").glob("*.yaml"))
    assert ready and all(command.command_of(file.read(each), {}, None) for each in ready)


def test_a_trusted_sweep_trains_with_a_user_s_own(home: Path, tmp_path: Path) -> None:
    parameters = {
        "network": {"values": ["swept_net:net(width=4)"]}, "iterations": {"value": 0},
        "test_tasks": {"value": 2}, "logger": {"value": "none"},
    }  # fmt: skip
    metric = {"name": "test/accuracy", "goal": "maximize"}
    path = sweeps.written(tmp_path, parameters=parameters, command=OURS, metric=metric)
    there = ["--folder", str(tmp_path / "there")]
    with pytest.raises(UserError, match=r"import: --network=swept_net.*give --trust"):
        sweep.main([str(path), *there])
    assert sweep.main([str(path), *there, "--trust"]) == 0
    assert read_config(tmp_path / "there/trials/0000").network == "swept_net:net(width=4)"
    # Without workers nothing runs, so nothing must be trusted.
    assert sweep.main([str(path), *there, "--workers", "0"]) == 0
