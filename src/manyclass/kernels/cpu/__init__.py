"""Compiled CPU kernels: optional, built on first use, each beside eager code that does the same."""

from manyclass.kernels.cpu._cells import can_probe as can_probe
from manyclass.kernels.cpu._cells import probe as probe
from manyclass.kernels.cpu._closed_form import log_sum_exp_ as log_sum_exp_
from manyclass.kernels.cpu._closed_form import pair_sum_ as pair_sum_
from manyclass.kernels.cpu._closed_form import pull_back_ as pull_back_
from manyclass.kernels.cpu._exact import exponentials_ as exponentials_
from manyclass.kernels.cpu._explicit import put_in_front as put_in_front
from manyclass.kernels.cpu._likely import likely_ as likely_
from manyclass.kernels.cpu._locate import SearchTable as SearchTable
from manyclass.kernels.cpu._locate import comb as comb
from manyclass.kernels.cpu._locate import locate as locate
from manyclass.kernels.cpu._rows import adagrad_ as adagrad_
from manyclass.kernels.cpu._rows import adam_ as adam_
from manyclass.kernels.cpu._rows import has_row_kernel as has_row_kernel
from manyclass.kernels.cpu.build import is_available as is_available
from manyclass.kernels.cpu.build import is_plain as is_plain
from manyclass.kernels.cpu.build import library as library
