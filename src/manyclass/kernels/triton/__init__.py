"""Triton kernels for GPUs: optional, compiled on first use, each beside eager code that does the same.

A module with kernels is imported where it is used, because it imports Triton.
"""

from manyclass.kernels.triton.available import is_available as is_available
from manyclass.kernels.triton.available import is_available_in_graphs as is_available_in_graphs
