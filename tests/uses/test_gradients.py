"""Gradient clipping, optimisers and indexes take any head, or say in one sentence why not."""

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from manyclass import optim
from manyclass.inference import Index
from tests.uses.table import (
    DEFAULT,
    FEW,
    HIDDEN,
    SPARSE,
    STEPS,
    cells,
    head_of,
    identical,
    loss_of,
    trained,
    works_or_refuses,
)

MANY = torch.randn(64, HIDDEN.shape[1], generator=torch.Generator().manual_seed(6))


def gradients(head):
    loss_of(head, HIDDEN.clone().requires_grad_(), 0).backward()
    return [parameter for parameter in head.parameters() if parameter.grad is not None]


@cells(FEW, without=["scorer, function"])
def test_torch_clips_gradients_or_refuses_in_one_sentence(cell):
    head = head_of(cell)
    parameters = gradients(head)
    before = [parameter.grad.to_dense().clone() for parameter in parameters]
    norm = torch.cat([gradient.flatten() for gradient in before]).norm()
    with works_or_refuses():
        torch.testing.assert_close(clip_grad_norm_(head.parameters(), 0.01), norm)
        for parameter, gradient in zip(parameters, before, strict=True):
            torch.testing.assert_close(parameter.grad.to_dense(), gradient * min(1.0, 0.01 / (norm + 1e-6)))


@cells(FEW)
def test_torch_clips_values_or_refuses_in_one_sentence(cell):
    head = head_of(cell)
    parameters = gradients(head)
    with works_or_refuses():
        clip_grad_value_(head.parameters(), 1e-3)
        assert all(parameter.grad.to_dense().abs().max() <= 1e-3 for parameter in parameters)


@cells(FEW)
def test_the_projects_clipping_takes_every_head(cell):
    head = head_of(cell)
    parameters = gradients(head)
    before = [parameter.grad.to_dense().clone() for parameter in parameters]
    norm = optim.clip_grad_norm_(head.parameters(), 0.01)
    torch.testing.assert_close(norm, torch.cat([gradient.flatten() for gradient in before] or [torch.zeros(0)]).norm())
    assert all(parameter.grad.is_sparse == (cell[0] in SPARSE) for parameter in parameters)


@cells(FEW)
def test_optimisers_of_torch_take_every_head(cell):
    head, twin = head_of(cell), head_of(cell)
    if not list(head.parameters()):
        return
    kinds = [torch.optim.SGD, torch.optim.SparseAdam] if cell[0] in SPARSE else [torch.optim.SGD, torch.optim.AdamW]
    for kind in kinds:
        optimizers = [kind(each.parameters(), lr=0.1) for each in (head, twin)]
        for step in range(STEPS):
            for each, optimizer in zip((head, twin), optimizers, strict=True):
                optimizer.zero_grad()
                loss = loss_of(each, HIDDEN, step)
                loss.backward()
                optimizer.step()
        assert loss.isfinite()
    assert identical(head.parameters(), twin.parameters())


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@cells([cell for cell in FEW if cell[1] == DEFAULT])
def test_an_index_of_every_head_is_built_or_refused_in_one_sentence(cell, autocast):
    pytest.importorskip("faiss")
    head = trained(cell)
    with works_or_refuses():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            index = Index.build(head, MANY, k=3, recall=0.9)
        assert index.report.recall > 0.5
        plain = Index.build(head, MANY, k=3, recall=0.9)
        assert torch.equal(index.search(MANY, 3), plain.search(MANY, 3))
        return
    assert not cell[0].startswith("class"), "an index of class vectors is refused"
