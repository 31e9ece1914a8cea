"""README and docs: every measurement comes from a record, and every link leads somewhere."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.record import table
from maml.studies import arms
from maml.studies.compare import compared
from tests.strategies.record_of_faults import rows_of

FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LEFT_OUT = re.compile(r"`[^`]*`|\]\([^)]*\)|arXiv:\S+")
"""No measurements: commands, links, papers."""
MEASURED = re.compile(
    r"\d ?(%|[mµ]?s\b|min\b|[kKMG]i?B\b|tasks/s|×(?! ?\d))|\d ± ?\d|^\s*\d[\d,.–]+\s*$"
)


def unmarked(text: str) -> list[str]:
    """Return each table's first line in ``text`` that shows a measurement without a record."""
    found, told = [], False
    for line in FENCED.sub("", tables.MARKED.sub("", text)).splitlines():
        cells = LEFT_OUT.sub("", line).strip().strip("|").split("|") if line[:1] == "|" else []
        measured = any(MEASURED.search(cell) for cell in cells)
        found += [line] if measured and not told else []
        told = bool(cells) and (told or measured)
    return found


@pytest.mark.parametrize("document", tables.documents(), ids=lambda path: path.name)
def test_measurements_are_what_records_say_and_links_lead_somewhere(document: Path) -> None:
    assert tables.problems(document) == [] == unmarked(document.read_text())
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        assert target.exists(), link
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if anchor else []
        anchors = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]
        assert not anchor or anchor in anchors, link


def test_readme_is_short() -> None:
    assert len((tables.REPO / "README.md").read_text().splitlines()) <= 100


def test_records_are_shown_and_say_where_they_are_from() -> None:
    """A record has the commit that was measured, or names what it was transcribed from."""
    for path in sorted((tables.REPO / "benchmarks" / "records").glob("*.json")):
        record = json.loads(path.read_text())
        known = record["hardware"]["git_commit"] is not None
        assert known != record.get("source", "").startswith("Transcribed from "), path.name
        if "injections" in record:
            made, shown = (
                [(row["fault"], row["of_rank"], row["lines"]) for row in rows]
                for rows in (rows_of(record["injections"]), record["rows"])
            )
            assert made == shown
        for setting in [one["setting"] for one in record.get("records", [])] or [None]:
            assert "| - " not in table(record, setting) and "| --" in table(record, setting)


def test_reports_of_studies_are_what_their_trials_say() -> None:
    for path in (tables.REPO / "launch" / "studies").glob("*/report.md"):
        text = path.read_text()
        settings = dict.fromkeys(re.findall(r"^\| (\w+=\S+) ", text, re.MULTILINE))
        read = (arms.read(str(path.parent / name), None) for name in settings)
        sides = [dataclasses.replace(arm, name=Path(arm.name).name) for arm in read]
        assert compared(sides)[0] in text


@pytest.fixture
def document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a README and the record that its table shows."""
    record = {
        "hardware": {"cores": 2, "processor": "abacus", "date": "2026-11-22", "git_commit": None},
        "source": "Transcribed from a stone.",
        "columns": {
            "peer": "{peer}", "accuracy": "{accuracy[0]:.1f} ± {accuracy[1]:.1f} %",
            "of none": "{nothing}",
        },
        "rows": [{"peer": "ours", "accuracy": [97.5, 0.25]}, {"peer": "theirs"}],
    }  # fmt: skip
    (tmp_path / "record.json").write_text(json.dumps(record))
    path = tmp_path / "README.md"
    path.write_text("Before.\n\n<!-- table: record.json -->\n<!-- /table -->\n\nAfter.\n")
    monkeypatch.setattr(tables, "REPO", tmp_path)
    return path


def test_tables_are_written_and_a_digit_that_differs_is_found(document, capsys):
    assert tables.main(["--check"]) == 1  # nothing is written yet
    assert "README.md: differs from its record: table: record.json" in capsys.readouterr().err
    assert tables.main([]) == 0 == tables.main(["--check"])
    text = document.read_text()
    assert "| ours   | 97.5 ± 0.2 % |" in text and "| theirs | –            |" in text
    assert "of none" not in text
    assert "[Record](record.json): 2 cores of abacus, 2026-11-22. Transcribed from a" in text
    assert text.startswith("Before.\n") and text.endswith("\n\nAfter.\n")
    document.write_text(text.replace("97.5", "98.5"))
    assert tables.main(["--check"]) == 1
    assert tables.main([]) == 0 and document.read_text() == text
    # A record or module that is not there is one line.
    for new in ("none.json", "record.json astrology", "astrology record.json"):
        document.write_text(text.replace("record.json", new))
        for arguments in ([], ["--check"]):
            assert tables.main(arguments) == 1
            assert new in capsys.readouterr().err.strip().splitlines()[-1]
