"""Inference: the best classes, their probabilities, ranks, and estimates of log Z with an error bar."""

from manyclass.inference.estimate import LogZ as LogZ
from manyclass.inference.estimate import estimate_log_z as estimate_log_z
from manyclass.inference.index import Index as Index
from manyclass.inference.index import IndexReport as IndexReport
from manyclass.inference.index import IndexState as IndexState
from manyclass.inference.rank import ranks as ranks
from manyclass.inference.top import Top as Top
from manyclass.inference.top import top as top
