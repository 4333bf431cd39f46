"""Two gloo processes that run checks together, and give back what each of them saw."""

import datetime
import importlib
import traceback
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing

WORLD = 2


def run_together(module, folder):
    """Run the CHECKS of a module, functions of the rank by name, on both processes; return their results by rank.

    An exception is a result too, as the text of its traceback, so that one check does not hide the others.
    """
    torch.multiprocessing.spawn(_work, (module, str(folder)), nprocs=WORLD)
    return [torch.load(folder / f"results-{rank}", weights_only=False) for rank in range(WORLD)]


def _work(rank, module, folder):
    torch.set_num_threads(1)
    # As in pytest: warnings are errors, but torch 2.11 warns about every sparse gradient.
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Sparse invariant checks", UserWarning)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=60),
    )
    results = {}
    for name, check in importlib.import_module(module).CHECKS.items():
        torch.manual_seed(rank)
        try:
            results[name] = check(rank)
        except Exception:
            results[name] = traceback.format_exc()
    torch.save(results, f"{folder}/results-{rank}")
    dist.destroy_process_group()
