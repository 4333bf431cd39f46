"""The best classes without scoring all of them: an index of class vectors, with the recall it was measured at."""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace

import torch
from torch import Tensor

from manyclass import _check
from manyclass.heads import ClassHead
from manyclass.inference._lists import CodedLists
from manyclass.inference._queries import (
    check_exclude,
    check_finite,
    class_vectors,
    digest_of,
    keep,
    most_excluded,
    queries,
    rows_at_once,
    rows_of,
)

_SAMPLE = 512  # queries that recall is measured with, at most: the exact side scores all classes for each
_MOST_LISTS = 1 << 13
_FORMAT = 1


@dataclass(frozen=True)
class IndexReport:
    """What an index was measured at when it was built.

    Args:
        num_classes, dim: of the head.
        lists: how many lists the classes are in.
        probes: how many of them are searched for a query.
        k: how many classes a query asked for.
        wanted: the recall that `probes` was chosen for, on one half of the queries.
        recall: the share of the exact k best classes that was found, on the other half.
        queries_per_s: with the index, in one batch.
        exact_per_s: by `head.topk`, the same batch on the same machine.
        build_s: seconds of building, without the measuring.
        num_bytes: what the index holds.
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
                f"queries a second    {self.queries_per_s:,.0f}, exactly {self.exact_per_s:,.0f}: "
                f"{self.queries_per_s / self.exact_per_s:,.1f} times as many",
                f"lists searched      {self.probes:,} of {self.lists:,}",
                f"built in            {self.build_s:.1f} s, {self.num_bytes / 2**20:,.1f} MiB "
                f"for {self.num_classes:,} × {self.dim} class vectors",
            )
        )


@dataclass(frozen=True)
class IndexState:
    """An index as something to keep.

    Args:
        tensors: what it holds, on the CPU.
        about: numbers and words, as JSON holds them: whose index it is, and what it was measured at.
    """

    tensors: Mapping[str, Tensor]
    about: Mapping[str, str | int | float]


class Index:
    """Class vectors of a head in lists of neighbours, of which a query searches a few: see `build`.

    A vector is [w, b], w of unit length where the similarity is the cosine, and a query [hidden, 1], so that inner
    products are scores. Lists hold a byte for each number, a quarter of what the head holds; what they find is scored
    by the head. So an index belongs to one head, and to its weights as they were: when those have moved, it still
    scores what it finds right, but misses more.

    The lists are searched on the CPU, by faiss.

    Args:
        head: whose classes they are.
        lists: of its vectors.
        digest: of the weights that the lists were made of.
        report: what it was measured at.
    """

    def __init__(self, head: ClassHead, lists: CodedLists, *, digest: str, report: IndexReport) -> None:
        self.head, self.report = head, report
        self._lists, self._digest = lists, digest

    @classmethod
    @torch.no_grad()
    def build(
        cls, head: ClassHead, hidden: Tensor, *, k: int = 10, recall: float = 0.95, lists: int | None = None
    ) -> "Index":
        """Index a head's classes so that about the wanted share of the k best is found.

        How many lists that takes depends on the vectors of both sides, so it is found out with queries like those to
        come: on one half of them as many lists are taken as reach the wanted recall, one standard error to spare; on
        the other half it is measured.

        Args:
            head: whose classes to index.
            hidden: [..., D], at least two queries, as a trained encoder makes them; up to 512 of them are used.
            k: how many classes a query will ask for.
            recall: the share of them that is to be found.
            lists: their number. Default: 4√C, at most a quarter of C and 8,192.

        Raises:
            ImportError: faiss is not installed.
            ValueError: numbers out of range, fewer than two queries, vectors that are not finite.

        Example:
            >>> generator = torch.Generator().manual_seed(0)
            >>> head = ClassHead(16, 2000)
            >>> index = Index.build(head, torch.randn(64, 16, generator=generator), recall=0.9)
            >>> index.search(torch.randn(3, 16, generator=generator), 5).shape, index.report.recall > 0.8
            (torch.Size([3, 5]), True)
        """
        _check.whole("k", k, 1, head.num_classes)
        if not 0 < _check.number("recall", recall) <= 1:
            raise ValueError(f"`recall` must lie in (0, 1], got {recall}")
        number = max(1, min(4 * math.isqrt(head.num_classes), head.num_classes // 4, _MOST_LISTS))
        number = number if lists is None else _check.whole("lists", lists, 1, head.num_classes)
        hidden = rows_of(head, hidden).detach()
        if len(hidden) < 2:
            raise ValueError(f"`hidden` must hold at least 2 queries, got {len(hidden)}")
        hidden = hidden[:: -(-len(hidden) // _SAMPLE)]
        check_finite(head, hidden)
        start = time.perf_counter()
        coded = CodedLists.of(lambda ids: class_vectors(head, ids), head.num_classes, number, head.weight.device)
        digest = digest_of(head)
        built = time.perf_counter() - start
        start = time.perf_counter()
        # On the CPU: what is on its way there has been waited for.
        exact = head.topk(hidden, k).ids.cpu()
        exactly = time.perf_counter() - start
        probes = _choose_probes(coded, queries(head, hidden[::2]).cpu(), exact[::2], recall)
        report = IndexReport(
            num_classes=head.num_classes,
            dim=head.dim,
            lists=number,
            probes=probes,
            k=k,
            wanted=float(recall),
            recall=0.0,
            queries_per_s=0.0,
            exact_per_s=len(hidden) / exactly,
            build_s=built,
            num_bytes=coded.num_bytes,
        )
        index = cls(head, coded, digest=digest, report=report)
        index.search(hidden[:2], k)  # wakes threads
        start = time.perf_counter()
        found = index.search(hidden, k).cpu()
        per_s = len(hidden) / (time.perf_counter() - start)
        index.report = replace(report, recall=_recall(found[1::2], exact[1::2]), queries_per_s=per_s)
        return index

    @property
    def num_classes(self) -> int:
        return self.report.num_classes

    def search(self, hidden: Tensor, k: int, *, exclude: Tensor | None = None) -> Tensor:
        """Ids [..., k] of about the k best classes of hidden [..., D], best first, that are not in exclude [..., E].

        -1 where fewer are left.
        """
        _check.whole("k", k, 1, self.num_classes)
        rows, others = rows_of(self.head, hidden), check_exclude(self.head, hidden, exclude)
        n = k + most_excluded(others)
        size = rows_at_once(self.head, n)
        parts = []
        for start in range(0, max(len(rows), 1), size):
            here = slice(start, start + size)
            parts.append(keep(*self.nearest(rows[here], n), k, None if others is None else others[here])[1])
        return torch.cat(parts).reshape(*hidden.shape[:-1], k)

    @torch.no_grad()
    def nearest(self, hidden: Tensor, n: int, *, thorough: int = 1) -> tuple[Tensor, Tensor]:
        """Scores and ids [B, n] of about the n best classes of hidden [B, D], best first; -inf and -1 pad.

        Args:
            hidden: [B, D].
            n: how many; no more than there are classes come back.
            thorough: how many times as many lists to search as the recall that was wanted takes.
        """
        head, lists = self.head, self._lists
        if head.num_classes != self.num_classes:
            raise ValueError(
                f"`index` must be of the head's {head.num_classes} classes, got one of {self.num_classes}: "
                "build it anew"
            )
        n = min(n, self.num_classes)
        # Bytes are not exact: a few more are found, and scored.
        more = min(n + max(8, n // 4), self.num_classes)
        query, probes = queries(head, hidden), thorough * self.report.probes
        ids = lists.search(query, more, probes)
        # Where those lists hold too few, as many more are searched as it takes.
        while probes < lists.num_lists and (short := ids[:, n - 1] < 0).any():
            probes = min(2 * probes, lists.num_lists)
            ids[short] = lists.search(query[short], more, probes)
        scores = head.scores(hidden, ids.clamp(min=0)).masked_fill_(ids < 0, -math.inf)
        best, place = scores.topk(n, dim=1)
        return best, ids.gather(1, place)

    def recall(self, hidden: Tensor, k: int = 10) -> float:
        """The share of the exact k best classes of hidden [..., D] that the index finds."""
        rows = rows_of(self.head, hidden)
        return _recall(self.search(rows, k), self.head.topk(rows, k).ids)

    def state(self) -> IndexState:
        """The index as tensors, and a few words on whose it is."""
        return IndexState(self._lists.tensors(), {"format": _FORMAT, "digest": self._digest, **asdict(self.report)})

    @classmethod
    def from_state(cls, state: IndexState, head: ClassHead) -> "Index":
        """The index that a state was taken of, for the head whose classes it holds.

        Nothing in a state is trusted: it is plain tensors and numbers, and each is checked.

        Raises:
            ImportError: faiss is not installed.
            ValueError: it is of other weights, of another format, or no index at all.
        """
        about = state.about
        if about.get("format") != _FORMAT:
            raise ValueError(f"`state` must be an index of format {_FORMAT}, got {about.get('format')!r}")
        report = _read_report(about)
        if (report.num_classes, report.dim) != (head.num_classes, head.dim):
            raise ValueError(
                f"`state` must be of the head's {head.num_classes} × {head.dim} class vectors, "
                f"got {report.num_classes} × {report.dim}"
            )
        digest = digest_of(head)
        if about.get("digest") != digest:
            raise ValueError("`state` must be of the head's own weights, got an index of others: build it anew")
        lists = CodedLists.from_tensors(state.tensors, head.num_classes, head.dim + (head.bias is not None))
        if not 1 <= report.probes <= report.lists == lists.num_lists:
            raise ValueError(
                f"`state` must have as many lists as it tells of, {report.lists}, and search 1 or more of them, "
                f"got {lists.num_lists} and {report.probes}"
            )
        return cls(head, lists, digest=digest, report=report)


def _choose_probes(lists: CodedLists, query: Tensor, exact: Tensor, recall: float) -> int:
    """How many lists queries [B, ...] must search to find so many of their best classes [B, k]."""
    turn = lists.turns(query).gather(1, lists.list_of()[exact])

    def enough(probes: int) -> bool:
        found = (turn < probes).double().mean(1)
        spare = float(found.std()) / math.sqrt(len(found)) if len(found) > 1 else 0.0
        return float(found.mean()) - spare >= recall

    low, high = 0, lists.num_lists
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _recall(found: Tensor, exact: Tensor) -> float:
    return float((exact.unsqueeze(2) == found.unsqueeze(1)).any(2).double().mean())


def _read_report(about: Mapping[str, object]) -> IndexReport:
    values: dict[str, int | float] = {}
    for field in fields(IndexReport):
        value = about.get(field.name)
        kind = int if field.type is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, kind) or not value >= 0:
            raise ValueError(f"`state` must tell {field.name!r} as a number that is not negative, got {value!r}")
        values[field.name] = value
    return IndexReport(**values)  # type: ignore[arg-type]
