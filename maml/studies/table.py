"""``python -m launch.table``: the published tables next to ours, only from the records.

A row is a preset that has a published number or a record. A preset without records is "not run".
"""

import fnmatch
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from datasets.words import counted
from maml.config import Config
from maml.config.fields import CHOOSING
from maml.config.parser import Parser
from maml.config.presets import DEVIATIONS, PRESETS, changed, experiment
from maml.errors import UserError
from maml.evaluation.scores import has_answers, with_interval
from maml.run.files import headline
from maml.run.reading import Run
from maml.studies import grid, recorded

HEADER = (
    "preset", "published", "ours", "seeds", "test tasks a seed", "non-transductive", "minutes",
)  # fmt: skip
DIFFERS = "What differs between a preset and the published experiment; some of it is a flag:"


def main(arguments: list[str]) -> int:
    """Print the table."""
    parser = Parser(prog="python -m launch.table", description=__doc__)
    parser.add_argument("--records", type=Path, default=recorded.RECORDS, help="where they are")
    parser.add_argument("--run", action="store_true", help="leave out what was not run")
    options = parser.parse_args(arguments)
    if not recorded.folders(options.records):
        raise UserError(
            f"--records {options.records}: no record there; python -m launch.record RUN_DIR makes "
            "one of a run"
        )
    print(table(options.records, *(["run"] if options.run else [])))
    return 0


def table(records: Path, *words: str) -> str:
    """Return the table in Markdown, and below it the deviations and notes of its rows.

    The word ``run`` leaves out presets without runs, ``own`` leaves out experiments other than the
    presets' own, and ``bare`` leaves out the text below the table. All other words are patterns: a
    preset's name must match one of them.
    """
    of_preset: defaultdict[str, list[Run]] = defaultdict(list)
    for record in _found(records, words):
        of_preset[record.config.preset].append(record)
    rows: list[tuple[str, ...]] = []
    deviating: list[str] = []
    notes: dict[str, list[str]] = {}
    # Records of a preset that was renamed, or of a user's own configuration.
    others = {name: of[0].config for name, of in of_preset.items() if name not in PRESETS}
    for name, preset in (PRESETS | others).items():
        if not _fits(name, words):
            continue
        own = [record for record in of_preset[name] if not changed(record.config)]
        if not own and preset.published is not None and "run" not in words:
            rows.append((f"`{name}`", _claim(preset), "not run", *4 * "–"))
        if preset.published is not None and (own or "run" not in words):
            deviating.append(name)
        seeds_of: defaultdict[str, list[Run]] = defaultdict(list)
        for record in sorted(of_preset[name], key=lambda record: len(changed(record.config))):
            seeds_of[experiment(record.config)].append(record)
        for seeds in seeds_of.values():
            rows.append(_row(preset, seeds))
            rows += [_together(preset, record) for record in seeds if "ensemble" in record.result]
        for record in of_preset[name]:
            for said in filter(None, (record.made["note"], _went_wrong(record))):
                of = f"`{experiment(record.config)}`, seed {record.config.seed}"
                notes.setdefault(said, []).append(of)
    return grid(HEADER, rows) + ("" if "bare" in words else _below(deviating, notes))


def _below(deviating: list[str], notes: dict[str, list[str]]) -> str:
    """Return the presets' deviations, and the notes with the runs of each; or ""."""
    lines = [
        f"- {', '.join(f'`{pattern}`' for pattern in patterns)}: {said}"
        for said, patterns in DEVIATIONS.items()
        if any(fnmatch.filter(deviating, pattern) for pattern in patterns)
    ]
    text = "\n".join(["", "", DIFFERS, "", *lines]) if lines else ""
    lines = [
        f"- {f'{of[0]}, and {len(of) - 1} more' if len(of) > 3 else '; '.join(of)}: {said}"
        for said, of in notes.items()
    ]
    return text + ("\n".join(["", "", "Notes on the runs:", "", *lines]) if lines else "")


def measured_on(records: Path, *words: str) -> str:
    """Return a sentence: the hardware and dates of the rows of `table`, for the same arguments."""
    made = [record.made for record in _found(records, words)]
    if not made:
        return "none of these rows was run."
    # A run may have continued on another machine. Starts of older runs have no machine.
    machines = [start.get("machine") or of["hardware"] for of in made for start in of["starts"]]
    processors = " or ".join(sorted({of.get("gpu") or of["processor"] for of in machines}))
    dates = sorted({of["hardware"]["date"] for of in made})
    between = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{processors}, {between}; each says its command, commit and versions."


def _found(records: Path, words: tuple[str, ...]) -> list[Run]:
    """Return the records that the words of `table` ask for."""
    return [
        record
        for record in recorded.find(records)
        if _fits(record.config.preset, words) and not ("own" in words and changed(record.config))
    ]


def _fits(preset: str, words: tuple[str, ...]) -> bool:
    patterns = [word for word in words if word not in ("run", "own", "bare")] or ["*"]
    return any(fnmatch.fnmatchcase(preset, pattern) for pattern in patterns)


def _claim(preset: Config) -> str:
    """Return the published claim, or else the published number in percent; "–" without both."""
    if preset.published is None:
        return "–"
    return preset.claim or f"{100 * preset.published:.4g} %"


def _row(preset: Config, records: list[Run]) -> tuple[str, ...]:
    """Return the row of an experiment's seeds."""
    # An experiment other than the preset's own has no published number.
    claimed = "–" if changed(records[0].config) else _claim(preset)
    minutes = statistics.median(record.made["minutes"] for record in records)
    results = [record.result for record in records]
    name = f"`{experiment(records[0].config)}`"
    return _cells(name, claimed, records, results, f"{minutes:.0f}")


def _together(preset: Config, record: Run) -> tuple[str, ...]:
    """Return the row of a seed's ensemble, which stands below the single model's."""
    result, models = record.result, len(record.result["ensemble"])
    # The published number is of ``keep_best`` models, chosen with the preset's settings.
    chosen_by = ("keep_best", *CHOOSING)
    alike = all(getattr(record.config, name) == getattr(preset, name) for name in chosen_by)
    is_published = alike and not changed(record.config) and models == preset.keep_best
    claimed = _claim(preset).removesuffix(" (ensemble)") if is_published else "–"
    scores = {
        n.removeprefix("ensemble_"): v for n, v in result.items() if n.startswith("ensemble_")
    }
    scores["tasks"] = result["tasks"]
    return _cells(f"– ensemble of {models}", claimed, [record], [scores], "–")


def _cells(
    name: str, claimed: str, records: list[Run], results: list[dict[str, Any]], minutes: str
) -> tuple[str, ...]:
    """Return a row: the seeds' headline score and, if they have it, the non-transductive one."""
    seeds = ", ".join(str(record.config.seed) for record in records)
    tasks = "–".join(sorted({f"{result['tasks']:,}" for result in results}))
    judged = headline([key for key, value in results[0].items() if value is not None])
    ours = spread([result[judged] for result in results], results[0].get("ci95"), judged)
    name_alone, alone = f"non_transductive_{judged}", "–"
    if name_alone in results[0]:
        ci95 = results[0].get(f"{name_alone}_ci95")
        alone = spread([result[name_alone] for result in results], ci95, judged)
    return name, claimed, ours, seeds, tasks, alone, minutes


def _went_wrong(record: Run) -> str:
    """Say why a run's numbers are doubtful; "" if nothing went wrong."""
    result = record.result
    skipped, steps = result.get("skipped"), counted(result["iterations"], "step")
    said = {
        "its test loss is not finite": not has_answers(result),
        "its training has diverged": result.get("diverged"),
        f"{skipped} of {steps} {'was' if skipped == 1 else 'were'} skipped": skipped,
    }
    return "; ".join(line for line, holds in said.items() if holds)


def spread(values: list[float], ci95: float | None, judged: str = "accuracy") -> str:
    """Return the mean of the seeds' scores, with one seed's interval or with all seeds' scores."""
    unit = "" if judged == "accuracy" else f" ({judged})"
    if len(values) == 1:
        return with_interval(values[0], ci95, judged) + unit
    scale, percent = (100, " %") if judged == "accuracy" else (1, "")
    each = ", ".join(f"{scale * value:.2f}" for value in values)
    return f"{scale * statistics.mean(values):.2f}{percent}{unit} (seeds: {each})"
