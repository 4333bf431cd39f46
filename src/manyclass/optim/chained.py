"""Several optimisers as one, for programs that take only one."""

import inspect
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyclass.optim.adagrad import RowAdagrad


class Chained(Optimizer):
    """An optimiser made of others, each of which updates its own parameters.

    Learning rate schedulers, closures, `GradScaler` and the trainers of Transformers and Lightning take it as one
    optimiser: its groups are those of the others, in their order, and its step is one step of each. A schedule changes
    the learning rates of all groups by one factor.

    Args:
        *optimizers: the optimisers, without a parameter in common.

    Raises:
        TypeError: one of them is no optimiser, or its step needs a closure, which would run once for each.
        ValueError: there is none, or two of them share a parameter.

    Example:
        >>> from manyclass.optim import RowAdagrad
        >>> table, layer = nn.Embedding(1000, 8, sparse=True), nn.Linear(8, 8)
        >>> optimizer = Chained(RowAdagrad(table.parameters(), 0.1), torch.optim.AdamW(layer.parameters(), 1e-3))
        >>> layer(table(torch.tensor([3, 14]))).sum().backward()
        >>> optimizer.step()
        >>> list(optimizer.state_dict())
        ['0 RowAdagrad', '1 AdamW']
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        if not optimizers:
            raise ValueError("`optimizers` must hold an optimiser, got none")
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer):
                raise TypeError(f"`optimizers` must be torch optimisers, got a {type(optimizer).__name__}")
            closure = inspect.signature(optimizer.step).parameters.get("closure")
            if closure is not None and closure.default is closure.empty:
                raise TypeError(f"`optimizers` must step without a closure, got a {type(optimizer).__name__}")
        self.optimizers = optimizers
        self._check_no_shared_parameter()
        super().__init__(self.param_groups, {})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimisers, not copies."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, value: object) -> None:
        # torch's constructor begins with no groups; they are those of the optimisers from the start.
        _refuse("param_groups", value)

    @property
    def state(self) -> Any:
        """The state of all parameters, each in the state of its optimiser."""
        return _State(self.optimizers)

    @state.setter
    def state(self, value: object) -> None:
        _refuse("state", value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise unless the group is one of the optimisers': a new one does not say which of them it belongs to."""
        if not any(param_group is group for group in self.param_groups):
            raise ValueError("`param_group` must be added to one of `optimizers`, got a group for all of them")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one step of each optimiser, after a single call of the closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients of all parameters."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each optimiser, by its number and type."""
        return {name: optimizer.state_dict() for name, optimizer in self.children().items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of each optimiser. If one of them refuses its state, all are left as they were.

        Raises:
            ValueError: the state is not that of such optimisers in this order, or one of them refuses its part; it may
                raise another error.
        """
        children = self.children()
        if not isinstance(state_dict, dict) or state_dict.keys() != children.keys():
            got = list(state_dict) if isinstance(state_dict, dict) else type(state_dict).__name__
            raise ValueError(f"`state_dict` must be that of {list(children)}, got {got}")
        # Loading replaces the groups and the state of an optimiser and writes into neither, so nothing need be copied.
        before = [(optimizer, dict(vars(optimizer))) for optimizer in self._leaves()]
        try:
            for name, optimizer in children.items():
                optimizer.load_state_dict(state_dict[name])
        except BaseException:
            for optimizer, attributes in before:
                vars(optimizer).clear()
                vars(optimizer).update(attributes)
            raise

    def children(self) -> dict[str, Optimizer]:
        """Return the optimisers by the names that they have in a state dict."""
        return {f"{i} {type(optimizer).__name__}": optimizer for i, optimizer in enumerate(self.optimizers)}

    def catch_up(self) -> None:
        """Apply the updates that optimisers have put off, such as the momentum of `RowSGD`."""
        for optimizer in self.optimizers:
            if callable(catch_up := getattr(optimizer, "catch_up", None)):
                catch_up()

    def __reduce__(self) -> tuple[Any, ...]:
        return Chained, self.optimizers

    def __repr__(self) -> str:
        return f"Chained({', '.join(map(repr, self.optimizers))})"

    def _leaves(self) -> Iterator[Optimizer]:
        """Yield the optimisers that have groups and state themselves."""
        for optimizer in self.optimizers:
            yield from optimizer._leaves() if isinstance(optimizer, Chained) else (optimizer,)

    def _check_no_shared_parameter(self) -> None:
        owner: dict[int, str] = {}
        for name, optimizer in self.children().items():
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                first = owner.setdefault(id(parameter), name)
                if first != name:
                    shape = list(parameter.shape)
                    raise ValueError(
                        f"`optimizers` must not share a parameter, got one of shape {shape} in {first!r} and {name!r}"
                    )


class _State(MutableMapping[Tensor, Any]):
    """A view of the state of several optimisers, by parameter."""

    def __init__(self, optimizers: tuple[Optimizer, ...]) -> None:
        self._optimizers = optimizers

    def __getitem__(self, parameter: Tensor) -> Any:
        return self._of(parameter).state[parameter]

    def __setitem__(self, parameter: Tensor, value: Any) -> None:
        self._of(parameter).state[parameter] = value

    def __delitem__(self, parameter: Tensor) -> None:
        del self._of(parameter).state[parameter]

    def __contains__(self, parameter: object) -> bool:
        return any(parameter in optimizer.state for optimizer in self._optimizers)

    def __iter__(self) -> Iterator[Tensor]:
        return (parameter for optimizer in self._optimizers for parameter in optimizer.state)

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)

    def _of(self, parameter: Tensor) -> Optimizer:
        found = next((optimizer for optimizer in self._optimizers if parameter in optimizer.state), None)
        if found is None:
            groups = ((o, group) for o in self._optimizers for group in o.param_groups)
            found = next((o for o, group in groups if any(p is parameter for p in group["params"])), None)
        if found is None:
            raise KeyError(parameter)
        return found


def _refuse(name: str, value: object) -> None:
    if value:
        raise AttributeError(f"`{name}` must be set on one of `optimizers`")


def for_model(
    model: nn.Module,
    *,
    rows: Callable[[list[nn.Parameter]], Optimizer] | None = None,
    rest: Callable[[list[nn.Parameter]], Optimizer] | None = None,
) -> Chained:
    """Return one optimiser of all parameters of a model: one for rows of classes, and one for the rest.

    Rows are the class tables of heads, also if they are tied to an embedding, and the tables of `nn.Embedding` and
    `nn.EmbeddingBag` with sparse gradients. Adagrad suits them: Adam moves a row by its learning rate at each draw,
    whatever the number of classes that it stands for.

    Args:
        model: the model; parameters without `requires_grad` are left out.
        rows: makes the optimiser of the rows. Default: `RowAdagrad` with a learning rate of 0.1.
        rest: makes the optimiser of the rest. Default: `torch.optim.AdamW`.

    Raises:
        ValueError: no parameter of the model needs a gradient.

    Example:
        >>> from functools import partial
        >>> from manyclass import ClassHead
        >>> from manyclass.optim import RowAdagrad
        >>> model = nn.ModuleDict({"encoder": nn.Linear(4, 8), "head": ClassHead(8, 5000, sparse=True)})
        >>> optimizer = for_model(model, rows=partial(RowAdagrad, lr=0.1), rest=partial(torch.optim.AdamW, lr=1e-3))
        >>> [len(group["params"]) for group in optimizer.param_groups]
        [2, 2]
    """
    tables = {id(table) for module in model.modules() for table in _tables(module)}
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not learning:
        raise ValueError("`model` must have a parameter that needs a gradient, got none")
    of_rows = [parameter for parameter in learning if id(parameter) in tables]
    others = [parameter for parameter in learning if id(parameter) not in tables]
    make_rows = rows or (lambda parameters: RowAdagrad(parameters, 0.1))
    make_rest = rest or torch.optim.AdamW
    return Chained(*([make_rows(of_rows)] if of_rows else []), *([make_rest(others)] if others else []))


def _tables(module: nn.Module) -> list[nn.Parameter]:
    """Return the tables of a module that have a row for each class or id."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return list(module.parameters(recurse=False)) if module.sparse else []
    found = list(sparse()) if callable(sparse := getattr(module, "sparse_parameters", None)) else []
    # The class vectors of a head, also with dense gradients.
    return [*found, *(table for table in getattr(module, "class_vectors", ()) if isinstance(table, nn.Parameter))]
