"""Convert a user's data: images and labels for a model, tasks for a meta-learner.

Bad input raises a one-line `UserError`. Shape legend: n examples, E examples of a task, C H W.
"""

import contextlib
import inspect
import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from datasets import accelerator
from datasets.errors import needs
from datasets.tasks import Task
from datasets.whole import regular
from datasets.words import counted
from maml.errors import UserError
from maml.metagradient.by_task import one_by_one
from maml.networks.headless import in_short

Images: TypeAlias = Any
"""Floats ``[n, C, H, W]`` in [0, 1]; uint8 ``[n, H, W]`` or ``[n, H, W, C]``; a PIL image, a path
of a file that PIL opens, or a list of these."""

Parts: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
GivenTasks: TypeAlias = Task | Parts | Sequence[Task | Parts]
"""Tensors with a leading task dimension, or a list of tasks."""

FORM = (
    "give (support_x, support_y, query_x, query_y) with a leading task dimension, or a list of "
    "such tuples without it"
)

_ROUNDING = 1e-6


def images(given: Images, shape: tuple[int, int, int], data: str, what: str) -> Tensor:
    """Return images ``[n, C, H, W]``, floats in [0, 1]. Floats keep their precision.

    Arrays must have the right size. PIL images of any size and mode are converted to the form of
    the images in the data set ``data``. ``what`` names the argument in errors, as "support_x".
    """
    array = _array(given, shape, data, what)
    channels, height, width = shape
    if array.dtype == np.uint8:
        forms = [(height, width)] * (channels == 1) + [(height, width, channels)]
        if array.shape[1:] not in forms:
            fitted = " (PIL images of any size are fitted)"
            raise _misfit(f"{what}: uint8", array, *forms, more=fitted)
        array = array.reshape(len(array), height, width, channels).transpose(0, 3, 1, 2)
        return torch.from_numpy(np.ascontiguousarray(array)).to(torch.float64).div_(255)
    if not np.issubdtype(array.dtype, np.floating):
        raise UserError(f"{what}: of type {array.dtype}; give floats in [0, 1], or uint8")
    if array.shape[1:] != shape:
        raise _misfit(f"{what}: floats", array, shape)
    least, most = float(array.min()), float(array.max())
    # `not` a comparison, because nan must fail, too.
    if not (least >= -_ROUNDING and most <= 1 + _ROUNDING):
        raise UserError(f"{what}: floats from {least:g} to {most:g}; they must be in [0, 1]")
    return torch.from_numpy(np.array(array))


def numbers(given: Any, what: str, shape: tuple[int, ...], *, integers: bool = False) -> Tensor:
    """Return floats, or integers, ``[n, *shape]``: examples or targets that are no pictures."""
    array = _stacked(given, what)
    kind, called = (np.integer, "integers") if integers else (np.floating, "floats")
    if not np.issubdtype(array.dtype, kind) or array.shape[1:] != shape:
        raise _misfit(f"{what}: {array.dtype}", array, shape, takes=f"{called} ")
    return torch.from_numpy(np.array(array))


def labels(given: Any, n: int, ways: int | None) -> tuple[Tensor, list[Hashable]]:
    """Return labels as class numbers ``[n]`` int64, and the classes in order of first appearance.

    ``ways``: the model's number of classes; None: any number.
    """
    plain = given.tolist() if hasattr(given, "tolist") else given
    # We refuse a set, which has no order, and a generator, which can be read only once.
    if not isinstance(plain, (list, tuple, range)):
        kind = type(given).__name__
        raise UserError(f"support_y: {kind}; give a list with one label for each example")
    values = [item.item() if isinstance(item, (Tensor, np.generic)) else item for item in plain]
    if len(values) != n:
        raise UserError(f"support_y: {counted(len(values), 'label')} for {counted(n, 'example')}")
    try:
        classes = list(dict.fromkeys(values))
    except TypeError as error:
        raise UserError(f"support_y: a label must be hashable ({error})") from None
    if ways is not None and len(classes) != ways:
        found = f"{counted(len(classes), 'class', 'classes')} ({in_short(map(repr, classes))})"
        raise UserError(f"support_y: {found}; the model tells {ways} apart")
    number = {one: i for i, one in enumerate(classes)}
    return torch.tensor([number[value] for value in values]), classes


def whole(given: Any, what: str) -> int:
    """Return a whole number of Python, numpy or torch as an int. It must be at least 0."""
    with contextlib.suppress(TypeError):
        if not isinstance(given, bool) and (number := operator.index(given)) >= 0:
            return number
    raise UserError(f"{what} {given!r}: give a whole number, at least 0")


def _array(given: Images, shape: tuple[int, int, int], data: str, what: str) -> NDArray[Any]:
    """Return images as an array of any shape and type. PIL images get the model's size and mode."""
    if _is_picture(given):
        given = [given]
    many = given if isinstance(given, (list, tuple)) else []
    pictures = [*map(_is_picture, many)]
    if not any(pictures):
        return _stacked(given, what)
    if not all(pictures):
        raise UserError(f"{what}: pictures (PIL images, paths) and others in one list")
    channels, height, width = shape
    if height != width or channels not in (1, 3):
        raise UserError(f"{what}: PIL images are fitted to squares; the model takes {list(shape)}")
    with needs("train", "a picture"):
        from datasets.image_files import Decoder, as_in
    decoder = Decoder(height, "rgb" if channels == 3 else "grey")
    return as_in(data, np.stack([_decoded(one, decoder, what) for one in given]))


def _is_picture(one: Any) -> bool:
    """Return whether this is a path or an image of PIL, which need not be there."""
    of_pil = any(kind.__module__.startswith("PIL.") for kind in type(one).__mro__)
    return of_pil or isinstance(one, (str, Path))


def _decoded(picture: Any, decoder: Any, what: str) -> NDArray[np.uint8]:
    """Return a PIL image, or a file that PIL opens, in the size and mode of the model's images.

    ``decoder``: a `datasets.image_files.Decoder`.
    """
    from PIL import Image

    from datasets.image_files import shown

    which = "an image" if isinstance(picture, Image.Image) else shown(picture)
    try:
        if isinstance(picture, Image.Image):
            return decoder.image(picture)
        with Image.open(regular(Path(picture).expanduser())) as opened:
            return decoder.file(opened)
    # Pillow's readers raise errors of every kind for damaged bytes.
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(f"{what}: {which} cannot be read: {reason}") from error


def _stacked(given: Any, what: str) -> NDArray[Any]:
    """Return an array, a tensor, or a list of arrays or tensors as one array."""
    parts = given if isinstance(given, (list, tuple)) else [given]
    try:
        plain = [part.detach().cpu() if isinstance(part, Tensor) else part for part in parts]
        arrays = list(map(np.asarray, plain))
        array = np.stack(arrays) if parts is given else arrays[0]
    except (TypeError, ValueError) as error:
        # Arrays, or lists, of different lengths; types that numpy lacks; an empty list.
        raise UserError(f"{what}: no array of numbers: {str(error).splitlines()[0]}") from error
    if array.shape[:1] == (0,):
        raise UserError(f"{what}: empty; at least one example is needed")
    return array


def _misfit(
    what: str, array: NDArray[Any], *forms: tuple[int, ...], takes: str = "", more: str = ""
) -> UserError:
    wanted = " or ".join(f"[n, {', '.join(map(str, form))}]" for form in forms)
    return UserError(f"{what} of shape {list(array.shape)}; the model takes {takes}{wanted}{more}")


def as_tasks(given: Any, dtype: torch.dtype, *, leaves: bool = True) -> list[Task]:
    """Return tasks as a list of batches of one task each: tensors ``[1, E, …]``.

    Floats must have the ``dtype`` of the module's parameters. With ``leaves``, tensors that require
    a gradient are refused.
    """
    try:
        items = None if isinstance(given, Tensor | np.ndarray) else list(_by_name(given))
    except TypeError:
        items = None
    if items is None or any(isinstance(item, str) for item in items[:1]):  # names of a dictionary
        raise UserError(f"tasks is a {type(given).__name__}; {FORM}")
    if not items:
        raise UserError(f"tasks is empty; {FORM}")
    if any(isinstance(part, Tensor | np.ndarray) for part in items):
        whole = _task(items, "tasks")
        tensors = pytree.tree_leaves(whole)
        if min(part.dim() for part in tensors) < 2 or len({len(part) for part in tensors}) > 1:
            shapes = ", ".join(str(list(part.shape)) for part in tensors)
            raise UserError(f"tasks: its tensors are {shapes}; {FORM}")
        if not len(tensors[-1]):
            raise UserError(f"tasks is empty; {FORM}")
        tasks = list(one_by_one(whole))
    else:
        found = (_task(item, f"task {i}") for i, item in enumerate(items))
        tasks = [pytree.tree_map(lambda part: part[None], task) for task in found]
    for i, task in enumerate(tasks):
        _check(f"task {i}", task, dtype, leaves)
    return tasks


@contextlib.contextmanager
def as_support(x: Any, y: Any, dtype: torch.dtype) -> Iterator[Task]:
    """Yield a support set as a task ``[1, E, …]`` that queries it, too; errors name the support."""
    if not all(isinstance(part, Tensor) for part in pytree.tree_leaves(as_inputs(y))):
        raise UserError(
            "adapt takes (support_x, support_y), tensors or arrays; pictures and names are for "
            "maml.load"
        )
    try:
        (task,) = as_tasks([(x, y, x, y)], dtype, leaves=False)
        yield task
    except UserError as error:
        said = str(error).removeprefix("task 0: ").replace("query_", "support_")
        raise UserError(said) from error


def _by_name(given: Any) -> Any:
    """Return a dictionary's or named tuple's parts in `Task` order; return others unchanged."""
    named = given if isinstance(given, Mapping) else getattr(given, "_asdict", dict)()
    return [named[n] for n in Task._fields] if named.keys() >= {*Task._fields} else given


def _task(item: Any, what: str) -> Task:
    try:
        parts = [as_inputs(part) for part in _by_name(item)]
    except TypeError:
        parts = [item]
    if len(parts) != 4 or not all(map(pytree.tree_leaves, parts)):
        kinds = ", ".join(type(part).__name__ for part in parts[:6])
        raise UserError(f"{what} is ({kinds}); {FORM}")
    task = Task(*parts)
    for name, tensor in _named(task):
        if not isinstance(tensor, Tensor):
            kind = f"{type(tensor).__name__} {getattr(tensor, 'dtype', '')}".rstrip()
            raise UserError(f"{what}: {name} is {kind}; give a tensor, or leave an input out")
    support_y, query_y = (pytree.tree_map(_labels, y) for y in (task.support_y, task.query_y))
    return task._replace(support_y=support_y, query_y=query_y)


def as_inputs(given: Any) -> Any:
    """Return arrays of numpy as tensors. Several inputs become a tuple, or a dictionary by name."""
    if isinstance(given, Mapping):
        return {name: as_inputs(given[name]) for name in sorted(given, key=str)}
    if isinstance(given, list | tuple):
        return tuple(map(as_inputs, given))
    if isinstance(given, np.ndarray) and given.dtype.kind in "biufc":
        return torch.from_numpy(np.ascontiguousarray(given))
    return given


def called_with(network: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Return the inputs of a call ``network(*inputs, **named)`` in the form of a task's inputs."""
    if not named:
        return as_inputs(inputs[0] if len(inputs) == 1 else inputs)
    if inputs:  # a task's inputs are all in order or all by name
        own = getattr(network, "module", network)
        named = inspect.signature(own.forward).bind(*inputs, **named).arguments
    return as_inputs(named)


def _labels(y: Tensor) -> Tensor:
    # torch's losses expect int64 labels.
    return y.long() if y.dtype in (torch.int32, torch.int16, torch.int8, torch.uint8) else y


def _check(what: str, task: Task, dtype: torch.dtype, leaves: bool) -> None:
    for name, tensor in _named(task):
        if leaves and tensor.requires_grad:
            raise UserError(
                f"{what}: {name} requires a gradient, and a meta-gradient does not reach tasks: "
                "detach it, or use adapt() and an outer loss of your own"
            )
        if tensor.dtype == torch.bfloat16:
            raise UserError(f"{what}: {name} is {tensor.dtype}; give {dtype}: a call rounds it")
        if tensor.is_floating_point() and tensor.dtype != dtype:
            raise UserError(
                f"{what}: {name} is {tensor.dtype}, and the module's parameters are {dtype}; "
                "give both as one dtype"
            )
        part = name.partition("_")[0]
        y = pytree.tree_leaves(getattr(task, f"{part}_y"))[0]
        if tensor.dim() < 2 or y.dim() < 2:
            shapes = f"{name} is {list(tensor.shape[1:])} and {part}_y {list(y.shape[1:])}"
            raise UserError(f"{what}: {shapes}; give [E, …] each, an entry for each example")
        if tensor.shape[:2] != y.shape[:2]:
            counts = f"{name} has {tensor.shape[1]} examples, and {part}_y {y.shape[1]} targets"
            raise UserError(f"{what}: {counts}")
    if not n_examples(task.query_y):
        raise UserError(f"{what}: query_x is empty: a loss is of its examples")


def n_examples(y: Any) -> int:
    """Return E, the number of examples, of targets ``[B, E, …]``: one tensor, or several."""
    return pytree.tree_leaves(y)[0].shape[1]


@contextlib.contextmanager
def explained(tasks: Sequence[Task], like: Tensor) -> Iterator[None]:
    """Say which input it is of, if torch raises an error about a dtype or a device.

    Only torch tells, because a module may move and convert its inputs. ``like``: a parameter.
    """
    try:
        yield
    except RuntimeError as error:
        said = str(error)
        every = [(i, *named) for i, task in enumerate(tasks) for named in _named(task)]
        for i, name, tensor in every:
            what = f"task {i}: {name}" if len(tasks) > 1 else name
            if tensor.device != like.device and "device" in said:
                raise UserError(
                    f"{what} is on {tensor.device}, and the module's parameters on {like.device}: "
                    f"move it, as tasks.to({str(like.device)!r})"
                ) from error
            if tensor.dtype == torch.uint8 and ("Byte" in said or "unsigned char" in said):
                raise UserError(
                    f"{what} is torch.uint8, and the module's parameters are {like.dtype}: for "
                    "images, give .float() / 255"
                ) from error
        raise


def _named(task: Task) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of a task with its name, as "query_x" or "query_x['mask']"."""
    for field, part in task._asdict().items():
        if isinstance(part, Tensor):  # torch's walk takes as long as all checks
            yield field, part
            continue
        for path, tensor in pytree.tree_flatten_with_path(part)[0]:
            yield field + pytree.keystr(path), tensor


def with_labels_here(tasks: Sequence[Task]) -> list[Task]:
    """Return tasks whose integer targets are on the CPU, to be looked at; one copy brings all."""
    every = [y for task in tasks for y in (task.support_y, task.query_y)]
    whole = [i for i, y in enumerate(every) if isinstance(y, Tensor) and not y.is_floating_point()]
    for i, y in zip(whole, accelerator.read([every[i] for i in whole]), strict=True):
        every[i] = y
    sets = zip(tasks, every[::2], every[1::2], strict=True)
    return [task._replace(support_y=support, query_y=query) for task, support, query in sets]


def ways_of(i: int, task: Task) -> int:
    """Return the number of classes in task ``i``, for a learner that takes any number."""
    for name, y in (("support_y", task.support_y), ("query_y", task.query_y)):
        if not isinstance(y, Tensor) or y.is_floating_point() or y.dim() != 2:
            is_one = isinstance(y, Tensor)
            kind = f"{y.dtype} {list(y.shape[1:])}" if is_one else f"a {type(y).__name__}"
            raise UserError(
                f"task {i}: {name} is {kind}; give the number of each example's class, integers [E]"
            )
    known, asked = set(task.support_y[0].tolist()), set(task.query_y[0].tolist())
    if min(known) < 0:
        raise UserError(f"task {i}: support_y has the label {min(known)}; the first class is 0")
    if missing := set(range(len(known))) - known:
        raise UserError(f"task {i}: support_y has no example of class {min(missing)}")
    if strange := asked - known:
        unknown = f"query_y has the label {max(strange)}, and support_y no example of that class"
        raise UserError(f"task {i}: {unknown}")
    return len(known)
