"""The code of README.md and docs/library.md runs; of their tables see tests/test_tables.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from maml.config import registry
from maml.config.presets import PRESETS
from maml.learners import build_learner
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


def test_kernels_serve_whom_the_page_says() -> None:
    """Every few-shot learner is in the table of docs/learners.md, with a yes that is true."""
    said: dict[str, bool] = {}
    for line in (REPO / "docs" / "learners.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[2].startswith(("yes", "no")) and "(test)" not in cells[0]:
            served = cells[2].startswith("yes")
            said |= dict.fromkeys(re.findall(r"`(\w+)`", cells[0]), served)
    known = registry.known("learner")
    assert said.keys() == {name for name in known if registry.learner(name).tasks == "episodes"}
    for name, served in said.items():
        learner = build_learner(PRESETS[f"{name}-glyphs-5way-1shot"])
        assert (learner.obstacle(torch.device("cpu")) is None) == served, name
