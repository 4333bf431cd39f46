"""An inverted file of class vectors, searched for the largest inner products."""

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyclass._faiss import load_faiss
from manyclass._plain_state import saved_ids
from manyclass.kmeans import fit_centroids

ROWS_PER_ADD = 1 << 16
MIN_PRODUCTS_FOR_THREADS = 1 << 20


class ClassIndex:
    """An inverted file of N classes, each in the list of its nearest centroid. It never changes.

    faiss keeps and searches the lists, always on the CPU; the centroids are on the device of the head.

    Args:
        centroids: float32 [J, D], of J lists; [0, 0]: an empty index.
        vectors: the vectors of the classes [N, D], of any dtype, on any device.
        ids: int64 [N], ascending.
    """

    def __init__(self, centroids: Tensor, vectors: Tensor, ids: Tensor) -> None:
        faiss = load_faiss("`Nearest`")
        self.centroids = centroids
        coarse = faiss.IndexFlatL2(centroids.shape[1])
        coarse.add(centroids.cpu().numpy())
        self._lists: Any = faiss.IndexIVFFlat(coarse, centroids.shape[1], len(centroids), faiss.METRIC_INNER_PRODUCT)
        for part, numbers in zip(vectors.split(ROWS_PER_ADD), ids.split(ROWS_PER_ADD), strict=True):
            self._lists.add_with_ids(part.float().cpu().numpy(), numbers.cpu().numpy())

    @classmethod
    def of(cls, vectors: Tensor, ids: Tensor, number: int, start: Tensor | None = None) -> "ClassIndex":
        """Build the index of some of the classes with vectors [C, D].

        Args:
            vectors: class vectors of any dtype, on any device.
            ids: int64 [N], the classes in the index.
            number: the number of lists.
            start: centroids of an earlier index, from which k-means starts; None: from some of the vectors.
        """
        return cls(fit_centroids(vectors, number, start), vectors[ids], ids)

    @classmethod
    def empty(cls, device: torch.device) -> "ClassIndex":
        """Return an index of no classes."""
        nothing = torch.empty(0, 0, device=device)
        return cls(nothing, nothing, torch.empty(0, dtype=torch.int64, device=device))

    @classmethod
    def restored(cls, centroids: Tensor, vectors: Tensor, ids: Tensor, num_classes: int) -> "ClassIndex":
        """Build the index of a saved state; raise ValueError if it is not one of C classes."""
        saved_ids("indexed", ids, num_classes, length=vectors.shape[0] if vectors.dim() else None)
        for name, value in (("centroids", centroids), ("vectors", vectors)):
            if value.dtype != torch.float32 or value.dim() != 2 or not bool(value.isfinite().all()):
                raise ValueError(f"`{name}` must be finite, float32 [N, D], got {value.dtype} {list(value.shape)}")
        if vectors.shape[1] != centroids.shape[1] or len(centroids) > num_classes or (len(ids) and not len(centroids)):
            raise ValueError(
                f"`centroids` must be at most {num_classes} of length {vectors.shape[1]}, got {list(centroids.shape)}"
            )
        return cls(centroids, vectors, ids)

    def contents(self) -> tuple[Tensor, Tensor]:
        """Return the vectors float32 [N, D] and the ids int64 [N] in ascending order, on the CPU."""
        faiss, lists = load_faiss("`Nearest`"), self._lists.invlists
        dim = self.centroids.shape[1]
        vectors, ids = [np.empty((0, dim), np.float32)], [np.empty(0, np.int64)]
        for number in range(len(self.centroids)):
            if size := lists.list_size(number):
                codes = faiss.rev_swig_ptr(lists.get_codes(number), size * 4 * dim)
                vectors.append(codes.view(np.float32).reshape(size, dim))
                ids.append(faiss.rev_swig_ptr(lists.get_ids(number), size))
        found = np.concatenate(ids)
        order = found.argsort()
        return torch.from_numpy(np.concatenate(vectors)[order]), torch.from_numpy(found[order])

    @property
    def device(self) -> torch.device:
        """The device of the centroids."""
        return self.centroids.device

    def to(self, device: torch.device) -> "ClassIndex":
        """Return the same index with its centroids on a device."""
        moved = copy.copy(self)
        moved.centroids = self.centroids.to(device)
        return moved

    def search(self, query: Tensor, lists: Tensor, n: int) -> Tensor:
        """Return [G, n]: in the lists [G, P] of each query [G, D], the n classes of the largest inner products.

        They are distinct; -1 pads if the lists hold fewer.
        """
        self._lists.nprobe = lists.shape[1]
        # Threads share the queries if there is enough work. Each query belongs to one thread, so that the result does
        # not depend on their number.
        scanned = lists.numel() * self._lists.ntotal / self._lists.nlist
        self._lists.parallel_mode = 3 if scanned * query.shape[1] > MIN_PRODUCTS_FOR_THREADS else 0
        _, found = self._lists.search_preassigned(query.cpu().numpy(), n, lists.cpu().numpy(), None)
        return torch.from_numpy(found).to(query.device)
