"""A learner in one file of safetensors, or on the Hugging Face Hub.

The file holds the meta-parameters, and as its metadata what `maml.load` makes the learner of: the
configuration of a run; or a class of the family and its flags, for the module comes from the user.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets.errors import needs
from datasets.whole import regular
from maml.config import OF_A_HOST
from maml.errors import UserError
from maml.learners import Learner
from maml.library.flags import known
from maml.networks.ordinary import own_name
from maml.params import Params
from maml.run.files import misfit, naming, write_bytes

if TYPE_CHECKING:
    from maml.library.hub import OnHub

ENDING, KEY = ".safetensors", "maml"
FORM = {
    "config": (dict, None), "iteration": int | None,
    "learner": str | None, "flags": (dict, None), "give": ([str], None),
}  # fmt: skip
"""What a file holds as JSON under `KEY`: of a run its configuration; of a learner around a user's
module its class, its flags, and the names of the arguments that no file can hold."""


class Saved:
    """What can be saved, published and loaded: a meta-learner, or a `maml.Model`."""

    learner: Learner
    given: Sequence[str] = ()
    """The arguments that it was made with and that no file can hold."""

    def about(self) -> dict[str, Any]:
        """Return what `maml.load` makes the learner of, for JSON: see `FORM`."""
        learner, config = self.learner, self.learner.config
        bases = [b.__name__ for b in type(self).__mro__ if b.__module__ == "maml.library.family"]
        if not bases:  # of a run: the fields that mean the same on any host
            fields = dataclasses.asdict(config).items()
            return {"config": {n: v for n, v in fields if n not in (*OF_A_HOST, "init")}}
        flags = {name: getattr(config, name, None) for name in known(type(self))}
        if "order" in flags:
            flags["order"] = 1 if config.order == "first" else 2
        layers = {"head": "head_prefix", "context_layer": "context_layer"}
        for name, attribute in layers.items():
            layer = getattr(learner.network, attribute, None)
            if isinstance(layer, str) and (name == "head" or name in flags):
                flags[name] = own_name(learner.network, layer).rstrip(".")
        for name in self.given:
            flags.pop(name, None)
        give = {"give": [*self.given]} if self.given else {}
        return {"learner": bases[0], "flags": flags} | give

    def save(self, path: Path | str) -> None:
        """Write the meta-parameters to a ``.safetensors`` file, whole or not at all.

        ``maml.load(path)`` reads it; of a meta-learner around a module of your own,
        ``maml.load(path, module=net)``, with its ``loss``, ``inner_loss`` and rates if they are
        your own. Both need the extra ``hf``.

        Raises:
            UserError: if the file cannot be written, or has another ending.
        """
        path = Path(path).expanduser()
        if path.suffix != ENDING:
            raise UserError(f"{path}: give a name that ends in {ENDING}")
        with needs("hf", f"to write {path}"):
            from safetensors.torch import save
        about, held = self.about(), {**self.learner.meta_parameters()}
        if "learner" in about:  # a module of the user's may have buffers, which its author saves
            held = self.learner.state_dict() | held
        tensors = {name: p.detach().cpu().clone().contiguous() for name, p in held.items()}
        write_bytes(path, save(tensors, {KEY: json.dumps(about)}))

    def save_pretrained(self, folder: Path | str, **how: Any) -> None:
        """Write `save`'s file, its facts and a model card to a folder, as the hub has them."""
        on_hub()(self).save_pretrained(folder, config=self.about(), **how)

    def push_to_hub(self, name: str, **how: Any) -> str:
        """Upload what `save_pretrained` writes to ``name``, as "user/model"; return the address.

        ``how``: as of `huggingface_hub.ModelHubMixin.push_to_hub`: ``private=True``, ….
        """
        card = {"model_card_kwargs": {"repo": name}} | how
        return on_hub()(self).push_to_hub(name, config=self.about(), **card)


def on_hub() -> type[OnHub]:
    """Return what the hub's mixin needs of a learner."""
    with needs("hf", "the hub"):
        from maml.library.hub import OnHub
    return OnHub


def content_of(path: Path) -> tuple[dict[str, Any], Params]:
    """Return the facts and the meta-parameters that a file of `Saved.save` holds, on the CPU.

    Raises:
        UserError: if it is missing, damaged, or of another kind.
    """
    with needs("hf", f"to read {path}"):
        from safetensors import SafetensorError, safe_open
    try:
        with naming(path, "{}"):  # safetensors says less of a file that cannot be read
            regular(path).open("rb").close()
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {}).get(KEY, "null"))
            names = file.keys()
            params: Params = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, ValueError) as error:
        raise UserError(f"{path}: damaged: {str(error).splitlines()[0]}") from error
    kinds = {"config": dict, "learner": str}
    whole = isinstance(about, dict) and any(isinstance(about.get(n), k) for n, k in kinds.items())
    if not whole or misfit(about, FORM):
        raise UserError(f"{path}: no meta-learner is in it: maml.MAML(…).save has not written it")
    return about, params
