"""Trainings on two processes: python -m tests.integrations.lightning_ranks FOLDER."""

import datetime
import os
import sys
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.utils.data import DataLoader, DistributedSampler

from tests.integrations.lightning_model import NextClass, fit, state_of

RANKS = 2
Shuffled = partial(DataLoader, shuffle=True)


class SameDraws(NextClass):
    """A module without dropout whose draws depend on the batch alone, not on the rank."""

    def __init__(self, **options):
        super().__init__(dropout=0, **options)

    def training_step(self, batch, batch_idx):
        x, target = batch
        generator = torch.Generator().manual_seed(1000 * self.current_epoch + batch_idx)
        return self.head(self.encoder(x), target, generator=generator)


def joint(devices, rank=0, **options):
    """Return the weights after a training on joint batches, clipped and accumulated."""

    def loader(examples, batch_size):
        sampler = DistributedSampler(examples, devices, rank, shuffle=False)
        return DataLoader(examples, batch_size, sampler=sampler)

    clipping = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    trained = fit(partial(SameDraws, **options), loader=loader, devices=devices, **clipping)
    return state_of(trained)["module"]


class Noted(NextClass):
    """A module that keeps what a step drew."""

    def training_step(self, batch, batch_idx):
        self.drawn = torch.rand(4)
        return super().training_step(batch, batch_idx)


def sampled(folder, **options):
    """Return the state after a training with a sampler that learns, its held-out loss and its last random numbers."""
    trained = fit(partial(Noted, "Learned"), folder, loader=Shuffled, devices=RANKS, **options)
    return state_of(trained), trained.trainer.callback_metrics.get("held_out"), trained.drawn


def resumed(folder):
    """Return the results of a training that crashed in its second epoch and went on."""
    sampled(folder / "interrupted", crash=13)
    return sampled(folder / "resumed", resume=folder / "interrupted" / "last.ckpt", seed=99)


def unprepared():
    """Return the error without the callback."""
    try:
        fit(NextClass, loader=DataLoader, devices=RANKS, supported=False)
    except RuntimeError as error:
        return str(error)
    return "no error"


def main(rank, folder):
    """Save the results of this rank."""
    torch.set_num_threads(1)
    # Lightning's own.
    warnings.filterwarnings("ignore", module="lightning")
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=30),
    )
    results = {
        "sparse": joint(RANKS, rank),
        "dense": joint(RANKS, rank, sparse=False, rows=partial(torch.optim.Adagrad, lr=0.3)),
        "bf16-mixed": sampled(None, precision="bf16-mixed"),
        "bf16-true": sampled(None, precision="bf16-true", gradient_clip_val=0.01, gradient_clip_algorithm="value"),
        "whole": sampled(folder / "whole"),
        "resumed": resumed(folder),
        "unprepared": unprepared(),
    }
    torch.save(results, folder / f"results-{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    # Forked, so that Lightning is imported once. An error on one rank ends the other.
    torch.multiprocessing.start_processes(main, (Path(sys.argv[1]),), nprocs=RANKS, start_method="fork")
