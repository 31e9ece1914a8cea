"""Find a C++ compiler. Where there is one, a kernel that does not compile is a failure."""

import os
import shutil

import pytest

COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")

needs_compiler = pytest.mark.skipif(
    COMPILER is None, reason="no C++ compiler ($CXX, g++ or clang++) to compile kernels with"
)
