"""Training on several processes."""

from manyclass.parallel.checkpoint import load_checkpoint as load_checkpoint
from manyclass.parallel.checkpoint import save_checkpoint as save_checkpoint
from manyclass.parallel.checkpoint import save_weights as save_weights
from manyclass.parallel.prepare import prepare as prepare
from manyclass.parallel.shard import shard as shard
