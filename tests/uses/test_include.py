"""Every head takes included classes with every sampler: in training, compiled, transformed and copied."""

import copy
import io

import pytest
import torch
from torch.func import functional_call, grad
from torch.utils.checkpoint import checkpoint

from tests.uses.table import (
    ALL,
    CELLS,
    DEFAULT,
    EVERY,
    FEW,
    HIDDEN,
    SPARSE,
    STEPS,
    TARGET,
    UNSAMPLED,
    B,
    C,
    cells,
    differing,
    draws,
    head_of,
    identical,
    parameters_of,
    state_of,
    train,
    trained,
)

INCLUDE = torch.randint(-1, C, (B, 5), generator=torch.Generator().manual_seed(7))
EVERYTHING = torch.arange(C).expand(B, -1)
# Noise contrastive estimation is no likelihood: with all classes it is not the cross entropy.
NO_LIKELIHOOD = ("class, noise contrastive",)


def loss_including(head, hidden, step, run=None):
    """Return the loss of a step that draws from the global generator, which a graph and a checkpoint need."""
    torch.manual_seed(step)
    return (head if run is None else run)(hidden, TARGET.roll(step), include=INCLUDE.roll(step, 0))


def compiled(head, backend):
    run = torch.compile(head, backend=backend, fullgraph=True)
    return lambda head, hidden, step: loss_including(head, hidden, step, run)


@cells(ALL, without=(*UNSAMPLED, *NO_LIKELIHOOD))
def test_all_classes_included_are_the_exact_loss_before_and_after_training(cell):
    new, head = head_of(cell), head_of(cell)
    train(head, range(STEPS), loss=loss_including)
    for each in (new.eval(), head.eval()):
        loss = each(HIDDEN, TARGET, include=EVERYTHING)
        torch.testing.assert_close(loss, each.exact_loss(HIDDEN, TARGET), rtol=1e-4, atol=1e-5)


@cells()
def test_a_copy_and_a_restored_head_train_on_with_included_classes(cell):
    head = trained(cell)
    train(head, range(EVERY), loss=loss_including)
    twin, other, file = copy.deepcopy(head), head_of(cell, seed=1), io.BytesIO()
    torch.save(head.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    losses = [train(each, range(STEPS), loss=loss_including) for each in (head, twin, other)]
    assert identical(losses[0], losses[1])
    assert not differing(state_of(head), state_of(twin))
    assert all(loss.isfinite().all() for loss in losses[2])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:Sparse invariant checks")
@cells([("class", DEFAULT), ("class, sparse", "systematic"), ("scorer", "clustered, rebuilt")])
def test_a_head_that_includes_classes_compiles_into_one_graph_and_learns(cell):
    torch._dynamo.reset()
    head, twin = head_of(cell), head_of(cell)
    # Orders and clusters are built in eager code, by the first draw.
    assert identical(draws(head), draws(twin))
    before = state_of(head)
    ours = train(head, range(2), lr=0.1, loss=compiled(head, "aot_eager"))
    theirs = train(twin, range(2), lr=0.1, loss=loss_including)
    changed = differing(before, state_of(twin))
    assert differing(before, state_of(head)) == changed
    torch.testing.assert_close(ours[0], theirs[0])
    # What a sampler learns reaches a graph one step later.
    if not changed:
        for a, b in zip((*ours, *parameters_of(head)), (*theirs, *parameters_of(twin)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


@cells(FEW, without=SPARSE)
def test_transforms_differentiate_with_included_classes(cell):
    head = trained(cell).eval()
    head.zero_grad()
    hidden = HIDDEN.clone().requires_grad_()
    loss_including(head, hidden, 0).backward()
    parameters = {name: parameter.detach() for name, parameter in head.named_parameters()}

    def loss(parameters, hidden):
        return loss_including(
            head, hidden, 0, lambda *args, **options: functional_call(head, parameters, args, options)
        )

    of_parameters, of_hidden = grad(loss, argnums=(0, 1))(parameters, HIDDEN)
    torch.testing.assert_close(of_hidden, hidden.grad)
    for name, parameter in head.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(of_parameters[name], parameter.grad)


@cells([("class", DEFAULT), ("class", "clustered, rebuilt"), ("scorer", DEFAULT)])
def test_a_checkpoint_recomputes_the_included_classes(cell):
    def recomputed(head, hidden, step):
        torch.manual_seed(step)
        include = INCLUDE.roll(step, 0)
        return checkpoint(lambda x: head(x, TARGET.roll(step), include=include), hidden, use_reentrant=False)

    head, twin = head_of(cell), head_of(cell)
    assert identical(train(head, range(STEPS), loss=recomputed), train(twin, range(STEPS), loss=loss_including))
    assert not differing(state_of(head), state_of(twin))


@cells([cell for cell in CELLS if cell[0] != "scorer"])
def test_evaluations_with_included_classes_change_nothing(cell):
    head = trained(cell).eval()
    state, drawn, parameters = state_of(head), draws(head), parameters_of(head)
    with torch.no_grad():
        losses = [loss_including(head, HIDDEN, 0) for _ in range(2)]
    assert torch.equal(*losses)
    assert not differing(state_of(head), state)
    assert identical(draws(head), drawn)
    assert identical(parameters_of(head), parameters)
