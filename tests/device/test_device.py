"""The pretended accelerator's tests, each in processes of its own: see `tests.device`."""

import sys

import pytest

from tests.compiler import needs_compiler
from tests.device import compiled
from tests.launching import run

pytestmark = needs_compiler
INSTALLED = "-m", "tests.device"


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    compiled()


def test_in_one_process() -> None:
    suite = ["-m", "pytest", "tests/device/on_device.py", "-q", "-p", "no:cacheprovider"]
    run([sys.executable, *INSTALLED, *suite], timeout=120)
