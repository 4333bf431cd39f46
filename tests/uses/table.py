"""Table of every public head with every public sampler, for the tests of what can be done with a torch module."""

import contextlib
import copy

import pytest
import torch
from torch import nn

from manyclass import ClassCounts, ClassHead, HierarchicalHead, ScorerHead
from manyclass.heads._learning import attach_current
from manyclass.objectives import NoiseContrastive
from manyclass.samplers import (
    Automatic,
    Budget,
    Clustered,
    Costs,
    Importance,
    Learned,
    Systematic,
    Tailored,
    WithExplicit,
)
from manyclass.samplers.error_probe import POOLED_PROBES
from tests import tables

C, D, B, K, EVERY = 100, 6, 8, 16, 3
# Steps in which a rebuild starts, is taken up, and another one starts.
STEPS = 2 * EVERY + 1
WEIGHTS = 1 / torch.arange(1, C + 1, dtype=torch.float64)
FIXED = torch.tensor([0, 4, 7])
HIDDEN = torch.randn(B, D, generator=torch.Generator().manual_seed(3))
TARGET = torch.randint(C, (B,), generator=torch.Generator().manual_seed(4))
FEATURES = torch.randn(C, D, generator=torch.Generator().manual_seed(5))

# Samplers that change with training, rebuilt so often that a few steps start a rebuild and take it up.
REBUILT = {
    "learned, rebuilt": lambda w: Learned(w, K, every=EVERY, order="cluster"),
    "learned, heaviest first, rebuilt": lambda w: Learned(w, K, every=EVERY, order="frequency"),
    "learned from counts": lambda w: Learned(ClassCounts(w), K, every=EVERY, order="cluster"),
    "clustered, rebuilt": lambda w: Clustered(w, K, group_size=4, every=EVERY),
    "tailored, nearest explicit": lambda w: Tailored(w, K, group_size=4, nearest=2, every=EVERY),
    "tailored, rebuilt": lambda w: Tailored(w, K, group_size=4, rank=3, every=EVERY),
    "tailored, probing cells": lambda w: Tailored(w, K, group_size=4, probes=3, every=EVERY),
    "budget, rebuilt": lambda w: Budget(Learned(w, K, every=EVERY, order="cluster"), 0.1, every=2, least=8),
    # It takes up another design within the steps of most tests. With given costs decisions follow from the seed.
    "automatic, deciding": lambda w: Automatic(w, 0.02, least=8, every=1, costs=Costs(10.0, 1.0, 2.0, 0.01)),
    "learned and minibatch explicit": lambda w: WithExplicit(Learned(w, K, every=EVERY), "batch"),
    "learned and set explicit": lambda w: WithExplicit(Learned(w, K, every=EVERY, order="cluster"), FIXED),
}
# Each a function of the weights of the classes.
SAMPLERS = {
    **{name: lambda w, make=make: make(w, K, None) for name, make in tables.SAMPLERS.items()},
    "systematic from counts": lambda w: Systematic(ClassCounts(w), K, order="cluster"),
    **REBUILT,
}
DEFAULT = "learned, rebuilt"


class Towers(nn.Module):
    """Scores of an example's and a class's vector."""

    def __init__(self):
        super().__init__()
        self.classes = nn.Embedding(C, D)
        self.examples = nn.Linear(D, D)

    def forward(self, hidden, ids):
        return self.examples(hidden) @ self.classes(ids).transpose(-1, -2)


def score_features(hidden, ids):
    """Score fixed features of classes: a scorer that is no Module and has no parameters."""
    return hidden @ FEATURES.to(hidden)[ids].transpose(-1, -2)


# Public heads, functions of a sampler; each runs with every public sampler if it takes one.
HEADS = {
    "class": lambda sampler: ClassHead(D, C, sampler=sampler),
    "scorer": lambda sampler: ScorerHead(Towers(), sampler),
    "hierarchical": lambda sampler: HierarchicalHead(D, C, counts=WEIGHTS),
}
# Options of heads; each runs with the sampler that a head has by default.
VARIANTS = {
    "class, sparse": lambda sampler: ClassHead(D, C, sampler=sampler, sparse=True),
    "class, cosine": lambda sampler: ClassHead(D, C, sampler=sampler, similarity="cosine", bias=False),
    "class, observed": lambda sampler: ClassHead(D, C, sampler=sampler, update="observed"),
    "class, counts": lambda sampler: ClassHead(D, C, counts=WEIGHTS, k=K),
    "class, no counts": lambda sampler: ClassHead(D, C, k=K),
    "class, noise contrastive": lambda sampler: ClassHead(
        D, C, sampler=Importance(WEIGHTS, K), objective=NoiseContrastive(learn=True)
    ),
    "scorer, function": lambda sampler: ScorerHead(score_features, sampler),
    "hierarchical, sparse": lambda sampler: HierarchicalHead(D, C, sparse=True),
}
SPARSE = ("class, sparse", "hierarchical, sparse")
UNSAMPLED = ("hierarchical", "hierarchical, sparse")

# Public samplers by class, each as it is rebuilt if it is.
ONE_OF_EACH = {type(make(WEIGHTS)).__name__: name for name, make in SAMPLERS.items()}.values()

# Every head with every public sampler, and every option of heads and of samplers that change with training.
CELLS = [
    *(("class", sampler) for sampler in {**dict.fromkeys(ONE_OF_EACH), **REBUILT}),
    *(("scorer", sampler) for sampler in ONE_OF_EACH),
    *((head, DEFAULT) for head in (*HEADS, *VARIANTS) if head not in ("class", "scorer")),
]
# These and every other option of samplers.
ALL = [*CELLS, *(("class", sampler) for sampler in SAMPLERS if ("class", sampler) not in CELLS)]
# One cell for each head and option, and one for each sampler that changes with training.
FEW = [
    *((head, DEFAULT) for head in (*HEADS, *VARIANTS)),
    *(("class", sampler) for sampler in REBUILT if sampler != DEFAULT),
]
# The samplers that change with training alone.
CHANGING = [("class", sampler) for sampler in REBUILT]


def name_of(cell):
    return cell[0] if cell[0] in UNSAMPLED else " / ".join(cell)


def cells(chosen=CELLS, *, without=()):
    """Return a mark that runs a test with each cell: the names of a head and of a sampler."""
    kept = [cell for cell in chosen if cell[0] not in without]
    return pytest.mark.parametrize("cell", kept, ids=map(name_of, kept))


def sampler_of(cell, weights=WEIGHTS):
    return SAMPLERS[cell[1]](weights.clone())


def head_of(cell, *, seed=0, sampler=None):
    """Return a new head; the seed determines its parameters."""
    torch.manual_seed(seed)
    make = {**HEADS, **VARIANTS}[cell[0]]
    return make(sampler_of(cell) if sampler is None else sampler)


def reads_vectors(cell):
    """Return True if draws depend on the present class vectors, not only on the state of the sampler."""
    return cell[0] == "class" and ("tailored" in cell[1] or "automatic" in cell[1])


def draw(head, seed=0):
    """Return ids and log κ of a draw; of a head without a sampler, its log-probabilities."""
    if not hasattr(head, "sampler"):
        dtype = next(head.parameters()).dtype
        return (head.log_prob(HIDDEN.to(dtype), torch.arange(C, device="cpu")).detach(),)
    generator = torch.Generator("cpu").manual_seed(seed)
    # As before each draw of the head: torch may have replaced them.
    attach_current(head)
    candidates = head.sampler(TARGET, hidden=HIDDEN, exclude=TARGET.unsqueeze(1), generator=generator)
    return candidates.ids(), candidates.log_kappa()


def draws(head):
    return [tensor for seed in range(2) for tensor in draw(head, seed)]


def identical(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def loss_of(head, hidden, step, run=None):
    """Return the loss of a step, whose number is the seed of its draw."""
    run, target = head if run is None else run, TARGET.roll(step)
    if not hasattr(head, "sampler"):
        return run(hidden, target)
    return run(hidden, target, generator=torch.Generator("cpu").manual_seed(step))


def train(head, steps, *, lr=0.5, loss=loss_of):
    """Return the losses of training steps, and the gradient of the input at the last."""
    losses = []
    dtype = next((parameter.dtype for parameter in head.parameters()), HIDDEN.dtype)
    for step in steps:
        head.zero_grad()
        hidden = HIDDEN.to(dtype).detach().clone().requires_grad_()
        value = loss(head, hidden, step)
        value.backward()
        with torch.no_grad():
            for parameter in head.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-lr)
        losses.append(value.detach().clone())
    return [*losses, hidden.grad]


def trained(cell, steps=EVERY, **options):
    """Return a head that has drawn and trained; after `EVERY` steps a rebuild is pending."""
    head = head_of(cell, **options)
    train(head, range(steps))
    return head


def parameters_of(head):
    return [parameter.detach().clone() for parameter in head.parameters()]


def state_of(head):
    """Return the state of the sampler, or of a head that has none, by name."""
    return copy.deepcopy(getattr(head, "sampler", head).state_dict())


def differing(ours, theirs):
    """Return the names of the entries in which two states differ."""
    names = ours.keys() | theirs.keys()
    return {n for n in names if n not in ours or n not in theirs or not torch.equal(ours[n], theirs[n])}


def same_progress(ours, theirs):
    """Return True if two entries of progress agree, those of deciding samplers in all but the errors of probes."""
    if ours.dtype == torch.float64:
        # The last places hold mean squares, and -1 where there is none yet.
        ours, theirs = (torch.cat([x[:-POOLED_PROBES], (x[-POOLED_PROBES:] >= 0).double()]) for x in (ours, theirs))
    return torch.equal(ours, theirs)


def follows(head, twin, steps=range(EVERY, EVERY + STEPS)):
    """Assert that two heads draw and train the same, bit for bit, over steps that include rebuilds."""
    assert identical(draws(head), draws(twin))
    assert identical(train(head, steps), train(twin, steps))
    assert not differing(state_of(head), state_of(twin))
    assert identical(draws(head), draws(twin))
    assert identical(parameters_of(head), parameters_of(twin))


@contextlib.contextmanager
def works_or_refuses():
    """Accept an error of one sentence, for uses that torch itself makes impossible."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError) as error:
        message = str(error)
        assert "\n" not in message, message
        assert 20 < len(message) < 300, message
