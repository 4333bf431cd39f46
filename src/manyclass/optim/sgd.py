"""SGD that applies momentum and weight decay to a row when it next has a gradient."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from manyclass import _check
from manyclass.optim._divided import unwrapped, wrapped
from manyclass.optim._gradient import coalesced_rows
from manyclass.optim._history import append, check_history, empty, since
from manyclass.optim._kernels import add_missing_options, check_options, triton_rows
from manyclass.optim._optimizer import check_loaded, check_names, check_table, restore, update_all
from manyclass.optim._rate import check_rate, rate_of, subtract_
from manyclass.optim._rows import per_row, put, resized, take

_CHUNK_ROWS = 1 << 18


class RowSGD(Optimizer):
    """SGD at the cost of the rows that have a gradient: g ← g + λw, v ← μv + g, w ← w − ηv.

    With momentum μ or weight decay λ, torch.optim.SGD moves every row in every step. Here a row that has a gradient
    first catches up on the steps it missed, each with the learning rate, momentum and decay of that step: with zero
    gradient a step is the linear map

        (w, v) ← [[1 − ηλ, −ημ], [λ, μ]] (w, v),

    the same for all rows, and the product over any run of steps takes O(log T). So a gradient is applied to the weights
    that torch's SGD would have, up to rounding, but *scores computed in between see a row as it was after its last
    update*. `catch_up()` brings all rows up to date, in O(C): call it before evaluation and before saving a model.

    A step counts for a parameter if its gradient is not None; it may be empty. Without momentum and weight decay there
    is no state. With them each parameter keeps 8 bytes a row and 64 bytes a step; `catch_up()`, and any step with a
    dense gradient, clears the 64 bytes.

    Args:
        params: parameters or groups of them; their first dimension counts the rows.
        lr: η, the learning rate: a number, or a floating-point tensor of one element, on the device of the parameters
            or on the CPU, which a schedule may fill in place. A step does not wait for it. With momentum or weight
            decay it must be a number or on the CPU.
        momentum: μ.
        weight_decay: λ.
        impl: the implementation: "eager" by torch's operators; "triton" by a kernel for sparse gradients on a GPU, if
            there is neither momentum nor weight decay; "auto": by that kernel where it can run.
        stochastic_rounding: whether rows in bfloat16 are rounded at random, so that small updates count on average.

    Raises:
        ValueError: an option is outside its range.

    Example:
        >>> table = nn.Embedding(1000, 8, sparse=True)
        >>> optimizer = RowSGD(table.parameters(), 0.1, momentum=0.9)
        >>> table(torch.tensor([3, 14, 3])).sum().backward()
        >>> optimizer.step()
        >>> optimizer.catch_up()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        *,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        impl: str = "auto",
        stochastic_rounding: bool = False,
    ) -> None:
        options = {"impl": impl, "stochastic_rounding": stochastic_rounding}
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, **options})

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
        # A large int is a valid option, but torch takes only those of 64 bits.
        lr, momentum, decay = rate_of(group, parameter), float(group["momentum"]), float(group["weight_decay"])
        state = self.state[parameter]
        if isinstance(lr, Tensor) and (momentum or decay or state):
            # The product of missed steps is computed on the CPU.
            raise ValueError(
                f"`lr` must be a number with momentum or weight decay, or on the CPU, got a tensor on {lr.device}"
            )
        if not (momentum or decay or state) and (found := triton_rows(parameter, group)):
            from manyclass.kernels.triton import rows as kernels

            *raw, seed = found
            kernels.sgd_(parameter, *raw, lr=lr, seed=seed)
            return
        ids, gradient = coalesced_rows(parameter)
        if momentum and "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=gradient.dtype)
        if ids is None:
            self._catch_up(parameter, group)
        elif (momentum or decay) and "history" not in state:
            state["last"] = torch.zeros(len(parameter), dtype=torch.int64, device=parameter.device)
            state["history"] = empty(parameter.device)
        rows = take(parameter, ids)
        velocity = take(state["momentum_buffer"], ids) if "momentum_buffer" in state else None
        if ids is not None and "history" in state:
            _apply(since(state["history"], state["last"][ids]), rows, velocity)
        if decay:
            gradient = gradient.add(rows, alpha=decay)
        if momentum and velocity is not None:
            gradient = velocity.mul_(momentum).add_(gradient)
        put(parameter, ids, subtract_(rows, gradient, lr), stochastic=group["stochastic_rounding"])
        if velocity is not None:
            put(state["momentum_buffer"], ids, velocity)
        if ids is not None and "history" in state:
            assert isinstance(lr, float)
            # A step without momentum leaves the velocity unchanged, as in torch's SGD.
            missed = [1 - lr * decay, -lr * momentum, decay, momentum] if momentum else [1 - lr * decay, 0.0, 0.0, 1.0]
            append(state["history"], missed)
            state["last"].index_fill_(0, ids, state["history"]["steps"])

    @torch.no_grad()
    def catch_up(self) -> None:
        """Apply the missed steps to every row, as torch's SGD would have. O(C)."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._catch_up(parameter, group)

    def _catch_up(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state.get(parameter, {})
        if "history" not in state:
            return
        for start in range(0, len(parameter), _CHUNK_ROWS):
            part = slice(start, start + _CHUNK_ROWS)
            velocity = state["momentum_buffer"][part] if "momentum_buffer" in state else None
            table = parameter[part]
            rows = take(table, None)
            _apply(since(state["history"], state["last"][part]), rows, velocity)
            put(table, None, rows, stochastic=group["stochastic_rounding"])
        del state["history"], state["last"]

    def state_dict(self) -> dict[str, Any]:
        """Return the state; that of rows which are divided among processes as DTensors."""
        return wrapped(self, super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state with the dtypes of the arithmetic; the history keeps its own.

        Raises:
            TypeError, ValueError: the state is not that of a RowSGD of such parameters.
        """
        state_dict = unwrapped(self, state_dict)
        check_loaded(self, state_dict, _check_options, _check_state)
        super().load_state_dict(state_dict)
        restore(self, state_dict, exact=("last", "table"))

    def resize_rows(self, parameter: nn.Parameter, old_rows: int) -> None:
        """Resize the state of a parameter to its present number of rows. New ones are at rest and missed no step."""
        state = self.state.get(parameter, {})
        if "momentum_buffer" in state:
            state["momentum_buffer"] = resized(state["momentum_buffer"], old_rows, len(parameter), 0)
        if "history" in state:
            state["last"] = resized(state["last"], old_rows, len(parameter), state["history"]["steps"])


def _apply(product: Tensor, rows: Tensor, velocity: Tensor | None) -> None:
    """Set (w, v) ← product (w, v), in place; without a velocity it is 0 and stays 0."""
    w_w, w_v, v_w, v_v = (per_row(entry, rows) for entry in product.flatten(1).to(rows.dtype).unbind(1))
    if velocity is None:
        rows.mul_(w_w)
        return
    before = rows.clone()
    rows.mul_(w_w).addcmul_(velocity, w_v)
    velocity.mul_(v_v).addcmul_(before, v_w)


def _check_options(options: dict[str, Any]) -> None:
    check_options(options)
    check_rate(options["lr"])
    _check.fraction("momentum", options["momentum"])
    _check.number("weight_decay", options["weight_decay"], low=0)


def _check_state(state: dict[str, Any], parameter: Tensor) -> None:
    # The history and the last step of each row come and go together.
    missed = ("last", "history") if "last" in state or "history" in state else ()
    check_names(state, missed, optional=("momentum_buffer",))
    if "momentum_buffer" in state:
        check_table(state, "momentum_buffer", tuple(parameter.shape))
    if missed:
        steps = check_history(state["history"])
        last = check_table(state, "last", tuple(parameter.shape[:1]), dtype=torch.int64)
        if (bad := (last < 0) | (last > steps)).any():
            raise ValueError(f"`last` must lie in [0, {steps}], {_check.at_first(last, bad)}")
