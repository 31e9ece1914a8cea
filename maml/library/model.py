"""A trained learner that adapts and predicts on a user's own data, as the evaluation does."""

from __future__ import annotations

import copy
import os
from collections.abc import Hashable
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn

from datasets import accelerator
from datasets.tasks import Task
from datasets.words import counted
from maml.config import Config, registry
from maml.config.presets import title, with_values
from maml.config.saved import of_values, read
from maml.errors import UserError
from maml.evaluation.best import RECORDED, content_of
from maml.learners import Learner, build_learner
from maml.learners.objectives import REGRESSION
from maml.library import family, inputs
from maml.library.alone import alone
from maml.library.fast_module import BatchStatistics, FastModule, adapted, unadapted
from maml.library.flags import known
from maml.library.meta_learner import MetaLearner
from maml.library.saving import ENDING, Saved, on_hub
from maml.library.saving import content_of as content_of_file
from maml.library.tasks import Tasks
from maml.networks.ordinary import switched
from maml.params import Params
from maml.run import checkpoint
from maml.run.provenance import warn_of_edits


@overload
def load(
    path: Path | str, iteration: int | str | None = ..., device: str = ..., *, trust: bool = ...
) -> Model: ...


@overload
def load(path: Path | str, *, module: nn.Module, **arguments: Any) -> MetaLearner: ...


@alone()
def load(
    path: Path | str,
    iteration: int | str | None = None,
    device: str = "auto",
    *,
    trust: bool = False,
    module: nn.Module | None = None,
    **arguments: Any,
) -> Model | MetaLearner:
    """Load a trained model, or a meta-learner around a module of your own.

    Args:
        path: A run directory, a checkpoint file in a run directory, or a record that keeps its
            parameters (``launch/records/PRESET/seed-N``). A run directory gives the model that the
            run tests: the last, or the best with ``--test-model best``. Or a ``.safetensors`` file
            of `MetaLearner.save` or `Model.save`. Loading runs no code from the file.
        iteration: Another checkpoint of the run directory; "best": the kept checkpoint that
            validated best.
        device: cpu, cuda, cuda:N, or auto, which takes a GPU if there is one.
        trust: Whether to import a user's own components (``module:attribute``) that the run's
            config.yaml names. The import runs their code. Without trust such a run is refused.
        module: Of a file of `MetaLearner.save`: a module of the same form. Its tensors get the
            file's values, and the `MetaLearner` around it is returned.
        arguments: Further arguments of this meta-learner, as its ``loss``.

    A line on stderr names your own files (``--network module:Class``) that have changed since.

    Raises:
        UserError: if the file is missing, is damaged, is of another version, or names code
            without ``trust``. The one line names the file. Also for a run that does not adapt or
            that acts (``--learner supervised``, ``reinforce``).
    """
    if Path(path).suffix == ENDING:
        return _of_file(Path(path).expanduser(), device, trust, module, arguments)
    if module is not None or arguments:
        raise UserError(f"{path}: module and its arguments are for a {ENDING} file")
    run_dir, file = find(Path(path), iteration)
    config = with_values(read(run_dir / "config.yaml", trust=trust), strategy="local")
    registry.import_theirs(config)
    if file is None or file.name == RECORDED:
        wanted = None if iteration is None else str(iteration)
        saved = content_of(run_dir, wanted, transductive=config.transductive, flag="iteration")
    else:
        saved = checkpoint.load(file)
    learner = _built(config, run_dir)
    checkpoint.check_model(saved, learner.meta_parameters(), str(file or run_dir))
    warn_of_edits(config, saved)
    model = Model(learner, saved["model"], saved["iteration"], _there(device))
    model.run_dir = run_dir
    return model


def from_pretrained(name: Path | str, **how: Any) -> Any:
    """Return what `load` makes of a model on the hub, or in a folder of `save_pretrained`.

    Args:
        name: "user/model" on the Hugging Face Hub, or the folder.
        how: ``revision``, ``token``, … of `huggingface_hub`, and the arguments of `load`.
    """
    found = on_hub().from_pretrained(name, **how)
    assert found.file is not None
    return load(found.file, **found.arguments)


def _built(config: Config, what: Path) -> Learner:
    """Return the learner of a run, if it adapts."""
    learner = build_learner(config)
    why = {
        "batches": "it does not adapt",
        "environments": "it acts, and answers no queries; maml.evaluate scores it",
    }
    tasks = registry.learner(config.learner).tasks
    if tasks in why:
        raise UserError(f"{what}: a run of --learner {config.learner}: {why[tasks]}")
    return learner


def _of_file(
    path: Path, device: str, trust: bool, module: nn.Module | None, arguments: dict[str, Any]
) -> Model | MetaLearner:
    """Load what `Saved.save` has written."""
    about, params = content_of_file(path)
    if "learner" not in about:
        config = with_values(of_values(about["config"], path, trust=trust), strategy="local")
        registry.import_theirs(config)
        learner = _built(config, path)
        checkpoint.check_model({"model": params}, learner.meta_parameters(), str(path))
        iteration = about.get("iteration") or config.iterations
        return Model(learner, params, iteration, _there(device))
    kind: Any = vars(family).get(about["learner"])
    if not (isinstance(kind, type) and issubclass(kind, MetaLearner)):
        raise UserError(f"{path}: {about['learner']!r} is no meta-learner of this version")
    if module is None:
        raise UserError(f"{path}: {kind.__name__} around its author's module: give module=…")
    if lacking := [name for name in about.get("give") or () if name not in arguments]:
        named = ", ".join(f"{name}=…" for name in lacking)
        raise UserError(f"{path}: no file can hold its {' and '.join(lacking)}: give {named}, too")
    flags = about.get("flags") or {}
    if strange := flags.keys() - {*known(kind), "head"}:
        raise UserError(f"{path}: {kind.__name__} of this version has no {min(strange)}")
    made: MetaLearner = kind(module, **flags | arguments)
    own = made.learner.state_dict() | made.learner.meta_parameters()
    checkpoint.check_model({"model": params}, own, str(path))
    for name, tensor in own.items():
        tensor.data.copy_(params[name])
    return made


def _there(device: str) -> torch.device:
    """Return the device of a name; auto: a GPU if there is one."""
    if device == "auto":
        device = accelerator.kind() or "cpu"
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # torch has no other type for them
        raise UserError(f"device {device!r}: {str(error).splitlines()[0]}") from error


def find(path: Path, iteration: int | str | None = None) -> tuple[Path, Path | None]:
    """Return the run directory and the file to `load`; None: a checkpoint of that directory."""
    path = Path(os.path.expanduser(path))
    if path.is_dir():
        return path, None
    if not path.exists():
        raise UserError(f"{path}: no such run directory or checkpoint")
    if iteration is not None:
        raise UserError(f"{path}: a file is one iteration; for another, give the run directory")
    for file in (path.absolute(), path.resolve()):  # a link may be elsewhere, or lead elsewhere
        run_dir = file.parent if file.name == RECORDED else file.parent.parent
        if (run_dir / "config.yaml").exists():
            return run_dir, file
    return run_dir, file


class Model(Saved):
    """A trained learner with its meta-parameters.

    Attributes:
        config: The configuration of its run.
        iteration: The number of training iterations after which this model was saved.
        image_shape: (C, H, W) of the images that it takes; None if it takes no images.
        device: Where its parameters are.
        run_dir: The run directory or record that it was loaded from; None: a file.
        ways: The run's number of classes; None for a regression. If the learner has no parameters
            for a class (`Learner.any_ways`), the model takes any number of classes.
    """

    run_dir: Path | None = None

    def __init__(
        self, learner: Learner, meta_params: Params, iteration: int, device: torch.device
    ) -> None:
        self.learner, self.config, self.iteration = learner, learner.config, iteration
        self.image_shape = learner.image_shape
        self.ways = None if learner.objective is REGRESSION else learner.config.ways
        for name, parameter in learner.meta_parameters().items():
            parameter.data = meta_params[name].to(device)
        learner.hold_buffers(device)
        # Switched once, not at each call, because threads may share a model.
        self._module = MetaLearner.around(learner, learner.phase(iteration)).eval()
        self.device = device

    def __repr__(self) -> str:
        config = self.config
        task = f"regression of {config.data}" if self.ways is None else f"{self.ways}-way"
        images = "" if self.image_shape is None else f", images {list(self.image_shape)}"
        return f"<{config.learner} of {title(config)}, {task}{images}, iteration {self.iteration}>"

    def about(self) -> dict[str, Any]:
        """See `Saved.about`; with the iteration."""
        return super().about() | {"iteration": self.iteration}

    @property
    def meta_params(self) -> Params:
        """The meta-parameters, ``{name: […]}``, which share memory with those of `module`."""
        return {name: p.detach() for name, p in self.learner.meta_parameters().items()}

    @property
    def _dtype(self) -> torch.dtype:
        return next(iter(self.meta_params.values())).dtype

    @property
    def steps(self) -> int:
        """The default number of inner steps, which is that of the run's evaluation."""
        return self.config.eval_inner_steps

    @alone()
    def adapt(
        self, support_x: inputs.Images, support_y: Any, steps: int | None = None
    ) -> AdaptedModel:
        """Adapt to a support set; the model itself does not change.

        Args:
            support_x: n examples, any number for each class: images (`maml.library.inputs.Images`),
                or numbers ``[n, …]`` if the model takes no images.
            support_y: n labels, any hashable values; numbers ``[n, …]`` for a regression.
            steps: Inner steps; None: as many as the run's evaluation takes.

        Raises:
            UserError: for examples or labels of a wrong shape, type, range or number of classes.
        """
        steps = self.steps if steps is None else inputs.whole(steps, "steps")
        x = self.examples(support_x, "support_x")
        classes: list[Hashable] | None = None
        learner = self.learner
        if self.ways is None:
            answered = self.learner.contents.point[1:]
            y = inputs.numbers(support_y, "support_y", answered).to(self._dtype)
            if len(y) != len(x):
                counts = f"{counted(len(y), 'target')} for {counted(len(x), 'example')}"
                raise UserError(f"support_y: {counts}")
        else:
            any_ways = self.learner.any_ways
            y, classes = inputs.labels(support_y, len(x), None if any_ways else self.ways)
            if len(classes) != self.ways:
                learner = copy.copy(self.learner)
                learner.config = with_values(self.config, ways=len(classes))
        y = y.to(self.device)
        # Adapting reads only the support set. `AdaptedModel.predict` gets the queries later.
        with torch.no_grad(), switched(learner, training=False):
            fast = adapted(learner, self.meta_params, Task(x, y, x[:0], y[:0]), steps)
        return AdaptedModel(self, fast.eval(), classes)

    @cached_property
    def module(self) -> MetaLearner:
        """The learner as a torch module, to train it further in your own loop.

        Its parameters share memory with the model's meta-parameters, so an optimizer's step changes
        the model, too. A call with tasks of `episodes` returns their mean outer loss.
        """
        return self._module.train()

    def network_state(self) -> Params:
        """Return CPU copies of the ``state_dict`` of a `FastModule` before any adaptation."""
        state = unadapted(self.learner, self.meta_params).state_dict()
        return {name: tensor.cpu().clone() for name, tensor in state.items()}

    @alone()
    def features(self, x: inputs.Images) -> Tensor:
        """Return `FastModule.features` before any adaptation, on the CPU; ``x`` as in `adapt`."""
        with torch.no_grad():
            fast = unadapted(self.learner, self.meta_params).eval()
            return fast.features(self.examples(x, "x")).cpu()

    @alone()
    def episodes(self, split: str = "test", *, training: bool = False) -> Tasks:
        """Return tasks of the run's data set, with the ways and shots of the run's evaluation.

        Args:
            split: "train", "validation" or "test".
            training: Return tasks as the run's training uses them, for `module`. They may have
                other ways and shots (``--train-ways``, ``--train-shots``).

        Raises:
            UserError: for another split, or if the data is no longer at its place.
        """
        if split not in ("train", "validation", "test"):
            raise UserError(f"split {split!r}: train, validation or test")
        return Tasks(self.learner.open_tasks(split, evaluation=not training))

    def examples(self, given: Any, what: str) -> Tensor:
        """Return examples ``[n, …]`` in the network's form. Raise `UserError` for a wrong form."""
        shape, contents = self.image_shape, self.learner.contents
        if shape is not None and contents.pixels and not contents.integers:
            x = inputs.images(given, shape, self.config.data, what)
        else:
            x = inputs.numbers(given, what, contents.shape, integers=contents.integers)
        return x.to(self.device, torch.int64 if contents.integers else self._dtype)


class AdaptedModel:
    """A model after its inner steps on a support set.

    Attributes:
        classes: The labels in order of first appearance. The i-th label is class i of the
            predictions. None for a regression.
        module: The adapted network. It gives outputs, features and parameters for ``[E, …]``.
    """

    def __init__(self, model: Model, module: FastModule, classes: list[Hashable] | None) -> None:
        self.classes, self.module, self._model = classes, module, model

    @alone(adapting=False)
    def predict(
        self, query_x: inputs.Images, batch_statistics: BatchStatistics = "support"
    ) -> Tensor:
        """Answer queries.

        Args:
            query_x: E examples, as in `Model.adapt`.
            batch_statistics: "support": a query's answer depends on no other query. "query": the
                queries are normalised together, as in MAML's published numbers, so give all queries
                at once. Both give the same for a network that normalises nothing.

        Returns:
            Probabilities ``[E, N]`` of the `classes`, on the CPU; for a regression the outputs.

        Raises:
            UserError: for queries of a wrong form; for "support" with a network whose answer to a
                query always depends on the other queries.
        """
        outputs = self.logits(query_x, batch_statistics)
        return outputs if self.classes is None else outputs.softmax(-1)

    @alone(adapting=False)
    def logits(
        self, query_x: inputs.Images, batch_statistics: BatchStatistics = "support"
    ) -> Tensor:
        """Return the outputs ``[E, N]`` on the CPU. `predict` turns them into probabilities."""
        model = self._model
        x = model.examples(query_x, "query_x")
        if batch_statistics == "support" and model.learner.mixes(x):
            raise UserError(
                f'batch_statistics "support": --network {model.config.network}: an example\'s '
                'answer depends on the other examples of its set; ask for "query" '
                "(maml.predict: --batch-statistics query)"
            )
        with torch.no_grad():
            return self.module(x, batch_statistics=batch_statistics).cpu()
