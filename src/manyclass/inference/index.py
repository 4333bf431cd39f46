"""An index of class vectors that finds the best classes without scoring all, with its measured recall."""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace

import torch
from torch import Tensor

from manyclass import _check
from manyclass._context import isolated
from manyclass.heads import ClassHead
from manyclass.inference._lists import QuantizedLists
from manyclass.inference._queries import (
    check_exclude,
    check_finite,
    check_head,
    class_vectors,
    flatten_hidden,
    max_excluded,
    query_vectors,
    rows_per_chunk,
    select_best,
    weights_digest,
)

MAX_RECALL_QUERIES = 512  # to measure recall, which scores all classes for each query
MAX_LISTS = 1 << 13
FORMAT_VERSION = 1


@dataclass(frozen=True)
class IndexReport:
    """Measurements of an index from when it was built.

    Args:
        num_classes, dim: shape of the head's class vectors.
        lists: number of lists.
        probes: lists searched per query.
        k: classes per query in the measurement.
        wanted: the recall that `probes` was chosen for, on one half of the queries.
        recall: fraction of the exact k best classes that the index found, on the other half.
        queries_per_s: queries per second of the index, in one batch.
        exact_per_s: queries per second of `head.topk`, for the same batch on the same machine.
        build_s: seconds of building, without the measurement.
        num_bytes: memory of the index.
    """

    num_classes: int
    dim: int
    lists: int
    probes: int
    k: int
    wanted: float
    recall: float
    queries_per_s: float
    exact_per_s: float
    build_s: float
    num_bytes: int

    def __str__(self) -> str:
        name = f"recall@{self.k}"
        return "\n".join(
            (
                f"{name:<19} {self.recall:.1%} of the best classes found, {self.wanted:.1%} wanted",
                f"queries per second  {self.queries_per_s:,.0f}, exact search {self.exact_per_s:,.0f}: "
                f"{self.queries_per_s / self.exact_per_s:,.1f} times as fast",
                f"lists searched      {self.probes:,} of {self.lists:,}",
                f"built in            {self.build_s:.1f} s, {self.num_bytes / 2**20:,.1f} MiB "
                f"for {self.num_classes:,} × {self.dim} class vectors",
            )
        )


@dataclass(frozen=True)
class IndexState:
    """State of an index, to be saved.

    Args:
        tensors: its tensors, on the CPU.
        about: JSON-serialisable format version, digest of the weights, and report.
    """

    tensors: Mapping[str, Tensor]
    about: Mapping[str, str | int | float]


class Index:
    """Index of a head's class vectors in lists of neighbours, of which a query searches a few; see `build`.

    A vector is [w, b], with w of unit length for the cosine similarity, and a query is [hidden, 1], so that inner
    products are scores. Lists hold one byte per number, a quarter of the head's memory; the head scores the classes
    found. An index belongs to one head with its weights at the time: after the weights change, its scores are still
    correct, but it misses more classes.

    faiss searches the lists on the CPU.

    Args:
        head: the indexed head.
        lists: lists of its class vectors.
        digest: digest of the weights that the lists were built from.
        report: measurements from when it was built.
    """

    def __init__(self, head: ClassHead, lists: QuantizedLists, *, digest: str, report: IndexReport) -> None:
        self.head, self.report = head, report
        self._lists, self._digest = lists, digest

    @classmethod
    def build(
        cls, head: ClassHead, hidden: Tensor, *, k: int = 10, recall: float = 0.95, lists: int | None = None
    ) -> "Index":
        """Build an index that finds about the wanted fraction of the k best classes.

        The number of lists to search depends on class vectors and queries, so it is tuned on sample queries: the first
        half determines the number that exceeds the wanted recall by one standard error; the recall is measured on the
        second half.

        Args:
            head: the head to index.
            hidden: at least two sample queries [..., D] from a trained encoder; up to 512 are used.
            k: number of classes per query.
            recall: fraction of them to find.
            lists: number of lists; default: 4√C, at most C/4 and 8,192.

        Raises:
            ImportError: faiss is not installed.
            TypeError: the head has no class vectors.
            ValueError: an argument is out of range, or a class vector, bias or query is not finite.

        Example:
            >>> generator = torch.Generator().manual_seed(0)
            >>> head = ClassHead(16, 2000)
            >>> index = Index.build(head, torch.randn(64, 16, generator=generator), recall=0.9)
            >>> index.search(torch.randn(3, 16, generator=generator), 5).shape, index.report.recall > 0.8
            (torch.Size([3, 5]), True)
        """
        check_head(head)
        _check.integer("k", k, 1, head.num_classes)
        if not 0 < _check.number("recall", recall) <= 1:
            raise ValueError(f"`recall` must lie in (0, 1], got {recall}")
        number = max(1, min(4 * math.isqrt(head.num_classes), head.num_classes // 4, MAX_LISTS))
        number = number if lists is None else _check.integer("lists", lists, 1, head.num_classes)
        hidden = flatten_hidden(head, hidden).detach()
        if len(hidden) < 2:
            raise ValueError(f"`hidden` must hold at least 2 queries, got {len(hidden)}")
        hidden = hidden[:: -(-len(hidden) // MAX_RECALL_QUERIES)]
        with isolated():
            return cls._build(head, hidden, k=k, recall=float(recall), number=number)

    @classmethod
    def _build(cls, head: ClassHead, hidden: Tensor, *, k: int, recall: float, number: int) -> "Index":
        check_finite(head, hidden)
        start = time.perf_counter()
        coded = QuantizedLists.build(class_vectors(head), head.num_classes, number, head.weight.device)
        digest = weights_digest(head)
        built = time.perf_counter() - start
        start = time.perf_counter()
        # Copying to the CPU waits for the device, so the time is complete.
        exact = head.topk(hidden, k).ids.cpu()
        exactly = time.perf_counter() - start
        probes = _choose_probes(coded, query_vectors(head, hidden[::2]).cpu(), exact[::2], recall)
        report = IndexReport(
            num_classes=head.num_classes,
            dim=head.dim,
            lists=number,
            probes=probes,
            k=k,
            wanted=recall,
            recall=0.0,
            queries_per_s=0.0,
            exact_per_s=len(hidden) / exactly,
            build_s=built,
            num_bytes=coded.num_bytes,
        )
        index = cls(head, coded, digest=digest, report=report)
        index.search(hidden[:2], k)  # starts the threads, so that their start is not timed
        start = time.perf_counter()
        found = index.search(hidden, k).cpu()
        per_s = len(hidden) / (time.perf_counter() - start)
        index.report = replace(report, recall=_recall(found[1::2], exact[1::2]), queries_per_s=per_s)
        return index

    @property
    def num_classes(self) -> int:
        """The number of classes, C."""
        return self.report.num_classes

    def search(self, hidden: Tensor, k: int, *, exclude: Tensor | None = None) -> Tensor:
        """Return ids [..., k] of about the k best classes of hidden [..., D] that are not in exclude [..., E].

        The best comes first; -1 pads if fewer are left.
        """
        _check.integer("k", k, 1, self.num_classes)
        rows, others = flatten_hidden(self.head, hidden), check_exclude(self.head, hidden, exclude)
        n = k + max_excluded(others)
        size = rows_per_chunk(self.head, n)
        parts = []
        for start in range(0, max(len(rows), 1), size):
            here = slice(start, start + size)
            parts.append(select_best(*self.nearest(rows[here], n), k, None if others is None else others[here])[1])
        return torch.cat(parts).reshape(*hidden.shape[:-1], k)

    def nearest(self, hidden: Tensor, n: int, *, probe_factor: int = 1) -> tuple[Tensor, Tensor]:
        """Return scores and ids [B, n] of about the n best classes, best first, padded with -inf and -1.

        Args:
            hidden: hidden vectors [B, D].
            n: number of classes, at most C of which are returned.
            probe_factor: multiple of the tuned number of lists to search.
        """
        head = self.head
        if head.num_classes != self.num_classes:
            raise ValueError(
                f"`index` must be of the head's {head.num_classes} classes, got one of {self.num_classes}: "
                "build it again"
            )
        hidden = flatten_hidden(head, hidden)
        with isolated():
            return self._nearest(hidden, min(n, self.num_classes), probe_factor)

    def _nearest(self, hidden: Tensor, n: int, probe_factor: int) -> tuple[Tensor, Tensor]:
        head, lists = self.head, self._lists
        # Quantised scores are not exact, so find a few more and let the head score them.
        more = min(n + max(8, n // 4), self.num_classes)
        query, probes = query_vectors(head, hidden), probe_factor * self.report.probes
        ids = lists.search(query, more, probes)
        # If those lists hold too few classes, double the number of lists until they suffice.
        while probes < lists.num_lists and (short := ids[:, n - 1] < 0).any():
            probes = min(2 * probes, lists.num_lists)
            ids[short] = lists.search(query[short], more, probes)
        scores = head.scores(hidden, ids.clamp(min=0)).masked_fill_(ids < 0, -math.inf)
        best, place = scores.topk(n, dim=1)
        return best, ids.gather(1, place)

    def recall(self, hidden: Tensor, k: int = 10) -> float:
        """Measure the fraction of the exact k best classes of hidden [..., D] that the index finds."""
        rows = flatten_hidden(self.head, hidden)
        with isolated():
            return _recall(self.search(rows, k), self.head.topk(rows, k).ids)

    def state(self) -> IndexState:
        """Return the index as tensors and metadata."""
        about = {"format": FORMAT_VERSION, "digest": self._digest, **asdict(self.report)}
        return IndexState(self._lists.tensors(), about)

    @classmethod
    def from_state(cls, state: IndexState, head: ClassHead) -> "Index":
        """Restore an index from its state, for a head with the same weights.

        A state is not trusted: it is plain tensors and numbers, and each is checked.

        Raises:
            ImportError: faiss is not installed.
            TypeError: the head has no class vectors.
            ValueError: the state belongs to other weights, has another format, or is not a valid index.
        """
        check_head(head)
        about = state.about
        if not isinstance(state.tensors, Mapping) or not isinstance(about, Mapping):
            kinds = f"{type(state.tensors).__name__} and {type(about).__name__}"
            raise TypeError(f"`state` must have mappings of tensors and of facts about them, got {kinds}")
        for name, value in about.items():
            if not isinstance(value, str | int | float | None):
                raise TypeError(f"`state` must hold a string or a number as {name!r}, got a {type(value).__name__}")
        if about.get("format") != FORMAT_VERSION:
            raise ValueError(f"`state` must be an index of format {FORMAT_VERSION}, got {about.get('format')!r}")
        report = _read_report(about)
        if (report.num_classes, report.dim) != (head.num_classes, head.dim):
            raise ValueError(
                f"`state` must be of the head's {head.num_classes} × {head.dim} class vectors, "
                f"got {report.num_classes} × {report.dim}"
            )
        digest = weights_digest(head)
        if about.get("digest") != digest:
            raise ValueError("`state` must be of the head's weights, got an index of others: build it again")
        lists = QuantizedLists.from_tensors(state.tensors, head.num_classes, head.dim + (head.bias is not None))
        if not 1 <= report.probes <= report.lists == lists.num_lists:
            raise ValueError(
                f"`state` must have the number of lists in its report, {report.lists}, and search 1 or more of them, "
                f"got {lists.num_lists} and {report.probes}"
            )
        return cls(head, lists, digest=digest, report=report)


def _choose_probes(lists: QuantizedLists, query: Tensor, exact: Tensor, recall: float) -> int:
    """Return the number of lists that queries [B, ...] must search to find the wanted fraction of `exact` [B, k]."""
    position = lists.probe_order(query).gather(1, lists.list_ids()[exact])

    def is_enough(probes: int) -> bool:
        found = (position < probes).double().mean(1)
        standard_error = float(found.std()) / math.sqrt(len(found)) if len(found) > 1 else 0.0
        return float(found.mean()) - standard_error >= recall

    low, high = 0, lists.num_lists
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _recall(found: Tensor, exact: Tensor) -> float:
    return float((exact.unsqueeze(2) == found.unsqueeze(1)).any(2).double().mean())


def _read_report(about: Mapping[str, object]) -> IndexReport:
    values: dict[str, int | float] = {}
    for field in fields(IndexReport):
        value = about.get(field.name)
        allowed = int if field.type is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, allowed) or not value >= 0:
            raise ValueError(f"`state` must have {field.name!r} as a number that is not negative, got {value!r}")
        values[field.name] = value
    return IndexReport(**values)  # type: ignore[arg-type]
