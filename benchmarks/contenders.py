"""Training steps in torch, ours and others': each takes C, counts [C] and targets [N, B] and returns a step.

Every step gives a gradient to `hidden` [B, D], as the encoder before it would need, and updates all parameters by
Adagrad. Classes come by falling frequency, which log-uniform sampling and the adaptive softmax rely on.
"""

import itertools
import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyclass import ClassHead
from manyclass.samplers import Importance, Sampler, Systematic

BATCH, K, DIM = 256, 1000, 128
RATE = 0.01

Step = Callable[[], object]
Loss = Callable[[Tensor, Tensor], Tensor]


def products(num_classes: int, counts: np.ndarray, targets: np.ndarray) -> Step:
    """The floor: the matrix products of a step that scores k classes, and nothing else."""
    hidden, rows, gamma = torch.randn(BATCH, DIM), torch.randn(K, DIM), torch.randn(BATCH, K)

    def step() -> None:
        hidden @ rows.T
        gamma @ rows
        gamma.T @ hidden

    return step


def systematic(num_classes: int, counts: np.ndarray, targets: np.ndarray) -> Step:
    """Ours. Without compiled kernels where the environment says MANYCLASS_NATIVE=0."""
    return _own(Systematic(torch.from_numpy(counts), K), counts, targets)


def importance(num_classes: int, counts: np.ndarray, targets: np.ndarray) -> Step:
    return _own(Importance(torch.from_numpy(counts), K), counts, targets)


def _own(sampler: Sampler, counts: np.ndarray, targets: np.ndarray) -> Step:
    from manyclass.optim import RowAdagrad

    head = ClassHead(DIM, len(counts), counts=torch.from_numpy(counts), sampler=sampler, sparse=True)
    return _step(head, RowAdagrad(head.parameters(), RATE), targets)


def embedding(num_classes: int, counts: np.ndarray, targets: np.ndarray) -> Step:
    """Sampled softmax as written by hand: sparse embeddings, log-uniform classes, the correction for their rate."""
    weight = nn.Embedding(num_classes, DIM, sparse=True)
    bias = nn.Embedding(num_classes, 1, sparse=True)
    nn.init.zeros_(bias.weight)
    span = math.log(num_classes + 1)

    def loss(hidden: Tensor, target: Tensor) -> Tensor:
        drawn = torch.rand(K).mul_(span).exp_().long().sub_(1).clamp_(0, num_classes - 1)
        ids = torch.cat([target, drawn])
        rows, shift = weight(ids), bias(ids).squeeze(1)
        # log of the number of times that a class is drawn on average.
        shift = shift - (torch.log1p(1 / (ids + 1.0)) * (K / span)).log()
        own = (hidden * rows[:BATCH]).sum(1, keepdim=True) + shift[:BATCH, None]
        others = torch.addmm(shift[BATCH:], hidden, rows[BATCH:].T)
        others = others.masked_fill(drawn == target[:, None], -math.inf)
        return F.cross_entropy(torch.cat([own, others], 1), torch.zeros_like(target))

    return _step(loss, torch.optim.Adagrad([weight.weight, bias.weight], RATE), targets)


def exact(num_classes: int, counts: np.ndarray, targets: np.ndarray) -> Step:
    linear = nn.Linear(DIM, num_classes)
    return _step(
        lambda hidden, target: F.cross_entropy(linear(hidden), target),
        torch.optim.Adagrad(linear.parameters(), RATE),
        targets,
    )


def chunked(num_classes: int, counts: np.ndarray, targets: np.ndarray) -> Step:
    """The same loss by torch's own function that never holds all logits."""
    linear = nn.Linear(DIM, num_classes)
    # Left to itself it would go through the whole table once for each example, some 15 times as slow.
    options = nn.LinearCrossEntropyOptions(chunking_method=None, batch_chunk_size=BATCH // 4)

    def loss(hidden: Tensor, target: Tensor) -> Tensor:
        return F.linear_cross_entropy(hidden, linear.weight, target, linear_bias=linear.bias, options=options)

    return _step(loss, torch.optim.Adagrad(linear.parameters(), RATE), targets)


def adaptive(num_classes: int, counts: np.ndarray, targets: np.ndarray) -> Step:
    """The frequent hundredth of the classes in the head, the others in two clusters of 32 and 8 dimensions."""
    cutoffs = [num_classes // 100, num_classes // 10]
    softmax = nn.AdaptiveLogSoftmaxWithLoss(DIM, num_classes, cutoffs, div_value=4.0, head_bias=True)
    return _step(
        lambda hidden, target: softmax(hidden, target).loss,
        torch.optim.Adagrad(softmax.parameters(), RATE),
        targets,
    )


def _step(loss: Loss, optimizer: torch.optim.Optimizer, targets: np.ndarray) -> Step:
    hidden = torch.randn(BATCH, DIM, requires_grad=True)
    batches = itertools.cycle(torch.from_numpy(targets))

    def step() -> None:
        hidden.grad = None
        optimizer.zero_grad()
        loss(hidden, next(batches)).backward()
        optimizer.step()

    return step
