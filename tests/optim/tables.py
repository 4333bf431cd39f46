"""Every row optimiser with the dense one of torch that it equals, for tests that run over all of them."""

import torch

from manyclass.optim import RowAdagrad, RowAdam, RowSGD

# Name: (ours, torch's), both functions of the parameters. RowAdagrad by row has no twin.
OPTIMISERS = {
    "RowSGD": (lambda p: RowSGD(p, 0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "RowSGD, momentum": (
        lambda p: RowSGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    ),
    "RowSGD, decay": (
        lambda p: RowSGD(p, 0.1, weight_decay=0.05),
        lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.05),
    ),
    "RowSGD, both": (
        lambda p: RowSGD(p, 0.1, momentum=0.9, weight_decay=0.05),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.05),
    ),
    "RowAdagrad": (lambda p: RowAdagrad(p, 0.1), lambda p: torch.optim.Adagrad(p, 0.1)),
    "RowAdagrad, started": (
        lambda p: RowAdagrad(p, 0.1, initial_accumulator_value=0.3, eps=1e-3),
        lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.3, eps=1e-3),
    ),
    "RowAdagrad, by row": (lambda p: RowAdagrad(p, 0.1, by_row=True), None),
    "RowAdam": (lambda p: RowAdam(p, 0.1), lambda p: torch.optim.Adam(p, 0.1)),
    "RowAdam, options": (
        lambda p: RowAdam(p, 0.03, betas=(0.0, 0.9), eps=1e-3),
        lambda p: torch.optim.Adam(p, 0.03, betas=(0.0, 0.9), eps=1e-3),
    ),
}
OURS = {name: ours for name, (ours, _) in OPTIMISERS.items()}
TWINS = {name: (ours, twin) for name, (ours, twin) in OPTIMISERS.items() if twin is not None}

C, D = 11, 3


def parameters(dtype=torch.float64, seed=0):
    """Return a weight [C, D] and a bias [C]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((C, D), (C,))
    return [torch.nn.Parameter(torch.randn(shape, dtype=dtype, generator=generator)) for shape in shapes]


def sparse(ids, rows, like):
    return torch.sparse_coo_tensor(ids.unsqueeze(0), rows.to(like), like.shape, check_invariants=False)


def set_gradients(params, ids, seed):
    """Give each parameter a sparse gradient in the rows `ids`, which may repeat."""
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = sparse(ids, torch.randn(len(ids), *p.shape[1:], dtype=torch.float64, generator=generator), p)


def set_dense_gradients(params, ids, seed):
    """Give each parameter the same gradient, dense."""
    set_gradients(params, ids, seed)
    for p in params:
        p.grad = p.grad.to_dense()


def same(ours, theirs):
    """Assert equality up to rounding."""
    for mine, other in zip(ours, theirs, strict=True):
        tolerance = 1e-12 if mine.dtype == torch.float64 else 1e-6
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


def identical(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
