"""Classifiers over very many classes, trained by maximum likelihood at the cost of scoring a few hundred a step."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    from manyclass.estimator import ManyClassClassifier as ManyClassClassifier
    from manyclass.heads import ClassHead as ClassHead
    from manyclass.heads import HierarchicalHead as HierarchicalHead
    from manyclass.heads import ScorerHead as ScorerHead

__version__ = "0.1.0"

# What has a name here, and where it is. It is imported when it is first used: torch takes a second or two, which
# `manyclass --help` need not wait for, and only who wants the estimator needs scikit-learn.
_HOMES = {
    "check_values": "_check",
    "Block": "candidates",
    "Candidates": "candidates",
    "ClassCounts": "counts",
    "Diagnosis": "diagnostics",
    "diagnose": "diagnostics",
    "ManyClassClassifier": "estimator",
    "ClassHead": "heads",
    "HierarchicalHead": "heads",
    "ScorerHead": "heads",
}
_ROOMS = ("data", "encoders", "inference", "objectives", "optim", "report", "samplers", "storage", "tasks", "training")


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _HOMES:
        value: object = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_ROOMS})
