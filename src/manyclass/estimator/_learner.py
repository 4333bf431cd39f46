"""An encoder, a head and their optimiser: what a classifier trains and predicts with."""

import contextlib
import copy
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manyclass.counts import ClassCounts
from manyclass.data.rows import RowBatches, Rows, as_inputs
from manyclass.encoders import FeatureEncoder
from manyclass.estimator._labels import Array
from manyclass.estimator._options import Options
from manyclass.estimator._scores import Scores
from manyclass.heads import ClassHead
from manyclass.training import HeldOut, History, ProgressLine, Training

ROWS = 1024  # predicted at once
_REPORTS = 100  # steps between records, at most

# torch's global generator is one for all threads.
_lock = threading.Lock()


class Learner:
    """A linear classifier or a network, with all that it takes to train on.

    Args:
        num_features: F.
        counts: of the classes in the training set.
        sparse: whether it is to be trained on sparse rows.
        options: of the classifier.
        seed: of the first parameters.
    """

    def __init__(self, num_features: int, counts: ClassCounts, *, sparse: bool, options: Options, seed: int) -> None:
        self.counts = counts
        with _drawing(seed):
            self.encoder = FeatureEncoder(
                num_features, sparse=sparse, rank=options.rank, hidden_layers=options.hidden_layers
            )
            self.head = ClassHead(
                self.encoder.dim,
                counts.num_classes,
                counts=counts,
                sampler=options.make_sampler(counts),
                objective=options.make_objective(),
                sparse=True,
            )
        self.optimizer = options.make_optimizer(nn.ModuleList([self.encoder, self.head]).parameters())
        self.to(options.place())

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    def to(self, device: torch.device) -> None:
        """Move all of it, the optimiser's state included."""
        if device == self.device:
            return
        for module in (self.encoder, self.head, self.counts):
            module.to(device)
        # Loading puts state where the parameter is.
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    def set_learning_rate(self, learning_rate: float) -> None:
        """Of the optimiser, from now on."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    def grow(self, num_classes: int, options: Options, seed: int) -> None:
        """Add classes that have not been seen."""
        before = self.head.num_classes
        # A sampler follows by itself, unless it drew all classes for want of more, or is made by somebody else.
        anew = callable(options.sampler) or before <= options.drawn
        self.counts.resize(num_classes)
        try:
            sampler = options.make_sampler(self.counts) if anew else None
            with _drawing(seed):
                self.head.resize(num_classes, sampler=sampler, optimizer=self.optimizer)
        except Exception:
            self.counts.resize(before)
            raise

    def count(self, rows: Array, weight: Array | None) -> None:
        """Count targets [n], and let the sampler know."""
        add_counts(self.counts, rows, weight)
        self.head.sampler.refresh()

    def train(
        self,
        data: Rows,
        *,
        options: Options,
        epochs: int,
        chosen: Array,
        held_out: Array | None,
        weight: Array | None,
        seeds: tuple[int, int],
    ) -> History:
        """Some epochs over the chosen rows; seeds are of their order and of the draws of classes."""
        batches = RowBatches(data, options.batch_size, seed=seeds[0], chosen=chosen, weight=weight)
        evaluated = None
        if held_out is not None:
            evaluated = HeldOut(
                RowBatches(data, ROWS, chosen=held_out, weight=weight),
                patience=options.n_iter_no_change,
                restore_best=True,
            )
        history = Training(
            self.head,
            batches,
            self.optimizer,
            encoder=self.encoder,
            epochs=epochs,
            held_out=evaluated,
            report_every=min(_REPORTS, len(batches)),
            callbacks=[ProgressLine()] if options.verbose else [],
            seed=seeds[1],
        ).run()
        self.optimizer.zero_grad()
        return history

    @property
    def scores(self) -> Scores:
        return Scores(self.head)

    @torch.no_grad()
    def hidden(self, features: Any) -> Iterator[tuple[slice, Tensor]]:
        """Which rows, and their vectors [B, D] in float64, some at a time."""
        for start in range(0, features.shape[0], ROWS):
            rows = slice(start, min(start + ROWS, features.shape[0]))
            inputs = as_inputs(features[rows].astype(np.float32))
            if isinstance(inputs, dict):
                inputs = {name: value.to(self.device) for name, value in inputs.items()}
            else:
                inputs = inputs.to(self.device)
            yield rows, self.encoder(inputs).double()

    def __getstate__(self) -> dict[str, Any]:
        home = self.device
        if home.type == "cpu":
            return {"home": home, **self.__dict__}
        # From main memory, so that a machine without such a device can read it.
        self.to(torch.device("cpu"))
        try:
            return {"home": home, **copy.deepcopy(self.__dict__)}
        finally:
            self.to(home)

    def __setstate__(self, state: dict[str, Any]) -> None:
        home = state.pop("home")
        self.__dict__.update(state)
        if home.type == "cuda" and (home.index or 0) < torch.cuda.device_count():
            self.to(home)


def add_counts(counts: ClassCounts, rows: Array, weight: Array | None) -> None:
    """Count rows [n] of a head, each as often as its weight [n] says."""
    found = torch.from_numpy(np.bincount(rows, weight, counts.num_classes).astype(np.float64))
    counts.raw.add_(found.to(counts.raw.device))


@contextlib.contextmanager
def _drawing(seed: int) -> Iterator[None]:
    """What torch's global generator gives inside follows from the seed, and outside goes on as if it had not been."""
    with _lock, torch.random.fork_rng([]):
        torch.default_generator.manual_seed(seed)
        yield
