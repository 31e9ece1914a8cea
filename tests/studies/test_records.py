"""What is kept of a run: written from its directory, checked task by task, shown in the table."""

import dataclasses
import json
import math
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml

import maml
from maml import evaluate as evaluation
from maml.config.cli import parse
from maml.config.presets import PRESETS, changed, with_values
from maml.errors import UserError
from maml.evaluation.best import recorded_content
from maml.learners import build_learner
from maml.run import checkpoint, directory
from maml.run.files import read_tasks
from maml.run.provenance import digest_of
from maml.studies import record, recorded, table
from maml.trainer import Trainer
from tests.launching import REPO
from tests.metagradient.peer import oracle
from tests.runs import glyphs, last, same, sinusoid, train

OF_MAML = sorted(
    path.parent
    for path in recorded.RECORDS.glob("*/*/record.json")
    if path.parts[-3].startswith(("maml-", "fomaml-"))
)


@pytest.fixture(scope="module", autouse=True)
def commit() -> Iterator[None]:
    """Fake the commit: this checkout may have changes, which a record refuses."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("maml.run.directory.git_commit", lambda: "c0ffee")
        yield


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("recorded") / "run"
    assert Trainer(glyphs(test_tasks=6, run_dir=str(run_dir), iterations=20)).run() == 0
    return run_dir


@pytest.fixture
def kept(run_dir: Path, tmp_path: Path) -> Path:
    return record.write(run_dir, tmp_path)


def test_what_was_kept_scores_what_it_says(
    kept: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [path.read_text() for path in kept.iterdir() if path.suffix not in (".pt", ".png")]
    assert not any(place in text for text in texts for place in (str(run_dir), str(REPO)))
    assert recorded.main([str(kept), "--tasks", "10"]) == 0
    assert "6 tasks score what it says" in capsys.readouterr().out
    (row,) = [
        line for line in table.table(kept.parents[1], "bare").splitlines() if " with " in line
    ]
    one = recorded.read(kept)
    assert f"{100 * one.result['accuracy']:.2f} ± " in row, row
    assert "not run" in table.table(kept.parents[1])
    # Like a run, a record refuses a folder whose classes were divided anew.
    made = json.loads((kept / "record.json").read_text())
    (kept / "record.json").write_text(json.dumps(made | {"division": "c0ffee"}))
    with pytest.raises(UserError, match="trained on other classes"):
        checkpoint.check_division(recorded_content(kept), "another", kept)
    # The table warns about a run that diverged, skipped steps, or has no finite loss.
    wrong = {"diverged": {"loss": 9.0, "beginning": 2.0}, "skipped": 2}
    (kept / "result.json").write_text(json.dumps(one.result | wrong))
    said = "its training has diverged; 2 of 20 steps were skipped"
    assert table.table(kept.parents[1]).endswith(f", seed 0: {said}")
    answers = dataclasses.replace(one)
    vars(answers)["result"] = one.result | {"loss": math.nan}
    assert table._went_wrong(answers) == "its test loss is not finite"


def test_a_record_is_a_model_to_adapt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It holds the model that was tested, here the one that validated best."""
    run_dir = tmp_path / "run"
    config = glyphs(test_tasks=6, run_dir=str(run_dir), iterations=3, eval_every=2)
    assert Trainer(with_values(config, test_model="best")).run() == 0
    kept = record.write(run_dir, tmp_path / "records")
    assert recorded.main([str(kept), "--tasks", "6"]) == 0
    assert "6 tasks score what it says" in capsys.readouterr().out
    # In float32 other threads would give other bits.
    assert recorded.read(kept).made["command"].endswith(" --threads 1")
    task = maml.episodes("glyphs", split="test", ways=2, shots=1, queries=3).task(0)
    expected = maml.load(run_dir).adapt(task.support_x, task.support_y).logits(task.query_x)
    for path in (kept, kept / "model.pt"):
        model = maml.load(path)
        assert model.iteration == recorded.read(kept).result["tested_iteration"] == 2
        found = model.adapt(task.support_x, task.support_y).logits(task.query_x)
        assert torch.equal(found, expected)
    torch.save([1, 2], kept / "model.pt")
    with pytest.raises(UserError, match=r"model\.pt: not the file that was recorded"):
        maml.load(kept)


def test_a_file_of_a_user_s_own_is_known_by_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is in no commit. A record has its SHA-256, and each use of the model checks it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    mine = tmp_path / "recorded_mine.py"
    mine.write_text(
        "from maml.learners.maml import MAML\n\n\nclass Mine(MAML):\n"
        "    def __init__(self, config, why=0):\n        super().__init__(config)\n"
    )
    learner = "recorded_mine:Mine(why='no')"
    config = glyphs(learner=learner, test_tasks=3, run_dir="run", iterations=2)
    assert Trainer(config).run() == 0
    kept = record.write(Path("run"), tmp_path / "records", trust=True)
    (start,) = recorded.read(kept).made["starts"]
    assert start["own_files"] == {"learner": {"recorded_mine": digest_of(mine)}}
    # The command can be given again as it is.
    again = parse(shlex.split(recorded.read(kept).made["command"])[2:])
    assert again.learner == learner and changed(again) == changed(config)
    assert re.search(r"\+learner=recorded_mine_Mine_why=_no_\+.*-\w{8}$", kept.parent.name)
    said = f"recorded_mine.py (--learner {learner}) has changed since"
    warning = f"warning: {said} this checkpoint was saved: results may differ\n"
    uses = [
        lambda: evaluation.main(["run", "--tasks", "2", "--trust"]),
        lambda: maml.load("run", trust=True),
        lambda: maml.load("run/checkpoints/last.pt", trust=True),
        lambda: maml.load(kept, trust=True),
    ]
    for use in uses:
        use()
    assert "has changed" not in capsys.readouterr().err
    assert recorded.main([str(kept), "--trust"]) == 0
    assert said not in capsys.readouterr().out
    mine.write_text(f"{mine.read_text()}\n# other\n")
    assert recorded.main([str(kept), "--trust"]) == 0
    assert f"{said} it was recorded" in capsys.readouterr().out
    for use in uses:
        use()
        assert capsys.readouterr().err.count(warning) == 1
    assert Trainer(with_values(config, iterations=3)).run() == 0
    assert warning in capsys.readouterr().err


@pytest.mark.parametrize("folder", OF_MAML, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_learn2learn_finds_what_our_records_say(
    folder: Path, request: pytest.FixtureRequest
) -> None:
    """The losses of the first tasks of each record of MAML, also of first order.

    Network, adaptation and loss are learn2learn's and torch's. Only tasks and parameters are ours.
    Batch norms normalise all queries together, so the losses are transductive.
    """
    one, tasks = recorded.read(folder), 5
    config = with_values(one.config, strategy="local", device="cpu", threads=1)
    if config.data != "glyphs":
        config = with_values(config, data_root=str(request.getfixturevalue("data_root")))
    kind = ("OmniglotCNN" if config.network == "conv4" else "CNN4"), "vision.models"
    network = oracle(*kind)(config.ways, hidden_size=config.filters)
    ours = recorded_content(folder)["model"]
    # Both list their blocks in the order in which they compute.
    for i, block in enumerate(network.base if config.network == "conv4" else network.features):
        block.normalize.eps = config.norm_eps
        block.normalize.requires_grad_(config.adapt != "*,@norm=0")
        for name, module in (("conv", block.conv), ("norm", block.normalize)):
            for part in ("weight", "bias"):
                getattr(module, part).data = ours.pop(f"network.blocks.{i}.{name}.{part}")
    for part in ("weight", "bias"):
        getattr(network.classifier, part).data = ours.pop(f"network.head.{part}")
    assert not ours
    learned = oracle("MAML")(network, lr=config.inner_lr, allow_nograd=True)
    given = build_learner(config).open_tasks("test", evaluation=True).tasks(torch.arange(tasks))
    for index in range(tasks):
        support_x, support_y, query_x, query_y = (part[index] for part in given)
        clone = learned.clone()
        for _ in range(config.eval_inner_steps):
            clone.adapt(F.cross_entropy(clone(support_x), support_y))
        loss = F.cross_entropy(clone(query_x), query_y).item()
        recorded_loss = one.scores["test", config.seed, index]["loss"]
        assert loss == pytest.approx(recorded_loss, rel=0, abs=1e-4)


def test_a_run_that_went_on_elsewhere_names_both_machines(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be recorded before it has finished."""
    there, onward = tmp_path / "there", tmp_path / "onward"
    half = with_values(directory.read_config(run_dir), run_dir=str(there), iterations=10)
    assert Trainer(half).run() == 0
    directory.write_status(there, "stopped", 10)
    with pytest.raises(UserError, match=f"not finished; .* with --run-dir {there} goes on"):
        record.write(there, tmp_path)
    monkeypatch.setattr("maml.run.directory.machine", lambda: {"processor": "abacus"})
    saved = str(checkpoint.last_checkpoint(there))
    whole = with_values(half, run_dir=str(onward), iterations=12, resume=saved)
    assert Trainer(whole).run() == 0
    done = record.write(onward, tmp_path, "whole")
    first, second = recorded.read(done).made["starts"]
    assert (first["iteration"], second["iteration"]) == (0, 10)
    processors = sorted({first["machine"]["processor"], "abacus"})
    assert table.measured_on(tmp_path).startswith(" or ".join(processors) + ", ")
    straight = torch.load(done / "model.pt", weights_only=True)
    assert same(straight, last(onward)["model"])
    assert table.table(tmp_path, "run", "maml-*").endswith(", seed 0: whole")


def test_epochs_and_not_their_iterations_are_the_experiment() -> None:
    config = with_values(PRESETS["supervised-glyphs-lenet"], epochs=2, iterations=14)
    again = parse(shlex.split(record._again(config, {}))[2:])
    assert changed(again) == changed(config) == {"epochs": 2}


def test_another_experiment_of_a_preset_has_a_place_and_a_row_of_its_own(kept: Path) -> None:
    config = with_values(recorded.read(kept).config, inner_lr=0.3)
    other = kept.parents[1] / recorded.place_of(config)
    assert other.name == "seed-0" and other != kept
    shutil.copytree(kept, other)
    text = (kept / "config.yaml").read_text()
    (other / "config.yaml").write_text(text.replace("inner_lr: 0.4", "inner_lr: 0.3"))
    rows = table.table(kept.parents[1], "run").splitlines()[2:]
    assert len(rows) == 2 and "--inner-lr 0.3" in rows[1] and "inner-lr" not in rows[0]
    # Both have fewer iterations than the preset's own.
    assert table.table(kept.parents[1], "run", "own").splitlines()[2:] == []


def test_an_edited_record_is_found(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Edits of the number that the table shows, and of every file behind it, are found."""
    whole = {path.name: path.read_bytes() for path in kept.iterdir()}
    result, made = json.loads(whole["result.json"]), json.loads(whole["record.json"])
    edits: list[tuple[str, Any, str]] = [
        ("result.json", result | {"accuracy": 0.99}, "its accuracy is 0.99, and"),
        ("result.json", result | {"accuracy": math.nan}, "its accuracy is nan, and"),
        ("record.json", {}, "record.json: damaged: its starts is None"),
        *(
            ("record.json", made | wrong, f"record.json: damaged: its {next(iter(wrong))} is ")
            for wrong in (
                {"starts": ["a"]},
                {"starts": [{"machine": {"gpu": [1]}}]},
                {"model_bytes": "5"},
                {"hardware": {}},
                {"minutes": None},
            )
        ),
        ("result.json", result | {"skipped": "no"}, "result.json: damaged: its skipped is 'no'"),
        ("record.json", None, "record.json: No such file"),
        ("test_tasks.csv", None, "test_tasks.csv: cannot read: No such"),
        ("test_tasks.csv", whole["test_tasks.csv"].splitlines()[0].decode(), "has 0 of them"),
        ("model.pt", None, "model.pt: No such file or directory: it was recorded"),
    ]
    for name, content, said in edits:
        (kept / name).write_text(content if isinstance(content, str) else json.dumps(content))
        if content is None:
            (kept / name).unlink()
        try:
            wrong = recorded.main([str(kept), "--tasks", "3"])
            assert wrong == 1 and said in capsys.readouterr().out, (name, said)
        except UserError as error:
            assert said in str(error)
        if name != "model.pt":
            # The table raises an error, too, and does not leave the row out.
            with pytest.raises(UserError, match=r"result\.json|record\.json|test_tasks\.csv"):
                table.table(kept.parents[1])
        (kept / name).write_bytes(whole[name])
    assert recorded.main([str(kept), "--tasks", "3"]) == 0
    # Another model, with its digest written into the record.
    params = torch.load(kept / "model.pt", weights_only=True)
    torch.save({name: tensor * 1.1 for name, tensor in params.items()}, kept / "model.pt")
    made |= {"model_sha256": digest_of(kept / "model.pt")}
    (kept / "record.json").write_text(json.dumps(made))
    assert recorded.main([str(kept), "--tasks", "6"]) == 1
    assert "tasks differ; the first is task 0: loss was" in capsys.readouterr().out
    # A task without a score always counts as different.
    scores = read_tasks(kept / "test_tasks.csv")
    first = next(iter(scores))
    assert "1 of 6 tasks differ" in recorded.differing(
        {**scores, first: {**scores[first], "accuracy": math.nan}}, scores
    )
    # The same run is not two seeds.
    shutil.copytree(kept, kept.with_name("seed-1"))
    with pytest.raises(UserError, match=r"seed-1: damaged: its run has the seed 0"):
        table.table(kept.parents[1])
    kept.with_name("seed-1").rename(kept.with_name("again"))
    with pytest.raises(UserError, match="it is of the same experiment and seed as"):
        table.table(kept.parents[1])


def test_an_ensemble_of_another_kind_has_no_published_number(kept: Path) -> None:
    whole = json.loads((kept / "result.json").read_text())
    names = ("accuracy", "ci95", "non_transductive_accuracy", "non_transductive_accuracy_ci95")
    kinds: list[tuple[int, dict[str, Any], str]] = [
        (5, {}, "99.47 %"), (2, {}, "–"), (5, {"eval_tasks": 5}, "–"), (5, {"inner_lr": 0.2}, "–"),
    ]  # fmt: skip
    for models, changes, claimed in kinds:
        config = with_values(PRESETS["mamlpp-omniglot-5way-1shot"], **changes)
        text = yaml.safe_dump({"config": dataclasses.asdict(config)})
        (kept / "config.yaml").write_text(text)
        result = whole | {"ensemble": list(range(models)), "iterations": config.iterations}
        result |= {f"ensemble_{name}": 0.5 for name in names}
        (kept / "result.json").write_text(json.dumps(result))
        row = table.table(kept.parents[1], "run", "bare").splitlines()[-1]
        shown = [cell.strip() for cell in row.split("|")[1:3]]
        assert shown == [f"– ensemble of {models}", claimed]


def test_a_record_that_is_judged_otherwise(tmp_path: Path) -> None:
    values: dict[str, Any] = {"iterations": 2, "test_tasks": 4, "eval_tasks": 4, "logger": "none"}
    values |= {"meta_batch_size": 2, "run_dir": str(tmp_path / "run"), "device": "cpu"}
    assert Trainer(with_values(PRESETS["reinforce-cartpole"], **values)).run() == 0
    kept = record.write(tmp_path / "run", tmp_path / "records")
    (row,) = table.table(tmp_path / "records", "run", "bare").splitlines()[2:]
    assert "`reinforce-cartpole with --" in row and "(return)" in row
    assert recorded.main([str(kept)]) == 0
    # An ensemble is judged as its models are.
    train(sinusoid(eval_every=1, checkpoint_every=1, test_tasks=4), tmp_path / "sinusoid")
    kept = record.write(tmp_path / "sinusoid", tmp_path / "others", ensemble=2)
    (*_, row) = table.table(tmp_path / "others", "run", "bare").splitlines()
    scores = recorded.read(kept).result
    assert f" {scores['ensemble_loss']:.2f} ± " in row and "(loss)" in row
    own = {n for n in scores if n.endswith("_ci95") and not n.startswith("ensemble_")}
    assert own and {f"ensemble_{name}" for name in own} <= scores.keys()


def test_what_is_refused(run_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run_dir, copy)
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(config.replace("c0ffee", "c0ffee-dirty"))
    with pytest.raises(UserError, match="made by c0ffee-dirty: not a commit without changes"):
        record.write(copy, tmp_path)
    (copy / "config.yaml").write_text(config)
    scores = (copy / "test_tasks.csv").read_text().replace(",0.", ",1.")
    (copy / "test_tasks.csv").write_text(scores)
    with pytest.raises(UserError, match=r"result\.json: not what test_tasks\.csv says: its loss"):
        record.write(copy, tmp_path)
    (copy / "result.json").unlink()
    with pytest.raises(UserError, match=r"result\.json: No such file"):
        record.write(copy, tmp_path)
    # Before anything is copied: result.json is still missing.
    content = yaml.safe_load(config)
    for other, said in (
        (content | {"starts": []}, r"config.yaml: damaged: .*its starts is \[\]"),
        (content["starts"][0].update(iteration=5) or content, "does not say how the run began$"),
    ):
        (copy / "config.yaml").write_text(yaml.safe_dump(other))
        with pytest.raises(UserError, match=said):
            record.write(copy, tmp_path)
    place = copy / "config.yaml"
    with pytest.raises(UserError, match=rf"^--records {place}: File exists"):
        record.main([str(run_dir), "--records", str(place)])
    with pytest.raises(UserError, match="no record there"):
        recorded.main([str(copy / "checkpoints")])
    # A folder with a record's name is still no record.
    copy.rename(tmp_path / "seed-0")
    for folder in (tmp_path, tmp_path / "seed-0", tmp_path / "nowhere"):
        with pytest.raises(UserError, match=r"no record there; python -m launch\.record "):
            table.main(["--records", str(folder)])
