"""Fixtures of all tests: the data folder, the session's cache, and a restored process state."""

import contextlib
import hashlib
import importlib.util
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from maml.processes.signals import SIGNALS

REPO = Path(__file__).resolve().parents[1]
_MAML_DATA = os.environ.get("MAML_DATA")
# Variables of the caller's shell, or of an enclosing torchrun, that must not reach a test.
NOT_INHERITED = (
    "WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT", "WANDB_DIR", "RANK", "WORLD_SIZE", "LOCAL_RANK",
    "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
)  # fmt: skip

# A background job, or one under nohup, ignores some signals. Its child processes would, too.
for _number in SIGNALS:
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(
            _number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL
        )


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--faults-record FILE``: see `tests.strategies.record_of_faults`."""
    text = "inject all faults, and write to this record what comes of them; with -m fault"
    parser.addoption("--faults-record", metavar="FILE", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Name the record for the modules that are imported from now on."""
    if record := config.getoption("--faults-record"):
        os.environ["FAULTS_RECORD"] = str(Path(record).absolute())


class _Module(pytest.Module):
    """A file of tests. Where only the library is installed, one that imports more is skipped."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError as error:
            lacks = error.__cause__
            if not isinstance(lacks, ModuleNotFoundError) or importlib.util.find_spec("psutil"):
                raise
            if (REPO / str(lacks.name).partition(".")[0]).exists():  # a mistake of this project
                raise
            pytest.skip(
                f"only the library is installed here (torch and numpy), and this file tests what "
                f"needs {lacks.name}: pip install '.[train]'",
                allow_module_level=True,
            )


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    """Make a file of tests."""
    return _Module.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest tests, so that short tests fill the rest of pytest's processes."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/strategies/"))


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder with real data: ``$MAML_DATA``, else ``../shared/data`` beside the repository."""
    candidates = [Path(_MAML_DATA)] if _MAML_DATA else []
    candidates.append(REPO.parent / "shared" / "data")
    for candidate in candidates:
        if (candidate / "omniglot").is_dir():
            return candidate
    pytest.skip(f"no omniglot/ in {' or '.join(map(str, candidates))}: set $MAML_DATA to test it")


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one cache for the session. The user's own cache is never touched.

    Compiled kernels, drawn glyphs and Omniglot's decoded images stay in the checkout, for all of
    pytest's processes and for later sessions. The name of a kernel has a hash of its sources, and
    so do the names of the other folders.
    """
    folder = tmp_path_factory.mktemp("cache")
    made_by = {"glyphs": ("glyphs", "addresses"), "omniglot": ("omniglot", "image_files")}
    kept = {"kernels": "test-kernels"}
    for name, modules in made_by.items():
        sources = b"".join((REPO / "datasets" / f"{each}.py").read_bytes() for each in modules)
        kept[name] = f"test-{name}-{hashlib.blake2b(sources, digest_size=8).hexdigest()}"
    for name, stays in kept.items():
        there = REPO / "build" / stays
        with contextlib.suppress(OSError):  # a read-only checkout: the session has its own
            there.mkdir(parents=True, exist_ok=True)
            (there / ".writable").touch()
            (folder / name).symlink_to(there)
    return folder


@pytest.fixture(scope="session", autouse=True)
def _own_settings(cache_dir: Path) -> Iterator[None]:
    """Keep the user's settings out of tests, and out of what module-wide fixtures launch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAML_CACHE", str(cache_dir))
        # Empty: a test that forgot ``data_root`` fails here as on a machine without data.
        patch.setenv("MAML_DATA", str(cache_dir / "data"))
        for name in NOT_INHERITED:
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(autouse=True)
def _as_found() -> Iterator[None]:
    """Put back what a run in this process changes."""
    # The tensors are too small for several threads, and other tests' subprocesses need cores too.
    torch.set_num_threads(1)
    exact = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = exact
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave curves.png out: drawing it is most of a tiny run."""
    monkeypatch.setattr(
        "maml.training.testing.draw_curves", lambda run_dir, *rest: run_dir / "curves.png"
    )
