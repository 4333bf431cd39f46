"""Gloo processes that run checks together, and give back what each of them saw."""

import contextlib
import datetime
import importlib
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from manyclass.errors import InaccurateWarning


def run_together(module, folder, world=2):
    """Run the CHECKS of a module, functions of the rank by name, on all processes; return their results by rank.

    An exception is a result too, as the text of its traceback, so that one check does not hide the others.
    """
    torch.multiprocessing.spawn(_work, (module, str(folder), world), nprocs=world)
    return [torch.load(folder / f"results-{rank}", weights_only=False) for rank in range(world)]


def call_together(function, folder, world):
    """Call a function of the rank, which can be pickled, on all processes; return its results by rank."""
    torch.multiprocessing.spawn(_call, (function, str(folder), world), nprocs=world)
    return [torch.load(folder / f"results-{rank}", weights_only=False) for rank in range(world)]


def _call(rank, function, folder, world):
    with _group(rank, folder, world):
        torch.save(function(rank), f"{folder}/results-{rank}")


def _work(rank, module, folder, world):
    results = {}
    with _group(rank, folder, world):
        for name, check in importlib.import_module(module).CHECKS.items():
            torch.manual_seed(rank)
            try:
                results[name] = check(rank)
            except Exception:
                results[name] = traceback.format_exc()
        torch.save(results, f"{folder}/results-{rank}")


@contextlib.contextmanager
def _group(rank, folder, world):
    torch.set_num_threads(1)
    # As in pytest: warnings are errors, but torch 2.11 warns about every sparse gradient.
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Sparse invariant checks", UserWarning)
    # Whether designs are accurate enough is not the subject here.
    warnings.simplefilter("ignore", InaccurateWarning)
    rendezvous = Path(f"{folder}/rendezvous-{world}")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )
    yield
    dist.destroy_process_group()
