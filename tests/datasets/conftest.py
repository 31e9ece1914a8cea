"""Fixtures of the data set tests. ``tests/conftest.py`` has those for real data and the cache."""

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("MAML_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def small_images() -> np.ndarray:
    """Noise, uint8 [30, 20, 28, 28]: images differ from each other and from their rotations."""
    return np.random.default_rng(0).integers(0, 256, (30, 20, 28, 28), dtype=np.uint8)
