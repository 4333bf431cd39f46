"""Autocast, inference mode, devices and checkpointing around a call leave nothing behind in a head."""

import contextlib

import pytest
import torch
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from manyclass import ClassHead, diagnose
from manyclass.samplers import Automatic, Learned, Systematic, WithExplicit
from tests.uses.table import (
    CHANGING,
    EVERY,
    FEW,
    HIDDEN,
    STEPS,
    TARGET,
    UNSAMPLED,
    WEIGHTS,
    C,
    D,
    K,
    cells,
    differing,
    draws,
    follows,
    head_of,
    identical,
    loss_of,
    parameters_of,
    same_progress,
    sampler_of,
    state_of,
    train,
    trained,
    works_or_refuses,
)

WITHOUT_GRADIENTS = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.fixture
def default_device():
    """Make meta the default device, in place of a GPU: a tensor that lands there by mistake has no values."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@cells()
def test_a_head_first_used_in_inference_mode_trains_as_if_it_had_not_been(cell):
    head, twin = head_of(cell), head_of(cell)
    with torch.inference_mode():
        evaluated = [*draws(head), loss_of(head, HIDDEN, 0), head.topk(HIDDEN, 3).ids]
    assert identical(evaluated, [*draws(twin), loss_of(twin.eval(), HIDDEN, 0).detach(), twin.topk(HIDDEN, 3).ids])
    follows(head, twin.train(), range(STEPS))


@pytest.mark.parametrize("context", WITHOUT_GRADIENTS)
@cells(CHANGING)
def test_a_trained_head_used_without_gradients_trains_on_as_if_it_had_not_been(cell, context):
    head, twin = trained(cell), trained(cell)
    with WITHOUT_GRADIENTS[context]():
        loss_of(head, HIDDEN, 0)
        head.state_dict()
    follows(head, twin)


@cells(FEW)
def test_a_head_built_in_inference_mode_draws_there(cell):
    with torch.inference_mode():
        head = head_of(cell).eval()
        assert loss_of(head, HIDDEN, 0).isfinite()
        found = draws(head)
    assert identical(found, draws(head_of(cell)))


@cells(without=UNSAMPLED)
def test_a_diagnosis_without_gradients_is_the_same(cell):
    plain = diagnose(head_of(cell), HIDDEN, TARGET, draws=2)
    for context in WITHOUT_GRADIENTS.values():
        head = head_of(cell)
        with context():
            # Signs of no parameters are NaN, which equals nothing.
            assert str(diagnose(head, HIDDEN, TARGET, draws=2)) == str(plain)
    assert plain.classes_scored > 1


@cells(FEW, without=UNSAMPLED)
def test_a_diagnosis_changes_nothing(cell):
    head, twin = head_of(cell), head_of(cell)
    random_state = torch.get_rng_state()
    diagnose(head, HIDDEN, TARGET, draws=2)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in head.parameters())
    draws(twin)
    assert not differing(state_of(head), state_of(twin))
    follows(head, twin, range(STEPS))


@cells()
def test_a_head_trains_under_autocast(cell):
    head = head_of(cell)
    dtypes = {name: tensor.dtype for name, tensor in head.state_dict().items()}
    with torch.autocast("cpu", torch.bfloat16):
        losses = train(head, range(STEPS), lr=0.1)
        head.topk(HIDDEN, 3)
    assert all(loss.isfinite().all() for loss in losses)
    assert {name: tensor.dtype for name, tensor in head.state_dict().items()} == dtypes
    torch.testing.assert_close(losses[0].float(), train(head_of(cell), range(1))[0], rtol=0.02, atol=0.02)


@cells(without=UNSAMPLED)
def test_draws_and_rebuilds_under_autocast_are_those_without_it(cell):
    head, twin = head_of(cell), head_of(cell)
    found = []
    for each, enabled in ((head, True), (twin, False)):
        drawn = []
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            # The first draw builds; steps without an observation rebuild from class vectors alone.
            for _ in range(STEPS):
                drawn += draws(each)
                each.sampler.advance()
            each.sampler.refresh()
            drawn += draws(each)
        found.append(drawn)
    assert identical(*found)
    follows(head, twin, range(STEPS))


@cells([cell for cell in FEW if "budget" not in cell[1]], without=UNSAMPLED)
def test_what_a_sampler_learns_under_autocast_is_close_to_what_it_learns_without(cell):
    head, twin = head_of(cell), head_of(cell)
    with torch.autocast("cpu", torch.bfloat16):
        train(head, range(EVERY), lr=0)
    train(twin, range(EVERY), lr=0)
    ours, theirs = state_of(head), state_of(twin)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, theirs[name], rtol=0.1, atol=1e-4)


@cells()
def test_another_default_device_changes_nothing(cell, default_device):
    with torch.device("cpu"):
        head, twin = head_of(cell), head_of(cell)
        expected = [*draws(twin), *train(twin, range(STEPS)), *draws(twin), twin.topk(HIDDEN, 3).ids]
    found = [*draws(head), *train(head, range(STEPS)), *draws(head), head.topk(HIDDEN, 3).ids]
    assert identical(found, expected)
    assert all(parameter.device.type == "cpu" for parameter in head.parameters())


@cells(FEW)
def test_a_state_is_loaded_under_another_default_device(cell):
    head, other = trained(cell), head_of(cell, seed=9)
    with torch.device("meta"):
        other.load_state_dict(head.state_dict())
    follows(other, head)


def meta_head(cell, inside):
    """Return a head without memory for its parameters; `inside`: the sampler is made there too."""
    sampler = None if inside else sampler_of(cell)
    with torch.device("meta"):
        head = head_of(cell, sampler=sampler)
    assert all(parameter.is_meta for parameter in head.parameters())
    return head


MATERIALISED = {
    "assign": lambda head, state: head.load_state_dict(state, assign=True),
    "to_empty": lambda head, state: head.to_empty(device="cpu").load_state_dict(state),
}


@pytest.mark.parametrize("materialised", MATERIALISED)
@cells()
def test_a_head_made_on_the_meta_device_loads_a_state_and_trains(cell, materialised):
    check_meta_head(cell, False, materialised)


@pytest.mark.parametrize("materialised", ["assign"])
@cells([*FEW, ("class", "importance"), ("class", "bernoulli"), ("class", "in batch")])
def test_a_head_made_with_its_sampler_on_the_meta_device_loads_a_state_and_trains(cell, materialised):
    check_meta_head(cell, True, materialised)


def check_meta_head(cell, inside, materialised):
    head = trained(cell)
    other = meta_head(cell, inside)
    state = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    MATERIALISED[materialised](other, state)
    assert all(parameter.device.type == "cpu" for parameter in other.parameters())
    follows(other, head)


def test_counts_without_values_are_refused_or_loaded():
    head = ClassHead(D, C, counts=WEIGHTS, k=K)
    train(head, range(EVERY))
    with works_or_refuses():
        with torch.device("meta"):
            other = ClassHead(D, C, counts=torch.ones(C), k=K)
        # The other head takes over the tensors themselves.
        other.load_state_dict({name: tensor.clone() for name, tensor in head.state_dict().items()}, assign=True)
        follows(other, head)


@cells(FEW)
def test_a_head_on_the_meta_device_has_shapes_but_draws_nothing(cell):
    head = meta_head(cell, inside=False)
    state = head.state_dict()
    assert state.keys() == head_of(cell).state_dict().keys()
    twin = head_of(cell).to("meta")
    assert all(parameter.is_meta for parameter in twin.parameters())


def checkpointed(use_reentrant):
    """Return the loss of a step inside a checkpoint, which restores the global generator; None: outside of one."""

    def loss(head, hidden, step):
        torch.manual_seed(step)
        target = TARGET.roll(step)
        if use_reentrant is None:
            return head(hidden, target)
        return checkpoint(lambda x: head(x, target), hidden, use_reentrant=use_reentrant)

    return loss


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved", "reentrant"])
@cells()
def test_a_checkpointed_head_learns_each_step_once(cell, use_reentrant):
    head, twin = head_of(cell), head_of(cell)
    before = state_of(head)
    losses = train(head, range(STEPS), loss=checkpointed(use_reentrant))
    expected = train(twin, range(STEPS), loss=checkpointed(None))
    changed = differing(before, state_of(twin))
    if use_reentrant and changed:
        # The first pass has no gradients and may be an evaluation: the sampler takes up a rebuild after the second.
        assert differing(before, state_of(head)) == changed
        for name, tensor in state_of(head).items():
            if name.endswith("progress"):
                assert same_progress(tensor, state_of(twin)[name])
        return
    assert identical(losses, expected)
    assert not differing(state_of(head), state_of(twin))
    assert identical(parameters_of(head), parameters_of(twin))
    follows(head, twin)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved", "reentrant"])
@cells(CHANGING)
def test_a_generator_inside_a_checkpoint_is_refused_before_anything_is_learned(cell, use_reentrant):
    head = head_of(cell)
    before, generator = state_of(head), torch.Generator().manual_seed(0)
    with pytest.raises(ValueError, match=r"`generator` must be None inside torch\.utils\.checkpoint"):
        checkpoint(
            lambda x: head(x, TARGET, generator=generator), HIDDEN.clone().requires_grad_(), use_reentrant=use_reentrant
        ).backward()
    assert not {name for name in differing(before, state_of(head)) if name.endswith("estimate")}


@cells(CHANGING)
def test_a_checkpointed_head_draws_once_from_the_global_generator(cell):
    results = []
    for each in (None, False):
        head = head_of(cell)
        torch.manual_seed(1)

        def loss(head, hidden, step, each=each):
            def run(x):
                return head(x, TARGET.roll(step))

            return run(hidden) if each is None else checkpoint(run, hidden, use_reentrant=each)

        losses = train(head, range(STEPS), loss=loss)
        results.append([*losses, *parameters_of(head), *draws(head), torch.get_rng_state()])
    assert identical(*results)


@cells(FEW)
def test_a_checkpoint_around_an_encoder_and_a_head_learns_each_step_once(cell):
    results = []
    for around in (False, True):
        head = head_of(cell)
        torch.manual_seed(7)
        encoder = torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Dropout(0.5))
        steps = []
        for step in range(STEPS):
            torch.manual_seed(step)

            def run(x, step=step, encoder=encoder, head=head):
                return head(encoder(x), TARGET.roll(step))

            hidden = HIDDEN.clone().requires_grad_()
            loss = checkpoint(run, hidden, use_reentrant=False) if around else run(hidden)
            loss.backward()
            steps += [loss.detach(), hidden.grad]
        results.append([*steps, *draws(head), *(p.grad.to_dense() for p in head.parameters() if p.grad is not None)])
    assert identical(*results)


@cells(FEW)
def test_a_head_in_evaluation_keeps_its_state(cell):
    head = trained(cell).eval()
    state, before = state_of(head), draws(head)
    for context in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
        with context():
            for step in range(EVERY):
                assert loss_of(head, HIDDEN, step).isfinite()
    assert not differing(state_of(head), state)
    assert identical(draws(head), before)


def test_ids_without_values_are_refused():
    with torch.device("meta"), pytest.raises(ValueError, match="`explicit` must have values, got a tensor on the meta"):
        WithExplicit(Systematic(torch.ones(C), K), torch.arange(9))
    with torch.device("meta"), pytest.raises(ValueError, match="`order` must have values, got a tensor on the meta"):
        Systematic(torch.ones(C), K, order=torch.arange(C))


@pytest.mark.parametrize("sampler", ["automatic", "learned"])
def test_a_checkpointed_head_with_a_parametrised_weight_trains(sampler):
    """Measurements of a step save nothing for its backward pass, which the recomputation would lack."""
    counts = torch.ones(2000)
    made = Automatic(counts, every=2) if sampler == "automatic" else Learned(counts, 100, order="cluster")
    head = weight_norm(ClassHead(8, 2000, sampler=made))
    for step in range(6):
        torch.manual_seed(step)
        hidden, target = torch.randn(16, 8, requires_grad=True), torch.randint(2000, (16,))
        checkpoint(lambda x, target=target: head(x, target), hidden, use_reentrant=False).backward()
    assert head.parametrizations.weight.original1.grad.isfinite().all()
