"""How far a run is: whole lines where there is no terminal."""

from pathlib import Path

import pytest

from maml.evaluation.scores import bar as bar_of_evaluations
from maml.run import progress
from tests.runs import sinusoid, train

pytestmark = pytest.mark.usefixtures("no_pictures")


def test_redirected_output_has_whole_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of training and evaluation, and a message between them."""
    assert bar_of_evaluations is progress.bar
    monkeypatch.setattr(progress, "PLAIN", 0.0)
    train(sinusoid(iterations=3, eval_every=2, test_tasks=9), tmp_path)
    said = capsys.readouterr().err
    assert "\r" not in said and "\x1b" not in said
    lines = said.splitlines()
    assert lines[0].startswith("training: 1 of 3 it, ")
    assert [line for line in lines if line.startswith("iteration 2: validation loss ")]
    assert [line for line in lines if line.startswith("training: 3 of 3 it, ")]
    assert [line for line in lines if line.startswith("test: 9 of 9 task, ")]
