"""``python -m tests.device FILE …`` or ``-m MODULE …``: a program that has the accelerator."""

import runpy
import sys

from tests.device import install

install()
sys.argv = sys.argv[1:]
if sys.argv[0] == "-m":
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
