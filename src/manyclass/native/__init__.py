"""Compiled CPU kernels: optional, built on first use; the eager code that they speed up is always there."""

from manyclass.native._build import is_plain as is_plain
from manyclass.native._build import library as library
from manyclass.native._build import runs_on as runs_on
from manyclass.native._closed_form import Draw as Draw
from manyclass.native._closed_form import pair_sum_ as pair_sum_
from manyclass.native._closed_form import pull_back_ as pull_back_
from manyclass.native._closed_form import softmax_ as softmax_
from manyclass.native._explicit import put_in_front as put_in_front
from manyclass.native._locate import Table as Table
from manyclass.native._locate import comb as comb
from manyclass.native._locate import locate as locate
from manyclass.native._rows import adagrad_ as adagrad_
from manyclass.native._rows import adam_ as adam_
from manyclass.native._rows import takes as takes
