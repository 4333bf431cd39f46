"""Class vectors in lists of neighbours, searched for the largest inner products."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from manyclass._derived import follow_loaded_state
from manyclass.samplers._clusters import learn_centroids

_CHUNK = 1 << 16
_WORTH_THREADS = 1 << 20


class ClassIndex(nn.Module):
    """An inverted file: N classes, each in the list of the centroid at the least distance; empty until it is built.

    faiss keeps and searches the lists, on the CPU whatever the device; the centroids move with the module.
    """

    _centroid_bits: Tensor

    def __init__(self) -> None:
        super().__init__()
        # As integers the bits of floats are safe from `.half()` and `.to(dtype)`, which convert every floating buffer.
        self.register_buffer("_centroid_bits", torch.empty(0, 0, dtype=torch.int32))
        self._lists: Any = None
        follow_loaded_state(self)

    def derive(self) -> None:
        """Nothing follows from what was loaded but what was loaded."""

    @classmethod
    @torch.no_grad()
    def of(cls, vectors: Tensor, ids: Tensor, number: int, start: Tensor | None = None) -> "ClassIndex":
        """The index of some of the classes with vectors [C, D].

        Args:
            vectors: of any dtype and on any device.
            ids: int64 [N], the classes in the index.
            number: of lists.
            start: centroids of an index of vectors that have moved a little since.
        """
        faiss = load_faiss()
        index = cls()
        centroids = learn_centroids(vectors, number, start)
        index._centroid_bits = centroids.view(torch.int32)
        coarse = faiss.IndexFlatL2(vectors.shape[1])
        coarse.add(centroids.cpu().numpy())
        index._lists = faiss.IndexIVFFlat(coarse, vectors.shape[1], number, faiss.METRIC_INNER_PRODUCT)
        for part in ids.split(_CHUNK):
            index._lists.add_with_ids(vectors[part].float().cpu().numpy(), part.cpu().numpy())
        return index

    @property
    def centroids(self) -> Tensor:
        """float32 [J, D]; none until the index is built."""
        return self._centroid_bits.view(torch.float32)

    def search(self, query: Tensor, lists: Tensor, n: int) -> Tensor:
        """int64 [G, n]: the classes of the largest inner products with each query [G, D] in its lists [G, P].

        They are distinct; where the lists hold fewer, -1 pads.
        """
        self._lists.nprobe = lists.shape[1]
        # Queries are shared out among threads where that is worth it; each is one thread's, so that what is found does
        # not depend on their number.
        scanned = lists.numel() * self._lists.ntotal / self._lists.nlist
        self._lists.parallel_mode = 3 if scanned * query.shape[1] > _WORTH_THREADS else 0
        _, found = self._lists.search_preassigned(query.cpu().numpy(), n, lists.cpu().numpy(), None)
        return torch.from_numpy(found).to(query.device)

    def get_extra_state(self) -> Tensor:
        """The lists, as bytes."""
        if self._lists is None:
            return torch.empty(0, dtype=torch.uint8)
        return torch.from_numpy(load_faiss().serialize_index(self._lists))

    def set_extra_state(self, state: Tensor) -> None:
        self._lists = load_faiss().deserialize_index(state.cpu().numpy()) if len(state) else None


def load_faiss(who: str = "`Nearest`") -> ModuleType:
    """faiss, or what to do where it is missing and who needs it."""
    try:
        import faiss
    except ImportError as error:
        raise ImportError(f"{who} needs faiss: pip install 'manyclass[ann]'") from error
    return faiss
