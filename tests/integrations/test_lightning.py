"""A head trains under Lightning in every precision, clipped and accumulated, and resumes bit for bit."""

import copy
from functools import partial

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader

from manyclass import optim
from tests.integrations.lightning_model import (
    BATCH,
    SAMPLERS,
    Examples,
    NextClass,
    assert_same,
    fit,
    state_of,
)
from tests.optim.tables import identical

pytestmark = [
    # Lightning's own: it calls a class that torch 2.13 deprecates,
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    # knows that these small data need no processes to load them,
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    # and notes that a resumed training saves its checkpoints into another folder.
    pytest.mark.filterwarnings("ignore:The dirpath has changed from"),
]

PRECISIONS = {
    "32-true": lambda: {"precision": "32-true"},
    "bf16-mixed": lambda: {"precision": "bf16-mixed"},
    # On CPUs Lightning turns "16-mixed" into "bf16-mixed", but its plugin uses float16 and a GradScaler there too.
    "16-mixed": lambda: {"plugins": [MixedPrecision("16-mixed", "cpu")]},
    "bf16-true": lambda: {"precision": "bf16-true"},
}
CLIPPING = {
    "not clipped": {},
    "clipped by norm": {"gradient_clip_val": 0.3, "gradient_clip_algorithm": "norm"},
    "clipped by value": {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
}
ROWS = {
    "RowSGD": partial(optim.RowSGD, lr=0.5, momentum=0.9, weight_decay=0.01),
    "RowAdagrad": partial(optim.RowAdagrad, lr=0.3, by_row=True),
    "RowAdam": partial(optim.RowAdam, lr=0.03),
}


def assert_resumes(module, tmp_path, options=dict, *, every=3, crash=4):
    """Raise unless a training that crashes equals one that does not, after it went on from its last checkpoint."""
    whole = fit(module, tmp_path / "whole", every=every, **options())
    interrupted = fit(module, tmp_path / "interrupted", every=every, crash=crash, **options())
    assert interrupted.trainer.global_step < whole.trainer.global_step
    # In another process torch's seed would be another too.
    last = tmp_path / "interrupted" / "last.ckpt"
    resumed = fit(module, tmp_path / "resumed", every=every, resume=last, seed=99, **options())
    assert resumed.trainer.global_step == whole.trainer.global_step
    assert_same(state_of(whole), state_of(resumed))
    return whole


class Clipped(NextClass):
    """A module that compares each step's gradients with dense ones, clipped by torch."""

    compared = reduced = 0

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        assert self.head.weight.grad.is_sparse
        assert self.head.bias.grad.is_sparse
        before = self.gradients()
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        after = self.gradients()
        assert self.head.weight.grad.is_sparse
        if not all(gradient.isfinite().all() for gradient in before):
            return
        expected = [torch.nn.Parameter(torch.empty_like(gradient)) for gradient in before]
        for parameter, gradient in zip(expected, before, strict=True):
            parameter.grad = gradient.clone()
        if gradient_clip_algorithm == "norm":
            torch.nn.utils.clip_grad_norm_(expected, gradient_clip_val)
        elif gradient_clip_algorithm == "value":
            torch.nn.utils.clip_grad_value_(expected, gradient_clip_val)
        # Each row of a gradient is rounded to the dtype before rows of one class are summed.
        half = self.head.weight.dtype == torch.bfloat16
        largest = max(gradient.abs().max().item() for gradient in before)
        tolerance = {"rtol": 2**-7, "atol": 2**-8 * largest} if half else {"rtol": 1e-5, "atol": 1e-7}
        for mine, other in zip(after, expected, strict=True):
            torch.testing.assert_close(mine, other.grad, **tolerance)
        self.compared += 1
        self.reduced += any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))

    def gradients(self):
        return [parameter.grad.to(torch.float32, copy=True).to_dense() for parameter in self.parameters()]


@torch.no_grad()
def loss_before(module):
    """Return the exact held-out loss of a module that has not been trained."""
    torch.manual_seed(0)
    x, target = Examples(32, seed=1)[:]
    module = module().eval()
    return module.head.exact_loss(module.encoder(x), target)


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("clipping", CLIPPING)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_training_that_crashes_goes_on_bit_for_bit(tmp_path, precision, clipping, accumulated):
    def module():
        return Clipped("Learned")

    def options():
        return PRECISIONS[precision]() | CLIPPING[clipping] | {"accumulate_grad_batches": accumulated}

    trained = assert_resumes(module, tmp_path, options)
    steps = 18 // accumulated
    # A GradScaler starts too high, and leaves out some steps.
    assert trained.compared >= (steps if precision != "16-mixed" else steps - 4)
    assert trained.reduced == (0 if clipping == "not clipped" else trained.compared)
    assert trained.trainer.callback_metrics["held_out"] < loss_before(module)


@pytest.mark.parametrize("every", [4, None], ids=["within an epoch", "after a validation"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_row_optimiser_and_sampler_resumes(tmp_path, sampler, rows, every):
    def module():
        return NextClass(sampler, rows=ROWS[rows])

    trained = assert_resumes(module, tmp_path, every=every, crash=13)
    if sampler == "Automatic":
        assert trained.head.sampler.decisions


def test_an_ordinary_loader_resumes_after_an_epoch(tmp_path):
    assert_resumes(NextClass, tmp_path, lambda: {"loader": DataLoader}, every=None, crash=13)


def test_a_checkpoint_holds_each_optimiser_by_name(tmp_path):
    module = fit(NextClass, tmp_path)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert_same(saved["optimizer_states"], [state_of(module)["optimizer"]])
    assert list(saved["optimizer_states"][0]) == ["0 RowAdagrad", "1 AdamW"]


class Plain(NextClass):
    """A module whose draws depend on nothing but the number of the step."""

    def training_step(self, batch, batch_idx):
        torch.manual_seed(self.global_step)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("rows", ROWS)
def test_lightning_steps_as_a_loop_with_both_optimisers_apart(rows):
    torch.manual_seed(3)
    module = Plain(rows=ROWS[rows])
    alone = copy.deepcopy(module)
    fit(lambda: module, loader=DataLoader, supported=False, max_epochs=1)
    optimizers = [
        ROWS[rows]([alone.head.weight, alone.head.bias]),
        torch.optim.AdamW(alone.encoder.parameters(), lr=0.01),
    ]
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 0.97**step) for each in optimizers]
    for step, (x, target) in enumerate(DataLoader(Examples(), BATCH)):
        torch.manual_seed(step)
        for each in optimizers:
            each.zero_grad()
        alone.head(alone.encoder(x), target).backward()
        for each in (*optimizers, *schedules):
            each.step()
    identical(module.parameters(), alone.parameters())
    (chained,) = module.trainer.optimizers
    for mine, other in zip(chained.children().values(), optimizers, strict=True):
        assert_same(mine.state_dict(), other.state_dict())


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_sparse_gradients_train_as_dense_ones_that_torch_clips(algorithm):
    options = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm, "accumulate_grad_batches": 2}
    sparse = fit(NextClass, **options)
    dense = fit(partial(NextClass, sparse=False, rows=partial(torch.optim.Adagrad, lr=0.3)), **options)
    for mine, other in zip(sparse.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


class Manual(NextClass):
    """A module that steps its optimiser itself."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step()


def test_manual_optimization_is_automatic_optimization():
    automatic, manual = fit(NextClass), fit(Manual)
    assert_same(state_of(automatic), state_of(manual))


def test_batches_and_epochs_draw_anew_and_a_training_repeats():
    class Recording(NextClass):
        def __init__(self):
            super().__init__()
            self.drawn = []

        def training_step(self, batch, batch_idx):
            self.drawn.append(torch.rand(4).tolist())
            return super().training_step(batch, batch_idx)

    first, second = fit(Recording).drawn, fit(Recording).drawn
    assert first == second
    assert len({tuple(numbers) for numbers in first}) == 18
    assert fit(Recording, seed=1).drawn != first
