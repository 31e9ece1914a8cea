"""A user's own network, data set and learner, each in a file outside the repository."""

import copy
import itertools
import random
import re
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

import maml
from datasets import DataError
from maml.config.cli import parse
from maml.config.presets import with_values
from maml.errors import UserError
from maml.evaluate import main as evaluate
from maml.evaluation.scores import check_answers, check_own_data
from maml.learners import build_learner
from maml.networks.ordinary import explicit, own_name
from maml.run.directory import read_config
from maml.run.files import read_rows, read_tasks
from maml.trainer import Trainer
from maml.training.initial import initial_weights
from maml.worker import Worker
from tests.launching import REPO, run
from tests.runs import last, refused, result, same

EXAMPLES = REPO / "docs" / "examples"
THEIRS = [
    "--network", "my_network:Wide(width=16)", "--data", "my_data:textures",
    "--learner", "my_learner:Slower",
]  # fmt: skip
SMALL = [
    "maml-glyphs-5way-1shot", *THEIRS, "--inner-steps", "2", "--eval-inner-steps", "2",
    "--meta-batch-size", "3", "--iterations", "2", "--eval-every", "0", "--test-tasks", "4",
    "--log-every", "1", "--logger", "none", "--threads", "1", "--dtype", "float64",
]  # fmt: skip
BRIEF_WORDS = [
    "--iterations", "1", "--meta-batch-size", "2", "--eval-every", "0", "--test-tasks", "2",
    "--logger", "none", "--threads", "1",
]  # fmt: skip
IMAGES = ["maml-glyphs-5way-1shot", "--logger", "none", "--threads", "1"]
_numbers = itertools.count()
Write = Callable[[str], str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the documented examples to a new folder, and make it the current folder."""
    for path in EXAMPLES.glob("*.py"):
        shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    # A process imports a module only once. That is right, because all tests have equal copies.
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.fixture
def write(folder: Path) -> Write:
    """Return a function that writes a module under a new name and returns the name."""

    def call(source: str) -> str:
        name = f"theirs_{next(_numbers)}"
        (folder / f"{name}.py").write_text(source)
        return name

    return call


def test_from_command_to_evaluation(folder: Path, cache_dir: Path) -> None:
    """launch/local trains as one process does, in their folder; the run is evaluated."""
    environment = {"MAML_CACHE": str(cache_dir), "PYTHONPATH": str(REPO), "VENV": sys.prefix}
    words = [*SMALL, "--strategy", "rpc", "--run-dir", "rpc", "--workers", "2"]
    run([str(REPO / "launch" / "local"), *words], 240, cwd=folder, env=environment)
    assert Trainer(parse([*SMALL, "--run-dir", "alone"])).run() == 0
    alone = last(folder / "alone")["model"]
    for name, tensor in last(folder / "rpc")["model"].items():
        torch.testing.assert_close(tensor, alone[name], rtol=1e-10, atol=1e-10)
    written = yaml.safe_load((folder / "rpc" / "config.yaml").read_text())["config"]
    assert [written["network"], written["data"], written["learner"]] == THEIRS[1::2]
    assert result(folder / "rpc")["changed"]["network"] == "my_network:Wide(width=16)"
    assert evaluate(["rpc", "--tasks", "4", "--trust"]) == 0
    (row,) = read_rows(folder / "rpc" / "evaluations.jsonl")
    assert row["accuracy"] == result(folder / "rpc")["accuracy"]


def test_where_their_file_is_not(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The message names the folder or the error, and does not blame another version."""
    run_dir = tmp_path_factory.mktemp("run")
    (run_dir / "config.yaml").write_text(yaml.dump({"config": {"network": "not_here:Net"}}))
    where = f"there is no module not_here in {folder} or on PYTHONPATH"
    line = f"{run_dir}/config.yaml: --network not_here:Net: {where}"
    assert refused(read_config, run_dir, trust=True) == line
    (folder / "raising.py").write_text("Net = 1 / 0\n")
    (run_dir / "config.yaml").write_text(yaml.dump({"config": {"network": "raising:Net"}}))
    line = r"raising:Net: ZeroDivisionError: .*raising\.py:1"
    with pytest.raises(UserError, match=line) as caught:
        maml.load(run_dir, trust=True)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 2


def test_a_learner_has_the_facts_of_its_base(folder: Path, write: Write) -> None:
    name = write(
        "from maml.learners.imaml import IMAML\nfrom maml.learners.supervised import Supervised\n"
        "class Mine(IMAML):\n    pass\nclass Batches(Supervised):\n    pass\n"
    )
    preset = "maml-glyphs-5way-1shot"
    parse([preset, "--learner", f"{name}:Mine", "--proximal", "0.5", "--cg-steps", "2"])
    with pytest.raises(UserError, match=r"--meta-gradient reverse: --learner \w+:Mine has an imp"):
        parse([preset, "--learner", f"{name}:Mine", "--meta-gradient", "reverse"])
    with pytest.raises(UserError, match=r"--data miniimagenet: has no .* --learner \w+:Batches"):
        parse([preset, "--learner", f"{name}:Batches", "--data", "miniimagenet"])
    with pytest.raises(UserError, match=r"--leak 0.01 is not for --network .*, but for conv4"):
        parse([*SMALL, "--leak", "0.01"])
    config = parse([preset, "--learner", f"{name}:Batches", "--batch-size", "7", "--ways", "9"])
    assert build_learner(config).open_tasks("train").tasks(torch.arange(1)).query_x.shape[1] == 7


NETWORKS = """
import dataclasses
import torch
from torch import nn
from maml.learners.maml import MAML
def small(image_shape, width=6): return nn.Sequential(nn.Flatten(), nn.Linear(784, width))
def headless(image_shape, ways):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(ways))
class Misnamed(nn.Module):
    head_prefix = "out."
    def __init__(self, image_shape, ways):
        super().__init__()
        self.layer = nn.Linear(784, ways)
    def forward(self, x): return self.layer(x.flatten(1))
class Twice(nn.Linear):
    def forward(self, x): return (super().forward(x),) * 2
class Spare(nn.Linear):
    def __init__(self, *size):
        super().__init__(*size)
        self.spare = nn.Linear(2, 2)
def twice(image_shape, ways): return nn.Sequential(nn.Flatten(), Twice(784, ways))
def spare(image_shape, ways): return nn.Sequential(nn.Flatten(), Spare(784, ways))
class Unstated(MAML):
    def problem(self, meta_params, steps): return meta_params["temp"]
class Warmer(MAML):
    def __init__(self, config):
        super().__init__(config)
        self.temp = nn.Parameter(torch.tensor(2.0))
    def problem(self, meta_params, steps):
        found = super().problem(meta_params, steps)
        return dataclasses.replace(found, fixed={**found.fixed, "temp": meta_params["temp"]})
    def support_loss(self, params, task, step):
        loss, outputs = super().support_loss(params, task, step)
        return loss * params["temp"], outputs
class Short(MAML):
    def query_loss(self, params, task, step):
        return super().query_loss(params, task, step)[0]
class Noisy(nn.Linear):
    def forward(self, x):
        self.noise = getattr(self, "noise", torch.Generator())
        return super().forward(x) + torch.rand(5, generator=self.noise)
def noisy(image_shape, ways): return nn.Sequential(nn.Flatten(), Noisy(784, ways))
class Listed(nn.Linear):
    def __init__(self, *size):
        super().__init__(*size)
        self.norms = [nn.BatchNorm1d(size[1])]
    def forward(self, x): return self.norms[0](super().forward(x))
def listed(image_shape, ways): return nn.Sequential(nn.Flatten(), Listed(784, ways))
class Measuring(MAML):
    def metrics(self, outputs, y):
        return super().metrics(outputs, y) | {"margin": outputs.amax(-1).mean(-1)}
class Averaging(MAML):
    def metrics(self, outputs, y):
        return {"accuracy": (outputs.argmax(-1) == y).float().mean()}
class Naming(MAML):
    def __init__(self, config, names):
        super().__init__(config)
        self.metric_names = names
"""


ARGUMENTS = """
import numpy as np
from torch import nn
from maml.learners.maml import MAML
def net(image_shape, num_classes=9, width=4, *, sizes=(), norm=None):
    sizes += [width] if isinstance(sizes, list) else (width,)
    layers = [nn.Flatten(), nn.Linear(784, *sizes[-1:])]
    return nn.Sequential(*layers, *[nn.Linear(*sizes[-1:], num_classes)])
def images(split, ways, *, side=28, name="?"):
    return [np.full((9, side, side), 20 * label, np.uint8) for label in range(len(name) + ways)]
class Plain(MAML):
    def __init__(self, config): super().__init__(config)
class Sharp(MAML):
    def __init__(self, config, sharp, **more):
        super().__init__(config)
        self.sharp = sharp, more
"""


def test_each_may_have_arguments_of_its_own(write: Write, tmp_path: Path) -> None:
    """Arguments are part of the name; a learner keeps its class and its base's facts."""
    module = write(ARGUMENTS)
    network, data, learner = (
        f'{module}:net(width=6, norm="a (b", sizes=[1])',
        f"{module}:images(side=28, name='ab:c')",
        f"{module}:Sharp(sharp=-0.5, other={{'a': (1, None)}})",
    )
    words = [*IMAGES, "--network", network, "--data", data, "--learner", learner]
    config = parse([*words, "--iterations", "1", "--test-tasks", "2", "--run-dir", "run"])
    for _ in range(2):  # net() changes its list; the next call gets a new one
        built = build_learner(config)
        assert built.network.get_parameter("module.1.weight").shape == (6, 784)
    assert vars(built)["sharp"] == (-0.5, {"other": {"a": (1, None)}})
    episodes = built.open_tasks("train")
    assert episodes.tasks(torch.arange(1)).query_x.shape[-3:] == (1, 28, 28)
    assert Trainer(config).run() == 0
    resolved = with_values(config, strategy="local", batching="vmap")
    assert read_config(tmp_path / "run") == resolved
    assert parse(["--config", "run/config.yaml", "--trust"]).network == network
    assert maml.load(tmp_path / "run", trust=True).adapt(torch.rand(5, 1, 28, 28), range(5))
    start = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["starts"][-1]
    assert {kind: [*files] for kind, files in start["own_files"].items()} == {
        "learner": [module], "network": [module], "data": [module]
    }  # fmt: skip
    task = maml.episodes(f"{module}:images(side=9)", "test", queries=2).task(0)
    assert task.support_x.shape == (5, 1, 9, 9)
    with pytest.raises(UserError, match=r"^side: no option of data"):
        maml.episodes(f"{module}:images(side=9)", "test", side=3)


CANNOT_BE = {
    "--network noisy": r"two calls .* counts its calls.* same seed",
    "--network smal": r"module \w+ \(.*\.py\) has no smal; did you mean small\?",
    "--network twice": r"forward returns tuple, no tensor; concatenate .* splits in loss",
    "--network spare": r"'module.1.spare.bias' .*not have",
    "--network listed": r"not among its params.* keep them in nn.ModuleList",
    "--network whole": r"which cannot learn; make it a buffer",
    "--network doubling": r"has a forward, hooks or a parametrization of its own",
    "--network Switching": r"forward switches the mode of a batch norm",
    "--network Weight": r":Weight: head.bias differs when",
    "--network headless --learner anil": r"give its class head_prefix",
    "--network Misnamed --learner boil": r"'out.', and no .* so: layer.weight, layer.b",
    "--learner Short": r"Short.query_loss returns one tensor \[\]: it must re",
    "--learner Measuring": r"metrics returns accuracy, margin and metric_names is acc",
    "--learner Averaging": r"metrics returns \[\] as 'accuracy': of . tasks, .*must return",
    "--learner Naming(names=('loss',))": r": metric_names has 'loss': taken by ",
    "--learner Learner": r":Learner: dice differs when",
    "--learner small": r"is no subclass of maml.learners.Learner",
    "--network net(width=32": r"'\(' was never closed; write module:attribute\(name=value",
    "--network net(32)": r"gives plain values by name; write module:attribute",
    "--network small": r"two images became \[2, 6\]; outputs must be \[2, 5\]",
    "--network net(num_classes=3)": r"num_classes is given by this program: leave it out$",
    "--learner Sharp": r"missing 1 required positional argument: 'sharp'",
    "--learner Plain(x=3)": r"unexpected keyword argument 'x'; it takes \(config\)$",
    "--data images(ways=3)": r"ways is what --ways says: leave it out$",
}


@pytest.mark.parametrize("words", CANNOT_BE)
def test_what_cannot_be_is_one_line(words: str, write: Write) -> None:
    flag, attribute, *more = words.split()
    spelled = f"{write(NETWORKS + ARGUMENTS + ODD_NETWORKS + DICE)}:{attribute}"
    given = ["maml-glyphs-5way-1shot", flag, spelled, *more]
    message = refused(lambda: Worker(parse(given), torch.device("cpu")))
    assert f"{flag} {spelled}" in message and re.search(CANNOT_BE[words], message), message


def test_of_two_of_theirs_the_one_at_fault_is_named(write: Write) -> None:
    """The component whose file raised the error is named, whichever calls the other."""
    learner = write(NETWORKS)
    network = write(
        "from torch import nn\nclass Plain(nn.Sequential):\n"
        "    def __init__(self, _, ways): super().__init__(nn.Flatten(), nn.Linear(784, ways))\n"
        "class Late(Plain):\n    def forward(self, x):\n"
        "        return super().forward(x) + (1 / 0 if x.requires_grad or len(x) == 75 else 0)\n"
    )
    for name, attribute, says in (
        ("Plain", "Unstated", f"--learner {learner}:Unstated: KeyError"),
        ("Late", "Warmer", f"--network {network}:Late: ZeroDivisionError"),
    ):
        flags = ["--network", f"{network}:{name}", "--learner", f"{learner}:{attribute}"]
        words = [*IMAGES, *flags, "--queries", "15"]
        with pytest.raises((UserError, DataError), match=f"^{re.escape(says)}"):
            Worker(parse(words), torch.device("cpu"))


# ---- networks ---------------------------------------------------------------------------------


def test_an_ordinary_module_s_statistics_are_explicit() -> None:
    """Batch statistics equal torch's in training; given statistics equal torch's running ones."""
    support, query = torch.rand(2, 5, 1, 8, 8, dtype=torch.float64)
    peer = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 6),
        nn.BatchNorm1d(6, affine=False), nn.Linear(6, 3),
    ).double()  # fmt: skip
    ours = explicit(copy.deepcopy(peer), "x")
    for norm in (peer[1], peer[5]):
        norm.momentum = 1.0
    outputs, used = ours(support)
    torch.testing.assert_close(outputs, peer(support), rtol=1e-12, atol=1e-12)
    # Torch keeps the unbiased variance, ours is biased.
    for norm, examples in ((peer[1], 5 * 36), (peer[5], 5)):
        norm.running_var *= (examples - 1) / examples
    torch.testing.assert_close(ours(query, used)[0], peer.eval()(query), rtol=1e-10, atol=1e-10)
    assert not list(ours.buffers())


ODD_NETWORKS = """
import torch
from torch import nn
from maml.networks.conv4 import Conv4
def Lazy(shape, ways):
    layers = nn.LazyConv2d(4, 3, 2), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(ways)
    return nn.Sequential(*layers)
class Whole(nn.Linear):
    def __init__(self):
        super().__init__(784, 5)
        self.places = nn.Parameter(torch.arange(3), requires_grad=False)
def whole(shape, ways): return nn.Sequential(nn.Flatten(), Whole())
class Doubling(nn.BatchNorm2d):
    def forward(self, x): return 2 * super().forward(x)
def doubling(shape, ways): return nn.Sequential(Doubling(1), nn.Flatten(), nn.Linear(784, ways))
class Switching(nn.Module):
    def __init__(self, shape, ways):
        super().__init__()
        self.norm, self.head = nn.BatchNorm2d(1), nn.Linear(784, ways)
    def forward(self, x):
        x = self.norm.eval()(x)
        self.norm.train()
        return self.head(x.flatten(1))
class Shared(nn.Module):
    def __init__(self, shape, ways):
        super().__init__()
        self.first = self.second = nn.BatchNorm2d(1)
        self.head = nn.Linear(784, ways)
    def forward(self, x):
        return self.head(torch.relu(self.second(torch.relu(self.first(x)))).flatten(1))
class Mine(Conv4):
    def __init__(self, shape, ways): super().__init__(shape, ways, filters=16, pool=False)
    def forward(self, x, statistics=None):
        outputs, used = super().forward(x, statistics)
        return 2 * outputs, used
class Mixing(nn.Module):
    def __init__(self, shape, ways):
        super().__init__()
        self.layer = nn.Linear(784, ways)
    def forward(self, x):
        return self.layer((x - x.mean(0)).flatten(1))
class Branching(nn.Module):
    def __init__(self, shape, ways):
        super().__init__()
        self.rows = nn.GRU(28, 8, batch_first=True)
        self.head = nn.Linear(8, ways)
    def forward(self, x):
        h = self.rows(x[:, 0])[0][:, -1]
        return self.head(torch.tanh(h) if h.mean() > 0 else h)
def frozen(shape, ways):
    body = nn.Sequential(nn.Conv2d(1, 4, 3, 2), nn.BatchNorm2d(4), nn.Flatten())
    body[1].running_mean.fill_(0.3)
    body.eval().requires_grad_(False)
    return nn.Sequential(body, nn.Linear(676, ways))
"""


def test_a_network_that_mixes_examples_answers_no_query_alone(
    write: Write, tmp_path: Path, capsys: Any
) -> None:
    """A request for such answers is an error and writes no files; else there is one warning."""
    network = f"{write(ODD_NETWORKS)}:Mixing"
    run_dir = tmp_path / "run"
    words = [*IMAGES, "--network", network, "--iterations", "0", "--test-tasks", "2",
             "--run-dir", str(run_dir)]  # fmt: skip
    with pytest.raises(UserError, match=f"^--no-transductive: --network {network}: an example's "):
        Trainer(parse([*words, "--no-transductive"]))
    assert not run_dir.exists()
    assert Trainer(parse(words)).run() == 0
    assert evaluate([str(run_dir), "--tasks", "2", "--trust"]) == 0
    line = f"warning: --network {network}: an example's answer depends on the other examples"
    assert capsys.readouterr().err.count(line) == 2
    with pytest.raises(UserError, match=r"^--non-transductive: --network"):
        evaluate([str(run_dir), "--tasks", "2", "--non-transductive", "--trust"])
    adapted = maml.load(run_dir, trust=True).adapt(torch.rand(5, 1, 28, 28), range(5))
    with pytest.raises(UserError, match=r'^batch_statistics "support": .*; ask for "query"'):
        adapted.predict(torch.rand(4, 1, 28, 28))
    assert adapted.predict(torch.rand(4, 1, 28, 28), "query").shape == (4, 5)


def test_what_cannot_be_batched_trains_and_is_evaluated(
    write: Write, tmp_path: Path, capsys: Any
) -> None:
    """The start says so, config.yaml keeps it, and the model adapts as in training."""
    network = f"{write(ODD_NETWORKS)}:Branching"
    words = [*BRIEF_WORDS, "--network", network, "--run-dir", str(tmp_path), "--dtype", "float64"]
    assert Trainer(parse(["imaml-glyphs-5way-1shot", *words])).run() == 0
    line = "finds another gradient, so tasks are computed one by one"
    assert capsys.readouterr().err.count(line) == 1
    assert read_config(tmp_path).batching == "tasks"
    before = result(tmp_path)["accuracy"]
    assert evaluate([str(tmp_path), "--tasks", "2", "--trust"]) == 0
    assert read_rows(tmp_path / "evaluations.jsonl")[-1]["accuracy"] == before
    asked = parse(["imaml-glyphs-5way-1shot", *words, "--batching", "vmap"])
    with pytest.raises(UserError, match=f"^--batching vmap: torch.func.vmap cannot .* {network}"):
        Worker(asked, torch.device("cpu"))


def test_a_norm_in_evaluation_mode_keeps_its_statistics(write: Write, tmp_path: Path) -> None:
    """A frozen body gives torch's features; a checkpoint and ``--init`` have its statistics."""
    module = write(ODD_NETWORKS)
    words = [*IMAGES, "--network", f"{module}:frozen", "--dtype", "float64"]
    learner = build_learner(parse(words))
    assert "network.module.0.1.running_var" in learner.meta_parameters()
    x = torch.rand(3, 1, 28, 28, dtype=torch.float64)
    torch.manual_seed(0)
    peer = sys.modules[module].frozen((1, 28, 28), 5).double()
    peer.load_state_dict({own_name(learner.network, n): t for n, t in learner.network.state_dict()
                          .items()}, strict=False)  # fmt: skip
    outputs, used = learner.network(x)
    torch.testing.assert_close(outputs, peer(x), rtol=1e-12, atol=1e-12)
    assert used == ()
    peer[0][1].running_mean.fill_(0.7)
    torch.save(peer.state_dict(), tmp_path / "peer.pt")
    begun, _ = initial_weights(str(tmp_path / "peer.pt"), learner)
    assert float(begun["network.module.0.1.running_mean"][0]) == 0.7


@pytest.mark.parametrize("name", ["Shared", "Mine", "Lazy"])
def test_lazy_and_shared_layers_and_subclasses_of_ours_train(name: str, write: Write) -> None:
    module = write(ODD_NETWORKS)
    config = parse([*IMAGES, "--network", f"{module}:{name}"])
    worker = Worker(config, torch.device("cpu"))
    share = worker.share(worker.learner.meta_parameters(), torch.arange(2), worker.learner)
    assert 0 < sum(gradient.abs().sum() for gradient in share.gradients.values()) < torch.inf


# ---- data -------------------------------------------------------------------------------------

DATA = """
import numpy as np
import torch
from datasets import Examples, ImageClasses
from datasets.sinusoid import Sinusoid
def colours(split):
    return [np.full((6, 8, 10, 3), 20 * label, np.uint8) for label in range(5)]
def waves(split, shots, queries, seed, dtype):
    return Sinusoid(split=split, shots=shots, queries=queries, seed=seed, dtype=dtype)
def labelled(split):
    rows = np.arange(12)
    return Examples(np.zeros((12, 8, 8), np.uint8), rows, (rows % 5).astype(np.int32))
def unequal(split):
    return {"few": np.zeros((2, 8, 8), np.uint8), "many": np.zeros((3, 8, 8), np.uint8)}
def apart(split):
    dice = np.random.default_rng(len(split))
    return {f"{split} {i}": dice.integers(0, 255, (6, 8, 8)).astype(np.uint8) for i in range(5)}
def forgetful(split):
    images = torch.from_numpy(np.concatenate([*apart("train").values()]))
    return ImageClasses.in_order(images, [6] * 5, [*apart("train")])
def one_text(split): return {1: np.zeros((2, 8, 8), np.uint8), "1": np.zeros((2, 8, 8), np.uint8)}
def numbers(split): return labelled(split)._replace(images=np.zeros((12, 8, 8)))
def from_one(split): return labelled(split)._replace(labels=np.arange(12) % 5 + 1)
def below(split): return labelled(split)._replace(labels=np.arange(12) % 5 - 1)
def shade(split, of): return {name: np.full((2, 8, 8), 9 * (of is True), np.uint8) for name in "ab"}
"""


@pytest.mark.parametrize(
    ("attribute", "flags", "shape"),
    [
        ("colours", [], (2, 25, 3, 8, 10)),
        ("colours", ["--learner", "supervised", "--batch-size", "7"], (2, 7, 3, 8, 10)),
        ("waves", ["--network", "mlp"], (2, 5, 1)),
        ("labelled", ["--learner", "supervised", "--batch-size", "7"], (2, 7, 1, 8, 8)),
    ],
)
def test_what_a_data_set_may_return(
    attribute: str, flags: list[str], shape: tuple[int, ...], write: Write
) -> None:
    """A learner opens it at first for the image shape; numbers as targets mean regression."""
    spelled = f"{write(DATA)}:{attribute}"
    config = parse(["maml-glyphs-5way-1shot", "--data", spelled, "--network", "lenet", *flags])
    learner = build_learner(config)
    tasks = learner.open_tasks("train").tasks(torch.arange(2))
    assert tasks.query_x.shape == shape
    assert ("accuracy" in learner.metric_names) == (attribute != "waves")
    outer = learner.outer_gradient(learner.meta_parameters(), tasks)
    assert outer.losses.isfinite().all()
    again = learner.open_tasks("train").tasks(torch.arange(2))
    assert same(tuple(tasks), tuple(again))


def test_what_a_data_set_may_not(write: Write) -> None:
    module = write(DATA)
    for words, says in {
        "colours --learner supervised --ways 4": r"has 5 classes; give --ways 5",
        "labelled": r"Examples is for --learner supervised alone",
        "unequal --ways 2": r"the train split has 2 of few, 3 of many",
        "one_text": r"two classes of train have the name 1, as text$",
        "numbers --learner supervised": r": train is float64 \[12, 8, 8\]; all must be uint8",
        "from_one --learner supervised": r"train has the label 5; of 5 ways labels are from 0 to 4",
        "below --learner supervised": r"train has the label -1; of 5 ways labels are from 0 to 4",
    }.items():
        data = ["maml-glyphs-5way-1shot", "--network", "lenet", "--data", *words.split()]
        data[4] = f"{module}:{data[4]}"
        with pytest.raises((UserError, DataError), match=says):
            build_learner(parse(data)).open_tasks("train")


def test_an_option_is_found_again_by_its_value_and_kind(write: Write) -> None:
    data = f"{write(DATA)}:shade"
    for of in (1, True, [1]):  # no cache can look up a list
        task = maml.episodes(data, "train", ways=2, queries=1, of=of).task(0)
        assert bool(task.query_x.any()) == (of is True)


def test_a_class_in_two_splits_is_said(write: Write) -> None:
    module = write(DATA)
    for attribute, says in {
        "apart": "",
        "forgetful": "5 of 5 validation classes have the same images as a class of train, and 5 of "
        "5 test classes have the same images as a class of train: the accuracy on them says",
    }.items():
        words = ["--data", f"{module}:{attribute}", "--network", "lenet"]
        worker = Worker(parse(["maml-glyphs-5way-1shot", *words]), torch.device("cpu"))
        (line,) = check_own_data(worker, ["validation", "test"], trains=True)
        assert says in line and bool(says) == line.startswith(f"warning: --data {module}:")


def test_a_learner_learns_what_it_hands_to_its_losses(write: Write) -> None:
    """A query loss has no part in tests, and one line says so."""
    module = write(NETWORKS)
    short = build_learner(parse([*IMAGES, "--learner", f"{module}:Short"]))
    assert "Short: query_loss is yours; tests score" in check_answers(short)
    learner = Worker(parse([*IMAGES, "--learner", f"{module}:Warmer"]), torch.device("cpu")).learner
    assert not check_answers(learner)
    tasks = learner.open_tasks("train").tasks(torch.arange(2))
    found = learner.outer_gradient(learner.meta_parameters(), tasks)
    assert found.gradients["temp"].abs() > 1e-6


PARTS = """
import dataclasses, torch
from torch import nn
from torch.func import functional_call
from maml.learners.maml import MAML
class Stated(MAML):
    def __init__(self, config):
        super().__init__(config)
        self.gate = nn.Sequential(nn.BatchNorm1d(config.ways), nn.Dropout(0.5))
        self.mixer = nn.Linear(config.ways, config.ways).requires_grad_(False)
        self.mixer_again = nn.Linear(config.ways, config.ways).requires_grad_(False)
        self.mixer_again.weight = self.mixer.weight
        self.mixer_index = nn.Parameter(torch.tensor(2**24 + 1), requires_grad=False)
    def problem(self, meta_params, steps):
        found = super().problem(meta_params, steps)
        gate = {n: t for n, t in meta_params.items() if n.startswith("gate.")}
        noise = 0.01 * torch.randn(()) * self.training  # of a task, in all its steps
        start = {name: tensor + noise for name, tensor in found.start.items()}
        return dataclasses.replace(found, start=start, fixed={**found.fixed, **gate})
    def support_loss(self, params, task, step):
        loss, outputs = super().support_loss(params, task, step)
        return loss + params["gate.0.weight"].prod() * params["gate.0.bias"].sum(), outputs
class Called(Stated):
    def call_network(self, params, x, statistics=None):
        outputs, used = super().call_network(params, x, statistics)
        gate = {n[5:]: t for n, t in params.items() if n.startswith("gate.")}
        return self.mixer(functional_call(self.gate, gate, (outputs,))), used
"""


def test_a_learner_s_own_modules_are_as_its_network_s(write: Write, tmp_path: Path) -> None:
    """Their dtype, mode and statistics; a draw in ``problem`` is of the task."""
    module = write(PARTS)
    words = [*BRIEF_WORDS, "--dtype", "float64", "--inner-lr", "0.01"]
    for name in ("Stated", "Called"):
        run_dir = tmp_path / name
        own = ["--learner", f"{module}:{name}", "--run-dir", str(run_dir)]
        assert Trainer(parse([IMAGES[0], *words, *own])).run() == 0
        model = maml.load(run_dir, trust=True)
        assert not {n for n in model.meta_params if n.startswith("mixer")}
        assert int(model.learner.get_buffer("mixer_index")) == 2**24 + 1
        assert not {n for n, _ in model.learner.named_buffers() if n.startswith("gate")}
        task = model.episodes("test").task(0)

        def loss(model: Any = model, task: Any = task) -> float:
            outputs = model.adapt(task.support_x, task.support_y).logits(task.query_x, "query")
            return float(torch.nn.functional.cross_entropy(outputs, task.query_y))

        tested = read_tasks(run_dir / "test_tasks.csv")["test", 0, 0]["loss"]
        assert loss() == pytest.approx(tested, rel=1e-12)
        assert model.module.training and loss() == pytest.approx(tested, rel=1e-12)


DICE = """
import random
import numpy as np
import torch
from torch import nn
from maml.learners.maml import MAML
dice = np.random.default_rng()
class Drawn(nn.Module):
    def __init__(self, shape, ways):
        super().__init__()
        self.head = nn.Linear(784, ways)
        nn.init.constant_(self.head.bias, random.random())
        self.head.weight.data.copy_(torch.from_numpy(np.random.rand(ways, 784)))
    def forward(self, x):
        return self.head(x.flatten(1))
class Weight(Drawn):
    def __init__(self, shape, ways):
        super().__init__(shape, ways)
        self.head.bias.data.fill_(dice.random())
class Seeded(Weight):
    def __init__(self, shape, ways):
        super().__init__(shape, ways)
        self.head.bias.data.fill_(np.random.default_rng(0).random())
        self.register_buffer("nothing", torch.full((2,), torch.nan), persistent=False)
class Learner(MAML):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("dice", torch.tensor(dice.random()))
"""


def test_initial_weights_follow_the_seed_whoever_draws_them(write: Write) -> None:
    """The program's own generators keep their states; an own one must begin the same each time."""
    module = write(DICE)
    build_learner(parse([*IMAGES, "--network", f"{module}:Seeded"]))
    words = [*IMAGES, "--network", f"{module}:Drawn", "--seed"]
    before = np.random.get_state()[1].tolist(), random.getstate()
    zero, again, one = (
        build_learner(parse([*words, seed])).meta_parameters() for seed in ("0", "0", "1")
    )
    assert same(zero, again)
    assert not any(torch.equal(zero[name], one[name]) for name in zero)
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before
