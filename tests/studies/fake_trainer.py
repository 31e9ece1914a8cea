"""Leave a training's files in a tenth of a second, for tests of programs that run trainings.

``--rounds`` validations, ``--pause`` seconds apart, of the accuracy ``--good``. It saves after
each, stops at SIGTERM, and continues where it ended. Its test takes ``--test`` seconds and heeds
no signal.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

flags = dict(word[2:].split("=", 1) for word in sys.argv[1:])
run_dir, rounds = Path(flags["run_dir"]), int(flags.get("rounds", "2"))
run_dir.mkdir(parents=True, exist_ok=True)
stops: list[int] = []
signal.signal(signal.SIGTERM, lambda number, frame: stops.append(number))


def status(state: str, iteration: int) -> None:
    content = json.dumps({"state": state, "iteration": iteration})
    (run_dir / "status.json").write_text(content)


rows = run_dir / "metrics.jsonl"
done = rows.read_text().count('"validation"') if rows.exists() else 0
with open(run_dir / "starts", "a") as file:
    file.write(f"{done} {len(os.sched_getaffinity(0))} {os.environ['WANDB_RUN_GROUP']}\n")
if flags.get("fails", "") == flags.get("seed", "0") and "FAKE_MENDED" not in os.environ:
    print("some words\nerror: as was asked\nmore words", file=sys.stderr)
    sys.exit(2)
if "ends" in flags:
    code = int(flags["ends"])
    os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
status("training", done)
row: dict[str, object] = {"iteration": done}
for iteration in range(done + 1, rounds + 1):
    time.sleep(float(flags.get("pause", "0")))
    row = {"iteration": iteration, "split": "validation", "accuracy": float(flags.get("good", 0.5))}
    with open(rows, "a") as file:
        file.write(json.dumps(row) + "\n")
    status("training", iteration)
    if stops:
        status("stopped", iteration)
        sys.exit(143)
time.sleep(float(flags.get("test", "0")))
row |= {"split": "test", "accuracy": float(flags.get("good", 0.5)) - 0.0625}
with open(rows, "a") as file:
    file.write(json.dumps(row) + "\n")
(run_dir / "result.json").write_text(json.dumps(row))
status("finished", rounds)
