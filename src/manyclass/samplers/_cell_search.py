"""The search for the probable classes of each example in cells that follow the class vectors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyclass._context import is_transformed, isolated
from manyclass._plain_state import load_state, move_state, save_state
from manyclass.samplers._cells import Cells
from manyclass.samplers._rebuild import BackgroundRebuild, default_interval

DOUBLINGS = 5  # of the interval between builds
CLASSES_KEPT = 64  # by each example: those of its largest p̂ in the cells that it probes


@dataclass(frozen=True)
class Found:
    """The classes that the examples of each group have found.

    Args:
        ids: int64 [G, N], distinct and in ascending order; C marks an empty place.
        likelihood: float64 [G, N], the largest p̂ that an example gives to the class, of those that have found it; 0 in
            empty places.
        nearest: int64 [B, n], the classes of the largest p̂ of each example, which it leaves out; -1 pads.
    """

    ids: Tensor
    likelihood: Tensor
    nearest: Tensor


def places(found: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places of classes [G, K] among the ids that were found [G, N], and a bool mask of those found."""
    place = torch.searchsorted(found, ids.contiguous()).clamp_(max=found.shape[1] - 1)
    return place, found.gather(1, place) == ids


class CellSearch(nn.Module):
    """Cells of C classes, made from class vectors at the first draw and again every few training steps.

    They are rebuilt on a background thread from a copy of the class vectors and used a quarter of the steps later. The
    first builds follow each other sooner, since cells of random vectors find nothing.

    Args:
        num_classes: C.
        probes: the number of cells that each example probes.
    """

    saved = (
        "line",
        "centroids",
        "levels",
        "progress",
        "pending_line",
        "pending_centroids",
        "pending_levels",
    )
    _apply, _save_to_state_dict, _load_from_state_dict = move_state, save_state, load_state

    def __init__(self, num_classes: int, probes: int) -> None:
        super().__init__()
        self.probes = probes
        self.cells = Cells.by_id(num_classes, 0, torch.device("cpu"))
        self.schedule: BackgroundRebuild[Cells] = BackgroundRebuild()

    line = property(lambda self: self.cells.order)
    centroids = property(lambda self: self.cells.centroids)
    levels = property(lambda self: self.cells.levels)
    progress = property(lambda self: self.schedule.progress)
    pending_line = property(lambda self: self._pending("order"))
    pending_centroids = property(lambda self: self._pending("centroids"))
    pending_levels = property(lambda self: self._pending("levels"))
    device = property(lambda self: self.cells.device)

    def _pending(self, name: str) -> Tensor:
        """Return a tensor of the rebuild in progress; zeros if there is none."""
        pending = self.schedule.pending()
        found: Tensor = getattr(self.cells if pending is None else pending, name)
        return torch.zeros_like(found) if pending is None else found

    def move(self, device: torch.device) -> None:
        """Move the cells to a device."""
        self.cells = self.cells.to(device)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from saved cells."""
        cells = self._restored(state, "")
        # An order of two classes or more is not 0 everywhere.
        pending = self._restored(state, "pending_") if state["pending_line"].any() else None
        self.schedule.restore(state["progress"], pending)
        self.cells = cells

    def _restored(self, state: Mapping[str, Tensor], prefix: str) -> Cells:
        parts = (state[prefix + name] for name in ("line", "centroids", "levels"))
        return Cells.restored(*parts, num_classes=len(self.cells.order), dim=self.cells.centroids.shape[1])

    def attach(self, *vectors: Tensor) -> None:
        """Make cells of these class vectors [C, D], and biases [C] if any, from the next draw on."""
        self.schedule.attach(*vectors)
        if self.cells.centroids.shape[1] != vectors[0].shape[1]:
            self.cells = Cells.by_id(len(self.cells.order), vectors[0].shape[1], self.device)

    def advance(self, moment: Tensor) -> None:
        """Count a training step: the cells follow the class vectors.

        Args:
            moment: second moment of hidden [D, D], to any scale.
        """
        if self.schedule.vectors:
            self.build_if_stale(moment)
            every = _interval(len(self.cells.order), self.schedule.steps + 1)
            self.cells = self.schedule.advance(self.cells, every, lambda: self._snapshot(moment.clone()))

    def build_if_stale(self, moment: Tensor) -> None:
        """Make cells of newly attached class vectors."""
        if not is_transformed() and self.schedule.stale and self.schedule.vectors:
            self.refresh(moment)

    def refresh(self, moment: Tensor) -> None:
        """Make cells of the present class vectors."""
        self.schedule.drop()
        if self.schedule.vectors:
            with isolated():
                self.cells = self._snapshot(moment)()
            self.schedule.stale = False

    def _snapshot(self, moment: Tensor) -> Callable[[], Cells]:
        """Copy the inputs of a build, and return the function that makes cells of them."""
        weight, *bias = (x.detach().clone() for x in self.schedule.vectors)
        return lambda: Cells.of(weight, bias[0] if bias else None, moment)

    def find(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, groups: int, nearest: int) -> Found:
        """Return the classes that examples hidden [B, D] find, by groups of ceil(B / G) of them.

        Args:
            hidden: the examples.
            weight: class vectors [C, D].
            bias: [C], or None.
            groups: G.
            nearest: the number of classes of the largest p̂ that each example leaves out.
        """
        classes = len(weight)
        cells, log_p = self.cells.search(hidden.detach().float(), weight, bias, self.probes)
        # NaN in hidden or class vectors is for the loss to report.
        log_p = log_p.flatten(1).nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
        log_p, place = log_p.topk(min(nearest + CLASSES_KEPT, log_p.shape[1]), 1)
        ids = self.cells.members(cells).flatten(1).gather(1, place).masked_fill_(log_p == -torch.inf, classes)
        own = ids[:, :nearest]
        own = F.pad(own.masked_fill(own == classes, -1), (0, nearest - own.shape[1]), value=-1)
        # The rows that pad the last group are no examples, and find nothing. There is at least one place, if empty.
        padding = (0, int(ids.shape[1] <= nearest), 0, groups * -(-len(ids) // groups) - len(ids))
        ids = F.pad(ids[:, nearest:], padding, value=classes).reshape(groups, -1)
        p = F.pad(log_p[:, nearest:], padding, value=-torch.inf).reshape(groups, -1).double().exp_()
        return Found(*_largest(ids, p, classes), own)

    def extra_repr(self) -> str:
        """Return the number of cells that an example probes."""
        return f"probes={self.probes}"


def _interval(num_classes: int, step: int) -> int:
    """Return the steps between two builds at this step: they double up to about the default."""
    first = -(-default_interval(num_classes) >> DOUBLINGS)
    return first << min(DOUBLINGS, max(1, step // first).bit_length() - 1)


def _largest(ids: Tensor, p: Tensor, empty: int) -> tuple[Tensor, Tensor]:
    """Return the distinct ids of each row [G, N] in ascending order, then `empty`, and the largest p of each, then 0.

    Args:
        ids: int64 [G, N], repeated; `empty` is above all others.
        p: [G, N], not negative, 0 for those that are empty.
        empty: the id of an empty place.
    """
    ids, order = ids.sort(1)
    place = F.pad(ids.diff(dim=1) > 0, (1, 0)).cumsum(1)
    largest = torch.zeros_like(p).scatter_reduce_(1, place, p.gather(1, order), "amax")
    return torch.full_like(ids, empty).scatter_(1, place, ids), largest
