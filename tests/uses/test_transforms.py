"""Transforms of torch.func and averages of weights leave a head intact."""

import copy

import torch
from torch.func import functional_call, grad, grad_and_value, vjp
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.uses.table import (
    ALL,
    EVERY,
    FEW,
    HIDDEN,
    SPARSE,
    STEPS,
    TARGET,
    UNSAMPLED,
    C,
    cells,
    draws,
    follows,
    head_of,
    identical,
    loss_of,
    parameters_of,
    reads_vectors,
    train,
    trained,
)


def functional_loss(head, step=0):
    """Return the loss of a step as a function of parameters and input."""

    def run(parameters, hidden):
        return loss_of(head, hidden, step, lambda *args, **options: functional_call(head, parameters, args, options))

    return run


def detached(head):
    return {name: parameter.detach() for name, parameter in head.named_parameters()}


# Torch has no sparse gradients inside its transforms.
@cells(ALL, without=SPARSE)
def test_a_head_differentiated_once_trains_as_if_it_had_not_been(cell):
    head, twin = head_of(cell).eval(), head_of(cell)
    gradients = grad(functional_loss(head), argnums=(0, 1))(detached(head), HIDDEN)
    assert all(gradient.isfinite().all() for gradient in gradients[0].values())
    follows(head.train(), twin, range(STEPS))


@cells(without=SPARSE)
def test_transforms_give_the_loss_and_gradients_of_autograd(cell):
    head = trained(cell).eval()
    head.zero_grad()
    hidden = HIDDEN.clone().requires_grad_()
    expected = loss_of(head, hidden, 0)
    expected.backward()
    (by_name, of_hidden), loss = grad_and_value(functional_loss(head), argnums=(0, 1))(detached(head), HIDDEN)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(of_hidden, hidden.grad)
    for name, parameter in head.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(by_name[name], parameter.grad)


@cells(without=SPARSE)
def test_a_head_in_training_survives_a_transform(cell):
    head = head_of(cell)
    for step in range(STEPS):
        grad(functional_loss(head, step))(detached(head), HIDDEN)
    losses = train(head, range(STEPS))
    assert all(loss.isfinite().all() for loss in losses)
    assert identical(draws(copy.deepcopy(head)), draws(head))
    for tensor in head.state_dict().values():
        assert not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


@cells(FEW)
def test_a_functional_call_without_a_transform_uses_the_parameters_it_is_given(cell):
    head, twin, other = head_of(cell).eval(), head_of(cell).eval(), head_of(cell, seed=9)
    # The order of classes is that of the vectors of the first draw.
    draws(head), draws(twin)
    given = {name: parameter.detach().clone() for name, parameter in other.named_parameters()}
    loss = functional_loss(head)(given, HIDDEN)
    with torch.no_grad():
        for parameter, value in zip(twin.parameters(), given.values(), strict=True):
            parameter.copy_(value)
    torch.testing.assert_close(loss, loss_of(twin, HIDDEN, 0))
    assert identical(parameters_of(head), parameters_of(head_of(cell)))
    if hasattr(head, "sampler") and not reads_vectors(cell):
        assert identical(draws(head), draws(twin))


@cells(FEW, without=SPARSE)
def test_a_vector_jacobian_product_of_the_losses_works(cell):
    head = head_of(cell).eval()
    losses, pull_back = vjp(lambda hidden: head(hidden, TARGET, reduction="none"), HIDDEN)
    (gradient,) = pull_back(torch.ones_like(losses))
    assert gradient.shape == HIDDEN.shape
    assert gradient.isfinite().all()


def averaged_models(head):
    yield "mean", AveragedModel(head, use_buffers=False)
    yield "mean and buffers", AveragedModel(head, use_buffers=True)
    yield "ema and buffers", AveragedModel(head, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)


# Torch cannot average a module without parameters.
@cells(ALL, without=["scorer, function"])
def test_a_head_with_averaged_weights_draws_as_when_it_was_copied(cell):
    head = trained(cell)
    twin = copy.deepcopy(head)
    averages = dict(averaged_models(head))
    seen = [parameters_of(head)]
    for steps in (range(EVERY, 2 * EVERY), range(2 * EVERY, 3 * EVERY)):
        for average in averages.values():
            average.update_parameters(head)
        seen.append(parameters_of(head))
        train(head, steps)
    for average in averages.values():
        average.update_parameters(head)
    expected = draws(twin)
    for name, average in averages.items():
        if hasattr(head, "sampler") and not reads_vectors(cell):
            assert identical(draws(average.module), expected), name
        average.eval()
        loss = average(HIDDEN, TARGET)
        assert loss.isfinite()
        loss.backward()
        assert average.module.topk(HIDDEN, 3).ids.max() < C
    for found, *parts in zip(averages["mean"].parameters(), *seen[1:], parameters_of(head), strict=True):
        torch.testing.assert_close(found.detach(), torch.stack(parts).mean(0), rtol=1e-4, atol=1e-5)


@cells(FEW, without=["scorer, function"])
def test_a_head_with_averaged_weights_is_saved_and_trains_on(cell):
    head = trained(cell)
    average = AveragedModel(head, use_buffers=True)
    for steps in (range(EVERY, 2 * EVERY), range(2 * EVERY, 3 * EVERY)):
        train(head, steps)
        average.update_parameters(head)
    other = AveragedModel(head_of(cell, seed=9), use_buffers=True)
    other.load_state_dict(average.state_dict())
    follows(other.module, average.module, range(STEPS))


@cells(FEW, without=(*SPARSE, *UNSAMPLED))
def test_exact_losses_are_differentiated_by_transforms(cell):
    head, hidden = trained(cell).eval(), HIDDEN.clone().requires_grad_()
    (expected,) = torch.autograd.grad(head.exact_loss(hidden, TARGET), hidden)
    torch.testing.assert_close(grad(lambda x: head.exact_loss(x, TARGET))(HIDDEN), expected)
