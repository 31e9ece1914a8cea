"""Learners learn: minutes each, real commands, `launch/test -m slow`."""

import json
from pathlib import Path

import pytest

from tests.launching import run, torchrun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def accuracy(args: list[str], run_dir: Path) -> tuple[float, float]:
    """Train on two workers; return the test accuracy and its interval."""
    common = ["--logger", "none", "--partition", "chunk", "--run-dir", str(run_dir)]
    run([*torchrun(2), *args, *common], timeout=1700)
    result = json.loads((run_dir / "result.json").read_text())
    assert result["tasks"] == 600
    return result["accuracy"], result["ci95"]


def test_glyphs_are_learned(tmp_path: Path) -> None:
    """Far above the untrained learner (41 %) and the nearest neighbour (48 %)."""
    found, ci95 = accuracy(["maml-glyphs-5way-1shot"], tmp_path)
    assert found - ci95 > 0.9


def test_omniglot_is_learned_in_3000_iterations(tmp_path: Path, data_root: Path) -> None:
    """A plain prototype reached 96 % after half as many iterations."""
    args = ["maml-omniglot-5way-1shot", "--data-root", str(data_root), "--iterations", "3000"]
    found, ci95 = accuracy(args, tmp_path)
    assert found + ci95 > 0.965
