"""The code of README.md and docs/library.md runs; of their tables see tests/test_tables.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.launching import REPO
from tests.runs import glyphs, train


def blocks_of(name: str) -> list[str]:
    """Return the Python code of a page."""
    text = (REPO / name).read_text()
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def test_the_library_s_page_and_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From top to bottom in one namespace, as in a notebook; the run is a tiny one."""
    train(glyphs(ways=5), tmp_path / "runs" / "glyphs")
    monkeypatch.chdir(tmp_path)
    readme: dict[str, Any] = {}
    (block,) = blocks_of("README.md")
    exec(compile(block, "README.md", "exec"), readme)
    assert readme["probabilities"].shape == (15, 5) and len(readme["answers"]) == 15
    blocks = blocks_of("docs/library.md")
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
