"""What a validation tells of the inner loop."""

from pathlib import Path

import pytest

from tests.runs import glyphs, metrics, sinusoid, train

pytestmark = pytest.mark.usefixtures("no_pictures")


def test_validations_tell_of_the_inner_loop(tmp_path: Path) -> None:
    """Of each step; of many steps three are looked at; where rates are learned, of them, too."""
    values = {"iterations": 1, "eval_every": 1}
    train(glyphs(learner="metasgd", eval_inner_steps=3, **values), tmp_path / "few")
    train(sinusoid(eval_inner_steps=20, **values), tmp_path / "many")
    few, many = (metrics(tmp_path / name)[-1] for name in ("few", "many"))
    assert list(few["after"]) == ["0", "1", "2", "3"]
    assert all(0 <= accuracy <= 1 for accuracy in few["after"].values())
    assert {name.partition("/")[0] for name in few["rates"]} == {"1"}
    assert list(many["after"]) == ["0", "10", "20"] and "rates" not in many
    assert many["after"]["0"] > 0
