"""An inverted file of class vectors, searched for the largest inner products."""

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyclass._faiss import load_faiss
from manyclass._plain_state import saved_vector
from manyclass.kmeans import fit_centroids

ROWS_PER_ADD = 1 << 16
MIN_PRODUCTS_FOR_THREADS = 1 << 20


class ClassIndex:
    """An inverted file of some of C classes, each in the list of its nearest centroid. It never changes.

    faiss keeps and searches the lists, always on the CPU; the centroids are on the device of the head.

    Args:
        centroids: float32 [J, D], of J lists.
        vectors: the class vectors [C, D], of any dtype, on any device.
        indexed: bool [C], True for the classes in the index.
    """

    def __init__(self, centroids: Tensor, vectors: Tensor, indexed: Tensor) -> None:
        faiss = load_faiss("`Nearest`")
        self.centroids = centroids
        self.is_empty = not bool(indexed.any())
        self._num_classes = len(indexed)
        self._lists: Any = None
        if self.is_empty:
            return
        coarse = faiss.IndexFlatL2(centroids.shape[1])
        coarse.add(centroids.cpu().numpy())
        self._lists = faiss.IndexIVFFlat(coarse, centroids.shape[1], len(centroids), faiss.METRIC_INNER_PRODUCT)
        for part in indexed.nonzero().squeeze(1).split(ROWS_PER_ADD):
            self._lists.add_with_ids(vectors[part].float().cpu().numpy(), part.cpu().numpy())

    @classmethod
    def of(cls, vectors: Tensor, indexed: Tensor, number: int, start: Tensor | None = None) -> "ClassIndex":
        """Build the index of some of the classes with vectors [C, D].

        Args:
            vectors: class vectors of any dtype, on any device.
            indexed: bool [C], True for the classes in the index.
            number: the number of lists.
            start: centroids of an earlier index, from which k-means starts; None: from some of the vectors.
        """
        return cls(fit_centroids(vectors, number, start), vectors, indexed)

    @classmethod
    def empty(cls, num_classes: int, number: int, dim: int, device: torch.device) -> "ClassIndex":
        """Return an index of no classes."""
        indexed = torch.zeros(num_classes, dtype=torch.bool, device=device)
        return cls(torch.zeros(number, dim, device=device), indexed, indexed)

    @classmethod
    def restored(cls, centroids: Tensor, vectors: Tensor, indexed: Tensor, like: "ClassIndex") -> "ClassIndex":
        """Build the index of a saved state; raise ValueError unless it has as many classes and lists as another one."""
        saved_vector("indexed", indexed, torch.bool, like._num_classes, low=None)
        for name, value, rows in (("centroids", centroids, len(like.centroids)), ("vectors", vectors, len(indexed))):
            if value.dtype != torch.float32 or value.dim() != 2 or len(value) != rows:
                raise ValueError(f"`{name}` must be float32 [{rows}, D], got {value.dtype} {list(value.shape)}")
            # Before class vectors are attached, their length is that of the state.
            if value.shape[1] != (like.centroids.shape[1] or centroids.shape[1]) or not bool(value.isfinite().all()):
                raise ValueError(
                    f"`{name}` must be finite, with rows as long as class vectors, got {list(value.shape)}"
                )
        return cls(centroids, vectors, indexed)

    def contents(self) -> tuple[Tensor, Tensor]:
        """Return the vectors float32 [C, D], 0 for those not in the index, and bool [C], True for those in it."""
        dim = self.centroids.shape[1]
        vectors, indexed = np.zeros((self._num_classes, dim), np.float32), np.zeros(self._num_classes, bool)
        if not self.is_empty:
            faiss, lists = load_faiss("`Nearest`"), self._lists.invlists
            for number in range(len(self.centroids)):
                if size := lists.list_size(number):
                    ids = faiss.rev_swig_ptr(lists.get_ids(number), size)
                    codes = faiss.rev_swig_ptr(lists.get_codes(number), size * 4 * dim)
                    vectors[ids], indexed[ids] = codes.view(np.float32).reshape(size, dim), True
        return torch.from_numpy(vectors), torch.from_numpy(indexed)

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
