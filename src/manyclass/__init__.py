"""Classifiers over very many classes, trained by maximum likelihood at the cost of scoring a few hundred a step."""

from typing import TYPE_CHECKING

from manyclass import objectives as objectives
from manyclass import optim as optim
from manyclass import samplers as samplers
from manyclass import training as training
from manyclass._check import check_values as check_values
from manyclass.candidates import Block as Block
from manyclass.candidates import Candidates as Candidates
from manyclass.counts import ClassCounts as ClassCounts
from manyclass.diagnostics import Diagnosis as Diagnosis
from manyclass.diagnostics import diagnose as diagnose
from manyclass.heads import ClassHead as ClassHead
from manyclass.heads import HierarchicalHead as HierarchicalHead
from manyclass.heads import ScorerHead as ScorerHead

if TYPE_CHECKING:
    from manyclass.estimator import ManyClassClassifier as ManyClassClassifier

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # Only who wants the estimator needs scikit-learn, and waits for it.
    if name == "ManyClassClassifier":
        from manyclass.estimator import ManyClassClassifier

        return ManyClassClassifier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
