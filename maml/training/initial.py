"""``--init PATH``: training begins with weights that another run, or another program, has made.

Tensors are taken by name. Those of another program have the names that the network's author gave
them, as ``state_dict`` has them; perhaps with the names of what it was a part of before them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from datasets.folder import own_name
from datasets.words import counted
from maml.errors import UserError
from maml.evaluation import best
from maml.learners import Learner
from maml.networks.headless import in_short
from maml.networks.ordinary import AROUND
from maml.params import Params
from maml.run import checkpoint, directory

BEFORE = ("", "network.", f"network.{AROUND}")
"""What stands before the names in a run, where in another program nothing does."""

COMPILED = "_orig_mod."
"""What stands before the names in whatever ``torch.compile`` has wrapped, at any place."""


def initial_weights(source: str, learner: Learner) -> tuple[Params, str]:
    """Return meta-parameters to begin with, and a line: what was taken from where.

    The ``source`` is a run directory or a record, whose tested model it is; or a file: a
    checkpoint, or a ``state_dict`` that torch has saved. A parameter that it does not have begins
    as it would without it. So does the output layer where that has another shape: it tells other
    classes apart. A UserError names ``--init`` where weights do not fit or are not finite.
    """
    what = f"--init {source}"
    try:
        given, under = _saved(Path(source))
    except UserError as error:
        raise UserError(f"--init {error}") from error
    params = learner.meta_parameters()
    given, stripped = _named_as_here(given, params)
    head = getattr(learner.network, "head_prefix", None)
    begun, anew = dict(params), []
    for name, own in params.items():
        tensor = given.get(name)
        if tensor is not None and tensor.shape == own.shape:
            if not tensor.isfinite().all():
                raise UserError(f"{what}: {name} is not finite there")
            begun[name] = tensor.to(own.dtype)
        elif tensor is None or (head and name.partition(".")[2].startswith(head)):
            anew.append(name)
        else:
            raise UserError(f"{what}: {name} is {list(tensor.shape)} there, {list(own.shape)} here")
    if len(anew) == len(params):
        raise UserError(
            f"{what}: none of its tensors has a name and shape of these: {in_short(anew)}; there "
            f"it has {in_short(list(given)) or 'none'}"
        )
    line = f"weights: {len(params) - len(anew)} of {len(params)} tensors from {source}"
    line += f", its {under}" if under else ""
    line += f", without {stripped} before their names" if stripped else ""
    line += f"; anew: {in_short(anew)}" if anew else ""
    # Each process builds them for itself.
    buffers = sorted(learner.network.state_dict().keys() & dict(learner.network.named_buffers()))
    line += f"; buffers, as --network makes them: {in_short(buffers)}" if buffers else ""
    return begun, line


def met_before(source: str, classes: Mapping[str, Sequence[str]] | None) -> str:
    """Return a warning where ``source`` learned from classes that are tested here, or "".

    Published splits of Omniglot are divided otherwise; so is a folder to which a class was added.
    What has no ``classes.json`` above it is not known; nor are ``classes`` of splits that are None.
    """
    path = Path(source)
    folders = [path, *path.absolute().parents[:2]]
    learned = next(filter(None, (directory.read_json(f / "classes.json") for f in folders)), {})
    met = set(map(own_name, learned.get("train", ()))).intersection
    shared = " and ".join(
        f"{count} of the {counted(len(names), f'{split} class', f'{split} classes')}"
        for split, names in (classes or {}).items()
        if split != "train" and (count := len(met(map(own_name, names))))
    )
    if not shared:
        return ""
    return (
        f"warning: --init {source}: it was trained on {shared}, by their names: the accuracy on "
        "them says nothing about new classes"
    )


def _named_as_here(given: Params, params: Params) -> tuple[Params, str]:
    """Return tensors by the names that they have in ``params``, and what was stripped of them.

    It is whatever lets most names match: ``module.``, ``backbone.``, ``model.encoder.``.
    """
    plain = {name.replace(COMPILED, ""): tensor for name, tensor in given.items()}
    matches = Counter(
        (name[:cut], before)
        for name in plain
        for cut in (0, *(i + 1 for i, letter in enumerate(name) if letter == "."))
        for before in BEFORE
        if before + name[cut:] in params
    )
    # Between equals, the shortest prefix.
    part, before = min(
        matches, key=lambda found: (-matches[found], len(found[0])), default=("", "")
    )
    named = {before + n[len(part) :]: tensor for n, tensor in plain.items() if n.startswith(part)}
    stripped = [COMPILED] if plain.keys() != given.keys() else []
    return named, " and ".join([*stripped, part] if part else stripped)


def _saved(path: Path) -> tuple[Params, str]:
    """Return the parameters that are kept at ``path``, and under which key of a file they lie."""
    if path.is_dir():
        transductive = directory.read_config(path).transductive
        found: Params = best.content_of(path, None, transductive=transductive)["model"]
        return found, ""
    return checkpoint.load_parameters(path)
