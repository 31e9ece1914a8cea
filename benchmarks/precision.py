"""What a rounder arithmetic costs in accuracy and gives in speed: ``--precision`` on this device.

    python -m benchmarks.precision [--setting omniglot-5w1s] [--tasks 8] [--rounds 15] [--json FILE]

Accuracy: the meta-gradient of the same tasks at the same weights against float64, as the norm of
the difference relative to the norm, and the cosine of the angle between them. Speed: tasks per
second, one repetition of each in turn, by torch's operations; "default flags" are the compiled
kernels where they serve.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.command import command_line, count, write
from benchmarks.hardware import describe
from benchmarks.markdown import grid
from benchmarks.settings import SETTINGS, make_tasks
from datasets.tasks import Task
from maml.config import Config
from maml.config.presets import with_values
from maml.execution import precision
from maml.learners import build_learner
from maml.processes import allocator

ROWS: dict[str, dict[str, str]] = {
    "default flags": {},
    "float32": {"kernels": "torch"},
    "tf32": {"kernels": "torch", "precision": "tf32"},
    "bf16": {"kernels": "torch", "precision": "bf16"},
}
"""What is compared: names, and the flags of each."""


def repetition(config: Config, n_tasks: int, device: torch.device) -> Callable[[], Tensor]:
    """Return a function that computes the meta-gradient, as one float64 vector on the CPU."""
    learner = build_learner(config)
    params = {name: p.detach().to(device) for name, p in learner.meta_parameters().items()}
    tasks = Task(*(tensor.to(device) for tensor in make_tasks(config, n_tasks)))

    def repeat() -> Tensor:
        # Of the process, so set anew for each row.
        precision.use(config.precision)
        gradients = learner.outer_gradient(params, tasks).gradients
        # The copy also waits for the device.
        return torch.cat([gradients[name].flatten().double() for name in params]).cpu()

    return repeat


def measure(setting: str, n_tasks: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Measure one setting; return its record."""
    config = SETTINGS[setting].config
    double = with_values(config, dtype="float64", kernels="torch")
    exact = repetition(double, n_tasks, device)()
    runners = {
        name: repetition(with_values(config, **flags), n_tasks, device)
        for name, flags in ROWS.items()
    }
    found = {name: repeat() for name, repeat in runners.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for _ in tqdm(range(rounds), desc=setting, unit="round", leave=False):
        for name, repeat in runners.items():
            began = time.perf_counter()
            repeat()
            seconds[name].append(time.perf_counter() - began)
    rows = []
    for name, gradient in found.items():
        rates = sorted(n_tasks / s for s in seconds[name])
        rows.append(
            {
                "precision": name,
                "flags": ROWS[name],
                "relative_error": float((gradient - exact).norm() / exact.norm()),
                "cosine": float(gradient @ exact / (gradient.norm() * exact.norm())),
                "tasks_per_second": statistics.median(rates),
                "quartiles": [rates[len(rates) // 4], rates[-1 - len(rates) // 4]],
            }
        )
    return {
        "setting": setting,
        "title": SETTINGS[setting].title,
        "device": device.type,
        "tasks": n_tasks,
        "rounds": rounds,
        "rows": rows,
    }


def table(report: dict[str, Any]) -> str:
    """Return a record as Markdown; errors are relative to float64."""
    record = report["record"]
    rows = [
        [
            row["precision"],
            f"{row['relative_error']:.1e}",
            f"{row['cosine']:.6f}",
            f"{row['tasks_per_second']:.1f}",
            "{:.1f}–{:.1f}".format(*row["quartiles"]),
        ]
        for row in record["rows"]
    ]
    title = (
        f"**{record['title']}**, {record['device']}: {record['tasks']} tasks, "
        f"median of {record['rounds']} rounds"
    )
    header = ["precision", "relative error", "cosine", "tasks/s", "quartiles"]
    return f"{title}\n\n{grid(header, rows)}"


def main() -> None:
    """Run the benchmark."""
    parser = command_line("precision", __doc__)
    parser.add_argument("--setting", choices=SETTINGS, default="omniglot-5w1s")
    parser.add_argument("--tasks", type=count, default=8, help="tasks a repetition")
    parser.add_argument("--rounds", type=count, default=15)
    parser.add_argument("--threads", type=count, default=torch.get_num_threads())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    allocator.tune()
    torch.set_num_threads(options.threads)
    hardware = describe(options.threads)
    record = measure(options.setting, options.tasks, options.rounds, torch.device(options.device))
    report = {"hardware": hardware, "record": record}
    print(table(report), flush=True)
    write(options.json, report)


if __name__ == "__main__":
    main()
