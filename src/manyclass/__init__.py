"""Classifiers over very many classes, trained by maximum likelihood while a step scores only a few hundred of them."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from manyclass import objectives as objectives
    from manyclass import optim as optim
    from manyclass import parallel as parallel
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

# Public names and their modules, imported on first use: importing torch takes a second or two, which would delay
# `manyclass --help`, and only the estimator needs scikit-learn.
_MODULE_OF = {
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
_ROOMS = (
    "data",
    "encoders",
    "inference",
    "objectives",
    "optim",
    "parallel",
    "report",
    "samplers",
    "storage",
    "tasks",
    "training",
)


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _MODULE_OF:
        value: object = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF, *_ROOMS})
