"""The documentation's code runs, and its tables are what their records hold."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import functional_memory
from tests.launching import REPO
from tests.runs import glyphs, train

PAGE = (REPO / "docs" / "library.md").read_text()


def test_the_library_s_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From top to bottom in one namespace, as in a notebook; the run is a tiny one."""
    train(glyphs(ways=5), tmp_path / "runs" / "glyphs")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 6
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/library.md", "exec"), names)
    assert set(names["answers"]) <= set(names["names"])
    assert names["batch"].query_x.shape == (3, 75, 1, 28, 28)
    # What the page says of its example.
    assert names["right"] > 0.9
    assert names["wrong"] < 0.2
    maml, meta = names["maml"], {"logits": names["logits"].detach()}
    mixed, reverse = (
        maml.meta_gradient(names["state"], meta, names["task"], way).gradients["logits"]
        for way in ("mixed", "reverse")
    )
    assert (mixed - reverse).abs().max() < 1e-4 * reverse.abs().max()


def test_the_library_s_table_is_its_record() -> None:
    (path,) = re.findall(r"record: `(\S+\.json)`", PAGE)
    record = json.loads((REPO / path).read_text())
    assert functional_memory.table(record) in PAGE
    assert len(record["hardware"]["git_commit"]) == 40  # of a clean commit
