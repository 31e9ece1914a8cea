"""Begin a run: from a checkpoint, with the weights of ``--init PATH``, or anew.

Weights of another run or program are matched by name. Another program's weights have the names of
its ``state_dict``, which the network's author chose. A prefix may stand before these names, if the
network was part of a larger module.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets.folder import own_name
from datasets.words import counted
from maml.config.fields import MUST_MATCH, Config, flag, must_match, user_path
from maml.config.presets import spelled
from maml.errors import UserError
from maml.evaluation import best
from maml.learners import Learner
from maml.metagradient.outer_optimizer import OuterOptimizer
from maml.networks.headless import in_short
from maml.networks.ordinary import AROUND
from maml.params import Params
from maml.run import checkpoint, directory
from maml.run.files import CLASSES, naming, read_json, read_rows, write_text

BEFORE = ("", "network.", f"network.{AROUND}")
"""Prefixes of a run's parameter names that another program's names do not have."""

COMPILED = "_orig_mod."
"""The prefix that ``torch.compile`` adds to the names of a wrapped module, at any place."""


def beginning(run_dir: Path, config: Config, params: Params) -> dict[str, Any] | None:
    """Return the content of the checkpoint to continue from, or None; refuse another run's."""
    is_begun = checkpoint.is_begun(run_dir)
    # An automatic restart repeats the command, whose --resume has taken effect already.
    if config.resume == "auto" or (is_begun and directory.is_restart(run_dir)):
        return _newest(run_dir, config, params) if is_begun else None
    path, anew = user_path("resume", config.resume), config.resume == "never"
    if not anew and not path.is_file():
        raise UserError(f"--resume {path}: no such file (auto, never or a checkpoint)")
    if is_begun and (anew or run_dir.resolve() not in path.resolve().parents):
        raise UserError(
            f"--resume {config.resume}: {run_dir} already holds a run; choose another --run-dir"
        )
    return None if anew else _checked(path, config, params)


def bring_history(run_dir: Path, config: Config) -> None:
    """Copy the rows of the run of ``--resume``'s checkpoint, if this run has no metrics.jsonl."""
    rows = run_dir / "metrics.jsonl"
    if config.resume in ("auto", "never") or rows.exists():
        return
    for folder in list(user_path("resume", config.resume).absolute().parents)[:2]:
        if (folder / rows.name).is_file():
            read_rows(folder / rows.name)
            write_text(rows, (folder / rows.name).read_text(encoding="utf-8"))
            return


def _newest(run_dir: Path, config: Config, params: Params) -> dict[str, Any]:
    """Return the newest whole checkpoint; set damaged ones aside, and name them in a warning."""
    damaged: dict[Path, checkpoint.DamagedError] = {}
    numbered = reversed(checkpoint.numbered_checkpoints(run_dir).values())
    for path in (checkpoint.last_checkpoint(run_dir), *numbered):
        try:
            saved = _checked(path, config, params)
        except checkpoint.DamagedError as error:
            damaged[path] = error
            continue
        if damaged:
            aside = [_set_aside(each).name for each in damaged if each.exists()]
            kept = f"; kept aside as {', '.join(aside)}" if aside else ""
            after = f"after iteration {saved['iteration']}"
            line = f"warning: {next(iter(damaged.values()))}; going on from {path}, {after}{kept}"
            print(line, file=sys.stderr, flush=True)
        return saved
    first = next(iter(damaged.values()))
    others = "; none of the others can be read either" if len(damaged) > 1 else ""
    raise UserError(f"{first}{others}") from first.__cause__


def _set_aside(path: Path) -> Path:
    names = (f"{path.name}.damaged{n}" for n in ("", *(f"-{n}" for n in range(2, 1000))))
    target = next(each for each in map(path.with_name, names) if not each.exists())
    with naming(path, "cannot set it aside: {}"):
        return path.rename(target)


def _checked(path: Path, config: Config, params: Params) -> dict[str, Any]:
    """Return a checkpoint's content; refuse one with other flags, or one that cannot continue."""
    saved = checkpoint.load(path)
    checkpoint.check_finite(saved, path)
    # An earlier version lacked some MUST_MATCH fields and behaved like their defaults. Other fields
    # that must match now may not be saved, so they are not compared.
    then = {name: getattr(Config(), name) for name in MUST_MATCH} | saved["config"]
    made_with = {name: then[name] for name in must_match(config) if name in then}
    others = {name: value for name, value in made_with.items() if value != getattr(config, name)}
    if others:
        name, value = next(iter(others.items()))
        more = f" ({len(others) - 1} more differ)" if others.keys() - {name} else ""
        raise UserError(
            f"{flag(name)} is {getattr(config, name)}, but {path} was made with {value}{more}; "
            f"give {spelled(others)}, or --resume never and another --run-dir"
        )
    checkpoint.check_model(saved, params, str(path))
    checkpoint.check_model(checkpoint.tested(saved), params, f"{path}: its best model")
    if saved["iteration"] > config.iterations:
        length = "iterations" if config.epochs is None else "epochs"
        made = f"{path} was made after iteration {saved['iteration']}"
        what = f"{flag(length)} {getattr(config, length)}: {made}"
        raise UserError(f"{what}; give more, or --resume never and another --run-dir")
    try:
        OuterOptimizer(config, params).load_state_dict(saved["optimizer"])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise checkpoint.DamagedError(
            f"{path}: its optimizer is damaged, or from another version of this program ({error}); "
            "--resume never and another --run-dir begin anew"
        ) from error
    return saved


def initial_weights(source: str, learner: Learner) -> tuple[Params, str]:
    """Return the initial meta-parameters, and a line that tells which come from ``source``.

    The ``source`` is a run directory or a record, and gives its tested model; or it is a file: a
    checkpoint, or a ``state_dict`` that torch saved. Parameters that it lacks, and an output layer
    of another shape, begin anew. A UserError names what does not fit or is not finite.
    """
    what = f"--init {source}"
    try:
        if Path(source).is_dir():
            # The metric does not matter, because the model that a run tests is not chosen anew.
            given, under = best.content_of(Path(source), None, transductive=True)["model"], ""
        else:
            given, under = checkpoint.load_parameters(Path(source))
    except UserError as error:
        raise UserError(f"--init {error}") from error
    params = learner.meta_parameters()
    given, stripped = _named_as_here(given, params)
    head = getattr(learner.network, "head_prefix", None)
    begun, anew, dtypes = dict(params), [], set()
    for name, new in params.items():
        tensor = given.get(name)
        if tensor is not None and tensor.shape == new.shape:
            if not tensor.is_floating_point():
                there, here = map(checkpoint.form_of, (tensor, new))
                raise UserError(f"{what}: {name} is {there} there, {here} here")
            if not tensor.isfinite().all():
                raise UserError(f"{what}: {name} is not finite there")
            begun[name] = tensor.to(new.dtype)
            if tensor.dtype != new.dtype:
                dtypes.add(str(tensor.dtype).removeprefix("torch."))
        elif tensor is None or (head and name.partition(".")[2].startswith(head)):
            anew.append(name)
        else:
            raise UserError(f"{what}: {name} is {list(tensor.shape)} there, {list(new.shape)} here")
    if len(anew) == len(params):
        raise UserError(
            f"{what}: none of its tensors has a name and shape of these: {in_short(anew)}; there "
            f"it has {in_short(list(given)) or 'none'}"
        )
    line = f"weights: {len(params) - len(anew)} of {len(params)} tensors from {source}"
    line += f", its {under}" if under else ""
    line += f", without {stripped} before their names" if stripped else ""
    line += f"; converted from {' and '.join(sorted(dtypes))}" if dtypes else ""
    line += f"; anew: {in_short(anew)}" if anew else ""
    # Buffers do not come from the source, because each process builds its own.
    buffers = sorted(learner.network.state_dict().keys() & dict(learner.network.named_buffers()))
    line += f"; buffers, as --network makes them: {in_short(buffers)}" if buffers else ""
    return begun, line


def met_before(source: str, classes: Mapping[str, Sequence[str]]) -> str:
    """Return a warning if ``source`` learned from classes that are tested here, else "".

    If ``classes`` is empty, or no ``classes.json`` is in ``source`` or above, nothing is known: "".
    """
    path = Path(source)
    folders = [path, *path.absolute().parents[:2]]
    found = (read_json(folder / "classes.json", CLASSES) for folder in folders)
    learned = next(filter(None, found), {})
    met = set(map(own_name, learned.get("train", ()))).intersection
    shared = " and ".join(
        f"{count} of the {counted(len(names), f'{split} class', f'{split} classes')}"
        for split, names in classes.items()
        if split != "train" and (count := len(met(map(own_name, names))))
    )
    if not shared:
        return ""
    return (
        f"warning: --init {source}: it was trained on {shared}, by their names: the accuracy on "
        "them says nothing about new classes"
    )


def _named_as_here(given: Params, params: Params) -> tuple[Params, str]:
    """Return tensors by their names in ``params``, and stripped prefixes (``model.encoder.``)."""
    plain = {name.replace(COMPILED, ""): tensor for name, tensor in given.items()}
    matches = Counter(
        (name[:cut], before)
        for name in plain
        for cut in (0, *(i + 1 for i, letter in enumerate(name) if letter == "."))
        for before in BEFORE
        if before + name[cut:] in params
    )
    # Choose the prefix that lets most names match. A tie goes to the shortest prefix.
    part, before = min(
        matches, key=lambda found: (-matches[found], len(found[0])), default=("", "")
    )
    named = {before + n[len(part) :]: tensor for n, tensor in plain.items() if n.startswith(part)}
    stripped = [COMPILED] if plain.keys() != given.keys() else []
    return named, " and ".join([*stripped, part] if part else stripped)
