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
    known = find(data)
    if not isinstance(known.image_shape, str):
        return known.image_shape
    return _function(known, known.image_shape)(**options)


def contents(data: str, data_root: Path | str | None = None, **request: Any) -> Contents:
    """Return a data set's contents. Open a user's own with the options of :func:`open_episodes`."""
    known = find(data)
    if not known.is_theirs:
        return Contents(image_shape(data, **request), known.classifies, known.point)
    found = _call(known, known.attribute, "train", data_root, request)
    if isinstance(found, Acting):
        acts = found.environment
        return Contents(None, classifies=False, point=(acts.observation_size, acts.outputs))
    if isinstance(found, Episodes) or is_taskset(found):
        tasks = open_episodes(data, "train", data_root=data_root, **request).tasks
        made: Any = tasks(torch.arange(1))
        task = made[0] if isinstance(made, list) else made
        return _contents_of(task, request["ways"], f"{FLAG} {data}")
    image = found.images.shape[1:]
    return Contents((image[2] if len(image) == 3 else 1, image[0], image[1]), classifies=True)


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
    known = find(data)
    if known.episodes is None:
        other = "reinforce" if known.environments else "supervised"
        raise DataError(f"{FLAG} {data}: not a few-shot data set; --learner {other} learns it")
    task = {"ways": ways, "shots": shots, "queries": queries, "seed": seed}
    found = _call(known, known.episodes, split, data_root, {**task, "dtype": dtype, **options})
    if is_taskset(found):
        found = Tasksets(found, data, split, ways=ways, shots=shots, queries=queries)
    if isinstance(found, Acting) or (isinstance(found, Episodes) and not known.is_theirs):
        return found
    if isinstance(found, Episodes):
        make = Checked(found, known, split, seed, dtype, form, classes)
        return found.remade(make, split=split)
    if not isinstance(found, ImageClasses):
        raise DataError(f"{FLAG} {data}: {type(found).__name__} is for --learner supervised alone")
    published = not (known.is_theirs or known.own_images)
    return FewShotImages(found, split=split, dtype=dtype, published=published, **task)


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
    known, ways = find(data), request["ways"]
    opener = known.examples or ""

    def examples(split: str) -> Examples:
        if opener == known.episodes and not known.is_theirs:
            # Of a few-shot data set of ours: the drawings of the training classes.
            return divide(_call(known, opener, "train", data_root, request), split, ways)
        found = _call(known, opener, split, data_root, request)
        if isinstance(found, ImageClasses) and found.names is not None:
            learned = _call(known, opener, "train", data_root, request).names
            if len(learned) != ways:
                say = f"{data} has {len(learned)} classes; give --ways {len(learned)}"
                raise DataError(f"--ways {ways}: {say}")
            return labelled(found, learned, f"{FLAG} {data}: {split}")
        if not isinstance(found, Examples):
            raise DataError(f"{FLAG} {data}: {type(found).__name__} is for few-shot learners alone")
        if strange := {*np.unique(found.labels).tolist()} - {*range(ways)}:
            say = f"of {ways} ways labels are from 0 to {ways - 1}"
            raise DataError(f"{FLAG} {data}: {split} has the label {max(strange)}; {say}")
        return found._replace(labels=np.asarray(found.labels, dtype=np.int64))

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
    known = find(data)
    found = _call(known, known.environments or "", split, data_root, request)
    if not isinstance(found, Acting):
        raise DataError(f"{FLAG} {data}: {type(found).__name__} is no environment")
    return found


def options_of(data: str) -> set[str] | None:
    """Return the names of the options that a few-shot data set takes; None if it takes any."""
    known = find(data)
    if known.episodes is None:
        return set()
    parameters = inspect.signature(_function(known, known.episodes)).parameters.values()
    if any(each.kind is each.VAR_KEYWORD and each.name[0] != "_" for each in parameters):
        return None
    named = {each.name for each in parameters if each.kind is not each.VAR_KEYWORD}
    return named - {"name", "split", *known.arguments} | {"dtype"}


def _function(known: DataSet, name: str) -> Any:
    """Return ``name`` of a data set's module; for an environment, a function that opens tasks."""
    found = getattr(importlib.import_module(known.module), name)
    if isinstance(found, type) and issubclass(found, Environment):
        return functools.partial(Acting, found())
    return found


def _call(
    known: DataSet, opener: str, split: str, data_root: Path | str | None, request: dict[str, Any]
) -> Any:
    """Call ``opener`` with those of the options that it takes, and return its result."""
    for name in known.arguments.keys() & {"data_root", *request}:
        say = f"--{name.replace('_', '-')}"
        raise DataError(f"{FLAG} {known.name}: {name} is what {say} says: leave it out")
    if split not in SPLITS and not known.is_theirs:
        raise DataError(f"--split {split}: unknown; one of {', '.join(SPLITS)}")
    function = _function(known, opener)
    root = default_data_root() if data_root is None else Path(data_root)
    options = {"name": known.name, "data_root": root, **request}
    parameters = inspect.signature(function).parameters
    if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        options = {name: value for name, value in options.items() if name in parameters}
    if not known.is_theirs:
        return function(split, **options)
    own = {name: options[name] for name in sorted(options) if name not in known.arguments}
    try:
        hash(tuple(own.values()))
    except TypeError:  # a list is no key of a cache
        return _call_theirs.__wrapped__(known.name, split, **own)
    return _call_theirs(known.name, split, **own)


@functools.lru_cache(maxsize=4, typed=True)
def _call_theirs(data: str, split: str, /, **options: Any) -> Any:
    """Return a user's own function's result, cached; make images by class :class:`ImageClasses`."""
    known = find(data)
    with calling(data=known):
        found = known.maker()(split, **options)
    if isinstance(found, (ImageClasses, Examples)):
        _check_images(found.images, found.images.shape[1:], f"{FLAG} {data}: {split}")
        if isinstance(found.images, torch.Tensor):
            found = found._replace(images=found.images.numpy(force=True))
    elif not isinstance(found, Episodes) and not is_taskset(found):
        found = image_classes(found, data, split)
    return found


def image_classes(found: Any, data: str, split: str) -> ImageClasses:
    """Copy a mapping or a list of images by class, or raise :class:`DataError`."""
    if isinstance(found, Sequence):
        found = dict(enumerate(found))
    if not isinstance(found, Mapping):
        raise DataError(
            f"{FLAG} {data}: returned {type(found).__name__} for {split}, not {{class: images}}, "
            "ImageClasses, Examples, Episodes or a Taskset of learn2learn"
        )
    arrays = {str(name): np.asarray(images) for name, images in found.items()}
    size = next((images.shape[1:] for images in arrays.values()), ())
    for name, images in arrays.items():
        _check_images(images, size, f"{FLAG} {data}: class {name} of {split}")
    if not arrays:
        raise DataError(f"{FLAG} {data}: returned no class for {split}")
    if len(arrays) < len(found):
        twice = next(name for name in arrays if [*map(str, found)].count(name) > 1)
        raise DataError(f"{FLAG} {data}: two classes of {split} have the name {twice}, as text")
    joined = np.concatenate([*arrays.values()])
    return ImageClasses.in_order(joined, [len(images) for images in arrays.values()], [*arrays])


def _check_images(images: Any, size: tuple[int, ...], what: str) -> None:
    is_image = images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3)
    if images.dtype not in (np.uint8, torch.uint8) or not is_image or images.shape[1:] != size:
        say = "all must be uint8 [n, H, W] or [n, H, W, 3], of one size"
        raise DataError(f"{what} is {images.dtype} {list(images.shape)}; {say}")
