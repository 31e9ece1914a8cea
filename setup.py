"""Builds a wheel of `maml` and `train_maml`, with the folder ``datasets`` inside `maml`.

Hugging Face has a package of that name, too. The folder stays at the top of the repository, so the
files of a wheel import ``maml.datasets``, not ``datasets``. An editable install changes nothing.
"""

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

NAMED = re.compile(r"""(?m)(^\s*from |["'`])datasets(?=[. ])""")


class Inside(build_py):
    """Moves ``datasets`` into `maml`, and leaves out folders that only a checkout has."""

    def run(self) -> None:
        """Build, then move and rename."""
        build = Path(self.build_lib)
        if not self.editable_mode:
            shutil.rmtree(build, ignore_errors=True)
        super().run()
        if self.editable_mode:
            return
        for name in ("launch", "benchmarks"):
            shutil.rmtree(build / name)
        (build / "datasets").rename(build / "maml" / "datasets")
        for file in build.rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            file.write_text(NAMED.sub(r"\1maml.datasets", text), encoding="utf-8")


setup(cmdclass={"build_py": Inside})
