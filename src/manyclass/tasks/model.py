"""A trained model as a whole, and its content as a file holds it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
from manyclass.tasks.catalog import TASKS
from manyclass.tasks.settings import Settings
from manyclass.tasks.task import ModelSpec
from manyclass.training import load_checkpoint

CONTENT_FORMAT = 2  # version of the content
SAMPLER_PREFIX = "head.sampler."


class Model(nn.Module):
    """An encoder and a head, with initial parameters, and the spec that they follow.

    Args:
        spec: the spec.
        divisible: whether it is to be divided among processes. Then a tied head only shares the table of the embedding,
            which is replaced.
    """

    def __init__(self, spec: ModelSpec, *, divisible: bool = False) -> None:
        super().__init__()
        self.spec = spec
        built, settings = spec.task.build(spec), spec.settings
        self.encoder = built.encoder
        counts = ClassCounts(spec.counts)
        sampler = make_sampler(settings.sampler, counts, k=settings.k, rmse_log_z=settings.rmse_log_z)
        objective = None if settings.objective is None else OBJECTIVES[settings.objective]()
        if built.tied is None or divisible:
            self.head = ClassHead(
                built.dim,
                len(spec.names),
                counts=counts,
                sampler=sampler,
                objective=objective,
                bias=built.bias,
                sparse=True,
                weight=None if built.tied is None else cast("nn.Parameter", built.tied.weight),
            )
        else:
            self.head = ClassHead.tied(built.tied, counts=counts, sampler=sampler, objective=objective, bias=built.bias)

    @property
    def names(self) -> Names:
        """The names of the classes."""
        return self.spec.names

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.head.weight.device

    def content(self) -> dict[str, Any]:
        """Return all that a prediction needs, as `storage.save` takes it."""
        spec = self.spec
        # The learned state of a sampler is for training only; it is rebuilt from the counts.
        parameters = {name: value for name, value in self.state_dict().items() if not name.startswith(SAMPLER_PREFIX)}
        return {
            "format": CONTENT_FORMAT,
            "kind": spec.task.kind,
            "names": pack_strings(list(spec.names)),
            "counts": spec.counts,
            "config": dict(spec.config),
            "settings": spec.settings.to_json(),
            "parameters": parameters,
        }

    def load_parameters(self, content: Mapping[str, Any]) -> None:
        """Load the parameters that `content` of a model of the same spec returned.

        Raises:
            ValueError: a parameter is missing or unexpected.
        """
        missing, unexpected = self.load_state_dict(content["parameters"], strict=False)
        if wrong := [name for name in missing if not name.startswith(SAMPLER_PREFIX)] + unexpected:
            raise ValueError(f"it does not have the parameters of such a model: {wrong[0]}")


def open_model(
    folder: Path | str, *, checkpoint: str | None = None, device: str = "cpu", divisible: bool = False
) -> Model:
    """Load the model that a training left in a folder.

    Args:
        folder: folder of the training.
        checkpoint: "best", "newest" or "previous". None: the best if there is one, else the newest.
        device: device of the model.
        divisible: whether it is to be divided among processes.

    Raises:
        UserError: there is no model, or it cannot be read; the message gives the reason.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"`MODEL` must be a folder that `manyclass fit` made, got {folder}, which is no folder")
    if checkpoint is None:
        checkpoint = "best" if (folder / "best.safetensors").exists() else "newest"
    content, path = load_checkpoint(folder, checkpoint)  # type: ignore[arg-type]
    held = content if checkpoint == "best" else content.get("model")
    return model_from_content(held, path, divisible=divisible).to(device)


def model_from_content(content: object, path: Path, *, divisible: bool = False) -> Model:
    """Build the model whose content a file holds.

    Raises:
        UserError: the content is not that of a model.
    """
    spec = spec_from_content(content, path)
    with _naming_file(path):
        with torch.random.fork_rng([]):
            model = Model(spec, divisible=divisible)
        model.load_parameters(cast("dict[str, Any]", content))
    return model


def spec_from_content(content: object, path: Path) -> ModelSpec:
    """Return the spec of the model whose content a file holds, after checking its parameters; no model is built.

    Raises:
        UserError: the content is not that of a model.
    """
    with _naming_file(path):
        if not isinstance(content, dict) or content.get("kind") not in TASKS:
            raise ValueError("it holds a model of an unknown kind of data")
        if content.get("format") != CONTENT_FORMAT:
            raise ValueError("it was written by an earlier version of manyclass; train it again")
        if not isinstance(content["config"], dict):
            raise ValueError("it does not say how inputs are read")
        spec = ModelSpec(
            TASKS[content["kind"]],
            Names(unpack_strings(content["names"])),
            content["counts"],
            content["config"],
            Settings.from_json(content["settings"]),
        )
        _check_parameters(spec, content["parameters"])
    return spec


@contextmanager
def _naming_file(path: Path) -> Iterator[None]:
    """Turn errors inside into a UserError that names the file."""
    try:
        yield
    except (UserError, LookupError, TypeError, ValueError, RuntimeError, AttributeError, ArithmeticError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"cannot read {path}: it does not hold a model that this version knows: {reason}") from None


def _check_parameters(spec: ModelSpec, parameters: object) -> None:
    """Check the parameters against the spec before memory is allocated, since a damaged spec may have any size."""
    if not isinstance(parameters, dict) or (spec.settings.layers or 1) > len(parameters):
        raise ValueError("it does not have the parameters of such a model")
    with torch.device("meta"):
        built = spec.task.build(spec)
    wanted = {f"encoder.{name}": tuple(value.shape) for name, value in built.encoder.state_dict().items()}
    wanted["head.weight"] = (len(spec.names), built.dim)
    if built.bias:
        wanted["head.bias"] = (len(spec.names),)
    for name in parameters:
        if name not in wanted:
            raise ValueError(f"it does not have the parameters of such a model: {name!r:.60}")
    for name, shape in wanted.items():
        value = parameters.get(name)
        if not isinstance(value, Tensor) or tuple(value.shape) != shape or not value.is_floating_point():
            raise ValueError(f"it does not have the parameters of such a model: {name}")
        if not value.isfinite().all():
            raise ValueError(f"its parameters must be finite: {name}")
