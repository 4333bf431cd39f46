"""Optimisers that update only the rows that have a gradient."""

from manyclass.optim.adagrad import RowAdagrad as RowAdagrad
from manyclass.optim.adam import RowAdam as RowAdam
from manyclass.optim.chained import Chained as Chained
from manyclass.optim.chained import for_model as for_model
from manyclass.optim.clip import clip_grad_norm_ as clip_grad_norm_
from manyclass.optim.sgd import RowSGD as RowSGD
