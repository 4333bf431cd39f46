"""Training steps in torch, ours and others': each builder takes C, counts [C] and targets [N, B] and returns a step.

Every step computes the gradient of `hidden` [B, D], as an encoder needs it, and updates all parameters by Adagrad.
Classes are sorted by falling frequency, as log-uniform sampling and the adaptive softmax require.
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

BATCH_SIZE, K, DIM = 256, 1000, 128
LEARNING_RATE = 0.01

Step = Callable[[], object]
Loss = Callable[[Tensor, Tensor], Tensor]


def products(num_classes: int, counts: np.ndarray, targets: np.ndarray) -> Step:
    """Return the floor: only the matrix products of a step that scores k classes."""
    hidden, rows, gamma = torch.randn(BATCH_SIZE, DIM), torch.randn(K, DIM), torch.randn(BATCH_SIZE, K)

    def step() -> None:
        hidden @ rows.T
        gamma @ rows
        gamma.T @ hidden

    return step


def systematic(num_classes: int, counts: np.ndarray, targets: np.ndarray) -> Step:
    """Return our step with `Systematic`; the environment variable MANYCLASS_NATIVE=0 turns compiled kernels off."""
    return _manyclass_step(Systematic(torch.from_numpy(counts), K), counts, targets)


def importance(num_classes: int, counts: np.ndarray, targets: np.ndarray) -> Step:
    """Return our step with `Importance`."""
    return _manyclass_step(Importance(torch.from_numpy(counts), K), counts, targets)


def _manyclass_step(sampler: Sampler, counts: np.ndarray, targets: np.ndarray) -> Step:
    from manyclass.optim import RowAdagrad

    head = ClassHead(DIM, len(counts), counts=torch.from_numpy(counts), sampler=sampler, sparse=True)
    return _step(head, RowAdagrad(head.parameters(), LEARNING_RATE), targets)


def embedding(num_classes: int, counts: np.ndarray, targets: np.ndarray) -> Step:
    """Return a hand-written sampled softmax: sparse embeddings, log-uniform classes, correction by expected counts."""
    weight = nn.Embedding(num_classes, DIM, sparse=True)
    bias = nn.Embedding(num_classes, 1, sparse=True)
    nn.init.zeros_(bias.weight)
    span = math.log(num_classes + 1)

    def loss(hidden: Tensor, target: Tensor) -> Tensor:
        drawn = torch.rand(K).mul_(span).exp_().long().sub_(1).clamp_(0, num_classes - 1)
        ids = torch.cat([target, drawn])
        rows, shift = weight(ids), bias(ids).squeeze(1)
        # Subtract the log of the expected number of times that a class is drawn.
        shift = shift - (torch.log1p(1 / (ids + 1.0)) * (K / span)).log()
        own = (hidden * rows[:BATCH_SIZE]).sum(1, keepdim=True) + shift[:BATCH_SIZE, None]
        others = torch.addmm(shift[BATCH_SIZE:], hidden, rows[BATCH_SIZE:].T)
        others = others.masked_fill(drawn == target[:, None], -math.inf)
        return F.cross_entropy(torch.cat([own, others], 1), torch.zeros_like(target))

    return _step(loss, torch.optim.Adagrad([weight.weight, bias.weight], LEARNING_RATE), targets)


def exact(num_classes: int, counts: np.ndarray, targets: np.ndarray) -> Step:
    """Return a step of the exact softmax."""
    linear = nn.Linear(DIM, num_classes)
    return _step(
        lambda hidden, target: F.cross_entropy(linear(hidden), target),
        torch.optim.Adagrad(linear.parameters(), LEARNING_RATE),
        targets,
    )


def chunked(num_classes: int, counts: np.ndarray, targets: np.ndarray) -> Step:
    """Return a step of the exact softmax by the torch function that never holds all logits."""
    linear = nn.Linear(DIM, num_classes)
    # By default it reads the whole table once per example, which is about 15 times as slow.
    options = nn.LinearCrossEntropyOptions(chunking_method=None, batch_chunk_size=BATCH_SIZE // 4)

    def loss(hidden: Tensor, target: Tensor) -> Tensor:
        return F.linear_cross_entropy(hidden, linear.weight, target, linear_bias=linear.bias, options=options)

    return _step(loss, torch.optim.Adagrad(linear.parameters(), LEARNING_RATE), targets)


def adaptive(num_classes: int, counts: np.ndarray, targets: np.ndarray) -> Step:
    """Return an adaptive softmax: the most frequent 1 % in the head, two clusters of 32 and 8 dimensions."""
    cutoffs = [num_classes // 100, num_classes // 10]
    softmax = nn.AdaptiveLogSoftmaxWithLoss(DIM, num_classes, cutoffs, div_value=4.0, head_bias=True)
    return _step(
        lambda hidden, target: softmax(hidden, target).loss,
        torch.optim.Adagrad(softmax.parameters(), LEARNING_RATE),
        targets,
    )


def _step(loss: Loss, optimizer: torch.optim.Optimizer, targets: np.ndarray) -> Step:
    hidden = torch.randn(BATCH_SIZE, DIM, requires_grad=True)
    batches = itertools.cycle(torch.from_numpy(targets))

    def step() -> None:
        hidden.grad = None
        optimizer.zero_grad()
        loss(hidden, next(batches)).backward()
        optimizer.step()

    return step
