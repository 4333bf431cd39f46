"""Heads: the modules that hold the parameters of classes."""

from manyclass.heads._default import choose_sampler as choose_sampler
from manyclass.heads._divided import scores_of_classes as scores_of_classes
from manyclass.heads._learning import draw_candidates as draw_candidates
from manyclass.heads._together import examples_of_all as examples_of_all
from manyclass.heads.exact import ChunkedHead as ChunkedHead
from manyclass.heads.exact import TopK as TopK
from manyclass.heads.exact import exact_log_z as exact_log_z
from manyclass.heads.exact import exact_scores as exact_scores
from manyclass.heads.exact import exact_topk as exact_topk
from manyclass.heads.examples import Examples as Examples
from manyclass.heads.examples import flatten_examples as flatten_examples
from manyclass.heads.hierarchical import HierarchicalHead as HierarchicalHead
from manyclass.heads.linear import ClassHead as ClassHead
from manyclass.heads.sampled import SampledHead as SampledHead
from manyclass.heads.scorer import ScorerHead as ScorerHead
from manyclass.kernels import mask_columns as mask_columns
