"""Restoring a training from a checkpoint, after checking that it belongs to that training."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from manyclass import storage
from manyclass.errors import UserError
from manyclass.samplers import ErrorProbe
from manyclass.tasks.divide import own_rows
from manyclass.tasks.model import SAMPLER_PREFIX, Model, spec_from_content
from manyclass.tasks.settings import Settings
from manyclass.training import Record, Training

if TYPE_CHECKING:
    from manyclass._shard import Shard

_LARGEST_NUMBER = 1 << 53
_ADAM_STATE = {"step", "exp_avg", "exp_avg_sq"}  # of torch, which checks none of it
_RECORD_TYPES = {"step": int, "epoch": int, "examples": int, "seconds": float, "loss": float}


def check_files(folder: Path, checkpoint: Literal["newest", "previous"]) -> None:
    """Check the files of a folder before a training is resumed from them.

    Raises:
        UserError: the checkpoint or the best model is damaged.
    """
    path, best = folder / f"{checkpoint}.safetensors", folder / "best.safetensors"
    if path.exists():
        try:
            storage.check(path, content_type="checkpoint")
        except UserError as error:
            other = "previous" if checkpoint == "newest" else "newest"
            raise UserError(f"{error}; {_other(folder, other)}") from None
    if best.exists():
        try:
            spec_from_content(storage.load(best, content_type="model"), best)
        except UserError as error:
            raise UserError(
                f"{error}; if you delete that file, the training goes on without the best model so far"
            ) from None


def _other(folder: Path, checkpoint: str) -> str:
    path = folder / f"{checkpoint}.safetensors"
    try:
        storage.check(path, content_type="checkpoint")
    except UserError:
        return f"nothing else in {folder} can be resumed from"
    option = "with `--from-previous`" if checkpoint == "previous" else "without `--from-previous`"
    return f"{path} can be read: resume {option}"


@dataclass(frozen=True)
class Run:
    """The parts of a training, and its batches per epoch."""

    model: Model
    optimizers: Sequence[Optimizer]
    schedulers: Sequence[LambdaLR]
    training: Training
    batches: int


def check(run: Run, state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Check that the state of a checkpoint, read from a path, is that of a training that has not started.

    Returns:
        The state, for `restore`; of tensors that are divided among processes, the rows of this one.

    Raises:
        UserError: the state is not that of a training, or that of another one.
    """
    model = run.model
    with _naming(path):
        saved = spec_from_content(state["model"], path)
        if saved.names != model.names or not torch.equal(saved.counts, model.spec.counts):
            raise UserError(f"`data` must be what the training began with, got other classes than {path} has")
        if _lasting(saved.settings) != _lasting(model.spec.settings):
            raise ValueError("it was trained with other settings")
        _check_training(state["training"], run.training.state_dict(), run.batches)
        for optimizer, own in zip(run.optimizers, state["optimizers"], strict=True):
            _check_optimizer(own, optimizer)
        for scheduler, own in zip(run.schedulers, state["schedulers"], strict=True):
            _check_alike("a schedule", own, scheduler.state_dict())
        for name, value in state["state_dict"].items():
            if isinstance(value, Tensor) and value.is_floating_point() and not value.isfinite().all():
                raise ValueError(f"{name} is not finite")
        fresh = model.state_dict()
        optimizers = zip(state["optimizers"], run.optimizers, strict=True)
        return {
            "state_dict": own_rows(_with_own_order(state["state_dict"], fresh), fresh),
            "optimizers": [_own_rows(own, optimizer) for own, optimizer in optimizers],
            "schedulers": state["schedulers"],
            "training": state["training"],
        }


def restore(run: Run, state: dict[str, Any], path: Path) -> None:
    """Load the state that `check` returned; all processes call it together.

    Raises:
        UserError: the state is not that of such a training.
    """
    with _naming(path):
        run.model.load_state_dict(state["state_dict"])
        for optimizer, own in zip(run.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(own)
        for scheduler, own in zip(run.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(own)
        run.training.load_state_dict(state["training"])


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn the errors of a state that does not fit into a UserError that names its file."""
    try:
        yield
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError, ArithmeticError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"cannot go on from {path}: it is of another training: {reason}") from None


def _with_own_order(saved: dict[str, Any], fresh: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a model with an order of classes for its sampler if, and only if, this model has one.

    Classes that are divided among processes lie by id on the line of a sampler, others by similarity. The order never
    changes a probability, so the state of one kind is good for the other.
    """
    found = dict(saved)
    for name in fresh.keys() | saved.keys():
        if not name.startswith(SAMPLER_PREFIX):
            continue
        if ".order." in name:
            if name not in fresh:
                del found[name]
            elif name not in found:
                found[name] = fresh[name]
        elif name.endswith("line") and name in found and not len(fresh[name]):
            # Empty: by id.
            found[name] = fresh[name]
    return found


def _own_rows(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return the state of an optimiser with the rows of this process."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kept = dict(state["state"])
    for i, own in kept.items():
        shard: Shard | None = getattr(parameters[i], "shard", None)
        if shard is not None:
            kept[i] = {name: shard.unwrapped(value).clone() for name, value in own.items()}
    return {**state, "state": kept}


def _whole_shape(parameter: Tensor) -> torch.Size:
    """Return the shape of a parameter with the rows of all processes."""
    shard: Shard | None = getattr(parameter, "shard", None)
    return parameter.shape if shard is None else torch.Size([shard.num_classes, *parameter.shape[1:]])


def _lasting(settings: Settings) -> Settings:
    """Return settings without the limits, which may change when a training is resumed."""
    return replace(settings, epochs=None, seconds=None)


def _check_alike(name: str, saved: Any, fresh: Any) -> None:
    """Check that a state has the structure of that of a training that has not started."""
    if isinstance(fresh, Tensor):
        good = isinstance(saved, Tensor) and (saved.dtype, saved.shape) == (fresh.dtype, fresh.shape)
    elif isinstance(fresh, dict):
        good = isinstance(saved, dict) and set(saved) == set(fresh)
        if good:
            for key, value in fresh.items():
                _check_alike(f"{name}[{key!r}]", saved[key], value)
    elif isinstance(fresh, list | tuple):
        good = type(saved) is type(fresh) and len(saved) == len(fresh)
        if good:
            for i, value in enumerate(fresh):
                _check_alike(f"{name}[{i}]", saved[i], value)
    elif isinstance(fresh, int | float) and not isinstance(fresh, bool):
        good = _is_number(saved, type(fresh))
    else:
        good = type(saved) is type(fresh)
    if not good:
        raise ValueError(f"{name} is not what it should be")


def _check_training(saved: Any, fresh: dict[str, Any], batches: int) -> None:
    if not isinstance(saved, dict) or set(saved) != set(fresh):
        raise ValueError("it does not describe a training")
    # These parts grow during the training, so their structure is checked separately.
    grown = ("records", "spent", "best", "rng_at_epoch", "loss", "probe", "extra_probe")
    _check_alike("its training", *({k: v for k, v in x.items() if k not in grown} for x in (saved, fresh)))
    progress, best, random = saved["progress"], saved["best"], saved["rng_at_epoch"]
    if progress["position"] > batches or progress["epoch"] > progress["step"]:
        raise ValueError("its position is beyond the end of an epoch")
    # Some objectives have a negative loss.
    if not isinstance(saved["loss"], float) or not math.isfinite(saved["loss"]):
        raise ValueError("its loss is no number")
    if not isinstance(saved["records"], list) or not all(map(_is_record, saved["records"])):
        raise ValueError("its records are damaged")
    for name in ("probe", "extra_probe"):
        if not isinstance(saved[name], list) or not all(isinstance(value, float) for value in saved[name]):
            raise ValueError("its probes are damaged")
        if fresh[name]:
            ErrorProbe().load_state(saved[name])
    if not isinstance(saved["spent"], dict) or not all(_is_number(x, float) for x in saved["spent"].values()):
        raise ValueError("its time by phase is damaged")
    if (
        not isinstance(best, dict)
        or set(best) != set(fresh["best"])
        or not all(isinstance(best[name], float) and best[name] == best[name] for name in ("cost", "loss"))
        or not (best["step"] is None or _is_number(best["step"], int))
        or not _is_number(best["waited"], int)
        or best["tensors"] is not None
    ):
        raise ValueError("its best evaluation is damaged")
    if not isinstance(random, list) or ((random or progress["position"]) and len(random) != len(fresh["rng_now"])):
        raise ValueError("it has no random state of its epoch")
    for own, value in zip(random, fresh["rng_now"], strict=False):
        _check_alike("its random state", own, value)
    for states in (saved["rng_now"], random):
        # A generator refuses a tensor that is no RNG state; the first state is that of the CPU.
        for own in states[:1]:
            torch.Generator().set_state(own)


def _check_optimizer(saved: Any, optimizer: Optimizer) -> None:
    fresh = optimizer.state_dict()
    if not isinstance(saved, dict) or set(saved) != set(fresh) or not isinstance(saved["state"], dict):
        raise ValueError("it does not hold an optimiser")
    _check_alike("an optimiser", saved["param_groups"], fresh["param_groups"])
    if [group["params"] for group in saved["param_groups"]] != [group["params"] for group in fresh["param_groups"]]:
        raise ValueError("an optimiser has other parameters")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for i, own in saved["state"].items():
        if i not in range(len(parameters)) or not isinstance(own, dict):
            raise ValueError("an optimiser has other parameters")
        if type(optimizer) is torch.optim.Adam and set(own) != _ADAM_STATE:
            raise ValueError("an optimiser's state is not what it should be")
        for name, value in own.items():
            shape = _whole_shape(parameters[i])
            # Adam counts steps: torch's for the whole tensor, the row optimiser for each row.
            wanted = {"step": shape[:0], "steps": shape[:1]}.get(name, shape)
            if not isinstance(value, Tensor) or value.shape != wanted or not value.is_floating_point():
                raise ValueError(f"an optimiser's {name} is not what it should be")
            if not value.isfinite().all():
                raise ValueError(f"an optimiser's {name} is not finite")
            if name in ("step", "steps") and (value < 0).any():
                raise ValueError(f"an optimiser's {name} is negative")


def _is_number(value: object, type_: type) -> bool:
    """Return True for a finite number that is not negative; ints count as floats too."""
    if isinstance(value, bool) or not isinstance(value, int if type_ is int else int | float):
        return False
    return 0 <= value < _LARGEST_NUMBER


def _is_record(record: object) -> bool:
    if not isinstance(record, dict) or set(record) != {field.name for field in fields(Record)}:
        return False
    metrics = record["metrics"]
    return (
        all(_is_number(record[name], type_) for name, type_ in _RECORD_TYPES.items() if name != "loss")
        and all(isinstance(record[name], float | None) for name in ("held_out_loss", "rmse_log_z", "seconds_left"))
        and isinstance(record["decision"], str | None)
        and isinstance(record["loss"], float)
        and isinstance(metrics, dict)
        and all(isinstance(name, str) and isinstance(value, float) for name, value in metrics.items())
    )
