"""Inverted lists of class vectors, quantised to one byte per number, for maximum inner product search."""

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from manyclass import _check
from manyclass._faiss import load_faiss
from manyclass.kmeans import fit_centroids, nearest_centroids

CHUNK_CLASSES = 1 << 16
SAMPLED_ROWS_PER_LIST = 64  # from which the centroids are learned
WIDTH_MULTIPLE = 16  # numbers; faiss scans such widths with vector instructions, several times as fast


class QuantizedLists:
    """C vectors, each in the list of its nearest centroid, as one byte per number of its difference from the centroid.

    A query searches the lists whose centroids have the largest inner products with it. (Lists by distance group classes
    of similar norm. Lists by direction, as faiss makes them for inner products, mix frequent with rare classes and find
    60 % where these find 95 %.)

    faiss scans the lists on the CPU; the centroids may be on another device.

    Args:
        centroids: float32 [J, W], where W is the vectors' length rounded up to a multiple of 16.
        lists: faiss's inverted file.
    """

    def __init__(self, centroids: Tensor, lists: Any) -> None:
        self.centroids = centroids
        self._lists = lists
        self._searching = threading.Lock()
        # Parallelise over queries only, so that results do not depend on the number of threads.
        lists.parallel_mode = 3

    @classmethod
    @torch.no_grad()
    def build(cls, rows: Callable[[Tensor], Tensor], num_classes: int, number: int, device: torch.device) -> Self:
        """Build the lists of C vectors, which are read in chunks.

        Args:
            rows: function from ids [N] to vectors, float32 [N, D].
            num_classes: C.
            number: number of lists.
            device: device of ids and vectors.
        """
        faiss = load_faiss("`Index`")
        some = max(SAMPLED_ROWS_PER_LIST * number, CHUNK_CLASSES)
        chosen = torch.arange(num_classes)
        if some < num_classes:
            chosen = torch.randint(num_classes, (some,), generator=torch.Generator().manual_seed(0))
        sample = _pad(rows(chosen.to(device)))
        centroids = fit_centroids(sample, number)
        del sample
        label, low, high = _assign(rows, num_classes, centroids)
        lists = _empty_lists(faiss, centroids, torch.cat([low, high - low]).cpu())
        for start in range(0, num_classes, CHUNK_CLASSES):
            ids = torch.arange(start, min(start + CHUNK_CLASSES, num_classes), device=device)
            arrays = [x.cpu().contiguous().numpy() for x in (_pad(rows(ids)), ids, label[ids])]
            lists.add_core(len(ids), *map(faiss.swig_ptr, arrays))
        return cls(centroids, lists)

    @property
    def num_lists(self) -> int:
        """The number of lists, J."""
        return int(self._lists.nlist)

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, ids and centroids."""
        return int(self._lists.ntotal) * (int(self._lists.code_size) + 8) + 4 * self.centroids.numel()

    def search(self, query: Tensor, n: int, probes: int) -> Tensor:
        """Return distinct ids [B, n] of about the largest inner products with queries float32 [B, D] in `probes` lists.

        -1 pads if those lists hold fewer than n.
        """
        near = self._affinity(query).topk(min(probes, self.num_lists))
        arrays = [x.cpu().contiguous().numpy() for x in (_pad(query), near.indices, near.values)]
        # The lock protects faiss's field `nprobe`, because other threads may search another number of lists.
        with self._searching:
            self._lists.nprobe = near.indices.shape[1]
            _, found = self._lists.search_preassigned(arrays[0], n, *arrays[1:])
        return torch.from_numpy(found).to(query.device)

    def probe_order(self, query: Tensor) -> Tensor:
        """Return the position [B, J] of each list in the order in which queries [B, D] search them."""
        return self._affinity(query).argsort(1, descending=True).argsort(1)

    def _affinity(self, query: Tensor) -> Tensor:
        centroids = self.centroids.to(query.device)
        self.centroids = centroids
        return _pad(query) @ centroids.T

    def list_ids(self) -> Tensor:
        """Return the list of each class, int64 [C]."""
        label = torch.empty(int(self._lists.ntotal), dtype=torch.int64)
        for i, (ids, _) in enumerate(self._contents()):
            label[ids] = i
        return label

    def tensors(self) -> dict[str, Tensor]:
        """Return the state as plain tensors."""
        faiss = load_faiss("`Index`")
        ids, codes = zip(*self._contents(), strict=True)
        return {
            "centroids": self.centroids.cpu().clone(),
            "range": torch.from_numpy(faiss.vector_to_array(self._lists.sq.trained)),
            "sizes": torch.tensor([len(part) for part in ids]),
            "ids": torch.cat(ids),
            "codes": torch.cat(codes),
        }

    def _contents(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ids [n] and codes [n, W] of each list, as views."""
        faiss = load_faiss("`Index`")
        inverted, width = self._lists.invlists, int(self._lists.code_size)
        for i in range(self.num_lists):
            n = inverted.list_size(i)
            if n == 0:
                yield torch.empty(0, dtype=torch.int64), torch.empty(0, width, dtype=torch.uint8)
                continue
            ids = faiss.rev_swig_ptr(inverted.get_ids(i), n)
            codes = faiss.rev_swig_ptr(inverted.get_codes(i), n * width)
            yield torch.from_numpy(ids), torch.from_numpy(codes).reshape(n, width)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], num_classes: int, length: int) -> Self:
        """Restore lists of `num_classes` vectors of this length from the output of `tensors`.

        Raises:
            TypeError: a value is not a tensor.
            ValueError: a tensor is missing, has a wrong dtype or shape, or holds values that no valid lists have.
        """
        faiss = load_faiss("`Index`")
        expected = {"centroids": torch.float32, "range": torch.float32, "sizes": torch.int64, "ids": torch.int64}
        for name, dtype in {**expected, "codes": torch.uint8}.items():
            if name not in tensors:
                raise ValueError(f"`state` must have a tensor {name!r}, got {', '.join(sorted(tensors)) or 'none'}")
            if _check.tensor(f"state[{name!r}]", tensors[name]).dtype != dtype:
                raise ValueError(f"`state` must have {name!r} as {dtype}, got {tensors[name].dtype}")
        centroids, limits, sizes, ids, codes = (
            tensors[name].cpu().contiguous() for name in ("centroids", "range", "sizes", "ids", "codes")
        )
        width = _width(length)
        number = len(sizes) if sizes.dim() == 1 else 0
        _check.shape("state['centroids']", centroids, (number, width))
        _check.shape("state['range']", limits, (2 * width,))
        _check.shape("state['ids']", ids, (num_classes,))
        _check.shape("state['codes']", codes, (num_classes, width))
        _check.ids("state['ids']", ids, num_classes)
        if number == 0 or sizes.min() < 0 or sizes.max() > num_classes or int(sizes.sum()) != num_classes:
            raise ValueError(f"`state['sizes']` must be sizes of lists that sum to {num_classes}, got {sizes.sum()}")
        seen = torch.zeros(num_classes, dtype=torch.bool)
        seen[ids] = True
        if not seen.all():
            raise ValueError(
                f"`state['ids']` must hold every class once, got none of class {int((~seen).nonzero()[0])}"
            )
        if not (centroids.isfinite().all() and limits.isfinite().all()):
            raise ValueError("`state` must hold finite numbers, got others among its centroids or ranges")
        lists = _empty_lists(faiss, centroids, limits)
        place = 0
        for i, n in enumerate(sizes.tolist()):
            if n:
                part, coded = ids[place : place + n].numpy(), codes[place : place + n].numpy()
                lists.invlists.add_entries(i, n, faiss.swig_ptr(part), faiss.swig_ptr(coded))
                place += n
        lists.ntotal = num_classes
        return cls(centroids, lists)


def _width(length: int) -> int:
    return -(-length // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def _pad(vectors: Tensor) -> Tensor:
    return F.pad(vectors, (0, _width(vectors.shape[1]) - vectors.shape[1]))


def _assign(rows: Callable[[Tensor], Tensor], num_classes: int, centroids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the list of each class [C], and minimum and maximum [W] of the differences from the centroids.

    The extremes are over all classes, not a sample: the few outliers are the frequent classes, which many queries seek,
    and codes that clip them would lose them.
    """
    label = torch.empty(num_classes, dtype=torch.int64, device=centroids.device)
    low = torch.full_like(centroids[0], torch.inf)
    high = -low
    for start in range(0, num_classes, CHUNK_CLASSES):
        ids = torch.arange(start, min(start + CHUNK_CLASSES, num_classes), device=centroids.device)
        part = _pad(rows(ids))
        label[ids] = nearest_centroids(part, centroids)
        least, most = (part - centroids[label[ids]]).aminmax(dim=0)
        low, high = torch.minimum(low, least), torch.maximum(high, most)
    return label, low, high


def _empty_lists(faiss: Any, centroids: Tensor, limits: Tensor) -> Any:
    """Create empty lists that encode differences from the centroids, which are small.

    Args:
        faiss: the library.
        centroids: float32 [J, W].
        limits: minimum and range of each number, float32 [2 W].
    """
    number, width = centroids.shape
    coarse = faiss.IndexFlatL2(width)
    coarse.add(centroids.cpu().numpy())
    lists = faiss.IndexIVFScalarQuantizer(
        coarse, width, number, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT, True
    )
    faiss.copy_array_to_vector(limits.numpy(), lists.sq.trained)
    lists.is_trained = True
    return lists
