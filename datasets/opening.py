"""Open a data set, by its name or a user's own function, as a stream of tasks.

A data set is a function ``open(split, ...)``. It gets those of the following that it names, or all
with ``**options``: ``name``, ``data_root``, ``ways``, ``shots``, ``queries``, ``seed``, ``dtype``,
and the fields of the configuration that its facts list. It returns ``{class: images}`` or a list of
images by class, uint8 ``[n, H, W]`` or ``[n, H, W, 3]`` each, if the images fit into memory;
`ImageClasses`, which may be memory-mapped; `Examples`, for ordinary classification; any `Episodes`;
`Acting`, for policies; or a ``Taskset`` of learn2learn.
"""

import functools
import importlib
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from datasets.batches import Batches, Examples, divide, labelled
from datasets.checked import Checked, Form, form_of
from datasets.environments.acting import Acting, Environment
from datasets.episodes import SPLITS, Episodes, FewShotImages, ImageClasses
from datasets.errors import DataError
from datasets.learn2learn_tasks import Tasksets, is_taskset
from datasets.paths import default_data_root
from datasets.registry import FLAG, DataSet, find
from datasets.tasks import Task
from datasets.theirs import calling


class Contents(NamedTuple):
    """What a network must know about a data set. The first three fields are as in `DataSet`."""

    image_shape: tuple[int, int, int] | None
    classifies: bool
    point: tuple[int, int] = (1, 1)
    pixels: bool = True  # whether the values of images are in [0, 1]
    form: Form | None = None  # of the training tasks, if one was opened to find out

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one example."""
        return self.image_shape or (self.form["query_x"][1] if self.form else self.point[:1])

    @property
    def integers(self) -> bool:
        """Return whether examples are integers, such as token ids, and not floats."""
        return self.form is not None and not self.form["query_x"][0].is_floating_point


def image_shape(data: str, **options: Any) -> tuple[int, int, int] | None:
    """Return the (C, H, W) of a data set's images without opening it; None if it has no images."""
    facts = find(data)
    if not isinstance(facts.image_shape, str):
        return facts.image_shape
    shape: Any = getattr(importlib.import_module(facts.module), facts.image_shape)(**options)
    return shape


def contents(data: str, data_root: Path | str | None = None, **request: Any) -> Contents:
    """Return a data set's contents. Open a user's own with the options of :func:`open_episodes`."""
    facts = find(data)
    if not facts.is_theirs:
        return Contents(image_shape(data, **request), facts.classifies, facts.point)
    opened = _open(facts, "train", data_root, request)
    if isinstance(opened, Acting):
        acts = opened.environment
        return Contents(None, classifies=False, point=(acts.observation_size, acts.outputs))
    if isinstance(opened, Episodes) or is_taskset(opened):
        tasks = open_episodes(data, "train", data_root=data_root, **request).tasks
        made: Any = tasks(torch.arange(1))
        task = made[0] if isinstance(made, list) else made
        return _contents_of(task, request["ways"], f"{FLAG} {data}")
    height, width, *colours = opened.images.shape[1:]
    return Contents((3 if colours else 1, height, width), classifies=True)


def _contents_of(task: Task, ways: int, what: str) -> Contents:
    """Return the contents that a task's query set shows."""
    x, y = task.query_x, task.query_y
    classifies = not y.is_floating_point()
    # Floats [E] minus outputs [E, 1] would broadcast to [E, E].
    if x.dim() < 3 or (y.dim() == 2 and not classifies):
        raise DataError(
            f"{what}: one task is {task}; query_x must be [1, E, C, H, W] for images, or "
            "[1, E, numbers, …]; query_y classes as integers, or floats [1, E, numbers]"
        )
    # Other targets, such as an image for an image, are up to the user's losses and network.
    answered = ways if classifies or y.dim() != 3 else y.shape[2]
    if x.dim() != 5:
        return Contents(None, classifies, (x.shape[2], answered), form=form_of(task))
    pixels = bool(x.min() >= 0) and bool(x.max() <= 1)
    c, h, w = x.shape[2:]
    return Contents((c, h, w), classifies, (1, answered), pixels, form_of(task))


def open_episodes(
    data: str,
    split: str,
    *,
    ways: int,
    shots: int,
    queries: int,
    seed: int,
    data_root: Path | str | None = None,
    dtype: torch.dtype = torch.float32,
    form: Form | None = None,
    classes: int | None = None,
    **options: Any,
) -> Episodes:
    """Return the few-shot tasks of a split of our data set, or of a user's own.

    ``data_root`` defaults to ``$MAML_DATA``, then ``~/.cache/maml``. Options that a data set does
    not take are ignored. ``form`` and ``classes``: the form and the number of labels that a user's
    own tasks must have (:mod:`datasets.checked`). Raise :class:`DataError` if anything is wrong.
    """
    facts = find(data)
    if "episodes" not in facts.tasks:
        other = "reinforce" if "environments" in facts.tasks else "supervised"
        raise DataError(f"{FLAG} {data}: not a few-shot data set; --learner {other} learns it")
    task = {"ways": ways, "shots": shots, "queries": queries, "seed": seed}
    opened = _open(facts, split, data_root, {**task, "dtype": dtype, **options})
    if is_taskset(opened):
        opened = Tasksets(opened, data, split, ways=ways, shots=shots, queries=queries)
    if isinstance(opened, Acting) or (isinstance(opened, Episodes) and not facts.is_theirs):
        return opened
    if isinstance(opened, Episodes):
        make = Checked(opened, facts, split, seed, dtype, form, classes)
        return opened.remade(make, split=split)
    if not isinstance(opened, ImageClasses):
        raise DataError(f"{FLAG} {data}: {type(opened).__name__} is for --learner supervised alone")
    published = not (facts.is_theirs or facts.own_images)
    return FewShotImages(opened, split=split, dtype=dtype, published=published, **task)


def open_batches(
    data: str,
    split: str,
    *,
    evaluation: bool,
    batch_size: int,
    data_root: Path | str | None = None,
    **request: Any,
) -> Batches:
    """Return the mini-batches of a split, as tasks, for training or for ``evaluation``.

    ``request``: ``ways``, ``seed``, ``dtype`` and the fields that the data set reads.
    """
    facts, ways = find(data), request["ways"]

    def examples(split: str) -> Examples:
        if "episodes" in facts.tasks and not facts.is_theirs:
            # Of a few-shot data set of ours: the drawings of the training classes.
            return divide(_open(facts, "train", data_root, request), split, ways)
        opened = _open(facts, split, data_root, request)
        if isinstance(opened, ImageClasses) and opened.names is not None:
            learned = _open(facts, "train", data_root, request).names
            if len(learned) != ways:
                say = f"{data} has {len(learned)} classes; give --ways {len(learned)}"
                raise DataError(f"--ways {ways}: {say}")
            return labelled(opened, learned, f"{FLAG} {data}: {split}")
        if not isinstance(opened, Examples):
            kind = type(opened).__name__
            raise DataError(f"{FLAG} {data}: {kind} is for few-shot learners alone")
        if strange := {*np.unique(opened.labels).tolist()} - {*range(ways)}:
            say = f"of {ways} ways labels are from 0 to {ways - 1}"
            raise DataError(f"{FLAG} {data}: {split} has the label {max(strange)}; {say}")
        return opened._replace(labels=np.asarray(opened.labels, dtype=np.int64))

    return Batches(
        examples(split),
        split=split,
        batch_size=batch_size,
        seed=request["seed"],
        reference=examples("train") if evaluation else None,
        dtype=request["dtype"],
    )


def open_environments(
    data: str, split: str, *, data_root: Path | str | None = None, **request: Any
) -> Acting:
    """Return the tasks of a split to act in; ``request`` holds the arguments of `Acting`."""
    opened = _open(find(data), split, data_root, request)
    if not isinstance(opened, Acting):
        raise DataError(f"{FLAG} {data}: {type(opened).__name__} is no environment")
    return opened


def options_of(data: str) -> set[str] | None:
    """Return the names of the options that a few-shot data set takes; None if it takes any."""
    facts = find(data)
    if "episodes" not in facts.tasks:
        return set()
    taken, takes_any = _options(facts.load())
    if takes_any and not takes_any.startswith("_"):
        return None
    return taken - {"name", "split", *facts.arguments} | {"dtype"}


def _options(function: Any) -> tuple[set[str], str]:
    """Return the names of a function's parameters, and of the one that takes all others, or ""."""
    parameters = inspect.signature(function).parameters
    rest = [name for name, each in parameters.items() if each.kind is each.VAR_KEYWORD]
    return parameters.keys() - rest, "".join(rest)


def _open(facts: DataSet, split: str, data_root: Path | str | None, request: dict[str, Any]) -> Any:
    """Return what a data set returns for a split, called with those options that it takes."""
    for name in facts.arguments.keys() & {"data_root", *request}:
        say = f"--{name.replace('_', '-')}"
        raise DataError(f"{FLAG} {facts.name}: {name} is what {say} says: leave it out")
    root = default_data_root() if data_root is None else Path(data_root)
    options = {"name": facts.name, "data_root": root, **request}
    loaded = facts.load()
    if not facts.is_theirs:
        if split not in SPLITS:
            raise DataError(f"--split {split}: unknown; one of {', '.join(SPLITS)}")
        if isinstance(loaded, type) and issubclass(loaded, Environment):
            return Acting(loaded(), split, **options)
        return loaded(split, **options)
    taken, takes_any = _options(loaded)
    names = options.keys() if takes_any else options.keys() & taken
    passed = {name: options[name] for name in sorted(names - facts.arguments.keys())}
    try:
        hash(tuple(passed.values()))
    except TypeError:  # a list is no key of a cache
        return _call_theirs.__wrapped__(facts.name, split, **passed)
    return _call_theirs(facts.name, split, **passed)


@functools.lru_cache(maxsize=4, typed=True)
def _call_theirs(data: str, split: str, /, **options: Any) -> Any:
    """Return a user's own function's result, cached; make images by class :class:`ImageClasses`."""
    facts = find(data)
    with calling(data=facts):
        returned = facts.maker()(split, **options)
    if isinstance(returned, (ImageClasses, Examples)):
        _check_images(returned.images, returned.images.shape[1:], f"{FLAG} {data}: {split}")
        if isinstance(returned.images, torch.Tensor):
            return returned._replace(images=returned.images.numpy(force=True))
    elif not isinstance(returned, Episodes) and not is_taskset(returned):
        return image_classes(returned, data, split)
    return returned


def image_classes(by_class: Any, data: str, split: str) -> ImageClasses:
    """Copy a mapping or a list of images by class, or raise :class:`DataError`."""
    if isinstance(by_class, Sequence):
        by_class = dict(enumerate(by_class))
    if not isinstance(by_class, Mapping):
        raise DataError(
            f"{FLAG} {data}: returned {type(by_class).__name__} for {split}, not {{class: images}},"
            " ImageClasses, Examples, Episodes or a Taskset of learn2learn"
        )
    if not by_class:
        raise DataError(f"{FLAG} {data}: returned no class for {split}")
    names, arrays = [*map(str, by_class)], [*map(np.asarray, by_class.values())]
    for name, images in zip(names, arrays, strict=True):
        _check_images(images, arrays[0].shape[1:], f"{FLAG} {data}: class {name} of {split}")
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{FLAG} {data}: two classes of {split} have the name {twice[0]}, as text")
    return ImageClasses.in_order(np.concatenate(arrays), [*map(len, arrays)], names)


def _check_images(images: Any, size: tuple[int, ...], what: str) -> None:
    is_image = images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3)
    if images.dtype not in (np.uint8, torch.uint8) or not is_image or images.shape[1:] != size:
        say = "all must be uint8 [n, H, W] or [n, H, W, 3], of one size"
        raise DataError(f"{what} is {images.dtype} {list(images.shape)}; {say}")
