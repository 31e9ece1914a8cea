"""A traced function answers what the function answers, whatever the shape, and travels without."""

import pickle

import torch

from maml.execution.compiled import WORTH, Traced


def choose(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ params["w"]).cumsum(-1)


def test_is_the_function_before_and_after_it_is_traced() -> None:
    generator = torch.Generator().manual_seed(0)
    of_each = Traced(choose, each=True)
    for rows in (3, 5):  # another shape is another trace
        for call in range(WORTH + 3):
            params = {"w": torch.randn(4, 2, 2, generator=generator, dtype=torch.float64)}
            x = torch.randn(4, rows, 2, generator=generator, dtype=torch.float64)
            found = of_each(params, x)
            if call % 50 == 0 or call >= WORTH:
                torch.testing.assert_close(found, torch.relu(x @ params["w"]).cumsum(-1))
    assert len(of_each._forms) == 2
    again = pickle.loads(pickle.dumps(of_each))
    torch.testing.assert_close(again(params, x), found)
    assert not again._forms
