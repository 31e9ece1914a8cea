"""A call on trial: it is counted, and what it writes is undone."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from maml.execution.outside import Reached

HEAVY = 250_000
"""From this mean number of multiplications and additions per operation, compute tasks one by one.

Below, the overhead of an operation counts, and ``torch.func.vmap`` pays it once for all tasks.
Above, one task fills a core, and the results of all tasks together do not fit in cache. Two cores
break even between 70,000 and 1,000,000; `benchmarks.throughput --settings own-…` compares both.
"""


class Trial(TorchDispatchMode):
    """A context that leaves what code reaches as it was, and may count the work inside.

    It sees what ``torch.func.vmap`` computes as plain tensors of all tasks.
    """

    supports_higher_order_operators = True

    def __init__(self, *roots: Any, weigh: bool = False) -> None:
        """Put back what `Reached` finds from ``roots``, and what is written into any old tensor.

        ``weigh``: count operations, and their multiplications and additions.
        """
        super().__init__()
        self._operations = self._flops = 0
        self._flops_of: dict[Any, Any] = {}
        if weigh:
            from torch.utils.flop_counter import flop_registry  # late, because it imports triton

            self._flops_of = flop_registry
        self._reached = Reached(*roots)
        self._made = set[int]()
        self._written: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.put_back()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import torch's compiler, which takes 1.5 seconds

    @property
    def is_heavy(self) -> bool:
        """Whether an operation is enough work for a core."""
        return self._flops >= HEAVY * max(self._operations, 1)

    def put_back(self) -> None:
        """Undo what was written until now."""
        self._reached.put_back()
        for memory, numbers in self._written:
            memory.copy_(numbers)
            self._made.discard(memory._cdata)
        self._written.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            for place, argument in enumerate(schema.arguments):
                if argument.is_write:
                    given = args[place] if place < len(args) else kwargs.get(argument.name)
                    self._remember(given)
        found = func(*args, **kwargs)
        if schema is None or not any(each.alias_info for each in schema.returns):
            self._made.update(each._cdata for each in _memory(found))
        self._operations += 1
        count = self._flops_of.get(getattr(func, "_overloadpacket", None))
        if count is not None:
            self._flops += count(*args, **kwargs, out_val=found)
        return found

    def _remember(self, tensors: Any) -> None:
        for memory in _memory(tensors):
            if memory._cdata not in self._made:
                self._made.add(memory._cdata)
                self._written.append((memory, memory.clone()))


def _memory(tensors: Any) -> list[torch.UntypedStorage]:
    leaves = (leaf for leaf in pytree.tree_leaves(tensors) if isinstance(leaf, Tensor))
    return [leaf.untyped_storage() for leaf in leaves if leaf.layout == torch.strided]
