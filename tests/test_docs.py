"""The code of README.md and docs/ runs; of their tables see tests/test_tables.py."""

import json
import re
from pathlib import Path

import pytest
import torch

import maml
from maml.config import registry
from maml.config.presets import PRESETS, with_values
from maml.learners import build_learner
from tests.launching import REPO
from tests.metagradient.peer import oracle
from tests.pages import run_page
from tests.runs import glyphs, train


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """The run that README.md and docs/library.md begin with, a tiny one."""
    train(glyphs(ways=5), tmp_path / "runs" / "glyphs")
    return tmp_path


def test_readme_runs(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run_page("README.md", trained, monkeypatch)
    assert names["probabilities"].shape == names["answers"].shape == (25, 5)


def test_the_library_s_page_runs(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run_page("docs/library.md", trained, monkeypatch)
    assert set(names["answers"]) <= set(names["names"])
    assert names["batch"].query_x.shape == (3, 75, 1, 28, 28)
    # What the page says of its example.
    assert names["right"] > 0.9
    assert names["wrong"] < 0.2
    meta = {"logits": names["logits"].detach()}
    mixed, reverse = (
        maml.meta_gradient(names["state"], meta, names["task"], way).gradients["logits"]
        for way in ("mixed", "reverse")
    )
    assert (mixed - reverse).abs().max() < 1e-4 * reverse.abs().max()


def test_kernels_serve_whom_the_page_says() -> None:
    """The table of docs/learners.md has every few-shot learner, with a true yes or no."""
    said: dict[str, bool] = {}
    for line in (REPO / "docs" / "learners.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[2].startswith(("yes", "no")) and "(test)" not in cells[0]:
            served = cells[2].startswith("yes")
            said |= dict.fromkeys(re.findall(r"`(\w+)`", cells[0]), served)
    known = registry.known("learner")
    assert said.keys() == {name for name in known if registry.learner(name).tasks == "episodes"}
    for name, served in said.items():
        config = with_values(PRESETS["maml-glyphs-5way-1shot"], learner=name, train_ways=800)
        learner = build_learner(config)
        assert (learner.obstacle(torch.device("cpu")) is None) == served, name


# ---- tutorials --------------------------------------------------------------------------------


def test_first_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With drawn glyphs in place of Omniglot."""
    instead = {"maml-omniglot": "maml-glyphs"}
    names = run_page("docs/tutorials/first-row.md", tmp_path, monkeypatch, instead)
    assert names["result"]["changed"]["iterations"] == 2
    assert (tmp_path / "runs/first-row/plots/curves.png").is_file()


def test_own_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run_page("docs/tutorials/own-images.md", tmp_path, monkeypatch)
    assert names["answer"] in names["labels"] and len(names["labels"]) == 3
    # The model has never seen these classes, as the page promises.
    assert set(names["labels"]) <= set(names["classes"]["test"])
    assert len(list((tmp_path / "unknown").glob("*/*.png"))) == 9


def test_own_learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run_page("docs/tutorials/own-learner.md", tmp_path, monkeypatch)
    assert names["rate"] != names["model"].config.inner_lr
    assert names["gradient"].item() == pytest.approx(
        ((names["above"] - names["below"]) / (2 * names["h"])).item(), rel=1e-4
    )


def test_own_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a download: the body is another of torchvision's, with random weights.

    There are hundreds of passes. Those of this body take a tenth of the time.
    """
    instead = {'weights="DEFAULT"': "weights=None", "resnet18": "shufflenet_v2_x0_5"}
    names = run_page("docs/tutorials/own-network.md", tmp_path, monkeypatch, instead)
    assert names["probabilities"].shape == (15, 5)
    # Only the output layer learns, and running statistics stay, so no query depends on another.
    learned = [name.rpartition("module.")[2] for name in names["learned"]]
    assert learned == ["head.weight", "head.bias"]
    result = json.loads((tmp_path / "runs/pretrained/result.json").read_text())
    assert result["accuracy"] == result["non_transductive_accuracy"]
    params = maml.load(tmp_path / "runs/pretrained", trust=True).meta_params
    running = [value for name, value in params.items() if name.endswith("running_mean")]
    assert len(running) == 56 and not any(value.any() for value in running)


def test_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one seed less, because each trial is a process of some seconds."""
    few = "eval_every: {value: 2}\n  test_tasks: {value: 4}\n  eval_tasks: {value: 4}"
    instead = {
        "seed: {values: [0, 1]}": "seed: {values: [0]}",
        "{value: 300}": "{value: 2}",
        "eval_every: {value: 100}": f"{few}\n  logger: {{value: none}}",
    }
    names = run_page("docs/tutorials/sweep.md", tmp_path, monkeypatch, instead)
    assert names["result"]["changed"]["inner_steps"] == 2
    assert (tmp_path / "runs/sweeps/steps/report.md").is_file()


def test_lora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("transformers", "peft"):
        pytest.importorskip(package, reason=f"needs {package} (requirements.txt)")
    torch.manual_seed(0)
    names = run_page("docs/tutorials/lora.md", tmp_path, monkeypatch)
    assert names["after"] < names["before"] - 0.03
    answer = names["again"](**names["pieces"](names["mine"][120:])[0]).loss
    torch.testing.assert_close(answer, names["after"])
    assert (tmp_path / "my-lora/adapter_model.safetensors").is_file()


# ---- other libraries --------------------------------------------------------------------------


def test_migration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's code for another library and for this one gives the same numbers."""
    oracle("MAML")
    names = run_page("docs/migration.md", tmp_path, monkeypatch)
    pairs = [name.removeprefix("ours_") for name in names if name.startswith("ours_")]
    assert pairs == ["maml", "sgd", "anil", "higher", "torchopt", "own"]
    for pair in pairs:
        ours, theirs = names[f"ours_{pair}"], names[f"theirs_{pair}"]
        assert ours.keys() == theirs.keys() and any(g.abs().max() > 0.01 for g in ours.values())
        for name, gradient in theirs.items():
            torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-5)


# ---- the site ---------------------------------------------------------------------------------


def test_the_site_has_all_that_maml_offers_and_every_page() -> None:
    page = (REPO / "docs" / "api.md").read_text()
    names = [*{*maml.__all__} - {"nn"}, *(f"nn.{name}" for name in maml.nn.__all__)]
    assert [name for name in names if f":: maml.{name}\n" not in page] == []
    docs = REPO / "docs"
    first = (docs / "index.md").read_text()
    pages = {str(path.relative_to(docs)) for path in docs.rglob("*.md")} - {"index.md"}
    assert [page for page in sorted(pages) if f"]({page})" not in first] == []
