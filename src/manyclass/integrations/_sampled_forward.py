"""The forward pass of a language model of Transformers whose loss in training is that of a head."""

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyclass.defaults import IGNORE_INDEX
from manyclass.heads import ClassHead
from manyclass.integrations._output_layer import run_without_scores, tables_of

# A plain attribute of the model, not a submodule, so that the head is not in its state dict.
ATTRIBUTE = "_manyclass"


@dataclass(frozen=True)
class Sampled:
    """The parts of a model that trains with a head.

    Args:
        head: shares the parameters of the output layer.
        layer: the output layer.
        shifts: whether the model predicts the label of the next position.
        embedding: the input embedding if it shares its weight with the output layer, else None.
        plain: the forward pass before.
        had_own_forward: whether that was one of this model alone, not of its class.
        sampling: the forward pass now, a function of the model and the arguments.
    """

    head: ClassHead
    layer: nn.Module
    shifts: bool
    embedding: nn.Embedding | None
    plain: Callable[..., Any]
    had_own_forward: bool
    sampling: Callable[..., Any]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Sampled":
        return Sampled(*(copy.deepcopy(getattr(self, field.name), memo) for field in fields(self)))

    def __reduce__(self) -> Any:
        # A pickle holds a forward pass by its name, which would become that of the class.
        raise TypeError("a model given to `apply` cannot be pickled: use `save_pretrained`, or call `remove` before")

    def current_head(self, model: Any) -> ClassHead:
        """Return the head with the present parameters of the output layer, which torch replaces at times.

        Raises:
            RuntimeError: the output layer is another one, or has another number of classes.
        """
        weight, bias = tables_of(self.layer)
        if model.get_output_embeddings() is not self.layer or len(weight) != self.head.sampler.num_classes:
            raise RuntimeError(
                "the output layer of a model must stay as it was in `apply`, got another one: call `remove` before "
                "you resize or replace it, and then `apply` again"
            )
        if self.head.weight is not weight or self.head.bias is not bias:
            self.head.weight, self.head.bias = weight, bias
        return self.head


def sampled_of(model: nn.Module) -> Sampled:
    """Return what was installed on a model.

    Raises:
        ValueError: nothing was.
    """
    sampled: Sampled | None = model.__dict__.get(ATTRIBUTE)
    if sampled is None:
        raise ValueError(f"`model` must have been given to `apply`, got a {type(model).__name__} that was not")
    return sampled


def install(model: Any, head: ClassHead, layer: nn.Module, embedding: nn.Embedding | None, *, shifts: bool) -> None:
    """Replace the forward pass of a model by one that computes the head's loss in training."""
    plain: Callable[..., Any] = model.forward
    sampled = Sampled(head, layer, shifts, embedding, plain, "forward" in model.__dict__, _sampling(plain))
    setattr(model, ATTRIBUTE, sampled)
    model.forward = MethodType(sampled.sampling, model)
    # `optim.for_model`, `parallel.prepare` and the checks under DistributedDataParallel find rows by these names.
    model.class_vectors, model.sparse_parameters = _ClassVectors(model), MethodType(_sparse_parameters, model)


class _ClassVectors:
    """The present weight and bias of a model's output layer."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __iter__(self) -> Iterator[Tensor | None]:
        return iter(sampled_of(self.model).current_head(self.model).class_vectors)


def _sparse_parameters(model: nn.Module) -> list[nn.Parameter]:
    return sampled_of(model).current_head(model).sparse_parameters()


def uninstall(model: Any) -> Sampled:
    """Give a model back the forward pass that it had, and return what was installed.

    Raises:
        ValueError: nothing was installed, or the forward pass was replaced since then.
    """
    sampled = sampled_of(model)
    if getattr(model.forward, "__func__", None) is not sampled.sampling:
        raise ValueError("`model` must have the forward pass that `apply` gave it, got another one")
    if sampled.had_own_forward:
        model.forward = sampled.plain
    else:
        del model.forward
    for name in (ATTRIBUTE, "class_vectors", "sparse_parameters"):
        delattr(model, name)
    return sampled


def _sampling(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward pass that computes the head's loss in training."""
    signature = inspect.signature(plain)
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    names = [name for name, kind in kinds.items() if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    if inspect.Parameter.VAR_POSITIONAL in kinds.values():
        names = []

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        sampled = sampled_of(self)
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        is_plain = named.get("labels") is None or not self.training or not torch.is_grad_enabled()
        # An argument that is given twice is an error of the plain forward pass.
        if is_plain or any(name in kwargs for name in names[: len(args)]):
            return sampled.plain(*args, **kwargs)
        return _training_output(self, sampled, args[len(names) :], named)

    # Trainer reads from it whether a model takes `num_items_in_batch`. Not by `__wrapped__`, which accelerate follows.
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    vars(forward)["__signature__"] = signature.replace(parameters=[own, *signature.parameters.values()])
    return forward


def _training_output(model: Any, sampled: Sampled, unnamed: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Return the model's output with the head's loss, without logits."""
    head = sampled.current_head(model)
    labels, shifted = named.pop("labels"), named.pop("shift_labels", None)
    number, ignored = named.pop("num_items_in_batch", None), named.pop("ignore_index", IGNORE_INDEX)
    is_wanted = named.pop("return_dict", None)
    hidden, output = run_without_scores(sampled.layer, lambda: sampled.plain(*unnamed, **named, return_dict=True))
    if output.get("aux_loss") is not None:
        raise ValueError(
            "`model` must have no auxiliary loss, which would be left out: set `output_router_logits` to False"
        )
    if sampled.shifts:
        labels = F.pad(labels, (0, 1), value=ignored)[..., 1:] if shifted is None else shifted
    reduction = "mean" if number is None else "sum"
    loss = head(hidden, labels.to(hidden.device), ignore_index=ignored, reduction=reduction)
    if number is not None:
        loss = loss / (number.to(loss.device) if isinstance(number, Tensor) else number)
    rest = {name: value for name, value in output.items() if name not in ("loss", "logits")}
    output = type(output)(loss=loss, **rest)
    return output if (model.config.return_dict if is_wanted is None else is_wanted) else output.to_tuple()
