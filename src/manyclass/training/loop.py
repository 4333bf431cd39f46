"""The loop: batches in, steps, records out."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from manyclass import _check
from manyclass.training import _interrupt, _random
from manyclass.training._best import Best
from manyclass.training._limits import Limits
from manyclass.training._spent import Spent
from manyclass.training._stream import Stream
from manyclass.training._update import Clip, Update
from manyclass.training.batch import Batch, device_of
from manyclass.training.callback import Callback
from manyclass.training.evaluate import HeldOut, evaluate
from manyclass.training.history import History, Progress, Record, Stopped, cost
from manyclass.training.probe import Probe

_SMOOTHING = 0.02


class Training:
    """Trains an encoder and a head until the first of its limits.

    A step is `head(encoder(inputs), target)`, its gradients, the optimisers, then the schedulers: those are stepped
    once a step. Parts stay in the mode (`train`, `eval`) they are in. The same seed gives the same run, bit for bit on
    the CPU; what else is random (first parameters, dropout, a loader that shuffles) follows `torch.manual_seed`.

    Args:
        head: whose loss is minimised.
        batches: an iterable of `(inputs, target)` or `(inputs, target, extras)`, see `Batch`; an epoch is one pass. If
            it, or its `sampler`, has `set_epoch`, that is called with the number of epochs completed.
        optimizers: one, or several of different parameters.
        encoder: from inputs to the head's `hidden`. None: inputs are that.
        schedulers: of learning rates.
        epochs, steps, seconds: limits, of which at least one is needed; evaluations take none of the seconds.
        held_out: what to evaluate on, when, and when to stop for it.
        probe: when and how to measure the error of log Z̃.
        report_every: how many steps lie between records of the training loss.
        penalty: what is added to the loss of a batch, such as a regulariser; records tell the loss without it.
        clip: the most that the gradients of all optimisers' parameters may be long together; or a function that is
            given these parameters when they have their gradients.
        callbacks: what is told of it.
        seed: of the head's draws.

    Raises:
        TypeError: an iterator as `batches` of several epochs, or a scheduler that wants a metric.
        ValueError: no limit or optimiser, a parameter that two optimisers have, or a number out of range. While it
            runs: no batch; as a `DivergedError`, a loss that is not finite, which a GPU tells with the next record
            only.

    Example:
        >>> from manyclass import ClassHead
        >>> batches = [(torch.randn(16, 8), torch.arange(16)) for _ in range(4)]
        >>> head = ClassHead(8, 500)
        >>> optimizer = torch.optim.Adam(head.parameters())
        >>> history = Training(head, batches, optimizer, epochs=2, held_out=HeldOut(batches)).run()
        >>> history.stopped, [record.step for record in history.records]
        ('epochs', [4, 8])
    """

    def __init__(
        self,
        head: nn.Module,
        batches: Iterable[object],
        optimizers: Optimizer | Sequence[Optimizer],
        *,
        encoder: nn.Module | None = None,
        schedulers: LRScheduler | Sequence[LRScheduler] = (),
        epochs: int | None = None,
        steps: int | None = None,
        seconds: float | None = None,
        held_out: HeldOut | None = None,
        probe: Probe | None = None,
        report_every: int = 100,
        penalty: Callable[[Batch], Tensor] | None = None,
        clip: float | Clip | None = None,
        callbacks: Sequence[Callback] = (),
        seed: int = 0,
    ) -> None:
        self._head, self._device = head, device_of(head)
        self._encoder = nn.Identity() if encoder is None else encoder
        self._limits = Limits(epochs, steps, seconds)
        self._stream = Stream(batches, self._device)
        if self._stream.one_shot and epochs is not None and epochs > 1:
            kind = type(batches).__name__
            raise TypeError(f"`batches` must be iterable more than once for {epochs} epochs, got a {kind}")
        self._update = Update(optimizers, schedulers, clip)
        self._samples = hasattr(head, "sampler")
        if probe is not None and not self._samples:
            raise ValueError(f"`probe` must be None for {type(head).__name__}, which has no sampler, got {probe}")
        self._held_out, self._probe = held_out, probe
        self._report_every = _check.whole("report_every", report_every, 1)
        self._penalty = penalty
        self._callbacks = list(callbacks)
        self._seed = _check.whole("seed", seed, 0)
        # All that changes; `state_dict` has it.
        self.progress = Progress()
        self._records: list[Record] = []
        self._draws = torch.Generator(self._device).manual_seed(seed)
        self._loss = torch.zeros((), dtype=torch.float64, device=self._device)
        self._best = Best(nn.ModuleList([self._encoder, head]) if held_out and held_out.restore_best else None)
        # torch's global randomness, while no run is under way.
        self._random_now: list[Tensor] | None = None
        self._since = 0.0
        self._spent = Spent()
        # Whether another training could go on from here; not so within a step.
        self._whole = False

    def run(self) -> History:
        """Train until a limit, or on from where it was interrupted.

        Ctrl-C ends it after the step under way; it waits for what callbacks save at the end.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed again, more than a second later, before that. Half a step cannot be
                resumed: to callbacks the training has failed.
        """
        stopped: Stopped = "failed"
        if self._random_now is not None:
            _random.restore(self._random_now, self._device)
            self._random_now = None
        with _interrupt.deferred() as interrupted:
            try:
                stopped = self._run(interrupted)
            except KeyboardInterrupt:
                if not self._whole:
                    raise
                stopped = "interrupted"
            except Exception as error:
                error.add_note(f"Training ended after step {self.progress.step}.")
                raise
            finally:
                # Whatever is drawn until it runs again is not the training's.
                self._random_now = _random.state(self._device)
                best = self._best
                found = None if best.step is None else best.loss
                history = History(tuple(self._records), self.progress, best.step, found, stopped, self._spent.seconds)
                for callback in self._callbacks:
                    callback.on_end(history)
            if interrupted():
                history = replace(history, stopped="interrupted")
        # Only now, so that what a callback saved at the end can go on to further steps.
        if history.stopped != "interrupted":
            self.restore_best()
        return history

    def _run(self, interrupted: Callable[[], bool]) -> Stopped:
        self._since = time.perf_counter()
        self._spent.start()
        reason = self._reached()
        while reason is None:
            reason = self._epoch(interrupted)
        self._whole = False
        self._update.catch_up()
        self._whole = True
        if self._held_out is not None and not self._evaluated():
            self._record(evaluating=True)
        elif not self._records or self._records[-1].step < self.progress.step:
            self._record()
        return "interrupted" if interrupted() else reason

    def restore_best(self) -> None:
        """Give encoder and head the parameters of the best evaluation, if `held_out` says to keep them."""
        self._best.restore()

    def state_dict(self) -> dict[str, Any]:
        """All that the loop knows between two steps. Encoder, head, optimisers and schedulers have their own."""
        return {
            "progress": asdict(self.progress),
            "records": [asdict(record) for record in self._records],
            "draws": self._draws.get_state(),
            "loss": float(self._loss),
            "spent": self._spent.seconds,
            "best": self._best.state_dict(),
            "random_now": self._random_now or _random.state(self._device),
            "random_at_epoch": self._stream.random_at_epoch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another training was. `run` then passes over the batches of the epoch that it has seen.

        The run is the same, bit for bit, as one that never stopped, if an epoch's batches follow from its number or
        from torch's global generator, which is put back too.
        """
        self.progress = Progress(**state["progress"])
        self._records = [Record(**record) for record in state["records"]]
        self._draws.set_state(state["draws"].cpu())
        self._loss.fill_(state["loss"])
        self._spent = Spent(state["spent"])
        self._best.load_state_dict(state["best"])
        self._random_now, self._stream.random_at_epoch = state["random_now"], state["random_at_epoch"]

    def _epoch(self, interrupted: Callable[[], bool]) -> Stopped | None:
        self._whole = False
        for item in self._stream.unseen(self.progress):
            self._spent.on("batches")
            self._step(Batch.of(item, self._device))
            self._whole = True
            for callback in self._callbacks:
                callback.on_step(self.progress)
            self._spent.on("callbacks")
            self._since = time.perf_counter()
            if interrupted():
                raise KeyboardInterrupt
            if reason := self._reached():
                return reason
            self._whole = False
        if self.progress.position == 0:
            if self._stream.one_shot and self.progress.step > 0:
                return "batches"
            raise ValueError(f"`batches` must hold a batch, got none in epoch {self.progress.epoch}")
        self.progress = replace(self.progress, epoch=self.progress.epoch + 1, position=0)
        if self._held_out is not None and self._held_out.by_epoch and not self._evaluated():
            self._record(evaluating=True)
        return self._reached()

    def _step(self, batch: Batch) -> None:
        hidden = self._encoder(batch.inputs)
        draws = {"generator": self._draws} if self._samples else {}
        loss: Tensor = self._head(hidden, batch.target, **batch.extras(), **draws)
        if batch.weight is not None:
            loss = loss * batch.mean_weight()
        step = self.progress.step + 1
        if loss.device.type == "cpu":
            _finite("loss", loss.item(), step)
        self._spent.on("forward")
        self._update(loss if self._penalty is None else loss + self._penalty(batch))
        self._spent.on("update")
        # Stays on the device, and once it is not finite it never is again: records can tell later.
        self._loss.lerp_(loss.detach().double(), max(_SMOOTHING, 1 / step))
        before = self.progress
        position, examples = self.progress.position + 1, self.progress.examples + batch.examples
        self.progress = replace(self.progress, step=step, position=position, examples=examples)
        self._count_seconds()
        evaluating = self._held_out is not None and self._held_out.due(before, self.progress)
        probing = self._probe is not None and step % self._probe.every == 0
        if evaluating or probing or step % self._report_every == 0:
            self._record(evaluating=evaluating, probed=(hidden, batch.target) if probing else None)

    def _record(self, *, evaluating: bool = False, probed: tuple[Tensor, Tensor] | None = None) -> None:
        loss = self._loss.item()
        # Only now has the device done what the seconds are for.
        self._count_seconds()
        at = self.progress
        left = self._limits.seconds_left(at, len(self._stream) or None)
        _finite("loss", loss, at.step)
        record = Record(at.step, at.epoch, at.examples, at.seconds, loss, seconds_left=left)
        if evaluating and self._held_out is not None:
            self._update.catch_up()
            report = evaluate(self._head, self._held_out.batches, encoder=self._encoder, metrics=self._held_out.metrics)
            self._whole = False
            _finite("held-out loss", report.loss, at.step)
            record = replace(record, held_out_loss=report.loss, metrics=report.metrics)
            self._best.update(cost(record, self._held_out.by), report.loss, at.step)
            self._spent.on("evaluation")
        if probed is not None and self._probe is not None:
            rmse = self._probe.rmse_log_z(self._head, *probed, seed=self._seed + at.step)
            record = replace(record, rmse_log_z=rmse)
            self._spent.on("probes")
        self._records.append(record)
        self._whole = True
        for callback in self._callbacks:
            callback.on_record(record)
        self._spent.on("callbacks")
        self._since = time.perf_counter()

    def _count_seconds(self) -> None:
        now = time.perf_counter()
        self.progress = replace(self.progress, seconds=self.progress.seconds + now - self._since)
        self._since = now

    def _evaluated(self) -> bool:
        """Whether the parameters are those of the last evaluation."""
        last = next((record for record in reversed(self._records) if record.held_out_loss is not None), None)
        return last is not None and last.step == self.progress.step

    def _reached(self) -> Stopped | None:
        patience = None if self._held_out is None else self._held_out.patience
        if patience is not None and self._best.waited >= patience:
            return "patience"
        return self._limits.reached(self.progress)


def _finite(name: str, value: float, step: int) -> float:
    if not math.isfinite(value):
        raise _check.DivergedError(f"The {name} must be finite, got {value} by step {step}")
    return value
