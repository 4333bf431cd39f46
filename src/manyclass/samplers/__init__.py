"""Samplers: the choice of the classes that a step scores."""

from manyclass.samplers._sampler import AdjustableSampler as AdjustableSampler
from manyclass.samplers._sampler import Observation as Observation
from manyclass.samplers._sampler import Sampler as Sampler
from manyclass.samplers._sampler import SubsetSampler as SubsetSampler
from manyclass.samplers._sampler import check_life_cycle as check_life_cycle
from manyclass.samplers._sampler import draw_including as draw_including
from manyclass.samplers._sampler import no_learning as no_learning
from manyclass.samplers._sampler import no_schedule as no_schedule
from manyclass.samplers._sampler import no_vectors as no_vectors
from manyclass.samplers.bernoulli import Bernoulli as Bernoulli
from manyclass.samplers.budget import Budget as Budget
from manyclass.samplers.clustered import Clustered as Clustered
from manyclass.samplers.exhaustive import Exhaustive as Exhaustive
from manyclass.samplers.explicit import WithExplicit as WithExplicit
from manyclass.samplers.importance import Importance as Importance
from manyclass.samplers.in_batch import InBatch as InBatch
from manyclass.samplers.learned import Learned as Learned
from manyclass.samplers.systematic import Systematic as Systematic
from manyclass.samplers.tailored import Tailored as Tailored
from manyclass.samplers.tailored import score_by as score_by
