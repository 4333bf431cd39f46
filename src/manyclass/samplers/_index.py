"""An inverted file of class vectors, searched for the largest inner products."""

from typing import Any

import torch
from torch import Tensor, nn

from manyclass._faiss import load_faiss
from manyclass._loaded_state import follow_loaded_state
from manyclass.kmeans import fit_centroids

ROWS_PER_ADD = 1 << 16
MIN_PRODUCTS_FOR_THREADS = 1 << 20


class ClassIndex(nn.Module):
    """An inverted file of N classes, each in the list of its nearest centroid; empty until it is built.

    faiss keeps and searches the lists, always on the CPU; the centroids move with the module.
    """

    _centroid_bits: Tensor

    def __init__(self) -> None:
        super().__init__()
        # Floats are stored as integer bits: `.half()` and `.to(dtype)` convert every floating-point buffer.
        self.register_buffer("_centroid_bits", torch.empty(0, 0, dtype=torch.int32))
        self._lists: Any = None
        follow_loaded_state(self)

    @classmethod
    @torch.no_grad()
    def of(cls, vectors: Tensor, ids: Tensor, number: int, start: Tensor | None = None) -> "ClassIndex":
        """Build the index of some of the classes with vectors [C, D].

        Args:
            vectors: class vectors of any dtype, on any device.
            ids: int64 [N], the classes in the index.
            number: the number of lists.
            start: centroids of an earlier index, from which k-means starts; None: from some of the vectors.
        """
        faiss = load_faiss("`Nearest`")
        index = cls()
        centroids = fit_centroids(vectors, number, start)
        index._centroid_bits = centroids.view(torch.int32)
        coarse = faiss.IndexFlatL2(vectors.shape[1])
        coarse.add(centroids.cpu().numpy())
        index._lists = faiss.IndexIVFFlat(coarse, vectors.shape[1], number, faiss.METRIC_INNER_PRODUCT)
        for part in ids.split(ROWS_PER_ADD):
            index._lists.add_with_ids(vectors[part].float().cpu().numpy(), part.cpu().numpy())
        return index

    @property
    def centroids(self) -> Tensor:
        """float32 [J, D]; [0, 0] until the index is built."""
        return self._centroid_bits.view(torch.float32)

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

    def get_extra_state(self) -> Tensor:
        """Return the lists as bytes."""
        if self._lists is None:
            return torch.empty(0, dtype=torch.uint8)
        return torch.from_numpy(load_faiss("`Nearest`").serialize_index(self._lists))

    def set_extra_state(self, state: Tensor) -> None:
        """Read the lists from bytes."""
        self._lists = load_faiss("`Nearest`").deserialize_index(state.cpu().numpy()) if len(state) else None
