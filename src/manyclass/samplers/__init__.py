"""Which classes a step scores."""

from manyclass.samplers._sampler import AdjustableSampler as AdjustableSampler
from manyclass.samplers._sampler import BudgetedSampler as BudgetedSampler
from manyclass.samplers._sampler import FollowingSampler as FollowingSampler
from manyclass.samplers._sampler import LearningSampler as LearningSampler
from manyclass.samplers._sampler import Sampler as Sampler
from manyclass.samplers._sampler import UpkeptSampler as UpkeptSampler
from manyclass.samplers.bernoulli import Bernoulli as Bernoulli
from manyclass.samplers.budget import Budget as Budget
from manyclass.samplers.clustered import Clustered as Clustered
from manyclass.samplers.exhaustive import Exhaustive as Exhaustive
from manyclass.samplers.explicit import WithExplicit as WithExplicit
from manyclass.samplers.importance import Importance as Importance
from manyclass.samplers.in_batch import InBatch as InBatch
from manyclass.samplers.learned import Learned as Learned
from manyclass.samplers.nearest import Nearest as Nearest
from manyclass.samplers.systematic import Systematic as Systematic
