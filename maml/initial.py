"""``--init PATH``: training begins with weights that another run, or another program, has made.

Tensors are taken by name. Those of another program have the names that the network's author gave
them, as ``state_dict`` has them.
"""

from __future__ import annotations

from pathlib import Path

from maml import best
from maml.errors import UserError
from maml.learners import Learner
from maml.networks.headless import in_short
from maml.networks.ordinary import AROUND
from maml.params import Params
from maml.run import checkpoint, directory

BEFORE = ("", "network.", f"network.{AROUND}")
"""What stands before the names in a run, where in another program nothing does."""


def initial_weights(source: str, learner: Learner) -> tuple[Params, str]:
    """Return meta-parameters to begin with, and a line: what was taken from where.

    A parameter that ``source`` does not have begins as it would without it. So does the output
    layer where that has another shape: it tells other classes apart.

    Args:
        source: A run directory or a record, whose tested model it is; or a file: a checkpoint, or a
            ``state_dict`` that torch has saved.
        learner: Whose parameters they become; they take its dtype.

    Raises:
        UserError: naming ``--init``, if there are no such weights, none of them has a name of the
            learner's, one is of another shape, or one is not finite.
    """
    what = f"--init {source}"
    try:
        given = _saved(Path(source))
    except UserError as error:
        raise UserError(f"--init {error}") from error
    params = learner.meta_parameters()
    around = max(BEFORE, key=lambda before: sum(before + name in params for name in given))
    given = {around + name: tensor for name, tensor in given.items()}
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
    line += f"; anew: {in_short(anew)}" if anew else ""
    # Each process builds them for itself.
    buffers = sorted(learner.network.state_dict().keys() & dict(learner.network.named_buffers()))
    line += f"; buffers, as --network makes them: {in_short(buffers)}" if buffers else ""
    return begun, line


def _saved(path: Path) -> Params:
    """Return the parameters that are kept at ``path``."""
    if path.is_dir():
        transductive = directory.read_config(path, own=False).transductive
        found: Params = best.content_of(path, None, transductive=transductive)["model"]
        return found
    return checkpoint.load_any_parameters(path)
