"""As a library: what a user types into a notebook, and `python -m maml.predict`."""

import argparse
import copy
import json
import pickle
import re
import shutil
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import maml
from datasets.errors import DataError
from datasets.folder import list_images
from datasets.image_files import Decoder
from datasets.tasks import Task
from maml import evaluate as evaluation
from maml import predict
from maml.config.presets import with_values
from maml.errors import UserError
from maml.learners import build_learner
from maml.plots.tasks import panel
from maml.run.files import read_rows
from tests.launching import REPO
from tests.runs import glyphs, sinusoid, supervised, train

NAMES = ["owl", "cat", "dog"]
TASKS = 6


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trained")
    train(glyphs(iterations=4, checkpoint_every=2, ways=3, eval_queries=3), directory)
    return directory


@pytest.fixture(scope="module")
def model(run_dir: Path) -> maml.Model:
    return maml.load(run_dir)


@pytest.fixture
def tasks() -> maml.Tasks:
    return maml.episodes("glyphs", split="test", ways=3, shots=1, queries=3)


@pytest.fixture
def task(tasks: maml.Tasks) -> Any:
    return tasks.task(0)


def drawn(x: Tensor) -> np.ndarray:
    return (x[:, 0] * 255).round().to(torch.uint8).numpy()


# ---- load, adapt, predict -----------------------------------------------------------------------


def test_adapts_to_names_and_predicts_them(model: maml.Model, task: Any) -> None:
    adapted = model.adapt(task.support_x, [NAMES[label] for label in task.support_y])
    assert adapted.classes == NAMES
    probabilities = adapted.predict(task.query_x)
    assert probabilities.shape == (9, 3)
    assert torch.allclose(probabilities.sum(1), torch.ones(9))
    assert (probabilities >= 0).all()
    # The model has not changed. An adapted model can be copied and sent to another process.
    again = model.adapt(task.support_x, [NAMES[label] for label in task.support_y])
    for one in (again, copy.deepcopy(adapted), pickle.loads(pickle.dumps(adapted))):
        with torch.inference_mode():
            found = one.predict(task.query_x)
        assert one.classes == NAMES and torch.equal(found, probabilities)
    more = model.adapt(task.support_x, task.support_y, steps=3)
    assert more.classes == [0, 1, 2]
    assert not torch.allclose(more.predict(task.query_x), probabilities, atol=1e-4)


@pytest.mark.parametrize("learner", ["mamlpp", "r2d2"])
def test_is_what_evaluation_measures(learner: str, tmp_path: Path) -> None:
    own = {"ways": 3, "eval_queries": 3, "filters": 16, "inner_steps": 1, "eval_inner_steps": 2}
    train(glyphs(iterations=1, learner=learner, **own), tmp_path)
    evaluation.main([str(tmp_path), "--tasks", str(TASKS)])
    row = json.loads((tmp_path / "evaluations.jsonl").read_text())
    model = maml.load(tmp_path)
    tasks = maml.episodes("glyphs", "test", ways=3, shots=1, queries=3)
    for prefix, batch_statistics in (("", "query"), ("non_transductive_", "support")):
        accuracies, losses = [], []
        for id in range(TASKS):
            task = tasks.task(id)
            adapted = model.adapt(task.support_x, task.support_y)
            found = adapted.predict(task.query_x, batch_statistics=batch_statistics)
            accuracies.append((found.argmax(1) == task.query_y).float().mean().item())
            losses.append(-found.log()[torch.arange(9), task.query_y].mean().item())
        assert np.mean(accuracies) == pytest.approx(row[f"{prefix}accuracy"], abs=1e-6)
        assert np.mean(losses) == pytest.approx(row[f"{prefix}loss"], abs=1e-5)


def test_a_model_is_one_file_and_a_folder_for_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("safetensors", reason="needs the extra hf")
    hub = pytest.importorskip("huggingface_hub.hub_mixin", reason="needs the extra hf")
    record = REPO / "launch/records/maml-glyphs-5way-1shot/seed-0"
    model, task = maml.load(record), maml.episodes("glyphs", "test", ways=5).task(0)
    model.save(tmp_path / "model.safetensors")
    sent = dict[str, str]()

    class Api:
        """Stands for the hub: it keeps what is uploaded."""

        def __init__(self, token: str | None) -> None:
            assert token == "mine"

        def create_repo(self, repo_id: str, **_: Any) -> Any:
            return argparse.Namespace(repo_id=repo_id)

        def upload_folder(self, folder_path: Path, **_: Any) -> str:
            shutil.copytree(folder_path, tmp_path / "hub")
            sent["card"] = (folder_path / "README.md").read_text()
            return "address"

    monkeypatch.setattr(hub, "HfApi", Api)
    assert model.push_to_hub("me/owls", token="mine") == "address"
    result, made = (json.loads((record / f"{n}.json").read_text()) for n in ("result", "record"))
    assert f"| accuracy | {result['accuracy']:.4f} | {result['ci95']:.4f} |" in sent["card"]
    assert 'maml.from_pretrained("me/owls")' in sent["card"]
    assert f"value: {round(100 * result['accuracy'], 2)}" in sent["card"]
    assert made["command"] in sent["card"] and made["starts"][-1]["git_commit"] in sent["card"]
    of_file, of_hub = maml.load(tmp_path / "model.safetensors"), tmp_path / "hub"
    before = model.adapt(task.support_x, task.support_y).predict(task.query_x)
    for again in (of_file, maml.from_pretrained(of_hub)):
        assert repr(again) == repr(model)
        adapted = again.adapt(task.support_x, task.support_y)
        assert torch.equal(adapted.predict(task.query_x), before)
    assert str(tmp_path) not in (of_hub / "config.json").read_text()


def test_a_learner_around_one_s_own_module_is_one_file(tmp_path: Path) -> None:
    """The module, the loss and rates that learn are given again; the rest is in the file."""
    pytest.importorskip("safetensors", reason="needs the extra hf")
    path, loss = tmp_path / "own.safetensors", nn.MSELoss()

    def net(width: int = 4) -> nn.Module:
        return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))

    rate = nn.Parameter(torch.tensor(0.2))
    own: dict[str, Any] = {"loss": loss, "inner_loss": nn.HuberLoss()}
    learner = maml.ANIL(net(), inner_lr=rate, inner_steps=2, order=1, head="2", **own)
    learner.save(path)
    lacks: dict[str, dict[str, Any]] = {
        ": ANIL around its author's module: give module=…": {},
        "no file can hold its loss and inner_loss and inner_lr: give loss=…": {"module": net()},
        "no file can hold its inner_loss: give": {"module": net(), "loss": loss, "inner_lr": rate},
        "another network's": {"module": net(5), "inner_lr": rate, **own},
    }
    for line, given in lacks.items():
        with pytest.raises(UserError, match=line):
            maml.load(path, **given)
    mine = nn.Parameter(torch.tensor(0.7))
    again = maml.load(path, module=net(), inner_lr=mine, **own)
    assert type(again) is maml.ANIL and again.learner.config == learner.learner.config
    assert mine == rate
    x, y = torch.randn(5, 3), torch.randn(5, 1)
    assert torch.equal(again.adapt(x, y)(x), learner.adapt(x, y)(x))
    scaled, other = net(), net()
    for module, scale in ((scaled, 3.0), (other, 1.0)):
        module.register_buffer("scale", torch.tensor(scale))
    maml.MAML(scaled, loss=nn.functional.cross_entropy).save(path)
    assert type(maml.load(path, module=other)) is maml.MAML and other.scale == 3
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(path.read_bytes()[:-1])
    (folder := tmp_path / "folder.safetensors").mkdir()
    says = {damaged: "damaged: ", tmp_path / "no.safetensors": "No such", folder: "Is a directory"}
    from safetensors.torch import save_file

    for i, (about, line) in enumerate(
        (({"config": None}, "no meta-learner"), ({"learner": "MAML", "flags": {"x": 3}}, "no x"))
    ):
        says[tmp_path / f"{i}.safetensors"] = line
        save_file({"a": x}, tmp_path / f"{i}.safetensors", {"maml": json.dumps(about)})
    for file, line in says.items():
        with pytest.raises(UserError, match=line):
            maml.load(file, module=net())
    with pytest.raises(UserError, match="give a name that ends in"):
        learner.save(tmp_path / "own.pt")


def threaded(shape: tuple[int, ...], ways: int) -> nn.Module:
    body = nn.Conv2d(shape[0], 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*body, nn.Dropout(0.5), nn.Linear(1352, ways))


def test_threads_share_a_model(tmp_path: Path) -> None:
    """Each answer is the same as without other threads, and has no dropout."""
    network = "tests.library.test_load:threaded"
    train(glyphs(iterations=0, test_tasks=1, ways=3, network=network), tmp_path)
    model = maml.load(tmp_path, trust=True)
    some = maml.episodes("glyphs", "test", ways=3, shots=1, queries=3)

    def answer(id: int) -> Tensor:
        task = some.task(id % 5)
        return model.adapt(task.support_x, task.support_y).predict(task.query_x)

    alone = [answer(id) for id in range(5)]
    with ThreadPoolExecutor(4) as threads:
        for id, found in enumerate(threads.map(answer, range(40))):
            assert torch.equal(found, alone[id % 5])
    assert model.module.training and torch.equal(answer(0), alone[0])


def test_images_of_every_kind(model: maml.Model, task: Any) -> None:
    """The same images give the same answers in every form."""
    ink = drawn(task.support_x)
    paper = [Image.fromarray(255 - one) for one in ink]  # as a scanner sees them
    colour = [one.convert("RGBA").resize((28, 28)) for one in paper]
    expected = model.adapt(task.support_x, NAMES).predict(task.query_x)
    for support in (
        task.support_x.numpy().astype(np.float64),
        list(task.support_x),
        ink,
        torch.from_numpy(ink)[..., None],
        [Image.fromarray(one) for one in ink],
        paper,
        colour,
    ):
        found = model.adapt(support, np.array(NAMES)).predict(drawn(task.query_x))
        assert torch.allclose(found, expected, atol=1e-5)
    large = [one.resize((90, 60)) for one in paper]
    assert model.adapt(large, NAMES).predict(large).shape == (3, 3)


def test_a_model_of_a_user_s_own_folder(tmp_path: Path) -> None:
    """In colour: files, PIL images and arrays of them give the same answers."""
    dice = np.random.default_rng(0)
    for split, names in {"train": "ab", "test": "cd"}.items():
        for name in names:
            folder = tmp_path / "mine" / split / name
            folder.mkdir(parents=True)
            for i in range(3):
                pixels = dice.integers(256, size=(40, 50, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    mine = {"data": "folder", "data_root": str(tmp_path / "mine"), "image_size": 32}
    train(glyphs(iterations=1, test_tasks=2, **mine), tmp_path / "run")
    classes = json.loads((tmp_path / "run/classes.json").read_text())
    assert classes == {"train": ["train/a", "train/b"], "test": ["test/c", "test/d"]}
    model = maml.load(tmp_path / "run")
    assert model.image_shape == (3, 32, 32)
    other = shutil.copytree(tmp_path / "mine", tmp_path / "other")
    shutil.copy(other / "test/d/0.png", other / "test/c/0.png")
    for root in ("mine", "other"):  # the watcher tells them apart
        options = ["--watch", "--tasks", "2", "--poll", "0.1", "--data-root", str(tmp_path / root)]
        assert evaluation.main([str(tmp_path / "run"), *options]) == 0
    mine, others = read_rows(tmp_path / "run/evaluations.jsonl")
    assert mine["images"] != others["images"]
    paths, labels = zip(*list_images(tmp_path / "mine" / "test"), strict=True)
    files = [Image.open(path) for path in paths]
    assert labels == tuple("cccddd")
    arrays = np.stack([Decoder(32, "rgb").file(Image.open(path)) for path in paths])
    expected = model.adapt(arrays, labels).predict(arrays)
    floats = torch.from_numpy(arrays).permute(0, 3, 1, 2) / 255
    assert torch.equal(model.adapt(files, labels).predict(floats), expected)
    # Paths are taken, too, also a single one.
    adapted = model.adapt(paths, labels)
    assert torch.allclose(adapted.predict(Path(files[4].filename)), expected[4:5], atol=1e-6)
    assert torch.equal(adapted.predict(files), expected)
    with pytest.raises(maml.UserError, match=r"the model takes \[n, 32, 32, 3\] \(PIL"):
        model.adapt(arrays[..., 0], labels)
    # The model knows its own kind of tasks. A panel names their classes.
    task = model.episodes("test").task(0)
    assert task.support_x.shape == (2, 3, 32, 32)
    drawn = panel(model)
    assert {"c", "d"} <= {text.get_text() for axis in drawn.axes for text in axis.texts}
    with pytest.raises(maml.UserError, match=r"^split 'valid': train, validation or test"):
        model.episodes("valid")


def test_a_regression_predicts_numbers(tmp_path: Path) -> None:
    train(sinusoid(iterations=1), tmp_path)
    evaluation.main([str(tmp_path), "--tasks", "3"])
    row = json.loads((tmp_path / "evaluations.jsonl").read_text())
    model = maml.load(tmp_path)
    tasks = maml.episodes("sinusoid", "test", shots=4, queries=4)
    losses = []
    for id in range(3):
        task = tasks.task(id)
        adapted = model.adapt(task.support_x, task.support_y)
        assert adapted.classes is None
        losses.append((adapted.predict(task.query_x) - task.query_y).square().mean().item())
    assert np.mean(losses) == pytest.approx(row["loss"], rel=1e-5)
    with pytest.raises(maml.UserError, match=r"support_x: int64 of shape \[3, 1\]"):
        model.adapt(np.array([[1], [2], [3]]), task.support_y)


def test_which_checkpoint_is_meant(run_dir: Path, tmp_path: Path) -> None:
    train(supervised(iterations=1), tmp_path / "blind")
    with pytest.raises(maml.UserError, match="--learner supervised: it does not adapt"):
        maml.load(tmp_path / "blind")
    assert (maml.load(run_dir).iteration, maml.load(str(run_dir), 2).iteration) == (4, 2)
    file = run_dir / "checkpoints" / "iteration-00000002.pt"
    assert maml.load(file).iteration == 2
    (tmp_path / "newest.pt").symlink_to(file)
    assert maml.load(tmp_path / "newest.pt").iteration == 2
    with pytest.raises(maml.UserError, match=r"^iteration 3: there is no .* of 2, 4$"):
        maml.load(run_dir, iteration=3)
    rows = [
        {"iteration": i, "split": "validation", "loss": 1.0, "accuracy": 0.9 - i / 10}
        for i in (2, 4)
    ]
    with (run_dir / "metrics.jsonl").open("a") as log:
        log.writelines(json.dumps(row) + "\n" for row in rows)
    assert maml.load(run_dir, iteration="best").iteration == 2
    with pytest.raises(maml.UserError, match="a file is one iteration"):
        maml.load(file, iteration=4)
    with pytest.raises(maml.UserError, match="no such run directory or checkpoint"):
        maml.load("~no-such/run")
    with pytest.raises(maml.UserError, match="not a run directory"):
        maml.load(tmp_path)
    damaged = Path(shutil.copytree(run_dir, tmp_path / "damaged"))
    for path in (damaged / "checkpoints").iterdir():
        path.unlink()
        path.write_bytes(b"no checkpoint")
    with pytest.raises(maml.UserError, match="not a readable checkpoint"):
        maml.load(damaged)
    content = torch.load(file, weights_only=True)
    changes = {torch.Tensor.to_sparse: "not dense", torch.Tensor.int: "its model"}
    for change, said in {
        **changes,
        torch.Tensor.half: r"float16 .* there, float32 .* here",
    }.items():
        changed = {name: change(tensor) for name, tensor in content["model"].items()}
        torch.save(content | {"model": changed}, damaged / "checkpoints" / "last.pt")
        with pytest.raises(maml.UserError, match=said):
            maml.load(damaged)


GOOD = torch.rand(3, 1, 28, 28)


@pytest.mark.parametrize(
    ("x", "y", "says"),
    [
        (GOOD[:, 0], NAMES, r"support_x: floats of shape [3, 28, 28]; the model takes [n, 1, 28"),
        (255 * GOOD, NAMES, r"they must be in [0, 1]"),
        (GOOD / 0, NAMES, r"they must be in [0, 1]"),
        (GOOD.long(), NAMES, r"support_x: of type int64; give floats in [0, 1], or uint8"),
        (
            np.zeros((3, 32, 32), np.uint8), NAMES,
            "support_x: uint8 of shape [3, 32, 32]; the model takes [n, 28, 28] or [n, 28, 28, 1]",
        ),
        (GOOD[:0], [], "support_x: empty"),
        ([], [], "support_x: no array of numbers"),
        ([GOOD[0], GOOD[0, 0]], NAMES, "support_x: no array of numbers: all input arrays must"),
        ([Image.new("L", (28, 28)), GOOD[0]], NAMES, "support_x: pictures (PIL images, paths) and"),
        (["nowhere.png"] * 3, NAMES, "support_x: nowhere.png cannot be read: No such file"),
        (["/dev/null"] * 3, NAMES, "support_x: /dev/null cannot be read: Not a regular file"),
        (GOOD, NAMES[:2], "support_y: 2 labels for 3 examples"),
        (GOOD, ["a", "a", "b"], "support_y: 2 classes ('a', 'b'); the model tells 3 apart"),
        (GOOD, "abc", "support_y: str; give a list"),
        (GOOD, set(NAMES), "support_y: set; give a list with one label for each example"),
        (GOOD, [[1], [2], [3]], "support_y: a label must be hashable"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(model: maml.Model, x: Any, y: Any, says: str) -> None:
    with pytest.raises(maml.UserError) as caught:
        model.adapt(x, y)
    assert says in str(caught.value)
    assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1
    with pytest.raises(maml.UserError, match="query_x: uint8 of shape"):
        model.adapt(GOOD, NAMES).predict(np.zeros((3, 1, 28, 28), np.uint8))
    for steps in (-1, 1.5, True):
        with pytest.raises(maml.UserError, match=f"^steps {steps!r}: give a whole number"):
            model.adapt(GOOD, NAMES, steps=steps)  # type: ignore[arg-type]


# ---- on in plain torch --------------------------------------------------------------------------


def test_an_optimizer_of_torch_takes_the_trainer_s_step(tmp_path: Path) -> None:
    """The step gives the next checkpoint, in float64. What adapted before stays unchanged."""
    steps = {"inner_steps": 2, "eval_inner_steps": 2, "meta_batch_size": 3, "queries": 2}
    train(
        glyphs(
            learner="mamlpp", iterations=2, checkpoint_every=1, dtype="float64",
            meta_optimizer="sgd", meta_lr=0.1, kernels="torch", **steps,
        ),
        tmp_path,
    )  # fmt: skip
    model, after = maml.load(tmp_path, iteration=1), maml.load(tmp_path, iteration=2).meta_params
    episodes = model.episodes("train", training=True)
    assert dict(model.learner.named_parameters()).keys() == after.keys()
    task = model.episodes("test").task(0)
    adapted = model.adapt(task.support_x, task.support_y)
    before = copy.deepcopy(adapted.module.state_dict())
    answers = adapted.logits(task.query_x)
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.1)
    model.module(episodes.tasks([3, 4, 5])).backward()
    optimizer.step()
    for name, tensor in after.items():
        # This is the model's own memory: it adapts and predicts with the new values from now on.
        assert torch.allclose(model.meta_params[name], tensor, rtol=0, atol=1e-10), name
    state = adapted.module.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
    assert torch.equal(adapted.logits(task.query_x), answers)


@pytest.mark.parametrize("learner", ["protonet", "finetune"])
def test_no_parameter_is_of_a_class(learner: str, tmp_path: Path) -> None:
    """So the model takes any number of ways, and equals a run of that many ways."""
    own = {"train_ways": 800, "eval_inner_steps": 3} if learner == "finetune" else {"train_ways": 7}
    config = glyphs(learner=learner, iterations=1, checkpoint_every=1, **own)
    train(config, tmp_path)
    model = maml.load(tmp_path)
    assert model.module(model.episodes("train", training=True).tasks([3, 4])).isfinite()
    other = with_values(config, ways=7)
    task = maml.episodes("glyphs", split="test", ways=7, queries=2).task(3)
    adapted = model.adapt(task.support_x, list("cabdefg"))
    found = adapted.logits(task.query_x)
    assert found.shape == (len(task.query_y), 7)
    batch = Task(*(part[None] for part in task))
    expected = build_learner(other).predictions(model.meta_params, batch, model.steps)
    assert torch.allclose(found, expected.non_transductive[0], atol=1e-5)
    evaluation.main([str(tmp_path), "--tasks", "4", "--ways", "7"])
    (row,) = map(json.loads, (tmp_path / "evaluations.jsonl").read_text().splitlines())
    assert row["ways"] == 7
    tasks = maml.episodes("glyphs", split="test", ways=7, queries=config.eval_queries)
    losses = build_learner(other).evaluate(model.meta_params, tasks.tasks(range(4)))["loss"]
    assert row["loss"] == pytest.approx(float(losses.mean()), rel=1e-5)


@pytest.mark.parametrize("learner", ["maml", "cavia", "protonet", "finetune"])
def test_what_has_adapted_is_a_module_too(learner: str, tmp_path: Path, task: Any) -> None:
    """Its outputs give the predictions. Its features are the input of its output layer."""
    more = {"train_ways": 800} if learner == "finetune" else {}
    train(glyphs(learner=learner, iterations=1, ways=3, **more), tmp_path)
    model = maml.load(tmp_path)
    adapted = model.adapt(task.support_x, NAMES)
    features = adapted.module.features(task.query_x)
    logits = adapted.logits(task.query_x, "query")
    assert torch.equal(logits.softmax(-1), adapted.predict(task.query_x, "query"))
    assert torch.equal(adapted.module(task.query_x), logits)
    if learner == "protonet":  # distances, of features that do not adapt
        assert torch.equal(features, model.features(task.query_x))
        return
    head = "tuned." if learner == "finetune" else "head."
    params = adapted.module.params
    outputs = features @ params[f"{head}weight"].T + params[f"{head}bias"]
    assert torch.allclose(outputs, logits, atol=1e-4)
    blind = model.adapt(task.support_x, NAMES, steps=0).module
    assert torch.allclose(model.features(task.query_x), blind.features(task.query_x), atol=1e-5)
    own: Any = model.module  # an object may have answers of its own
    own.learner.answers = lambda *_: (features, features)
    assert torch.equal(own.adapt(task.support_x, task.support_y)(task.query_x), features)


# ---- episodes -----------------------------------------------------------------------------------


def test_a_loader_of_torch_takes_tasks_in_order(tasks: maml.Tasks) -> None:
    """Each task is the same alone and in a batch."""
    loader = torch.utils.data.DataLoader(tasks, batch_size=2, num_workers=1)
    seen = [batch.query_x for _, batch in zip(range(3), loader, strict=False)]
    for i, found in enumerate(seen):
        alone = [tasks.task(id).query_x for id in (2 * i, 2 * i + 1)]
        assert torch.equal(found, torch.stack(alone)) and not torch.equal(*alone)
    # A user's own data may return a list.
    listed = tasks.episodes.remade(lambda ids: [tasks.episodes.tasks(ids)])  # type: ignore
    assert torch.equal(maml.Tasks(listed)[1].query_x, tasks[1].query_x)


def test_images_at_hand_are_a_data_set(tasks: maml.Tasks) -> None:
    images = {name: np.full((4, 9, 9), i, np.uint8) for i, name in enumerate("abc")}
    task = maml.episodes(images, ways=2, shots=1, queries=2).task(3)
    assert task.query_x.shape == (4, 1, 9, 9)
    as_tensors = {name: torch.from_numpy(of_class) for name, of_class in images.items()}
    again = maml.episodes(as_tensors, ways=2, shots=1, queries=2).task(3)
    assert torch.equal(again.query_x, task.query_x)
    for data, more, says in (
        ("glyphs", {"split": "test", "wayz": 3}, "wayz: no option of data 'glyphs', which takes"),
        ("glyphs", {"split": "test", "shots": 30}, "shots 30"),
        ({"a": np.zeros((4, 9, 9))}, {}, "class a of train is float64"),
        (images, {"image_size": 9}, "image_size: no option of data at hand, which takes dtype"),
        ("folder", {"split": "test", "data_root": "tests", "image_size": 0}, "image_size 0: must"),
        (images, {"split": "test"}, "split 'test': only named data sets have splits; give that"),
        ([images], {}, "data is a list; give the name of a data set, {class: images}, a Taskset"),
        ("tests", {"split": "test"}, "data tests: a folder; give data folder and data_root tests"),
        ("glyphs", {}, "split: give train, validation or test"),
        ("glyfs", {}, "data glyfs: unknown"),
        (images, {"shots": 1.5}, "shots 1.5: give a whole number"),
    ):
        with pytest.raises(maml.UserError, match=re.escape(says)) as caught:
            maml.episodes(data, ways=1, queries=2, **more)  # type: ignore[arg-type]
        assert "--" not in str(caught.value)  # of arguments, not of flags
    for ids, says in (([1, 1.5], "id 1.5"), (3, "ids 3"), ([-1], "id -1")):
        with pytest.raises(maml.UserError, match=f"^{says}.*: give a"):
            tasks.tasks(ids)  # type: ignore[arg-type]


# ---- the command --------------------------------------------------------------------------------


def folders(root: Path, x: Tensor, y: Tensor) -> Path:
    """Write images as a user has them: dark ink on white paper, a folder a class."""
    for i, (one, label) in enumerate(zip(drawn(x), y, strict=True)):
        folder = root / NAMES[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(255 - one).save(folder / f"{i}.png")
    return root


def test_folders_of_images(
    run_dir: Path,
    model: maml.Model,
    task: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    support = folders(tmp_path / "support", task.support_x, task.support_y)
    queries = folders(tmp_path / "queries", task.query_x, task.query_y)
    # Classes in the order of their folders' names.
    order = sorted(range(3), key=lambda label: NAMES[label])
    adapted = model.adapt(task.support_x[order], [NAMES[label] for label in order], steps=2)
    given = [str(run_dir), "--support", str(support), "--steps", "2", "--query"]
    predict.main([*given, str(queries)])
    probabilities = adapted.predict(task.query_x)
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert len(lines) == 10
    for line in lines[:-1]:
        path, name, share = line.split("\t")
        expected = probabilities[int(Path(path).stem)]
        assert name == adapted.classes[expected.argmax()]  # type: ignore[index]
        assert float(share) == pytest.approx(expected.max().item(), abs=1e-4)
    labels = [adapted.classes[i] for i in probabilities.argmax(1)]  # type: ignore[index]
    right = np.mean([name == NAMES[i] for name, i in zip(labels, task.query_y, strict=True)])
    assert lines[-1] == f"accuracy {100 * right:.2f} % of 9 images"
    assert said.err == ""
    flat = queries / "owl"
    predict.main([*given, str(flat)])
    assert len(capsys.readouterr().out.splitlines()) == 3  # no accuracy: labels are unknown
    (tmp_path / "odd").mkdir()
    (queries / "cat").rename(tmp_path / "odd" / "unicorn")
    for words, says in (
        ([tmp_path / "odd"], "class unicorn is not among those of --support: cat, dog, owl"),
        ([flat, "--support", flat], "needs a folder for each class"),
        ([tmp_path / "none"], f"{tmp_path}/none"),
        ([flat, "--steps", "-1"], "--steps must be at least 0, not -1"),
        ([flat, "--support", queries], f"--support {queries}: 2 classes; the model tells 3 apart"),
    ):
        with pytest.raises((maml.UserError, DataError), match=re.escape(says)):
            predict.main([*given, *map(str, words)])
