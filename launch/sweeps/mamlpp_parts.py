"""MAML and one part of MAML++ at a time: the program of ``launch/sweeps/mamlpp-parts.yaml``.

    python -m launch.sweeps.mamlpp_parts --part=msl [--flag value …]

A grid of all flags would train every combination of parts. This program trains with one part at a
time, to answer the paper's question (arXiv:1810.09502, table 1): what does each part contribute?
"""

import sys

import train_maml
from maml.config.parser import Parser
from maml.processes.program import run_program

COMMON = ["mamlpp-glyphs-5way-1shot", "--network=conv4", "--filters=32", "--meta-batch-size=8"]
NONE = {
    "lslr": "false", "per-step-norm": "false", "msl-epochs": "0", "first-order-epochs": "0",
    "meta-schedule": "constant",
}  # fmt: skip
PARTS: dict[str, dict[str, str]] = {
    "none": {},
    "msl": {"msl-epochs": "10"},
    "lslr": {"lslr": "true"},
    "per-step-norm": {"per-step-norm": "true"},
    "cosine": {"meta-schedule": "cosine", "meta-lr-end": "1e-5"},
    "annealing": {"first-order-epochs": "30"},
}
"""Flags for 100 epochs of ten iterations; the paper anneals for 50 of 150 epochs."""
PARTS["all"] = {name: value for part in PARTS.values() for name, value in part.items()}


def main(arguments: list[str]) -> int:
    """Train MAML with one part of MAML++, with none or with all."""
    parser = Parser(prog="python -m launch.sweeps.mamlpp_parts")
    parser.add_argument("--part", choices=PARTS, required=True)
    own, rest = parser.parse_known_args(arguments)
    flags = [f"--{name}={value}" for name, value in (NONE | PARTS[own.part]).items()]
    return train_maml.main([*COMMON, *flags, *rest])


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
