"""Compiled CPU kernels: optional, built on first use; the eager code that they speed up is always there."""

from manyclass.native._build import library as library
from manyclass.native._build import runs_on as runs_on
from manyclass.native._explicit import put_in_front as put_in_front
from manyclass.native._locate import locate as locate
