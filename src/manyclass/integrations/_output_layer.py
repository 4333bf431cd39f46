"""The output layer of a language model of Transformers: what it computes, and a forward pass that leaves it out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyclass import _check
from manyclass._context import fork_rng
from manyclass.defaults import IGNORE_INDEX

TOKENS = 4  # of a probe
PLANTED = 100.0  # a score of a probe: large, so that soft-capping and scaling change it whatever the weights are
LOSS_TOLERANCE = 1e-4  # the losses of a probe are 0 and 100 in any dtype; an auxiliary loss may be small
SCORE_TOLERANCE = 1e-2  # of a linear layer in 16 bits


@contextmanager
def _training_mode(model: nn.Module) -> Iterator[None]:
    """Hold a model in training mode, whose loss is to be replaced, then restore the mode of each submodule."""
    modes = [(part, part.training) for part in model.modules()]
    try:
        model.train()
        yield
    finally:
        for part, mode in modes:
            part.training = mode


@contextmanager
def scored_by(layer: nn.Module, score: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let a function stand for the forward pass of a layer."""
    is_own, plain = "forward" in layer.__dict__, layer.forward
    layer.forward = score
    try:
        yield
    finally:
        # torch.compile can set an attribute again, but not delete it.
        if is_own or torch.compiler.is_compiling():
            layer.forward = plain
        else:
            del layer.forward


def run_without_scores(layer: nn.Module, run: Callable[[], Any]) -> tuple[Tensor, Any]:
    """Return the input of an output layer in a run of its model, and the output, whose logits are of no class.

    Raises:
        RuntimeError: the model does not call the layer once.
    """
    seen: list[Tensor] = []

    def no_scores(hidden: Tensor) -> Tensor:
        seen.append(hidden)
        return hidden[..., :0]

    with scored_by(layer, no_scores):
        output = run()
    if len(seen) != 1:
        raise RuntimeError(f"the model must call its output layer once in a forward pass, got {len(seen)} calls")
    return seen[0], output


def output_layer(model: Any) -> nn.Module:
    """Return the layer from hidden states to logits.

    Raises:
        ValueError: the model has none, or one without a table of class vectors.
    """
    layer: nn.Module | None = model.get_output_embeddings()
    if layer is None:
        raise ValueError(f"`model` must have an output layer, got a {type(model).__name__} without one")
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(
            "`model` must have an output layer with a weight [C, D] of floats, got a "
            f"{type(model).__name__} with a {type(layer).__name__}"
        )
    _check.values("model", weight)
    tables = tables_of(layer)
    if any(all(parameter is not table for table in tables) for parameter in layer.parameters()):
        raise ValueError(
            "`model` must have an output layer with no parameters but a weight and a bias, got a "
            f"{type(model).__name__} with a {type(layer).__name__} that has others"
        )
    return layer


def tables_of(layer: Any) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Return weight and bias of an output layer."""
    return layer.weight, getattr(layer, "bias", None)


def shifts_labels(model: Any, layer: nn.Module) -> bool:
    """Return True if the model predicts the label of the next position, and False if that of the same position.

    Probes replace the model's scores by others and look at the logits and the loss that come out.

    Raises:
        ValueError: the logits are not those of a linear output layer, the loss is not the cross entropy of the logits,
            or the model cannot run without scores.
    """
    weight, bias = tables_of(layer)
    num_classes, dim = weight.shape
    # No pads: models warn about them.
    pad = getattr(model.config, "pad_token_id", None)
    some = [i for i in range(min(num_classes, TOKENS + 1)) if i != pad] or [0]
    ids = torch.tensor([(some * TOKENS)[:TOKENS]], device=weight.device)
    labels = ids.clone()
    labels[0, TOKENS // 2] = IGNORE_INDEX
    planted = torch.zeros(1, TOKENS, num_classes, dtype=weight.dtype, device=weight.device)
    planted.scatter_(2, ids.unsqueeze(2), PLANTED)
    hidden = torch.linspace(-1, 1, dim, device=weight.device).to(weight.dtype)
    with _training_mode(model), torch.no_grad():
        expected = F.linear(hidden, weight, bias)
        if not torch.allclose(layer(hidden), expected, rtol=SCORE_TOLERANCE, atol=SCORE_TOLERANCE):
            raise ValueError(f"`model` must have a linear output layer, got {type(layer).__name__} with other scores")
    # As in training: with gradients, without which a checkpoint warns.
    with _training_mode(model), fork_rng(weight.device), torch.enable_grad():
        try:
            with scored_by(layer, lambda hidden: planted):
                output = model(input_ids=ids, labels=labels, return_dict=True)
            logits, loss = output["logits"], float(output["loss"].detach())
            run_without_scores(layer, lambda: model(input_ids=ids, return_dict=True))
        except Exception as error:
            raise ValueError(
                "`model` must be a language model that runs on `input_ids` and `labels`, calls its output layer once "
                f"and returns logits and a loss, got a {type(model).__name__} that fails: {error!r}"
            ) from error
    if logits.shape != planted.shape or not torch.equal(logits.to(planted.dtype), planted):
        raise ValueError(
            "`model` must return the scores of its output layer as they are, got a "
            f"{type(model).__name__} that changes them, for example by soft-capping or scaling: "
            f"a score of {PLANTED:g} becomes {float(logits.max()):g}"
        )
    planted = planted.float()
    unshifted = float(F.cross_entropy(planted[0], labels[0]))
    shifted = float(F.cross_entropy(planted[0, :-1], labels[0, 1:]))
    for shifts, expected_loss in ((True, shifted), (False, unshifted)):
        if abs(loss - expected_loss) <= LOSS_TOLERANCE:
            return shifts
    raise ValueError(
        "`model` must have the cross entropy of its logits as its loss, got a "
        f"{type(model).__name__} with a loss of {loss:g} in a probe where that is {shifted:g} for labels that are "
        f"shifted and {unshifted:g} for labels that are not"
    )
