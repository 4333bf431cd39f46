"""A module of Lightning with a head over many classes, its data and its training."""

import copy
import logging
from functools import partial
from itertools import islice

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset

from manyclass import ClassHead, optim
from manyclass.integrations.lightning import SampledTraining
from manyclass.samplers import Automatic, Costs, Learned, Systematic

C, D, EXAMPLES, BATCH = 300, 8, 72, 8
COUNTS = 1000 // torch.arange(1, C + 1) + 1
SAMPLERS = {
    "Systematic": lambda: Systematic(COUNTS, 32),
    # Rebuilds its table, and takes it up, several times in a training of these tests.
    "Learned": lambda: Learned(COUNTS, 32, every=3),
    # Changes its design by costs that do not depend on the machine.
    "Automatic": lambda: Automatic(COUNTS, 0.005, least=32, every=3, costs=Costs(10.0, 1.0, 2.0, 0.01)),
}
# Lightning says which devices it found and how to log in to its site.
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Examples(Dataset):
    """Inputs [N, D] and targets [N] whose classes the inputs tell."""

    def __init__(self, number=EXAMPLES, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.target = torch.multinomial(COUNTS.float(), number, True, generator=generator)
        code = torch.randn(C, D, generator=torch.Generator().manual_seed(100))
        self.x = code[self.target] + 0.1 * torch.randn(number, D, generator=generator)

    def __len__(self):
        return len(self.target)

    def __getitem__(self, i):
        return self.x[i], self.target[i]


class Resumable(DataLoader):
    """A shuffled loader that can be resumed within an epoch, as those of torchdata."""

    def __init__(self, dataset, batch_size):
        super().__init__(dataset, batch_size, sampler=Order(len(dataset)))
        self.seen = self.skip = 0

    def __iter__(self):
        self.seen, skip, self.skip = self.skip, self.skip, 0
        for batch in islice(super().__iter__(), skip, None):
            self.seen += 1
            yield batch

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.skip = state["seen"] % len(self)


class Order(torch.utils.data.Sampler):
    """Another order in each epoch."""

    def __init__(self, number):
        self.number, self.epoch = number, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.number

    def __iter__(self):
        return iter(torch.randperm(self.number, generator=torch.Generator().manual_seed(self.epoch)).tolist())


ADAGRAD = partial(optim.RowAdagrad, lr=0.3)


class NextClass(L.LightningModule):
    """An encoder with dropout and a head with row-sparse gradients."""

    def __init__(self, sampler="Systematic", *, sparse=True, rows=ADAGRAD, dropout=0.1):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Dropout(dropout), nn.Linear(D, D))
        self.head = ClassHead(D, C, sampler=SAMPLERS[sampler](), counts=COUNTS, sparse=sparse)
        self.rows = rows

    def training_step(self, batch, batch_idx):
        x, target = batch
        loss = self.head(self.encoder(x), target)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, target = batch
        self.log("held_out", self.head.exact_loss(self.encoder(x), target), sync_dist=True)

    def configure_optimizers(self):
        optimizer = optim.for_model(self, rows=self.rows, rest=partial(torch.optim.AdamW, lr=0.01))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Crash(L.Callback):
    """Stops a training by an error at its first batch after a number of steps."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step >= self.step:
            raise InterruptedError


def fit(
    module,
    folder=None,
    *,
    every=None,
    crash=None,
    resume=None,
    seed=0,
    loader=Resumable,
    supported=True,
    devices=1,
    **options,
):
    """Train a module on CPUs, and return it with its trainer.

    Args:
        module: makes the module, after seeding.
        folder: folder of checkpoints; None: none are saved.
        every: steps between checkpoints; None: one after each validation.
        crash: number of steps after which the training stops with an error.
        resume: the checkpoint that it goes on from.
        seed: torch's seed.
        loader: makes the loader of the examples from a dataset and the size of a batch.
        supported: whether it has the callback that is tested.
        devices: processes that share the batches, each of which calls this function.
        options: those of the trainer.
    """
    torch.manual_seed(seed)
    module = module()
    callbacks = [Crash(crash)] if crash is not None else []
    if supported:
        callbacks.append(SampledTraining())
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, save_last=True, **{"every_n_train_steps": every} if every else {}))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        callbacks=callbacks,
        enable_checkpointing=folder is not None,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 2} | options,
    )
    loaders = loader(Examples(), BATCH // devices), DataLoader(Examples(32, seed=1), 16 // devices)
    try:
        # A checkpoint is read without running code from it.
        trainer.fit(module, *loaders, ckpt_path=resume, weights_only=True)
    except InterruptedError:
        assert trainer.global_step == crash
    return module


def state_of(module):
    """Return copies of all that a training changes: weights, state of the sampler, and of the optimiser."""
    (optimizer,) = module.trainer.optimizers
    return copy.deepcopy({"module": module.state_dict(), "optimizer": optimizer.state_dict()})


def flat(value, name=""):
    """Return the leaves of nested dicts and lists by their path."""
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {path: leaf for key, part in items for path, leaf in flat(part, f"{name}/{key}").items()}
    return {name: value}


def assert_same(first, second):
    """Raise unless nested states are equal, tensors bit for bit."""
    first, second = flat(first), flat(second)
    assert first.keys() == second.keys()
    for name, value in first.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == second[name].dtype, name
            assert torch.equal(value, second[name]), name
        else:
            assert value == second[name], name
