"""What a loss does to the parameters."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from manyclass import _check
from manyclass.optim import clip_grad_norm_

Clip = Callable[[list[nn.Parameter]], object]


class Update:
    """Gradients, clipped or not, then the optimisers, then the schedulers; arguments as of `Training`."""

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

    def __call__(self, loss: Tensor) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        loss.backward()
        if callable(self._clip):
            self._clip(self._parameters)
        elif self._clip is not None:
            clip_grad_norm_(self._parameters, self._clip)
        for optimizer in self._optimizers:
            optimizer.step()
        for scheduler in self._schedulers:
            scheduler.step()

    def catch_up(self) -> None:
        """Let optimisers that put some of their work off do it: others are to see the parameters."""
        for optimizer in self._optimizers:
            if callable(catch_up := getattr(optimizer, "catch_up", None)):
                catch_up()
