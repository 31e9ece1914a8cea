"""A user's own tasks, examples, targets and losses, of other kinds than ours."""

import re
import sys
from pathlib import Path

import pytest
import torch

import maml
from datasets import DataError, open_episodes
from maml.config import Config
from maml.config.cli import parse
from maml.errors import UserError
from maml.evaluate import main as evaluate
from maml.evaluation.scores import check_own_data
from maml.learners import build_learner
from maml.run.files import read_rows
from maml.trainer import Trainer
from maml.worker import Worker
from tests.runs import metrics, result

BRIEF = [
    "--meta-batch-size", "4", "--eval-every", "0", "--test-tasks", "3", "--log-every", "1",
    "--logger", "none", "--threads", "1",
]  # fmt: skip

SOURCE = '''
import math
from types import SimpleNamespace
import torch
import torch.nn.functional as F
from torch import nn
from datasets import Episodes, Task
from maml.learners.maml import MAML

class Drawn(Episodes):
    """Tasks of 10 support and 10 query examples; ``at`` is the task that ``change`` changes."""
    def __init__(self, split, of, change=None, at=5):
        self.split, self.of, self.change, self.at = split, of, change, at
    def tasks(self, ids):
        return Task(*map(torch.stack, zip(*map(self.one, ids.tolist()))))
    def one(self, id):
        x, y = self.of(torch.Generator().manual_seed(id))
        task = Task(x[:10], y[:10], x[10:], y[10:])
        return self.change(task) if id == self.at and self.change else task

def labels(): return torch.arange(5).repeat(4)
def image(dice): return torch.rand(20, 1, 8, 8, generator=dice), labels()
def images(split): return Drawn(split, image)
def unseeded(split):
    dice = torch.Generator()
    return Drawn(split, lambda _: image(dice))
def points(split):
    of = lambda x, y: (x[..., 0, 0, :3].requires_grad_(), y)
    return Drawn(split, lambda dice: of(*image(dice)))
def series(split): return Drawn(split, lambda dice: (image(dice)[0][:, 0, :3], labels()))

CHANGES = {
    "above": lambda t: t._replace(query_y=t.query_y + 3),
    "larger": lambda t: t._replace(query_x=torch.rand(10, 1, 9, 9)),
    "list": lambda t: t._replace(query_y=t.query_y.tolist()),
    "raises": lambda t: t.no_such_part,
}
def bad(split, change, at=5, of="train"):
    return Drawn(split, image, CHANGES[change] if split == of else None, at)

WAYS = {
    "space": lambda t: SimpleNamespace(**t._asdict()),
    "dicts": lambda t: [dict(zip(t._fields, one)) for one in zip(*t)],
    "listed": lambda t: [*zip(*t)],
    "short": lambda t: [one[:3] for one in zip(*t)],
    "pair": lambda t: t._replace(support_x=(t.support_x, t.support_x)),
}
def given(split, way):
    drawn = images(split)
    return drawn.remade(lambda ids: WAYS[way](drawn.tasks(ids)))

KINDS = {
    "int32": lambda x, y: (x, y.int()),
    "bytes": lambda x, y: ((255 * x).round().byte(), y),
    "several": lambda x, y: (x, torch.eye(5)[y].long()),
    "points": lambda x, y: (x.double().flatten(2)[:, 0, :3], y.double()[:, None]),
}
def kinds(split, kind): return Drawn(split, lambda dice: KINDS[kind](*image(dice)))

def words(split):
    def of(dice):
        x, y = torch.randint(0, 30, (20, 6), generator=dice), labels()
        return torch.cat([torch.randperm(30, generator=dice)[y][:, None], x], 1).int(), y
    return Drawn(split, of)
class Words(nn.Module):
    def __init__(self, shape, outputs):
        super().__init__()
        self.embedding, self.head = nn.Embedding(30, 8), nn.Linear(8 * shape[0], outputs)
    def forward(self, x): return self.head(self.embedding(x).flatten(1))

def two(shape, outputs):
    return nn.Sequential(nn.Linear(*shape, 20), nn.Tanh(), nn.Linear(20, 2 * outputs))
class Gaussian(MAML):
    def __init__(self, config):
        super().__init__(config)
        self.metric_names = ("error",)
    def loss(self, outputs, y):
        mean, log_variance = outputs.chunk(2, -1)
        return 0.5 * (log_variance + (mean - y).square() / log_variance.exp()).mean()
    def metrics(self, outputs, y):
        return {"error": (outputs.chunk(2, -1)[0] - y).abs().mean((-2, -1))}

def flat(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), outputs))
def words_of(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 10), nn.Unflatten(1, (5, 2)))
class Near(MAML):
    def loss(self, outputs, y): return (outputs.mean() - y.to(outputs.dtype).mean()).square()
class Weighted(MAML):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("weights", torch.arange(1, 1 + config.ways).float())
    def loss(self, outputs, y): return F.cross_entropy(outputs, y, weight=self.weights)
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a new module with the source above, in the current directory."""
    name = f"own_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


def untrained(config: Config) -> float:
    """Return the loss of the run's test tasks before any training."""
    learner = build_learner(config)
    tasks = learner.open_tasks("test", evaluation=True).tasks(torch.arange(config.test_tasks))
    return float(learner.evaluate(learner.meta_parameters(), tasks)["loss"].mean())


# ---- tasks that are wrong -----------------------------------------------------------------------

WRONG = {
    "above": r"query_y has the label 7; of 5 ways labels are from 0 to 4$",
    "larger": r"query_x is float32 \[1, 10, 1, 9, 9\]; that of the first task is float32 "
    r"\[1, E, 1, 8, 8\]$",
    "list": r"TypeError: .* \(.*own_\w+.py:\d+\); train task 5 of seed 0$",
    "raises": r"AttributeError: .*no_such_part.* \(.*own_\w+.py:\d+\); train task 5 of seed",
}  # fmt: skip


@pytest.mark.parametrize("change", WRONG)
def test_a_later_task_that_is_wrong_is_one_line(change: str, own: str) -> None:
    """Alone and in a batch, in a run (which makes tasks ahead in a thread) and in the library."""
    data = f"{own}:bad(change='{change}')"
    where = "" if change in ("list", "raises") else "train task 5 of seed 0: "
    line = rf"^--data {re.escape(data)}: {where}{WRONG[change]}"
    words = ["maml-glyphs-5way-1shot", "--data", data, "--network", f"{own}:flat", *BRIEF]
    learner = build_learner(parse(words))
    for ids in ([5], [3, 5, 4]):
        with pytest.raises(DataError, match=line):
            learner.open_tasks("train").tasks(torch.tensor(ids))
    if change == "above":  # only a learner knows the labels' range
        with pytest.raises(DataError, match=line):
            Trainer(parse([*words, "--iterations", "3", "--task-batch", "2"])).run()
    else:
        with pytest.raises(UserError, match=line):
            maml.episodes(data, "train").tasks([4, 5])


def test_a_task_of_another_type_has_the_parts_or_is_one_line(own: str) -> None:
    found, same = (maml.episodes(f"{own}:{f}", "test") for f in ("given(way='space')", "images"))
    assert torch.equal(found.tasks([3]).query_x, same.tasks([3]).query_x)
    several = "Task without a tensor support_x: several inputs go into its columns"
    wrong = {"dicts": "dict without a", "short": "tuple without a", "pair": several}
    for way, said in wrong.items():
        with pytest.raises(UserError, match=rf"test task 0 of .*: {said}"):
            maml.episodes(f"{own}:given(way='{way}')", "test").tasks([0])


def test_before_training_task_0_of_every_split_is_looked_at(own: str, tmp_path: Path) -> None:
    """It is compared with the training split's, and no run directory is left."""
    for change in ("above", "larger", "raises"):
        data = f"{own}:bad(change='{change}', at=0, of='test')"
        words = ["maml-glyphs-5way-1shot", "--data", data, "--network", f"{own}:flat", *BRIEF]
        with pytest.raises(DataError, match=rf"--data {re.escape(data)}: .*test task 0 of seed 0"):
            Trainer(parse([*words, "--run-dir", str(tmp_path / "run")]))
    assert not (tmp_path / "run").exists()


def test_task_0_depends_on_its_address_and_has_the_sizes_that_the_flags_say(own: str) -> None:
    words = ["maml-glyphs-5way-1shot", "--network", f"{own}:flat", *BRIEF, "--data"]
    with pytest.raises(UserError, match=r":unseeded: train task 0 differs at each call: "):
        Trainer(parse([*words, f"{own}:unseeded"]))
    fits = [f"{own}:images", "--shots", "2", "--queries", "2", "--eval-queries", "2"]
    listed = [f"{own}:given(way='listed')", *fits[1:]]
    floats = ["--learner", f"{own}:Gaussian", "--network", f"{own}:two"]
    for more, says in (
        (fits, []),
        ([*fits, "--shots", "3"], ["5-way 3-shot, 2 queries per class"]),
        ([*listed, "--shots", "3"], ["5-way 3-shot, 2 queries per class"]),
        ([f"{own}:kinds(kind='points')", *fits[1:], *floats], ["2-shot, 2 queries"]),
    ):
        worker = Worker(parse([*words, *more]), torch.device("cpu"))
        _, same, *sizes = check_own_data(worker, ["validation", "test"], trains=True)
        assert ": task 0 of validation and test has the support set of train task 0" in same
        for found in sizes, check_own_data(worker, ["test"], trains=False)[1:]:
            assert [line.split(" the flags say ")[1].split(":")[0] for line in found] == says
            assert all("has 10 support and 10 query examp" in line for line in found)


# ---- tasks that are converted -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype"), [("int32", "float32"), ("bytes", "float64"), ("points", "float32")]
)
def test_what_says_the_same_in_another_dtype_is_converted(kind: str, dtype: str, own: str) -> None:
    data = f"{own}:kinds(kind={kind!r})"
    preset = "maml-sinusoid-10shot" if kind == "points" else "maml-glyphs-5way-1shot"
    words = [preset, "--data", data, "--network", f"{own}:flat", "--dtype", dtype]
    learner = build_learner(parse(words))
    task = learner.open_tasks("train").tasks(torch.arange(3))
    plain = open_episodes(f"{own}:images", "train", ways=5, shots=1, queries=1, seed=0)
    x = plain.tasks(torch.arange(3)).query_x.to(task.query_x.dtype)
    assert task.query_x.dtype == getattr(torch, dtype)
    x = x.flatten(3)[:, :, 0, :3] if kind == "points" else x
    assert (task.query_x - x).abs().max() <= (0 if "int" in kind else 1 / 510 + 1e-7)
    assert task.query_y.dtype == (getattr(torch, dtype) if kind == "points" else torch.int64)
    found = learner.outer_gradient(learner.meta_parameters(), task)
    assert found.losses.isfinite().all() and found.losses.dtype == getattr(torch, dtype)


# ---- examples that are integers -----------------------------------------------------------------


def test_a_network_embeds_integers(own: str, tmp_path: Path) -> None:
    """From a command to the library, which also takes integers and refuses floats."""
    words = ["maml-sinusoid-10shot", "--data", f"{own}:words", "--ways", "5", *BRIEF]
    run_dir = tmp_path / "run"
    command = [*words, "--network", f"{own}:Words", "--meta-gradient", "mixed", "--inner-lr", "0.3"]
    config = parse([*command, "--iterations", "40", "--meta-lr", "0.01", "--run-dir", str(run_dir)])
    assert Trainer(config).run() == 0
    assert result(run_dir)["loss"] < 0.95 * untrained(config)
    assert evaluate([str(run_dir), "--tasks", "3", "--trust"]) == 0
    model = maml.load(run_dir, trust=True)
    task = model.episodes("test").task(0)
    assert task.support_x.dtype == torch.int64
    adapted = model.adapt(task.support_x.int(), task.support_y)
    assert adapted.predict(task.query_x.tolist()).shape == (10, 5)
    with pytest.raises(UserError, match=r"^query_x: float32 .*; the model takes integers \[n, 7\]"):
        adapted.predict(task.query_x.float())
    with pytest.raises(
        UserError, match=r"^--network mlp takes floats, and the examples of the data"
    ):
        build_learner(parse(words))


@pytest.mark.parametrize(("kind", "shape"), [("points", (3,)), ("series", (3, 8))])
def test_examples_of_any_shape(kind: str, shape: tuple[int, ...], own: str, tmp_path: Path) -> None:
    """The network has the examples' shape, and a trained model takes only this shape."""
    run_dir = str(tmp_path / "run")
    words = ["maml-sinusoid-10shot", "--data", f"{own}:{kind}", "--ways", "5", *BRIEF]
    if kind == "series":
        with pytest.raises(UserError, match=r"^--network mlp takes points, .* example is \[3, 8\]"):
            build_learner(parse(words))
        words += ["--network", f"{own}:flat"]
    assert Trainer(parse([*words, "--iterations", "1", "--run-dir", run_dir])).run() == 0
    model = maml.load(run_dir, trust=True)
    x, y, query, _ = model.episodes("test").task(0)
    assert x.shape == (10, *shape) and model.adapt(x, y).predict(query).shape == (10, 5)
    with pytest.raises(UserError, match=r"support_x: .*; the model takes floats \[n, 3"):
        model.adapt(x[:, :1], y)


# ---- other outputs, targets and losses ----------------------------------------------------------


def test_a_loss_of_one_s_own_takes_any_outputs_and_targets(
    own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two outputs for each target. Tests are scored by the loss that is trained."""
    run_dir = tmp_path / "run"
    words = ["maml-sinusoid-10shot", "--learner", f"{own}:Gaussian", "--network", f"{own}:two"]
    more = ["--iterations", "60", "--meta-lr", "0.01", "--run-dir", str(run_dir)]
    config = parse([*words, *BRIEF, *more])
    assert Trainer(config).run() == 0
    assert all("error" in row for row in metrics(run_dir))
    assert re.search(r"test loss \S+ ± \S+, error \d+\.\d\d ± \d+\.\d\d: ", capsys.readouterr().out)
    assert result(run_dir)["loss"] < untrained(config)
    assert evaluate([str(run_dir), "--tasks", "3", "--trust"]) == 0
    (row,) = read_rows(run_dir / "evaluations.jsonl")
    assert row["loss"] == result(run_dir)["loss"] and row["error"] == result(run_dir)["error"]
    # Integers that are classes of the outputs, or not.
    several = ["maml-glyphs-5way-1shot", "--data", f"{own}:kinds(kind='several')", *BRIEF]
    for network, measured in {"flat": False, "words_of": True}.items():
        of = [*several, "--learner", f"{own}:Near", "--network", f"{own}:{network}"]
        there = tmp_path / network
        assert Trainer(parse([*of, "--iterations", "1", "--run-dir", str(there)])).run() == 0
        assert (result(there)["accuracy"] is not None) == measured
    # Class weights, in a buffer.
    images = ["--data", f"{own}:images", "--network", f"{own}:flat", *BRIEF]
    weighted = ["maml-glyphs-5way-1shot", "--learner", f"{own}:Weighted", *images]
    for each in (config, parse(weighted)):
        learner = build_learner(each)
        task = learner.open_tasks("test", evaluation=True).tasks(torch.arange(3))
        params = learner.meta_parameters()
        outputs = learner.predictions(params, task, each.eval_inner_steps).transductive
        scored = learner.evaluate(params, task)["loss"]
        for i in range(3):
            torch.testing.assert_close(scored[i], learner.loss(outputs[i], task.query_y[i]))
