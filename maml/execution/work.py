"""How much work one operation on one task is: counted, so the same wherever it runs."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

HEAVY = 500_000
"""Multiplications and additions of one operation, from which on tasks are computed one by one.

With less, what an operation costs beside its work counts: ``torch.func.vmap`` pays it once for all
tasks. With more, one task fills a core, and for all together results leave the cache. Two cores
break even between 70,000 and 1,000,000; `benchmarks.throughput --settings own-…` compares both.
"""


class Work(TorchDispatchMode):
    """A context that counts what is computed inside.

    Attributes:
        operations, flops: How many of torch, and their multiplications and additions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.flops = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, for a second and a half

    @property
    def is_heavy(self) -> bool:
        """Whether one operation is work enough for a core."""
        return self.flops >= HEAVY * max(self.operations, 1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **kwargs or {})
        self.operations += 1
        count = flop_registry.get(getattr(func, "_overloadpacket", None))
        if count is not None:
            self.flops += count(*args, **kwargs or {}, out_val=found)
        return found
