"""Adam with a step count for each row."""

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
from manyclass.optim._rate import check_rate, rate_of
from manyclass.optim._rows import per_row, put, resized, take, wide_dtype


class RowAdam(Optimizer):
    """Adam on the rows that have a gradient; steps without one do not count for a row.

        m ← β₁m + (1 − β₁)g,   v ← β₂v + (1 − β₂)g²,   n ← n + 1,
        w ← w − η m/(1 − β₁ⁿ) / (√(v/(1 − β₂ⁿ)) + ε)

    The moments of a row decay only when it is updated, and n counts its updates. If n counted steps, as in
    torch.optim.SparseAdam, the moments of a row first updated late would start at 0 uncorrected, and it would move by
    (1 − β₁)/√(1 − β₂) ≈ 3 learning rates, not one. If every step updates every row, this is torch.optim.Adam.

    Args:
        params: parameters or groups of them; their first dimension counts the rows.
        lr: η, the learning rate: a number, or a floating-point tensor of one element, on the device of the parameters
            or on the CPU, which a schedule may fill in place. A step does not wait for it.
        betas: β₁ and β₂.
        eps: ε.
        impl: the implementation: "eager" by torch's operators; "triton" by a kernel for sparse gradients on a GPU;
            "auto" by compiled kernels on the CPU, and on a GPU as "triton" where its kernels can run.
        stochastic_rounding: whether rows in bfloat16 are rounded at random, so that small updates count on average.

    Raises:
        ValueError: an option is outside its range.

    Example:
        >>> table = nn.Embedding(1000, 8, sparse=True)
        >>> optimizer = RowAdam(table.parameters(), 0.1)
        >>> table(torch.tensor([3, 14, 3])).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[table.weight]["steps"].sum()
        tensor(2.)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        impl: str = "auto",
        stochastic_rounding: bool = False,
    ) -> None:
        options = {"impl": impl, "stochastic_rounding": stochastic_rounding}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, **options})

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
        (beta1, beta2), lr = group["betas"], rate_of(group, parameter)
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter, dtype=wide_dtype(parameter.dtype))
            state["exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
            # float32 counts exactly up to 2²⁴; the bias corrections are 1 by then.
            state["steps"] = torch.zeros(parameter.shape[:1], dtype=torch.float32, device=parameter.device)
        moments = (state["exp_avg"], state["exp_avg_sq"], state["steps"])
        if found := triton_rows(parameter, group):
            from manyclass.kernels.triton import rows as kernels

            row_ids, values, seed = found
            options = {"betas": (beta1, beta2), "eps": group["eps"]}
            kernels.adam_(parameter, *moments, row_ids, values, lr=lr, **options, seed=seed)
            return
        if group["impl"] == "auto" and (raw := raw_rows(parameter, state["exp_avg"], state["exp_avg_sq"])):
            cpu.adam_(parameter, *moments, *raw, lr=float(lr), betas=(beta1, beta2), eps=group["eps"])
            return
        ids, gradient = coalesced_rows(parameter)
        steps = take(state["steps"], ids).add_(1)
        first = take(state["exp_avg"], ids).lerp_(gradient, 1 - beta1)
        second = take(state["exp_avg_sq"], ids).mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        put(state["steps"], ids, steps)
        put(state["exp_avg"], ids, first)
        put(state["exp_avg_sq"], ids, second)
        # The powers are taken in float64: in float32 1 − 0.999ⁿ has no more than four digits.
        rate = lr / (1 - beta1 ** steps.double())
        spread = (1 - beta2 ** steps.double()).sqrt()
        rate, spread = (per_row(column.to(gradient.dtype), gradient) for column in (rate, spread))
        rows = take(parameter, ids)
        rows.sub_(rate * first / (second.sqrt() / spread).add_(group["eps"]))
        put(parameter, ids, rows, stochastic=group["stochastic_rounding"])

    def state_dict(self) -> dict[str, Any]:
        """Return the state; that of rows which are divided among processes as DTensors."""
        return wrapped(self, super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state with the dtypes of the arithmetic; step counts keep theirs.

        Raises:
            TypeError, ValueError: the state is not that of a RowAdam of such parameters.
        """
        state_dict = unwrapped(self, state_dict)
        check_loaded(self, state_dict, _check_options, _check_state)
        super().load_state_dict(state_dict)
        restore(self, state_dict, exact=("steps",))

    def resize_rows(self, parameter: nn.Parameter, old_rows: int) -> None:
        """Resize the state of a parameter to its present number of rows. New rows start at 0."""
        state = self.state.get(parameter, {})
        for name, table in state.items():
            state[name] = resized(table, old_rows, len(parameter), 0)


def _check_options(options: dict[str, Any]) -> None:
    check_options(options)
    betas = options["betas"]
    check_rate(options["lr"])
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"`betas` must be two numbers, got {betas}")
    for i, beta in enumerate(betas):
        _check.fraction(f"betas[{i}]", beta)
    _check.number("eps", options["eps"], low=0)


def _check_state(state: dict[str, Any], parameter: Tensor) -> None:
    check_names(state, ("exp_avg", "exp_avg_sq", "steps"))
    for name in ("exp_avg", "exp_avg_sq"):
        check_table(state, name, tuple(parameter.shape))
    steps = check_table(state, "steps", tuple(parameter.shape[:1]), dtype=torch.float32)
    if (bad := ~(steps >= 0) | steps.isinf()).any():
        raise ValueError(f"`steps` must be finite and not negative, {_check.at_first(steps, bad)}")
