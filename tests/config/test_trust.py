"""Files are data: no command imports code that only a file names, unless told to trust it."""

import copy
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

import maml
from datasets.theirs import FromFile
from launch import workers
from maml import evaluate, predict, replay
from maml.config import registry
from maml.config.cli import parse
from maml.config.saved import believed
from maml.errors import UserError
from maml.plots import __main__ as plots
from maml.processes.program import run_program
from maml.run import checkpoint
from maml.run.directory import read_config
from maml.studies import compare, record, recorded, table
from maml.studies.sweeping import file
from maml.trainer import Trainer
from tests.runs import last

Main = Callable[[list[str]], object]

NET = """
from subprocess import Popen
from torch import nn
def net(image_shape, ways, width=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.Linear(width, ways))
"""
HONEST = "honest_net:net(width=4)"
WORDS = [
    "maml-glyphs-5way-1shot", "--network", HONEST, "--iterations", "1", "--eval-every", "0",
    "--meta-batch-size", "2", "--test-tasks", "4", "--logger", "none", "--threads", "1",
    "--inner-steps", "1", "--eval-inner-steps", "1",
]  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder: a network, a run of it, its record, and images to predict."""
    home = tmp_path_factory.mktemp("home")
    (home / "honest_net.py").write_text(NET)
    for name in "abcde":
        (home / "images" / name).mkdir(parents=True)
        pixels = torch.rand(28, 28, generator=torch.Generator().manual_seed(ord(name))) * 255
        picture = Image.fromarray(pixels.byte().numpy())
        picture.save(home / "images" / name / "1.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr("maml.run.directory.git_commit", lambda: "c0ffee")
        # The command line of this run.
        patch.setattr(sys, "argv", ["train_maml.py", *WORDS])
        assert Trainer(parse([*WORDS, "--run-dir", "mine"])).run() == 0
        assert record.main(["mine", "--trust", "--records", "records"]) == 0
        yield home


def record_in(home: Path) -> Path:
    (found,) = (home / "records").glob("*/seed-0")
    return found


def marking(there: Path) -> str:
    return f"open({str(there / 'MARK')!r}, 'w')\n"


@pytest.fixture
def strange(home: Path, tmp_path: Path) -> Iterator[dict[str, Path]]:
    """Yield a stranger's run, with checkpoints, and record; their code could be imported."""
    there = tmp_path / "strange"
    there.mkdir()
    (home / "evil_beside.py").write_text(marking(there))
    (home / "evil_pack").mkdir(exist_ok=True)
    for name in ("__init__", "inner"):
        (home / "evil_pack" / f"{name}.py").write_text(marking(there))
    # Names that leave a file behind if anything imports or calls them.
    says = {"BASH_FUNC_train%%": f"() {{ touch {there / 'MARK'}; }}"}
    popen = f"subprocess:Popen(executable='/bin/bash', shell=True, env={says})"
    named = {"data": popen, "network": "evil_beside:Net", "learner": "evil_pack.inner:Mine"}
    found = {"run": there / "run", "record": there / "seed-0"}
    shutil.copytree(home / "mine", found["run"])
    shutil.copytree(record_in(home), found["record"])
    for folder in found.values():
        content = yaml.safe_load((folder / "config.yaml").read_text())
        content["config"] |= named
        (folder / "config.yaml").write_text(yaml.safe_dump(content))
    for path in (found["run"] / "checkpoints").glob("*.pt"):
        saved = checkpoint.load(path)
        checkpoint.save(path, saved | {"config": saved["config"] | named})
    shutil.copytree(found["run"], there / "again")
    yield found | {"again": there / "again"}
    assert not (there / "MARK").exists()
    assert not {"evil_beside", "evil_pack", "evil_pack.inner"} & sys.modules.keys()


def ended(main: Main, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[Any, ...]:
    """Run a command as its user does; return its exit code and its lines on stderr."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        run_program(main, arguments)
    return caught.value.code, capsys.readouterr().err.splitlines()


def test_no_command_imports_what_only_a_file_names(
    strange: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, kept = str(strange["run"]), str(strange["record"])
    images = ["--support", "images", "--query", "images"]
    commands: list[tuple[Main, list[str]]] = [
        (evaluate.main, [made]),
        (evaluate.main, [kept, "--iteration", "best"]),
        (predict.main, [made, *images]),
        (predict.main, [f"{made}/checkpoints/last.pt", *images]),
        (replay.main, [made]),
        (record.main, [made, "--records", str(tmp_path)]),
        (recorded.main, [kept]),
        (parse, ["--config", f"{made}/config.yaml"]),
        (parse, [f"--config={kept}", "--seed", "3"]),
        (workers.read, ["--config", made, "--workers", "2"]),
        (lambda words: maml.load(*words), [made]),
        (lambda words: maml.load(*words), [kept]),
    ]
    for main, words in commands:
        code, lines = ended(main, words, capsys)
        assert code == 2 and len(lines) == 1, (words, lines)
        folder = kept if words[0].endswith(kept) else made
        assert lines[0].startswith(f"error: {folder}/config.yaml: it names code to import: --")
        assert "give --trust" in lines[0]


def test_what_needs_no_component_imports_none(
    strange: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, again, drawn = str(strange["run"]), str(strange["again"]), tmp_path / "drawn"
    begun = ["--init", made, "--iterations", "0", "--run-dir", str(tmp_path / "begun")]
    commands: list[tuple[Main, list[str], int, str]] = [
        (plots.main, [made, "--folder", str(drawn)], 0, ""),
        (compare.main, [made, again], 0, "Comparing 2 by test accuracy"),
        (table.main, ["--records", str(strange["record"].parent)], 0, ""),
        (lambda words: Trainer(parse([*WORDS, *words])).run(), begun, 0, ""),
    ]  # fmt: skip
    for main, words, expected, says in commands:
        code, lines = ended(main, words, capsys)
        assert code == expected and says in "\n".join(lines), (words, lines)
    assert (drawn / "curves.png").is_file()


def test_with_trust_each_command_works(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maml.run.directory.git_commit", lambda: "c0ffee")
    shutil.copytree("mine", tmp_path / "run")
    made, kept = str(tmp_path / "run"), str(record_in(home))
    images = ["--support", "images", "--query", "images"]
    commands: list[tuple[Main, list[str]]] = [
        (evaluate.main, [made, "--tasks", "2"]),
        (evaluate.main, [kept, "--tasks", "2"]),
        (predict.main, [made, *images]),
        (predict.main, [f"{kept}/model.pt", *images]),
        (record.main, [made, "--records", str(tmp_path / "records")]),
        (recorded.main, [kept]),
        (lambda words: maml.load(*words[:1], trust="--trust" in words) and 0, [made]),
    ]
    for main, words in commands:
        code, lines = ended(main, [*words, "--trust"], capsys)
        assert code == 0, (words, lines)
    # This run has no refused step to replay, and the message says so. maml.replay has own tests.
    code, lines = ended(replay.main, [made, "--trust"], capsys)
    assert code == 2 and "no step of this run was refused" in lines[0]
    config = f"{made}/config.yaml"
    again = parse(["--config", config, "--trust"])
    assert (again.network, again.strategy) == (HONEST, "auto")  # "local" does not bind torchrun
    # The same name on the command line is trusted, and a run goes on in its own directory.
    assert parse(["--config", config, "--network", HONEST, "--seed", "2"]).network == HONEST
    assert Trainer(parse([*WORDS, "--run-dir", made, "--iterations", "2"])).run() == 0
    assert last(tmp_path / "run")["iteration"] == 2
    with pytest.raises(UserError, match=r"^--trust: is for --config FILE"):
        parse([*WORDS, "--trust"])


def test_what_a_file_has_said_stays_so(home: Path) -> None:
    """A copied name stays untrusted, even when the same name was trusted elsewhere."""
    config = read_config(Path("mine"))
    for name in (config.network, copy.deepcopy(config).network,
                 pickle.loads(pickle.dumps(config)).network):  # fmt: skip
        assert isinstance(name, FromFile) and name == HONEST
        with pytest.raises(UserError, match=r"mine/config\.yaml: it names code to import"):
            registry.find("network", name)
    assert registry.find("network", HONEST).module == "honest_net"
    assert type(believed(config).network) is str
    assert registry.find("network", believed(config).network)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("subprocess:Popen", "subprocess is a module of Python itself"),
        ("honest_net:Popen", "is defined in subprocess, not in honest_net: name it where"),
        ("honest_net:nn", "is no function or class, but module"),
        ("torch:add", "is no function or class, but builtin_function_or_method"),
    ],
)
def test_a_component_is_defined_where_it_is_named(name: str, says: str, home: Path) -> None:
    with pytest.raises(UserError, match=f"^--network {name}: {says}"):
        parse(["maml-glyphs-5way-1shot", "--network", name])


def test_a_tag_of_yaml_is_refused(home: Path, tmp_path: Path) -> None:
    tag = f"!!python/object/apply:os.system ['touch {tmp_path / 'MARK'}']"
    shutil.copytree("mine", tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text(f"config: {tag}\n")
    (tmp_path / "sweep.yaml").write_text(f"method: grid\nparameters: {tag}\n")
    with pytest.raises(UserError):
        maml.load(tmp_path / "run", trust=True)
    with pytest.raises(UserError):
        file.read(tmp_path / "sweep.yaml", trust=True)
    assert not (tmp_path / "MARK").exists()
