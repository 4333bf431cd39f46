"""An encoder, a head and their optimiser."""

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
from manyclass.training.batch import moved

BATCH_ROWS = 1024  # of a prediction or evaluation
_REPORT_STEPS = 100  # between records, at most

# All threads share torch's global RNG.
_lock = threading.Lock()


class Learner:
    """A linear classifier or a network, with its optimiser and class counts.

    Args:
        num_features: F.
        counts: counts of the classes in the training set.
        sparse: whether training rows are sparse.
        options: options of the classifier.
        seed: seed of the initial parameters.
    """

    def __init__(self, num_features: int, counts: ClassCounts, *, sparse: bool, options: Options, seed: int) -> None:
        self.counts = counts
        with _seeded(seed):
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
        """The device of the parameters."""
        return self.head.weight.device

    def to(self, device: torch.device) -> None:
        """Move everything, the optimiser's state included."""
        if device == self.device:
            return
        for module in (self.encoder, self.head, self.counts):
            module.to(device)
        # Loading a state dict moves the state to the device of the parameters.
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the optimiser."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    def grow(self, num_classes: int, options: Options, seed: int) -> None:
        """Add classes without examples so far."""
        before = self.head.num_classes
        # A sampler follows the head, unless it draws all classes for now, or was made by the user's function.
        replaced = callable(options.sampler) or before <= options.drawn
        self.counts.resize(num_classes)
        try:
            sampler = options.make_sampler(self.counts) if replaced else None
            with _seeded(seed):
                self.head.resize(num_classes, sampler=sampler, optimizer=self.optimizer)
        except Exception:
            self.counts.resize(before)
            raise

    def count(self, rows: Array, weight: Array | None) -> None:
        """Add targets [n] to the counts, and refresh the sampler."""
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
        """Train for some epochs on the chosen rows; the seeds are those of the order of rows and of the draws."""
        batches = RowBatches(data, options.batch_size, seed=seeds[0], chosen=chosen, weight=weight)
        evaluated = None
        if held_out is not None:
            evaluated = HeldOut(
                RowBatches(data, BATCH_ROWS, chosen=held_out, weight=weight),
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
            report_every=min(_REPORT_STEPS, len(batches)),
            callbacks=[ProgressLine()] if options.verbose else [],
            seed=seeds[1],
        ).run()
        self.optimizer.zero_grad()
        return history

    @property
    def scores(self) -> Scores:
        """Exact scores of all classes."""
        return Scores(self.head)

    @torch.no_grad()
    def hidden(self, features: Any) -> Iterator[tuple[slice, Tensor]]:
        """Iterate over slices of rows and their vectors [B, D] in float64."""
        for start in range(0, features.shape[0], BATCH_ROWS):
            rows = slice(start, min(start + BATCH_ROWS, features.shape[0]))
            inputs = moved(as_inputs(features[rows].astype(np.float32)), self.device)
            yield rows, self.encoder(inputs).double()

    def __getstate__(self) -> dict[str, Any]:
        home = self.device
        if home.type == "cpu":
            return {"home": home, **self.__dict__}
        # Tensors are moved to the CPU, so that a machine without this device can unpickle them.
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
    """Add rows [n] of a head to counts, with weights [n]."""
    found = torch.from_numpy(np.bincount(rows, weight, counts.num_classes).astype(np.float64))
    counts.raw.add_(found.to(counts.raw.device))


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch's global RNG inside the block, and restore its state afterwards."""
    with _lock, torch.random.fork_rng([]):
        torch.default_generator.manual_seed(seed)
        yield
