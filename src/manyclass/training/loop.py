"""The training loop."""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from manyclass import _check
from manyclass.samplers import ErrorProbe, deciding_part
from manyclass.training._stepping import BatchStream, Clip, Update, rng_state, set_rng_state
from manyclass.training._stopping import Best, Limits, Stopwatch, defer_interrupts
from manyclass.training.batch import Batch, device_of
from manyclass.training.callback import Callback
from manyclass.training.evaluate import HeldOut, evaluate
from manyclass.training.history import History, Progress, Record, Stopped, cost
from manyclass.training.ranks import ALONE, Ranks
from manyclass.training.replay import ReplayedStep

_LOSS_SMOOTHING = 0.02  # the share of the newest step in the running mean of the loss


class Training:
    """A training of an encoder and a head until the first of its limits.

    A step computes `head(encoder(inputs), target)` and its gradients, then steps the optimisers and the schedulers.
    Modules stay in the mode (`train` or `eval`) they are in. The same seed gives the same run, bit for bit on the CPU,
    with the same costs if the sampler decides by them; everything else that is random (initial parameters, dropout, a
    shuffling loader) follows `torch.manual_seed`.

    Args:
        head: the head whose loss is minimised.
        batches: an iterable of `(inputs, target)` or `(inputs, target, extras)`, see `Batch`; an epoch is one pass. If
            it, or its `sampler`, has `set_epoch`, that is called with the number of epochs completed.
        optimizers: one, or several of different parameters.
        encoder: maps inputs to the head's `hidden`. None: inputs are `hidden`.
        schedulers: learning-rate schedulers, stepped once per step.
        epochs, steps, seconds: limits, at least one; evaluations do not count as seconds.
        held_out: the data to evaluate on, when to evaluate, and when to stop early.
        probe_every: steps between measurements of the error of log Z̃, for the records only. None: those that the head
            makes anyway, at 1 % of the time; 0: none is recorded. A training does not depend on it.
        report_every: steps between records of the training loss.
        penalty: added to the loss of a batch, such as a regulariser; records hold the loss without it.
        clip: clip the gradient norm over the parameters of all optimisers at this value; or a function that is
            called with these parameters once they have gradients.
        callbacks: called with this training after steps, after records and at the end.
        seed: seed of the head's draws.
        replay: whether steps with batches of one shape are recorded as a CUDA graph and replayed, see `ReplayedStep`.
            None: on a GPU, where steps that cannot be replayed run as usual.
        ranks: the processes that train together, each on its part of every batch; the encoder averages gradients over
            them, and the head's classes are divided among them, see `manyclass.parallel`.

    Raises:
        TypeError: `batches` is an iterator but there are several epochs, or a scheduler needs a metric.
        ValueError: there is no limit or no optimiser, two optimisers share a parameter, or a number is out of range.
            During the run: there is no batch, or, as a `DivergedError`, the loss is not finite; on a GPU that is
            noticed at the next record.

    Example:
        >>> from manyclass import ClassHead
        >>> batches = [(torch.randn(16, 8), torch.arange(16)) for _ in range(4)]
        >>> head = ClassHead(8, 500)
        >>> optimizer = torch.optim.Adam(head.parameters())
        >>> history = Training(head, batches, optimizer, epochs=2, held_out=HeldOut(batches), probe_every=0).run()
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
        probe_every: int | None = None,
        report_every: int = 100,
        penalty: Callable[[Batch], Tensor] | None = None,
        clip: float | Clip | None = None,
        callbacks: Sequence[Callback] = (),
        seed: int = 0,
        replay: bool | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self._ranks = ranks
        self._head, self._device = head, device_of(head)
        self._encoder = nn.Identity() if encoder is None else encoder
        self._limits = Limits(epochs, steps, seconds)
        self._stream = BatchStream(batches, self._device)
        if self._stream.one_shot and epochs is not None and epochs > 1:
            got = type(batches).__name__
            raise TypeError(f"`batches` must be iterable more than once for {epochs} epochs, got a {got}")
        self._update = Update(optimizers, schedulers, clip)
        self._replayed: ReplayedStep | None = None
        if replay or (replay is None and self._device.type == "cuda" and not ranks.are_several):
            modules = [self._encoder, head]
            self._replayed = ReplayedStep(
                lambda parts: self._losses(Batch(*parts)), optimizers, clip=clip, schedulers=schedulers, modules=modules
            )
        self._samples = hasattr(head, "sampler")
        if probe_every is not None:
            _check.integer("probe_every", probe_every, 0)
        if probe_every and not self._samples:
            got = f"{type(head).__name__}, which has no sampler, got {probe_every}"
            raise ValueError(f"`probe_every` must be None or 0 for {got}")
        self._held_out = held_out
        # The probe to record: a separate one, the head's, or none.
        self._extra = ErrorProbe(every=probe_every) if probe_every else None
        self._shows_probes = self._samples and probe_every != 0
        self._probed, self._decided = 0, 0
        self._report_every = _check.integer("report_every", report_every, 1)
        self._penalty = penalty
        self._callbacks = list(callbacks)
        self._seed = _check.integer("seed", seed, 0)
        # The state that changes from here on; `state_dict` holds it.
        self.progress = Progress()
        self._records: list[Record] = []
        self._draws = torch.Generator(self._device).manual_seed(seed)
        self._loss = torch.zeros((), dtype=torch.float64, device=self._device)
        self._best = Best(nn.ModuleList([self._encoder, head]) if held_out and held_out.restore_best else None)
        # The global RNG state between two runs.
        self._rng_now: list[Tensor] | None = None
        self._since = 0.0
        self._stopwatch = Stopwatch()
        # False within a step, where a training cannot be resumed.
        self._resumable = False

    def run(self) -> History:
        """Train until a limit is reached, continuing where an interrupted run stopped.

        Ctrl-C ends the run after the current step; callbacks still save their state at the end.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed a second time, more than a second later, before the run had ended.
                Half a step cannot be resumed, so callbacks see a training that failed.
        """
        stopped: Stopped = "failed"
        if self._rng_now is not None:
            set_rng_state(self._rng_now, self._device)
            self._rng_now = None
        # A checkpoint holds the RNG state of the first process alone.
        self._ranks.seed(self._seed, self.progress.step)
        with defer_interrupts() as pressed, self._probing():

            def interrupted() -> bool:
                return self._ranks.any(pressed())

            try:
                stopped = self._run(interrupted)
            except KeyboardInterrupt:
                if not self._resumable:
                    raise
                stopped = "interrupted"
            except Exception as error:
                error.add_note(f"Training ended after step {self.progress.step}.")
                raise
            finally:
                # Numbers drawn until the next run must not change the training, so its RNG state is kept.
                self._rng_now = rng_state(self._device)
                best = self._best
                found = None if best.step is None else best.loss
                spent = self._stopwatch.seconds
                by = "loss" if self._held_out is None else self._held_out.by
                history = History(tuple(self._records), self.progress, best.step, found, stopped, spent, by)
                for callback in self._callbacks:
                    callback.on_end(self, history)
            if interrupted():
                history = replace(history, stopped="interrupted")
        # Callbacks come first, so that a checkpoint saved at the end holds the last parameters and can be resumed.
        if history.stopped != "interrupted":
            self.restore_best()
        return history

    def _run(self, interrupted: Callable[[], bool]) -> Stopped:
        self._since = time.perf_counter()
        self._stopwatch.restart()
        # What the head has measured and decided before this run is no news.
        self._news()
        reason = self._reached()
        while reason is None:
            reason = self._epoch(interrupted)
        self._resumable = False
        self._update.catch_up()
        self._resumable = True
        if self._held_out is not None and not self._is_evaluated():
            self._record(evaluating=True)
        elif not self._records or self._records[-1].step < self.progress.step:
            self._record()
        return "interrupted" if interrupted() else reason

    def restore_best(self) -> None:
        """Load the parameters of the best evaluation into encoder and head, if `held_out.restore_best` is set."""
        self._best.restore()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loop between two steps, without encoder, head, optimisers and schedulers."""
        return {
            "progress": asdict(self.progress),
            "records": [asdict(record) for record in self._records],
            "draws": self._draws.get_state(),
            "loss": float(self._loss),
            "spent": self._stopwatch.seconds,
            "best": self._best.state_dict(),
            "probe": self._head_probe().state() if self._samples else [],
            "extra_probe": [] if self._extra is None else self._extra.state(),
            "rng_now": self._rng_now or rng_state(self._device),
            "rng_at_epoch": self._stream.rng_at_epoch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of another training; `run` then skips the batches of the epoch it has seen.

        The run equals an uninterrupted one, bit for bit, if the batches of an epoch depend only on its number or on
        torch's global RNG state, which is restored too.
        """
        self.progress = Progress(**state["progress"])
        self._records = [Record(**record) for record in state["records"]]
        self._draws.set_state(state["draws"].cpu())
        self._loss.fill_(state["loss"])
        self._stopwatch = Stopwatch(state["spent"])
        self._best.load_state_dict(state["best"])
        if self._samples:
            self._head_probe().load_state(state["probe"])
        # A training may be continued with another `probe_every`.
        if self._extra is not None and state["extra_probe"]:
            self._extra.load_state(state["extra_probe"])
        if self._shows_probes:
            self._probed = self._shown_probe().number
        self._rng_now, self._stream.rng_at_epoch = state["rng_now"], state["rng_at_epoch"]

    def _epoch(self, interrupted: Callable[[], bool]) -> Stopped | None:
        self._resumable = False
        for item in self._stream.unseen(self.progress):
            self._stopwatch.lap("batches")
            self._step(Batch.of(item, self._device))
            self._resumable = True
            for callback in self._callbacks:
                callback.on_step(self)
            self._stopwatch.lap("callbacks")
            self._since = time.perf_counter()
            if interrupted():
                raise KeyboardInterrupt
            if reason := self._reached():
                return reason
            self._resumable = False
        if self.progress.position == 0:
            if self._stream.one_shot and self.progress.step > 0:
                return "batches"
            raise ValueError(f"`batches` must hold a batch, got none in epoch {self.progress.epoch}")
        self.progress = replace(self.progress, epoch=self.progress.epoch + 1, position=0)
        if self._held_out is not None and self._held_out.by_epoch and not self._is_evaluated():
            self._record(evaluating=True)
        return self._reached()

    def _losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss to minimise, and that of all processes without the penalty."""
        hidden = self._encoder(batch.inputs)
        draws = {"generator": self._draws} if self._samples else {}
        loss: Tensor = self._head(hidden, batch.target, **batch.extras(), **draws)
        if batch.weight is not None:
            loss = loss * batch.mean_weight(self._ranks)
        # The head's losses are such that their mean over processes is that of all examples.
        joint = self._ranks.summed(loss.detach().double()) / self._ranks.number
        if self._penalty is not None:
            share = self._ranks.number * batch.examples / max(1.0, self._ranks.total(batch.examples)[0])
            loss = loss + self._penalty(batch) * share
        return loss, joint

    def _step(self, batch: Batch) -> None:
        step = self.progress.step + 1
        examples = int(self._ranks.total(batch.examples)[0])
        if self._replayed is not None:
            _, joint = self._replayed(tuple(getattr(batch, field.name) for field in fields(batch)))
        else:
            loss, joint = self._losses(batch)
            if loss.device.type == "cpu":
                _finite("loss", joint.item(), step)
            self._stopwatch.lap("forward")
            self._update(loss)
        self._stopwatch.lap("update")
        # This stays on the device, and NaN or inf persists in it, so a later record can report it without a sync.
        self._loss.lerp_(joint, max(_LOSS_SMOOTHING, 1 / step))
        before = self.progress
        position, examples = self.progress.position + 1, self.progress.examples + examples
        self.progress = replace(self.progress, step=step, position=position, examples=examples)
        self._count_seconds()
        evaluating = self._held_out is not None and self._held_out.is_due(before, self.progress)
        news = self._news()
        if evaluating or news or step % self._report_every == 0:
            self._record(evaluating=evaluating, news=news)

    @contextlib.contextmanager
    def _probing(self) -> Iterator[None]:
        """Let the head probe for the records too."""
        if self._extra is None:
            yield
            return
        probes: list[ErrorProbe] = self._head.extra_probes  # type: ignore[assignment]
        probes.append(self._extra)
        try:
            yield
        finally:
            probes.remove(self._extra)

    def _head_probe(self) -> ErrorProbe:
        return self._head.probe  # type: ignore[return-value]

    def _shown_probe(self) -> ErrorProbe:
        return self._extra or self._head_probe()

    def _news(self) -> dict[str, Any]:
        """Return the fields of a record that the step has changed: the pooled error, a decision of the sampler."""
        news: dict[str, Any] = {}
        if not self._samples:
            return news
        if self._shows_probes and (probe := self._shown_probe()).number != self._probed:
            self._probed, news["rmse_log_z"] = probe.number, probe.error
        decides = deciding_part(self._head.sampler)  # type: ignore[arg-type]
        if decides is not None and len(decides.decisions) != self._decided:
            self._decided, news["decision"] = len(decides.decisions), decides.decisions[-1]
            if self._extra is not None:
                # What it has measured so far is the error of the design before.
                self._extra.restart_pool()
        return news

    def _record(self, *, evaluating: bool = False, news: dict[str, Any] | None = None) -> None:
        loss = self._loss.item()
        # Reading the loss waited for the device, so only now are the seconds complete.
        self._count_seconds()
        at = self.progress
        left = self._limits.seconds_left(at, len(self._stream) or None)
        _finite("loss", loss, at.step)
        record = Record(at.step, at.epoch, at.examples, at.seconds, loss, seconds_left=left, **(news or {}))
        if evaluating and self._held_out is not None:
            self._update.catch_up()
            report = evaluate(
                self._head,
                self._held_out.batches,
                encoder=self._encoder,
                metrics=self._held_out.metrics,
                ranks=self._ranks,
            )
            self._resumable = False
            _finite("held-out loss", report.loss, at.step)
            record = replace(record, held_out_loss=report.loss, metrics=report.metrics)
            self._best.update(cost(record, self._held_out.by), report.loss, at.step)
            self._stopwatch.lap("evaluation")
        self._records.append(record)
        self._resumable = True
        for callback in self._callbacks:
            callback.on_record(self, record)
        self._stopwatch.lap("callbacks")
        self._since = time.perf_counter()

    def _count_seconds(self) -> None:
        now = time.perf_counter()
        seconds = self._ranks.of_first(self.progress.seconds + now - self._since)
        self.progress = replace(self.progress, seconds=seconds)
        self._since = now

    def _is_evaluated(self) -> bool:
        """Return True if there was no step since the last evaluation."""
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
