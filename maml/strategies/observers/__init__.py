"""``--strategy observers``: rank 0 has the policy, the others have the environments.

``over_rpc`` has the agent and its observers, ``inference`` what answers their requests.
"""

from __future__ import annotations

from maml.strategies.observers.over_rpc import Observers

COMPONENTS = {
    "observers": {
        "attribute": "Observers",
        "help": "rank 0 is the agent, the others act in environments and ask it for actions",
        "reads": ("rpc_threads", "batched_inference", "batch_wait"),
    }
}

__all__ = ["Observers"]
