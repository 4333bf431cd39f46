"""The parts of a step: batches in, the update of the parameters, and the global RNG state that both depend on."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from manyclass import _check
from manyclass.optim import clip_grad_norm_
from manyclass.training.history import Progress

Clip = Callable[[list[nn.Parameter]], object]


def rng_state(device: torch.device) -> list[Tensor]:
    """Return the global RNG state of the CPU, then of the device if it is a GPU."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def set_rng_state(states: list[Tensor], device: torch.device) -> None:
    """Set the global RNG state that `rng_state` returned."""
    # A checkpoint may have been loaded onto a GPU, but torch takes these states from the CPU.
    torch.set_rng_state(states[0].cpu())
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1].cpu(), device)


class BatchStream:
    """Epochs of batches that can be left and resumed at any position.

    Args:
        batches: an iterable, opened once an epoch.
        device: device of the head, whose global RNG state is tracked.
    """

    def __init__(self, batches: Iterable[object], device: torch.device) -> None:
        self._batches, self._device = batches, device
        self._opened = False
        self.one_shot = isinstance(batches, Iterator)
        # A loader may have shuffled by the global RNG, so its state at the start of the epoch is kept.
        self.rng_at_epoch: list[Tensor] = []

    def __len__(self) -> int:
        """Return the batches of an epoch; 0 if that is unknown."""
        return len(self._batches) if isinstance(self._batches, Sized) else 0

    def unseen(self, at: Progress) -> Iterator[object]:
        """Iterate over the batches of this epoch that are still to come.

        Raises:
            ValueError: the epoch has fewer batches than were seen of it before.
        """
        now = rng_state(self._device)
        # An iterator that was opened before is at its position; everything else starts at the beginning.
        seen = 0 if self.one_shot and self._opened else at.position
        if at.position == 0:
            self.rng_at_epoch = now
        elif seen:
            set_rng_state(self.rng_at_epoch, self._device)
        for source in (self._batches, getattr(self._batches, "sampler", None)):
            if callable(set_epoch := getattr(source, "set_epoch", None)):
                set_epoch(at.epoch)
        stream = iter(self._batches)
        self._opened = True
        if seen:
            found = sum(1 for _ in itertools.islice(stream, seen))
            if found < seen:
                raise ValueError(f"`batches` must hold the {seen} of this epoch that were seen before, got {found}")
            set_rng_state(now, self._device)
        return stream


class Update:
    """Gradients, clipped if wanted, then the optimisers, then the schedulers; arguments as in `Training`."""

    def __init__(
        self,
        optimizers: Optimizer | Sequence[Optimizer],
        schedulers: LRScheduler | Sequence[LRScheduler],
        clip: float | Clip | None,
    ) -> None:
        self._optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        if not self._optimizers:
            raise ValueError("`optimizers` must hold an optimiser, got none")
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        self._parameters: list[nn.Parameter] = [parameter for group in groups for parameter in group["params"]]
        if len(set(map(id, self._parameters))) < len(self._parameters):
            raise ValueError("`optimizers` must not share a parameter, got one that two of them have")
        self._schedulers = [schedulers] if isinstance(schedulers, LRScheduler) else list(schedulers)
        for scheduler in self._schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                raise TypeError("`schedulers` must need nothing but the number of steps, got a ReduceLROnPlateau")
        self._clip = clip if clip is None or callable(clip) else _check.number("clip", clip, low=0, strict=True)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimisers."""
        return self._optimizers

    def __call__(self, loss: Tensor) -> None:
        self.zero_grad()
        loss.backward()
        self.apply()
        self.schedule()

    def zero_grad(self) -> None:
        """Remove the gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def apply(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Clip the gradients and step the optimisers.

        Args:
            scaler: has scaled the loss; a step with an infinite gradient changes no parameter.
        """
        if scaler is not None and self._clip is not None:
            for optimizer in self._optimizers:
                scaler.unscale_(optimizer)
        if callable(self._clip):
            self._clip(self._parameters)
        elif self._clip is not None:
            clip_grad_norm_(self._parameters, self._clip)
        for optimizer in self._optimizers:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        if scaler is not None:
            scaler.update()

    def schedule(self) -> None:
        """Step the schedulers."""
        for scheduler in self._schedulers:
            scheduler.step()

    def catch_up(self) -> None:
        """Let optimisers apply the updates that they have put off, before the parameters are read."""
        for optimizer in self._optimizers:
            if callable(catch_up := getattr(optimizer, "catch_up", None)):
                catch_up()
