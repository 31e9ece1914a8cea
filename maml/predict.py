"""Predict with a trained model on folders of images: ``python -m maml.predict RUN_DIR …``.

    python -m maml.predict runs/maml-omniglot-5way-1shot-… --support animals --query unknown

SUPPORT holds one folder per class, with any number of images each. QUERY is an image, a folder of
images, or a folder with one folder per class. The program prints one line per image: file, class,
probability, with tabs between them. In the last case, the accuracy follows.
"""

import argparse
import sys
from pathlib import Path
from typing import get_args

from maml.processes.program import run_program  # before torch

# isort: split
from datasets import accelerator
from datasets.folder import list_images
from datasets.image_files import shown
from datasets.words import counted
from maml.config.parser import Parser, add_iteration, add_trust, at_least
from maml.errors import UserError
from maml.library.fast_module import BatchStatistics
from maml.library.model import load


def main(arguments: list[str]) -> int:
    """Adapt to the support folder, and print a line for each image of the query folder."""
    options = _parse(arguments)
    accelerator.exactly()
    model = load(options.run_dir, options.iteration, options.device, trust=options.trust)
    if model.image_shape is None or not model.learner.contents.pixels:
        raise UserError(f"a model of --data {model.config.data} takes no pictures")
    (known, labels), (asked, truths) = (
        zip(*list_images(place), strict=True) for place in (options.support, options.query)
    )
    classes = list(dict.fromkeys(labels))
    if classes == [""]:
        raise UserError(f"--support {options.support}: needs a folder for each class")
    if strange := [n for n in truths if n and n not in classes]:
        raise UserError(
            f"--query {options.query}: class {strange[0]} is not among those of --support: "
            f"{', '.join(classes)}"
        )
    if len(classes) != model.ways and not model.learner.any_ways:
        raise UserError(
            f"--support {options.support}: {counted(len(classes), 'class', 'classes')}; "
            f"the model tells {model.ways} apart"
        )
    adapted = model.adapt(model.examples(known, "--support"), labels, options.steps)
    x = model.examples(asked, "--query")
    right, answers = 0, adapted.predict(x, options.batch_statistics).tolist()
    for path, truth, probabilities in zip(asked, truths, answers, strict=True):
        found, probability = max(zip(classes, probabilities, strict=True), key=lambda of: of[1])
        right += found == truth
        print(f"{shown(path)}\t{shown(found)}\t{probability:.4f}")
    if truths[0]:
        print(f"accuracy {100 * right / len(answers):.2f} % of {counted(len(answers), 'image')}")
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m maml.predict", description=__doc__)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="or a checkpoint file in one")
    text = "folders of images, one a class"
    parser.add_argument("--support", required=True, type=Path, metavar="DIR", help=text)
    text = "an image, a folder of images, or a folder of folders of classes"
    parser.add_argument("--query", required=True, type=Path, metavar="PATH", help=text)
    text = "inner steps (default: as the run is evaluated)"
    parser.add_argument("--steps", type=at_least(0), help=text)
    text = "normalise queries by the support set's statistics, each for itself (default), or by "
    text += "those of all queries together"
    choices = get_args(BatchStatistics)
    parser.add_argument("--batch-statistics", choices=choices, default="support", help=text)
    add_iteration(parser)
    add_trust(parser, "the run's config.yaml")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N or auto (default)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
