"""A trained model as a whole: what it predicts, how it reads its inputs, and its parameters."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from manyclass.counts import ClassCounts
from manyclass.data import Names
from manyclass.errors import UserError
from manyclass.heads import ClassHead
from manyclass.registry import OBJECTIVES, make_sampler
from manyclass.storage import pack_strings, unpack_strings
from manyclass.tasks.settings import Settings
from manyclass.training import load_checkpoint

_SAMPLER = "head.sampler."


@dataclass(frozen=True)
class Body:
    """The part of a model before its head.

    Args:
        encoder: from inputs to vectors.
        dim: of those vectors.
        tied: an embedding whose rows are the class vectors too; None: the head has vectors of its own.
        bias: whether classes have one.
    """

    encoder: nn.Module
    dim: int
    tied: nn.Embedding | None = None
    bias: bool = True


@dataclass(frozen=True)
class Plan:
    """What a model follows from, parameters apart.

    Args:
        kind: of data: "features", "text", "sequences" or "triples".
        names: of the classes.
        counts: float64 [C], how often each is there to train on.
        config: what the kind must know to read inputs and build an encoder, as `storage.save` takes it.
        settings: how it is built and trained.
    """

    kind: str
    names: Names
    counts: Tensor
    config: Mapping[str, Any]
    settings: Settings


class Model(nn.Module):
    """An encoder and a head, with the plan that they follow."""

    def __init__(self, plan: Plan, body: Body) -> None:
        super().__init__()
        self.plan = plan
        self.encoder = body.encoder
        settings = plan.settings
        counts = ClassCounts(plan.counts)
        sampler = make_sampler(settings.sampler, counts, k=settings.k, rmse_log_z=settings.rmse_log_z)
        objective = None if settings.objective is None else OBJECTIVES[settings.objective]()
        if body.tied is None:
            self.head = ClassHead(
                body.dim,
                len(plan.names),
                counts=counts,
                sampler=sampler,
                objective=objective,
                bias=body.bias,
                sparse=True,
            )
        else:
            self.head = ClassHead.tied(body.tied, counts=counts, sampler=sampler, objective=objective, bias=body.bias)

    @property
    def names(self) -> Names:
        return self.plan.names

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    def content(self) -> dict[str, Any]:
        """All that a prediction needs, as `storage.save` takes it."""
        plan = self.plan
        # What a sampler has learnt is for training; it is built anew from the counts.
        parameters = {name: value for name, value in self.state_dict().items() if not name.startswith(_SAMPLER)}
        return {
            "kind": plan.kind,
            "names": pack_strings(list(plan.names)),
            "counts": plan.counts,
            "config": dict(plan.config),
            "settings": plan.settings.to_json(),
            "parameters": parameters,
        }

    def load_parameters(self, content: Mapping[str, Any]) -> None:
        """Take those that `content` gave, of a model of the same plan.

        Raises:
            ValueError: they are of another.
        """
        missing, unexpected = self.load_state_dict(content["parameters"], strict=False)
        if wrong := [name for name in missing if not name.startswith(_SAMPLER)] + unexpected:
            raise ValueError(f"it has not the parameters of such a model: {wrong[0]}")


def open_model(folder: Path | str, *, which: str | None = None, device: str = "cpu") -> Model:
    """The model that a training left in a folder.

    Args:
        folder: of the training.
        which: "best", "newest" or "previous". None: the best if there is one, else the newest.
        device: where to.

    Raises:
        UserError: there is none, or it cannot be read; the message says why.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"`MODEL` must be a folder that `manyclass fit` made, got {folder}, which is none")
    if which is None:
        which = "best" if (folder / "best.safetensors").exists() else "newest"
    content, path = load_checkpoint(folder, which)  # type: ignore[arg-type]
    return model_of(content if which == "best" else content.get("model"), path).to(device)


def model_of(content: object, path: Path) -> Model:
    """The model whose content a file holds.

    Raises:
        UserError: it is none.
    """
    from manyclass.tasks.kinds import KINDS

    plan = plan_of(content, path)
    with _of_a_model(path):
        with torch.random.fork_rng([]):
            model = Model(plan, KINDS[plan.kind].build(plan))
        model.load_parameters(cast("dict[str, Any]", content))
    return model


def plan_of(content: object, path: Path) -> Plan:
    """The plan of the model whose content a file holds, and parameters that fit it; no model is built.

    Raises:
        UserError: it is none.
    """
    from manyclass.tasks.kinds import KINDS

    with _of_a_model(path):
        if not isinstance(content, dict) or content.get("kind") not in KINDS:
            raise ValueError("it holds no kind of model that is known")
        if not isinstance(content["config"], dict):
            raise ValueError("it does not tell how inputs are read")
        plan = Plan(
            content["kind"],
            Names(unpack_strings(content["names"])),
            content["counts"],
            content["config"],
            Settings.from_json(content["settings"]),
        )
        _check_shapes(plan, content["parameters"])
    return plan


@contextmanager
def _of_a_model(path: Path) -> Iterator[None]:
    """What goes wrong in here is a file's that holds no model."""
    try:
        yield
    except (UserError, LookupError, TypeError, ValueError, RuntimeError, AttributeError, ArithmeticError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"cannot read {path}: it does not hold a model that this version knows: {reason}") from None


def _check_shapes(plan: Plan, parameters: object) -> None:
    """Raise where parameters are not those of a model, before memory is taken for what a damaged plan asks for."""
    from manyclass.tasks.kinds import KINDS

    if not isinstance(parameters, dict) or (plan.settings.layers or 1) > len(parameters):
        raise ValueError("it has not the parameters of such a model")
    with torch.device("meta"):
        body = KINDS[plan.kind].build(plan)
    wanted = {f"encoder.{name}": tuple(value.shape) for name, value in body.encoder.state_dict().items()}
    wanted["head.weight"] = (len(plan.names), body.dim)
    if body.bias:
        wanted["head.bias"] = (len(plan.names),)
    for name, shape in wanted.items():
        value = parameters.get(name)
        if not isinstance(value, Tensor) or tuple(value.shape) != shape or not value.is_floating_point():
            raise ValueError(f"it has not the parameters of such a model: {name}")
        if not value.isfinite().all():
            raise ValueError(f"its parameters must be finite: {name}")
