"""Adagrad on the rows that have a gradient."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from manyclass import _check
from manyclass.kernels import cpu
from manyclass.optim._divided import unwrapped, wrapped
from manyclass.optim._gradient import coalesced_rows, raw_rows
from manyclass.optim._kernels import add_missing_options, check_options, triton_rows
from manyclass.optim._optimizer import check_loaded, check_names, check_table, restore, update_all
from manyclass.optim._rate import check_rate, rate_of, subtract_
from manyclass.optim._rows import per_row, put, resized, take, wide_dtype


class RowAdagrad(Optimizer):
    """Adagrad at the cost of the rows that have a gradient: G ← G + g², w ← w − η g / (√G + ε).

    Adagrad does not change a row of zero gradient, so this equals torch.optim.Adagrad.

    Args:
        params: parameters or groups of them; their first dimension counts the rows.
        lr: η, the learning rate: a number, or a floating-point tensor of one element, on the device of the parameters
            or on the CPU, which a schedule may fill in place. A step does not wait for it.
        initial_accumulator_value: initial G.
        eps: ε.
        by_row: sum the mean of g² over a row in one G: 1/D of the memory, and a row moves along its gradient.
        impl: the implementation: "eager" by torch's operators; "triton" by a kernel for sparse gradients on a GPU;
            "auto" by compiled kernels on the CPU, and on a GPU as "triton" where its kernels can run.
        stochastic_rounding: whether rows in bfloat16 are rounded at random, so that small updates count on average.

    Raises:
        ValueError: an option is outside its range.

    Example:
        >>> table = nn.Embedding(1000, 8, sparse=True)
        >>> optimizer = RowAdagrad(table.parameters(), 0.1, by_row=True)
        >>> table(torch.tensor([3, 14, 3])).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[table.weight]["sum"].shape
        torch.Size([1000])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.01,
        *,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        by_row: bool = False,
        impl: str = "auto",
        stochastic_rounding: bool = False,
    ) -> None:
        defaults = {"lr": lr, "initial_accumulator_value": initial_accumulator_value, "eps": eps, "by_row": by_row}
        super().__init__(params, {**defaults, "impl": impl, "stochastic_rounding": stochastic_rounding})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or loaded state; one that was saved by an earlier release lacks some options."""
        super().__setstate__(state)
        add_missing_options(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Check the options of a group and add it."""
        _check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the rows that have a gradient."""
        return update_all(self, closure, self._update)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, lr = self.state[parameter], rate_of(group, parameter)
        if "sum" not in state:
            shape = parameter.shape[:1] if group["by_row"] else parameter.shape
            start = float(group["initial_accumulator_value"])
            state["sum"] = torch.full(shape, start, dtype=wide_dtype(parameter.dtype), device=parameter.device)
        if found := triton_rows(parameter, group):
            from manyclass.kernels.triton import rows as kernels

            row_ids, values, seed = found
            kernels.adagrad_(parameter, state["sum"], row_ids, values, lr=lr, eps=group["eps"], seed=seed)
            return
        if group["impl"] == "auto" and (rows := raw_rows(parameter, state["sum"])):
            by_row = state["sum"].dim() < parameter.dim()
            cpu.adagrad_(parameter, state["sum"], *rows, lr=float(lr), eps=group["eps"], by_row=by_row)
            return
        ids, gradient = coalesced_rows(parameter)
        total = take(state["sum"], ids)
        square = gradient.square()
        total += square.flatten(1).mean(1) if total.dim() < square.dim() else square
        put(state["sum"], ids, total)
        scale = per_row(total.sqrt().add_(group["eps"]), gradient)
        updated = subtract_(take(parameter, ids), gradient / scale, lr)
        put(parameter, ids, updated, stochastic=group["stochastic_rounding"])

    def state_dict(self) -> dict[str, Any]:
        """Return the state; that of rows which are divided among processes as DTensors."""
        return wrapped(self, super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state with the dtypes of the arithmetic.

        Raises:
            TypeError, ValueError: the state is not that of a RowAdagrad of such parameters.
        """
        state_dict = unwrapped(self, state_dict)
        check_loaded(self, state_dict, _check_options, _check_state)
        super().load_state_dict(state_dict)
        restore(self, state_dict)

    def resize_rows(self, parameter: nn.Parameter, old_rows: int) -> None:
        """Resize the state of a parameter to its present number of rows. New rows start at the initial value."""
        state = self.state.get(parameter, {})
        if "sum" in state:
            (group,) = (group for group in self.param_groups if any(p is parameter for p in group["params"]))
            start = float(group["initial_accumulator_value"])
            state["sum"] = resized(state["sum"], old_rows, len(parameter), start)


def _check_options(options: dict[str, Any]) -> None:
    check_options(options)
    check_rate(options["lr"])
    for name in ("initial_accumulator_value", "eps"):
        _check.number(name, options[name], low=0)
    if not isinstance(options["by_row"], bool):
        raise TypeError(f"`by_row` must be True or False, got {options['by_row']!r}")


def _check_state(state: dict[str, Any], parameter: Tensor) -> None:
    check_names(state, ("sum",))
    check_table(state, "sum", tuple(parameter.shape), tuple(parameter.shape[:1]))
