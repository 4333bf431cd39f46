"""Small cells of similar classes, among which each example finds its probable classes without a scan of all."""

import copy
import math

import torch
from torch import Tensor

from manyclass import _check
from manyclass._plain_state import index_dtype, saved_permutation, saved_vector
from manyclass.kernels import cpu
from manyclass.samplers._halving import order_by_halving

CLASSES_PER_CELL = 8  # at most, and above half as many
MIN_CELLS_SCORED = 1024  # by each example, those of its most probable nodes
MIN_NODES_PROBED = 32
MAX_GATHERED = 1 << 26  # numbers of the centroids that the eager search gathers at once
NODES_PER_ROOT = 16  # nodes are this many times the root of the number of cells
MAX_CENTROID = 1e12  # of a loaded state; products with an example must be finite


class Cells:
    """J cells of C classes, cell by cell in an order, and Q nodes of J/Q cells. They never change.

    The log of the sum of exp(score) over a cell is taken for centroid · hidden + level, where level is the mean bias
    plus the log of the size. Cells are so small that their spread changes little.

    Args:
        order: int32 or int64 [C], the classes in order: cell j holds those from j C / J to (j + 1) C / J.
        centroids: float32 [J, D], the means of class vectors; D is 0 before class vectors are attached.
        levels: float32 [J].
    """

    def __init__(self, order: Tensor, centroids: Tensor, levels: Tensor) -> None:
        self.order, self.centroids, self.levels = order, centroids, levels
        cells = self.number
        size = cell_bounds(len(order), cells).diff().to(order.device)
        # A power of two of cells each, as all nodes of a level of the tree.
        nodes = min(cells, 1 << (NODES_PER_ROOT * math.isqrt(cells)).bit_length() - 1)
        self.cells_per_node = cells // nodes
        share = size.reshape(nodes, -1).float()
        total = share.sum(1, keepdim=True)
        # float32 [Q, D] and [Q]: the same of nodes.
        self._nodes = (
            centroids.reshape(nodes, self.cells_per_node, centroids.shape[1]) * (share / total).unsqueeze(2)
        ).sum(1)
        bias = levels.reshape(nodes, -1) - share.log()
        self._node_levels = (bias * share / total).sum(1) + total.squeeze(1).log()

    @classmethod
    def by_id(cls, num_classes: int, dim: int, device: torch.device) -> "Cells":
        """Return cells of neighbouring ids, for use until there are class vectors."""
        order = torch.arange(num_classes, dtype=index_dtype(num_classes), device=device)
        number = num_cells(num_classes)
        return cls(order, torch.zeros(number, dim, device=device), torch.zeros(number, device=device))

    @classmethod
    def of(cls, vectors: Tensor, bias: Tensor | None, moment: Tensor) -> "Cells":
        """Return cells of classes that examples give similar scores.

        Args:
            vectors: class vectors [C, D].
            bias: [C], or None.
            moment: second moment of hidden [D, D], to any scale; 0: all directions count alike.
        """
        vectors = _bounded(vectors)
        bias = vectors.new_zeros(len(vectors)) if bias is None else _bounded(bias)
        number = num_cells(len(vectors))
        bounds = cell_bounds(len(vectors), number)
        order = order_by_halving(torch.cat([_scaled(vectors, moment), bias.unsqueeze(1)], 1), bounds)
        cell = torch.repeat_interleave(torch.arange(number), bounds.diff()).to(order.device)
        size = bounds.diff().to(vectors)
        label = torch.empty_like(order)
        label[order] = cell
        centroids = vectors.new_zeros(number, vectors.shape[1]).index_add_(0, label, vectors).div_(size.unsqueeze(1))
        levels = vectors.new_zeros(number).index_add_(0, label, bias).div_(size).add_(size.log())
        return cls(order.to(index_dtype(len(order))), _bounded(centroids), _bounded(levels))

    @classmethod
    def restored(cls, order: Tensor, centroids: Tensor, levels: Tensor, *, num_classes: int, dim: int) -> "Cells":
        """Return the cells of a saved state; raise ValueError unless they are cells of C classes; D = 0: of any D."""
        number = num_cells(num_classes)
        saved_permutation("line", order, num_classes)
        saved_vector("levels", levels, torch.float32, number, low=-MAX_CENTROID)
        wanted = (number, dim or centroids.shape[-1])
        if centroids.dtype != torch.float32 or centroids.shape != wanted:
            raise ValueError(
                f"`centroids` must be float32 {list(wanted)}, got {centroids.dtype} {list(centroids.shape)}"
            )
        for name, value in (("centroids", centroids), ("levels", levels)):
            if (bad := ~(value.abs() <= MAX_CENTROID)).any():
                raise ValueError(f"`{name}` must lie within ±{MAX_CENTROID:g}, {_check.at_first(value, bad)}")
        return cls(order, centroids, levels)

    @property
    def number(self) -> int:
        """The number of cells J."""
        return len(self.centroids)

    @property
    def capacity(self) -> int:
        """The most classes in a cell, M."""
        return -(-len(self.order) // self.number)

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self.order.device

    def to(self, device: torch.device) -> "Cells":
        """Return the same cells on a device."""
        moved = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(moved, name, value.to(device))
        return moved

    def members(self, cell: Tensor) -> Tensor:
        """Return the classes of cells, int64 [..., M]; -1 for the last place of a smaller cell."""
        classes = len(self.order)
        start, end = (x * classes // self.number for x in (cell, cell + 1))
        place = start.unsqueeze(-1) + torch.arange(self.capacity, device=cell.device)
        ids = self.order[place.clamp(max=classes - 1)].long()
        return ids.masked_fill_(place >= end.unsqueeze(-1), -1)

    def search(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, probes: int) -> tuple[Tensor, Tensor]:
        """Return the most probable cells, int64 [B, P], and log p̂ of their classes [B, P, M].

        The classes are scored with the present class vectors; p̂ is normalised by their sum and the sums that are taken
        for all other cells and nodes. A place without a class has log p̂ = -inf.

        Args:
            hidden: float32 [B, D].
            weight: class vectors [C, D].
            bias: [C], or None.
            probes: P; at most the cells that are scored.
        """
        scores = torch.addmm(self._node_levels, hidden, self._nodes.T)
        nodes = min(scores.shape[1], max(MIN_NODES_PROBED, -(-max(MIN_CELLS_SCORED, probes) // self.cells_per_node)))
        probes = min(probes, nodes * self.cells_per_node)
        if cpu.can_probe(hidden, weight, bias, self.order):
            return cpu.probe(
                hidden, scores, self.centroids, self.levels, self.order, weight, bias, nodes=nodes, probes=probes
            )
        # Parts of the examples, since the centroids that all of them score may take too much memory.
        size = max(1, MAX_GATHERED // (nodes * self.cells_per_node * hidden.shape[1]))
        pairs = zip(hidden.split(size), scores.split(size), strict=True)
        parts = [self._search(some, near, weight, bias, nodes, probes) for some, near in pairs]
        cells, log_p = (torch.cat(part) for part in zip(*parts, strict=True))
        return cells, log_p

    def _search(
        self, hidden: Tensor, scores: Tensor, weight: Tensor, bias: Tensor | None, nodes: int, probes: int
    ) -> tuple[Tensor, Tensor]:
        """Return the same as `search`, the cells in the order of their scores: the eager reference."""
        near = scores.topk(nodes, 1).indices
        log_z = [scores.scatter(1, near, -math.inf)]
        cells = near.unsqueeze(2) * self.cells_per_node + torch.arange(self.cells_per_node, device=near.device)
        cells = cells.flatten(1)
        scores = (self.centroids[cells] @ hidden.unsqueeze(2)).squeeze(2) + self.levels[cells]
        chosen = scores.topk(probes, 1).indices
        log_z.append(scores.scatter(1, chosen, -math.inf))
        cells = cells.gather(1, chosen)
        ids = self.members(cells)
        rows = ids.clamp(min=0).flatten(1)
        scores = (weight[rows].to(hidden.dtype) @ hidden.unsqueeze(2)).squeeze(2)
        if bias is not None:
            scores = scores + bias[rows]
        scores = scores.masked_fill(ids.flatten(1) < 0, -math.inf)
        log_z.append(scores)
        normaliser = torch.cat(log_z, 1).logsumexp(1)
        return cells, (scores - normaliser.unsqueeze(1)).reshape(ids.shape)


def num_cells(num_classes: int) -> int:
    """Return the number of cells, a power of two."""
    return 1 << max(0, -(-num_classes // CLASSES_PER_CELL) - 1).bit_length()


def cell_bounds(num_classes: int, number: int) -> Tensor:
    """Return the first place of each cell in the order, and C, int64 [J + 1] on the CPU."""
    return torch.arange(number + 1, device="cpu") * num_classes // number


def _bounded(values: Tensor) -> Tensor:
    """Return values as float32 within the bounds of a state, NaN as 0: one bad class must not spoil its run."""
    return values.float().nan_to_num(nan=0.0).clamp_(-MAX_CENTROID, MAX_CENTROID)


def _scaled(vectors: Tensor, moment: Tensor) -> Tensor:
    """Return vectors [C, D] such that their distances are those of scores, in the mean over hidden."""
    if not moment.any() or not moment.isfinite().all():
        return vectors
    energy, directions = torch.linalg.eigh(moment.double())
    # Directions that hidden hardly has still count a little, since it changes.
    energy = (energy / energy.mean()).clamp_(min=1e-2).sqrt_()
    scaled: Tensor = vectors @ (directions * energy).float()
    return scaled
