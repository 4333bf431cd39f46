"""A head that resembles a trained one: clustered classes, larger biases of frequent ones, confident predictions."""

import torch

from manyclass import ClassHead
from manyclass.samplers import Systematic

C, D = 3000, 16


def frequencies(num_classes=C):
    weight = 1 / torch.arange(2.0, num_classes + 2)
    return weight / weight.sum()


def trained(
    num_classes=C, dim=D, *, k=300, bias=True, similarity="dot", sampler=None, dtype=torch.float32, rows=400, seed=0
):
    """Return a head and hidden vectors for it."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    frequency = frequencies(num_classes)
    centres = normal(40, dim)
    labels = torch.randint(40, (num_classes,), generator=generator)
    vectors = centres[labels] + 0.6 * normal(num_classes, dim)
    head = ClassHead(
        dim,
        num_classes,
        sampler=Systematic(frequency, k) if sampler is None else sampler,
        bias=bias,
        similarity=similarity,
        scale=12.0,
        dtype=dtype,
    )
    with torch.no_grad():
        head.weight.copy_(vectors)
        if head.bias is not None:
            head.bias.copy_(frequency.log())
    nearby = torch.randint(num_classes, (rows,), generator=generator)
    hidden = 0.5 * vectors[nearby] + 0.3 * normal(rows, dim)
    return head, hidden.to(dtype)
