"""What of a network neither adapts nor learns."""

from __future__ import annotations

from torch import nn

from maml.learners.adapting import named


def frozen(pattern: str | None, network: nn.Module, why: str) -> list[str]:
    """Return the names of the network's parameters that stay as they begin, in order.

    They are those that its author has frozen, by ``requires_grad_(False)``, and those of
    ``--freeze``. From here on all require a gradient again: what is differentiated is said by a
    problem, and what learns by this list.

    Args:
        pattern: Of ``--freeze``: as in `maml.learners.adapting`, without rates; or None.
        network: Whose parameters they are.
        why: What asks for them, for messages: ``--freeze …``.

    Raises:
        UserError: as `maml.learners.adapting.named`.
    """
    parameters = dict(network.named_parameters())
    still = {name for name, parameter in parameters.items() if not parameter.requires_grad}
    network.requires_grad_(True)
    if pattern is not None:
        for part in pattern.split(","):
            still.update(named(part.strip(), network, parameters, why))
    return [name for name in parameters if name in still]
