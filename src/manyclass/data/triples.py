"""Knowledge-graph triples: the tail is the class to predict from head and relation."""

from array import array
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from manyclass import _check
from manyclass.data.files import ReadProgress, find_by_stem, lines, shown
from manyclass.data.names import Names
from manyclass.errors import UserError

SPLITS = ("train", "valid", "test")
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class KnownTails:
    """The true tails of each pair of head and relation, in CSR form.

    Args:
        num_relations: number of relations, with reciprocal ones; a pair's key is head · num_relations + relation.
        pair: int64 [P], the keys in ascending order.
        start: int64 [P + 1], the position of each pair's first tail.
        tail: int64 [N], ascending within a pair, without duplicates.

    Example:
        >>> known = KnownTails.of(torch.tensor([[0, 0, 1], [0, 0, 2], [3, 0, 1]]), num_relations=1)
        >>> known.others(torch.tensor([[0, 0, 2], [3, 0, 1], [2, 0, 0]]))
        tensor([[ 1, -1],
                [-1, -1],
                [-1, -1]])
    """

    num_relations: int
    pair: Tensor
    start: Tensor
    tail: Tensor

    @classmethod
    def of(cls, triples: Tensor, *, num_relations: int) -> "KnownTails":
        """Collect the tails of triples [N, 3].

        Raises:
            ValueError: `triples` has another shape, or N is 0.
        """
        if triples.dim() != 2 or triples.shape[1] != 3 or not len(triples):
            raise ValueError(f"`triples` must have shape [N, 3], N at least 1, got {list(triples.shape)}")
        head, relation, tail = triples.unbind(1)
        key = head * num_relations + relation
        order = tail.argsort()
        order = order[key[order].argsort(stable=True)]
        key, tail = key[order], tail[order]
        again = (key[1:] == key[:-1]) & (tail[1:] == tail[:-1])
        key, tail = (x[~F.pad(again, (1, 0))] for x in (key, tail))
        pair, number = key.unique_consecutive(return_counts=True)
        return cls(num_relations, pair, F.pad(number.cumsum(0), (1, 0)), tail)

    def to(self, device: torch.device | str) -> "KnownTails":
        """Copy to another device."""
        return replace(self, pair=self.pair.to(device), start=self.start.to(device), tail=self.tail.to(device))

    def number(self, triples: Tensor) -> Tensor:
        """Return the number of known tails [B] for the heads and relations of triples [B, 3]."""
        return self._run(triples)[1]

    def others(self, triples: Tensor, *, width: int | None = None) -> Tensor:
        """Return the other known tails [B, E] of the heads and relations of triples [B, 3], padded with -1.

        Args:
            triples: ids [B, 3].
            width: E, at least the largest `number`. None: the largest, which synchronises with the device.

        Raises:
            ValueError: `width` is below the largest `number`.
        """
        begin, number = self._run(triples)
        if width is None:
            width = int(number.max()) if len(number) else 0
        elif _check.reads_values(number) and (number > width).any():
            raise ValueError(f"`width` must be at least {int(number.max())}, got {width}")
        place = torch.arange(width, device=number.device)
        tail = self.tail[(begin.unsqueeze(1) + place).clamp_(max=len(self.tail) - 1)]
        return tail.masked_fill_((place >= number.unsqueeze(1)) | (tail == triples[:, 2:]), -1)

    def _run(self, triples: Tensor) -> tuple[Tensor, Tensor]:
        """Return the position of the first tail of each pair [B], and the number of its tails [B]."""
        key = triples[:, 0] * self.num_relations + triples[:, 1]
        place = torch.searchsorted(self.pair, key).clamp_(max=len(self.pair) - 1)
        begin = self.start[place]
        return begin, torch.where(self.pair[place] == key, self.start[place + 1] - begin, 0)


def both_ways(triples: Tensor, num_relations: int) -> Tensor:
    """Return triples [2N, 3]: these [N, 3], then their reciprocals, with relation r + R from tail to head.

    Example:
        >>> both_ways(torch.tensor([[5, 0, 7]]), 3).tolist()
        [[5, 0, 7], [7, 3, 5]]
    """
    head, relation, tail = triples.unbind(1)
    return torch.cat([triples, torch.stack([tail, relation + num_relations, head], 1)])


@dataclass(frozen=True)
class Triples:
    """Triples of ids for training, validation and test; ids go from frequent to rare.

    Args:
        train, valid, test: int64 [N, 3]: head, relation, tail.
        entities, relations: the name of each id, including entities that occur in `valid` or `test` alone.
    """

    train: Tensor
    valid: Tensor
    test: Tensor
    entities: tuple[str, ...]
    relations: tuple[str, ...]

    @property
    def num_entities(self) -> int:
        """The number of entities, the classes."""
        return len(self.entities)

    @property
    def num_relations(self) -> int:
        """The number of relations, R; with reciprocal ones there are 2R."""
        return len(self.relations)

    def both_ways(self, triples: Tensor) -> Tensor:
        """Return triples [2N, 3] with reciprocals, see the function `both_ways`."""
        return both_ways(triples, self.num_relations)

    def known(self, *splits: str) -> KnownTails:
        """Return the true tails in these splits, both ways: "train" for training, all three to filter ranks."""
        for split in splits:
            _check.choice("splits", split, SPLITS)
        triples = torch.cat([getattr(self, split) for split in splits])
        return KnownTails.of(self.both_ways(triples), num_relations=2 * self.num_relations)


def read_triples(
    path: Path,
    *,
    valid: Path | None = None,
    test: Path | None = None,
    name: str = "data",
    progress: ReadProgress | None = None,
) -> Triples:
    """Read triples, one a line: head TAB relation TAB tail, in UTF-8; .gz, .xz and .bz2 are decompressed.

    Blank lines are ignored.

    Args:
        path: a training file; or a folder that holds `train.…`, and optionally `valid.…` and `test.…`.
        valid: a file. None: the one in the folder, if any.
        test: a file. None: the one in the folder, if any.
        name: the user's name for the file, for errors.
        progress: called with the bytes read and in total, for each file.

    Raises:
        UserError: a file is missing, cannot be read, is not UTF-8, or has a line that is not a triple, or there is no
            training triple.
    """
    paths = {"train": path, "valid": valid, "test": test}
    if path.is_dir():
        found = {split: find_by_stem(path, split, name=name) for split in SPLITS}
        paths = {**found, **{split: given for split, given in paths.items() if given not in (None, path)}}
    train = paths["train"]
    if train is None:
        raise UserError(f"`{name}` must be a file, or a folder with train.txt, got {path}, which has none")
    entities, relations = Names(), Names()
    parts = {
        split: np.empty((0, 3), dtype=np.int64) if file is None else _read(file, entities, relations, name, progress)
        for split, file in paths.items()
    }
    if not len(parts["train"]):
        raise UserError(f"`{name}` must hold a triple to train on, got none in {train}")
    everything = np.concatenate(list(parts.values()))
    entities, entity = entities.ranked(np.bincount(everything[:, [0, 2]].ravel(), minlength=len(entities)))
    relations, relation = relations.ranked(np.bincount(everything[:, 1], minlength=len(relations)))
    ranked = {
        split: torch.from_numpy(np.stack([entity[part[:, 0]], relation[part[:, 1]], entity[part[:, 2]]], 1))
        for split, part in parts.items()
    }
    return Triples(**ranked, entities=tuple(entities), relations=tuple(relations))


def _read(path: Path, entities: Names, relations: Names, name: str, progress: ReadProgress | None) -> Array:
    """Read the triples of a file, int64 [N, 3], with ids in order of first appearance."""
    ids = array("q")
    for number, line in enumerate(lines(path, name=name, progress=progress), 1):
        if not line.strip():
            continue
        fields = line.split("\t")
        if len(fields) != 3 or not all(fields):
            wanted = "head TAB relation TAB tail in each line"
            raise UserError(f"`{name}` must hold {wanted}, got {shown(line)} in line {number} of {path}")
        ids.extend((entities.add(fields[0]), relations.add(fields[1]), entities.add(fields[2])))
    return np.array(ids, dtype=np.int64).reshape(-1, 3)
