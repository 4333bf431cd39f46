"""How scores are computed fast; the eager reference is all there is so far."""

from manyclass.kernels.eager import exclude_hits as exclude_hits
from manyclass.kernels.eager import linear_scores as linear_scores
