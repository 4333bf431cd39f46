"""Who owns the parameters of classes."""

from manyclass.heads._default import choose_sampler as choose_sampler
from manyclass.heads._exact import TopK as TopK
from manyclass.heads._sampled import SampledHead as SampledHead
from manyclass.heads.hierarchical import HierarchicalHead as HierarchicalHead
from manyclass.heads.linear import ClassHead as ClassHead
from manyclass.heads.scorer import ScorerHead as ScorerHead
