"""Objectives: losses over the target's score and those of the candidates."""

from manyclass.forms import LogSumExp as LogSumExp
from manyclass.forms import PairSum as PairSum
from manyclass.objectives._objective import Objective as Objective
from manyclass.objectives.discrimination import BlackOut as BlackOut
from manyclass.objectives.discrimination import NegativeSampling as NegativeSampling
from manyclass.objectives.discrimination import NoiseContrastive as NoiseContrastive
from manyclass.objectives.likelihood import Likelihood as Likelihood
from manyclass.objectives.likelihood import PlainImportance as PlainImportance
from manyclass.objectives.likelihood import SubsetSoftmax as SubsetSoftmax
from manyclass.objectives.ranking import HingeRanking as HingeRanking
from manyclass.objectives.ranking import LogisticRanking as LogisticRanking
