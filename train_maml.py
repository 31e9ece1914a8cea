"""Train a few-shot learner, or an ordinary classifier.

    python train_maml.py maml-glyphs-5way-1shot --run-dir runs/glyphs
    torchrun --standalone --nproc_per_node=2 train_maml.py maml-omniglot-5way-1shot \
        --data-root ~/data --run-dir runs/omniglot-5w1s
    python train_maml.py supervised-glyphs-lenet --epochs 40 --logger none
    python train_maml.py --help

Give the same command with its --run-dir again, and the run continues from its last checkpoint.
"""

import os
import sys

from maml.config.cli import parse
from maml.processes import system
from maml.processes.launcher import watch_launcher
from maml.processes.namespaces import join_owner
from maml.processes.program import run_program
from maml.processes.world import World


def main(arguments: list[str]) -> int:
    """Parse the command line and train."""
    join_owner()
    watch_launcher()
    # Torch's sockets would log every failed connection to a store that is not there yet or has
    # ended. An important failure also raises an error.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    # Before torch is imported: `parse` may import a user's own component, which may import torch.
    # TorchOpt reads the environment, too, and ends in a traceback if the variables are invalid.
    World.from_environment()
    system.keep_memory()
    system.give_way()
    config = parse(arguments)
    # Imported late: --help and a mistyped flag need no torch.
    from maml.trainer import Trainer

    return Trainer(config).run()


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
