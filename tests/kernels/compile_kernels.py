"""Compilation of every Triton kernel for a GPU that need not be there.

    python -m tests.kernels.compile_kernels 90 100    # sm_90, at most 100 variants of a kernel; prints JSON

The functions that launch the kernels run on tensors of the CPU, so that the types, the constants and the divisibility
of the arguments are those of real launches; in place of each launch the kernel is compiled. Nothing is computed by a
kernel: results are what the memory held. The interpreter must be off (TRITON_INTERPRET).
"""

import collections
import contextlib
import importlib
import io
import json
import pkgutil
import re
import sys

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import manyclass.kernels.triton
from manyclass.candidates import Block, Candidates
from manyclass.forms import LogSumExp
from manyclass.kernels.draw import LinearDraw
from manyclass.samplers._comb import Comb
from tests.tables import OBJECTIVES

B, C, D, K = 64, 500, 64, 1024
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FORMS = {name: objective.form for name, (objective, *_) in OBJECTIVES.items() if objective.form is not None}


def kernel_modules():
    package = manyclass.kernels.triton
    return [
        importlib.import_module(f"{package.__name__}.{part.name}") for part in pkgutil.iter_modules(package.__path__)
    ]


def jit_functions():
    """Return every function that Triton compiles, by module and name."""
    return {
        f"{module.__name__}.{name}": value
        for module in kernel_modules()
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and value.fn.__module__ == module.__name__
    }


def called_by_others():
    """Return the names of functions that JIT functions call: these are compiled as parts of them."""
    return {name for function in jit_functions().values() for name in function.fn.__code__.co_names}


class CompilingDriver:
    """A driver for a GPU that is not there: it has a target and nothing else."""

    def __init__(self, capability):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_launches(capability, variants):
    """From now on compile what is launched; return a list that fills with a dict for each variant of a kernel."""
    found, number, run = [], collections.Counter(), JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        name = f"{self.fn.__module__}.{self.fn.__name__}"
        if number[name] == variants:
            return
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            run(self, *args, grid=grid, warmup=True, **kwargs)
        # A variant that is compiled already has no log.
        if sizes := re.findall(r"(\d+) bytes spill (?:stores|loads)", log.getvalue()):
            number[name] += 1
            constants = {key: str(value) for key, value in kwargs.items() if key.isupper() or key == "num_warps"}
            found.append({"kernel": name, "spilled_bytes": max(map(int, sizes)), "constants": constants})

    driver.set_active(CompilingDriver(capability))
    knobs.nvidia.dump_ptxas_log = True
    JITFunction.run = compile_only
    return found


def candidates_of(target, groups, *, k, excluded=1, included=0, order=None):
    blocks = tuple(
        Block(torch.randint(C, (number, k)), torch.zeros(number, k, dtype=torch.float64), order if number > 1 else None)
        for number in groups
    )
    include = torch.randint(C, (len(target), included)) if included else None
    exclude = target.unsqueeze(1).expand(-1, excluded)
    log_kappa = torch.zeros(len(target), dtype=torch.float64)
    return Candidates(blocks, exclude, lambda: log_kappa, C, include)


def train(form, dtype, *, groups=(1,), k=K, dim=D, batch=B, bias=False, valid=False, ordered=False, **options):
    """Launch the kernels of the loss of a draw and of its gradients."""
    from manyclass.kernels.triton.closed_form import closed_form_loss

    target = torch.randint(C, (batch,))
    candidates = candidates_of(target, groups, k=k, order=torch.randperm(batch) if ordered else None, **options)
    hidden, weight = (torch.randn(n, dim, dtype=dtype, requires_grad=True) for n in (batch, C))
    biases = torch.randn(C, dtype=dtype, requires_grad=True) if bias else None
    mask = torch.ones(batch, dtype=torch.bool) if valid else None
    loss, _ = closed_form_loss(form, LinearDraw(hidden, weight, biases, target, candidates, valid=mask))
    loss.sum().backward()


def draws():
    forms = [form for form in FORMS.values() if form.target_transform is None]
    sums = [next(form for form in forms if isinstance(form, LogSumExp) == is_sum) for is_sum in (True, False)]
    for form in forms:
        train(form, torch.bfloat16)
    for form in sums:
        for dtype in FLOATS:
            train(form, dtype, bias=True, valid=True)
            train(form, dtype, groups=(4,), ordered=True, excluded=20, included=3)
        # Odd sizes: no argument is divisible by 16, and the tiles are the smallest.
        train(form, torch.bfloat16, batch=63, k=7, dim=5, groups=(1, 63), included=1)
        train(form, torch.bfloat16, dim=2048, k=8192 // 4)


def one_gradient_of_a_draw():
    """A table or a hidden vector without a gradient has a smaller kernel."""
    from manyclass.kernels.triton.closed_form import closed_form_loss

    target = torch.randint(C, (B,))
    candidates = candidates_of(target, (1,), k=K)
    for wants_hidden in (True, False):
        hidden, weight = (
            torch.randn(B, D, requires_grad=wants_hidden),
            torch.randn(C, D, requires_grad=not wants_hidden),
        )
        loss, _ = closed_form_loss(FORMS["likelihood"], LinearDraw(hidden, weight, None, target, candidates))
        loss.sum().backward()


def row_updates():
    from manyclass.kernels.triton import rows

    ids = torch.randint(C, (48,))
    cases = [(torch.float32, False), (torch.float16, False), (torch.bfloat16, False), (torch.bfloat16, True)]
    for dim, some in ((256, cases), (1, cases[-1:]), (rows.MAX_DIM, cases[-1:])):
        for dtype, stochastic in some:
            seed = torch.zeros(1, dtype=torch.int64) if stochastic else None
            table, values = torch.zeros(C, dim, dtype=dtype), torch.zeros(48, dim, dtype=dtype)
            wide, narrow = torch.zeros(C, dim), torch.zeros(C)
            rows.sgd_(table, ids, values, lr=0.1, seed=seed)
            rows.adagrad_(table, narrow, ids, values, lr=0.1, eps=1e-10, seed=seed)
            rows.adagrad_(table, wide, ids, values, lr=0.1, eps=1e-10, seed=seed)
            options = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}
            rows.adam_(table, wide, wide, narrow, ids, values, **options, seed=seed)
    for lr in (torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64)):
        rows.sgd_(table, ids, values, lr=lr, seed=seed)
        rows.adagrad_(table, narrow, ids, values, lr=lr, eps=1e-10, seed=seed)
        rows.adam_(table, wide, wide, narrow, ids, values, **{**options, "lr": lr}, seed=seed)


def combs():
    from manyclass.kernels.triton.comb import comb

    weights = torch.rand(C, dtype=torch.float64) + 0.1
    uneven = torch.cat([weights, torch.tensor([1e4, 1e5], dtype=torch.float64)])
    for given, order in ((weights, None), (weights, torch.randperm(C)), (uneven, None), (uneven[:-1], None)):
        found = Comb.of(given, 32, order=order)
        for offsets in (1, found.teeth):
            offset = torch.rand(3, offsets, dtype=torch.float64)
            comb(found.table.gpu_table(), offset, found.numbers, len(found.certain) + found.teeth, found.certain)


def targets():
    from manyclass.kernels.triton.targets import present_targets

    # 1 is a constant of a kernel, and a large number has 64 bits.
    for batch, ignore_index in ((64, -100), (63, 1), (1, 2**40)):
        for dtype in (torch.float32, torch.float64):
            present_targets(torch.zeros(batch, dtype=torch.int64), ignore_index, dtype=dtype)


def exact_losses():
    from manyclass.kernels.triton.exponentials import exponentials_

    target = torch.zeros(B, dtype=torch.int64)
    for dtype in (torch.float32, torch.float64):
        scores, column = torch.zeros(B, C, dtype=dtype), torch.zeros(B, dtype=dtype)
        for bias in (None, torch.zeros(C, dtype=dtype)):
            for start in (1, 512):
                exponentials_(scores, start, bias=bias, target=target, shift=column)
                exponentials_(
                    scores, start, bias=bias, target=target, shift=column, log_sum=column, target_score=column
                )


def scans():
    from manyclass.kernels.triton.scan import largest_log_p

    # On a GPU a scan multiplies in bfloat16 alone.
    query, rows = (torch.zeros(n, 48, dtype=torch.bfloat16) for n in (B, C))
    for bias in (None, torch.zeros(C)):
        largest_log_p(query, rows, bias, 16)


CASES = (draws, one_gradient_of_a_draw, row_updates, combs, targets, exact_losses, scans)


def main(capability, variants):
    found = compile_launches(capability, variants)
    for case in CASES:
        case()
    called = called_by_others()
    launched = [name for name in jit_functions() if name.rpartition(".")[2] not in called]
    print(json.dumps({"launched": launched, "compiled": found}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
