"""A converted, copied, pickled or shared head draws and trains as before."""

import copy
import io
import pickle
import sys
import threading

import pytest
import torch
from torch import nn

from tests.uses.table import (
    ALL,
    CHANGING,
    EVERY,
    FEW,
    HIDDEN,
    STEPS,
    UNSAMPLED,
    B,
    D,
    cells,
    differing,
    draws,
    follows,
    head_of,
    identical,
    loss_of,
    parameters_of,
    reads_vectors,
    state_of,
    train,
    trained,
)

CONVERSIONS = {
    "bfloat16": (nn.Module.bfloat16, torch.bfloat16),
    "half": (nn.Module.half, torch.float16),
    "double": (nn.Module.double, torch.float64),
    "to": (lambda module: module.to(torch.float16), torch.float16),
}


def saved(head):
    file = io.BytesIO()
    torch.save(head, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda head: pickle.loads(pickle.dumps(head)),
    "torch.save": saved,
}


@cells(ALL, without=UNSAMPLED)
def test_a_converted_head_draws_as_before(cell):
    head = trained(cell)
    before, state = draws(head), state_of(head)
    for convert, dtype in CONVERSIONS.values():
        head = convert(head)
        assert all(parameter.dtype == dtype for parameter in head.parameters())
        assert reads_vectors(cell) or identical(draws(head), before)
        assert not differing(state_of(head), state)


@pytest.mark.parametrize("conversion", ["half", "double"])
@cells(FEW)
def test_a_converted_head_trains_on(cell, conversion):
    head = trained(cell)
    convert, dtype = CONVERSIONS[conversion]
    losses = train(convert(head), range(EVERY, EVERY + STEPS), lr=0.1)
    assert all(loss.isfinite().all() for loss in losses)
    assert all(parameter.isfinite().all() for parameter in parameters_of(head))
    if dtype == torch.float64:
        twin = train(trained(cell), range(EVERY, EVERY + STEPS), lr=0.1)
        torch.testing.assert_close(losses[-2].float(), twin[-2], rtol=1e-2, atol=1e-2)


@cells(FEW)
def test_a_head_converted_before_its_first_draw_trains(cell):
    head = head_of(cell).bfloat16()
    losses = train(head, range(STEPS), lr=0.1)
    assert all(loss.isfinite().all() for loss in losses)


@pytest.mark.parametrize("copied", ["deepcopy", "pickle"])
@cells()
def test_a_copy_trains_alone_and_like_the_original(cell, copied):
    check_copy(COPIES[copied], trained(cell), EVERY)


@cells(FEW)
def test_a_copy_of_a_head_that_never_drew_trains_like_the_original(cell):
    check_copy(copy.deepcopy, head_of(cell), 0)


@cells(CHANGING)
def test_a_head_saved_whole_trains_like_the_original(cell):
    check_copy(COPIES["torch.save"], trained(cell), EVERY)


def check_copy(copied, head, steps):
    before, state, parameters = draws(head), state_of(head), parameters_of(head)
    twin = copied(head)
    assert identical(draws(twin), before)
    if parameters:
        assert next(twin.parameters()) is not next(head.parameters())
    first = train(twin, range(steps, steps + STEPS))
    assert identical(parameters_of(head), parameters)
    assert not differing(state_of(head), state)
    assert identical(draws(head), before)
    assert identical(train(head, range(steps, steps + STEPS)), first)
    assert not differing(state_of(head), state_of(twin))


@cells(FEW)
def test_a_head_in_shared_memory_trains_as_before(cell):
    head, twin = trained(cell), trained(cell)
    # Sparse gradients cannot be shared.
    head.zero_grad()
    head.share_memory()
    assert all(parameter.is_shared() for parameter in head.parameters())
    follows(head, twin)


@cells(FEW)
def test_a_frozen_head_passes_gradients_to_its_input_alone(cell):
    head = head_of(cell).requires_grad_(False)
    losses = train(head, range(EVERY))
    assert losses[-1].shape == (B, D)
    assert losses[-1].abs().sum() > 0
    assert all(parameter.grad is None for parameter in head.parameters())
    twin = head_of(cell)
    head.requires_grad_(True)
    assert identical(parameters_of(head), parameters_of(twin))


@cells(FEW)
def test_zero_grad_leaves_no_gradient_and_keeps_the_sampler(cell):
    head = trained(cell)
    state = state_of(head)
    head.zero_grad()
    assert all(parameter.grad is None for parameter in head.parameters())
    head.zero_grad(set_to_none=False)
    assert not differing(state_of(head), state)


@cells(FEW)
def test_forward_hooks_see_every_loss(cell):
    head, twin = head_of(cell), head_of(cell)
    seen = []
    head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
    head.register_forward_hook(lambda _, __, loss: seen.append(loss.detach().clone()))
    losses = train(head, range(STEPS))
    assert seen[::2] == [HIDDEN.shape] * STEPS
    assert identical(seen[1::2], losses[:-1])
    assert identical(losses, train(twin, range(STEPS)))


@cells(FEW)
def test_a_head_in_a_model_trains_as_it_does_alone(cell):
    class Model(nn.Module):
        def __init__(self, head):
            super().__init__()
            self.body, self.head = nn.Identity(), head

        def forward(self, hidden, target, **options):
            return self.head(self.body(hidden), target, **options)

    head, twin = head_of(cell), head_of(cell)
    model = Model(head)
    losses = train(head, range(STEPS), loss=lambda head, hidden, step: loss_of(head, hidden, step, model))
    assert identical(losses, train(twin, range(STEPS)))
    assert model.train(False).head.training is False


@cells()
def test_two_threads_that_draw_at_once_draw_as_one_does(cell):
    head, twin = head_of(cell).eval(), head_of(cell).eval()
    # The first draw may build clusters, once: two threads could both begin.
    draws(head)
    expected = [*draws(twin), *(loss_of(twin, HIDDEN, step).detach() for step in range(4))]
    found, start = {}, threading.Barrier(2)
    # Threads take turns more often than by default, so that a race shows.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def work(name):
        start.wait()
        found[name] = [*draws(head), *(loss_of(head, HIDDEN, step).detach() for step in range(4))]

    threads = [threading.Thread(target=work, args=(name,)) for name in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert found.keys() == {0, 1}
    assert identical(found[0], expected)
    assert identical(found[1], expected)
