"""A sketch of scores: hidden vectors and class vectors in the few directions that hold most of hidden's energy."""

import copy

import torch
from torch import Tensor

RANK_MULTIPLE = 16
ENERGY_SHARE = 0.9


class Sketch:
    """The directions V in which scores are sketched, ŝ = (hidden V)(W V)ᵀ. It never changes.

    Args:
        directions: float32 [D, D]: V, and columns of 0 beyond its rank r. With r = D, or with columns of 0 alone, there
            is no sketch, ŝ = hidden Wᵀ.
    """

    def __init__(self, directions: Tensor) -> None:
        self.directions = directions
        kept = directions.any(0).nonzero()
        rank = int(kept[-1]) + 1 if len(kept) else 0
        # The shape [D, r] is static between two renewals. None: the full rank.
        self.basis = directions[:, :rank].contiguous() if 0 < rank < len(directions) else None

    @classmethod
    def full(cls, dim: int, device: torch.device) -> "Sketch":
        """Return the sketch of full rank, for vectors of length D."""
        # Not 0, which a state holds where no sketch is pending.
        return cls(torch.eye(dim, device=device))

    @classmethod
    def of(cls, moment: Tensor, rank: int | None) -> "Sketch":
        """Return the sketch by the leading eigenvectors of a second moment of hidden [D, D].

        Args:
            moment: the second moment, to any scale; 0: the full rank.
            rank: the number of directions; None: the least multiple of 16 that holds 90 % of the energy, or all if that
                is more than half.
        """
        dim = len(moment)
        if not moment.any():
            return cls.full(dim, moment.device)
        energy, vectors = torch.linalg.eigh(moment.double())
        share = energy.flip(0).clamp_(min=0.0).cumsum(0)
        needed = int((share < ENERGY_SHARE * share[-1]).sum()) + 1
        kept = -(-needed // RANK_MULTIPLE) * RANK_MULTIPLE if rank is None else rank
        # With more than half of the directions, the products of a sketch take as long as those of the full rank.
        if kept >= dim or (rank is None and 2 * kept > dim):
            return cls.full(dim, moment.device)
        directions = torch.zeros(dim, dim, device=moment.device)
        directions[:, :kept] = vectors.flip(1)[:, :kept]
        return cls(directions)

    @property
    def dim(self) -> int:
        """The length D of hidden and class vectors."""
        return len(self.directions)

    @property
    def device(self) -> torch.device:
        """The device of the directions."""
        return self.directions.device

    def to(self, device: torch.device) -> "Sketch":
        """Return the same sketch on a device."""
        moved = copy.copy(self)
        moved.directions = self.directions.to(device)
        moved.basis = None if self.basis is None else self.basis.to(device)
        return moved

    def project(self, vectors: Tensor, dtype: torch.dtype) -> Tensor:
        """Return vectors [N, D] in the directions of the sketch, [N, r]."""
        if self.basis is None:
            return vectors.to(dtype)
        # In the dtype of the scan: the sketch is coarser than its rounding.
        return vectors.to(dtype) @ self.basis.to(dtype)


def checked_square(name: str, value: Tensor, dim: int) -> Tensor:
    """Return a saved matrix; raise ValueError unless it is float32 [D, D] and finite; D = 0: any square."""
    size = dim or len(value)
    if value.dtype != torch.float32 or value.shape != (size, size):
        raise ValueError(f"`{name}` must be float32 [{size}, {size}], got {value.dtype} {list(value.shape)}")
    if not bool(value.isfinite().all()):
        raise ValueError(f"`{name}` must be finite, got infinite or NaN entries")
    return value
