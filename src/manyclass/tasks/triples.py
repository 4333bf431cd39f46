"""Knowledge-graph triples: the tail is the class, and by reciprocal relations the head."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from manyclass.data import WHOLE, KnownTails, Names, Share, Triples, read_triples
from manyclass.data.files import line_batches, shown
from manyclass.data.triples import both_ways
from manyclass.encoders import ComplEx
from manyclass.encoders.complex import INITIAL_STD
from manyclass.errors import UserError
from manyclass.tasks.settings import Settings
from manyclass.tasks.task import EncoderSpec, ModelSpec, PredictBatch, ReadProgress, Source, TrainingData

EVALUATION_TRIPLES = 1024  # per batch
PLACEHOLDER = "?"


class TripleBatches:
    """Batches of heads and relations [B, 2] and their tails.

    Args:
        triples: [N, 3].
        size: B.
        seed: seed of the shuffling. None: do not shuffle.
        known: the true tails, to exclude from the negatives; None: exclude nothing.
        share: the part of each batch to give. Default: all of it.
    """

    def __init__(
        self,
        triples: Tensor,
        size: int,
        *,
        seed: int | None = None,
        known: KnownTails | None = None,
        share: Share = WHOLE,
    ) -> None:
        self._triples, self._size, self._seed, self._known = triples, size, seed, known
        self._epoch, self._share = 0, share

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which decides the order."""
        self._epoch = epoch

    def __len__(self) -> int:
        return -(-len(self._triples) // self._size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, dict[str, Tensor]]]:
        order = torch.arange(len(self._triples))
        if self._seed is not None:
            generator = torch.Generator().manual_seed(1_000_003 * self._seed + self._epoch)
            order = torch.randperm(len(self._triples), generator=generator)
        for part in order.split(self._size):
            triples = self._triples[self._share.of(part)]
            extras = {} if self._known is None else {"exclude": self._known.others(triples)}
            yield triples[:, :2], self._share.targets(triples[:, 2].contiguous(), size=len(part)), extras


class TriplesTask:
    """Knowledge-graph triples, `head TAB relation TAB tail` a line; reciprocal relations predict heads."""

    kind = "triples"
    source_fields: tuple[str, ...] = ("held_out",)
    settings_fields: tuple[str, ...] = ("dim", "regulariser")
    defaults = Settings(
        epochs=30,
        batch_size=1000,
        optimizer="adagrad",
        learning_rate=0.1,
        decay=False,
        dim=200,
        regulariser=0.05,
        at=(1, 3, 10),
    )
    metrics: tuple[str, ...] = ("MRR", "hits@")
    best_by = "MRR"
    allows_seen: bool | None = True
    by_line = True

    def read(
        self,
        source: Source,
        settings: Settings,
        folder: Path,
        progress: ReadProgress | None = None,
        share: Share = WHOLE,
    ) -> TrainingData:
        """Read the triples; without a held-out file, one in twenty is held out."""
        triples = read_triples(source.data, valid=source.held_out, progress=progress)
        if not len(triples.valid):
            chosen = torch.randperm(len(triples.train), generator=torch.Generator().manual_seed(settings.seed))
            if len(chosen) < 2:
                raise UserError(f"`data` must hold 2 triples, one to hold out, got 1 in {source.data}")
            cut = max(1, len(chosen) // 20)
            triples = _parts(triples, chosen[cut:], chosen[:cut])
        train = triples.both_ways(triples.train)
        counts = torch.bincount(train[:, 2], minlength=triples.num_entities).double()
        config = {
            "relations": list(triples.relations),
            # Later evaluations filter ranks by these too. Test triples are not part of the model.
            "known": torch.cat([triples.train, triples.valid]).int(),
        }
        spec = ModelSpec(self, Names(triples.entities), counts, config, settings)
        valid = triples.both_ways(triples.valid)
        known = triples.known("train", "valid", *(["test"] if len(triples.test) else []))
        weight = settings.regulariser or 0.0

        def penalty(encoder: nn.Module, pairs: Tensor, tails: Tensor) -> Tensor:
            assert isinstance(encoder, ComplEx)
            return weight * encoder.cubes(pairs, tails)

        return TrainingData(
            spec,
            TripleBatches(train, settings.batch_size or 1, seed=settings.seed, share=share),
            lambda limit: TripleBatches(valid[_some(len(valid), limit)], EVALUATION_TRIPLES, known=known, share=share),
            (
                f"{source.data.name}: {len(triples.train):,} triples to train on, {len(triples.valid):,} held out, "
                f"each both ways; {triples.num_entities:,} entities, {triples.num_relations:,} relations",
                "ranks are filtered: other true tails do not count",
            ),
            penalty if weight else None,
        )

    def build(self, spec: ModelSpec) -> EncoderSpec:
        """Build `ComplEx`, tied to the head."""
        dim = spec.settings.dim or 2
        if dim % 2:
            raise UserError(f"`dim` must be even for triples, whose vectors are of complex numbers, got {dim}")
        relations = spec.config["relations"]
        if not isinstance(relations, list) or not all(isinstance(name, str) for name in relations):
            raise ValueError("`relations` must be names, got others")
        _check_known(spec.config["known"], len(spec.names), len(Names(relations)))
        entities = nn.Embedding(len(spec.names), dim, sparse=True)
        nn.init.normal_(entities.weight, std=INITIAL_STD)
        return EncoderSpec(ComplEx(entities, 2 * len(Names(relations))), dim, entities, bias=False)

    def evaluation_batches(
        self, spec: ModelSpec, source: Source, share: Share = WHOLE
    ) -> tuple[Iterable[object], Sequence[str]]:
        """Return batches of triples both ways; of a folder, those of test."""
        triples = read_triples(source.data, test=source.held_out)
        chosen, split = next((part, name) for name in ("test", "valid", "train") if len(part := getattr(triples, name)))
        relations = Names(spec.config["relations"])
        ids, unknown = _translated(chosen, triples, spec.names, relations)
        read, _ = _translated(torch.cat([triples.train, triples.valid, triples.test]), triples, spec.names, relations)
        if not len(ids):
            raise UserError(
                f"`data` must hold triples that the model knows, got {len(chosen):,} of others in {source.data}"
            )
        split = f"{split} triples" if source.data.is_dir() else "triples"
        summary = f"{source.data.name}: {len(ids):,} {split}, each both ways, ranks filtered"
        if unknown:
            summary += f"; {unknown:,} of entities or relations that the model does not know are left out"
        every = both_ways(ids, len(relations))
        return TripleBatches(every, EVALUATION_TRIPLES, known=_known(spec, read), share=share), (summary,)

    def predict_batches(self, spec: ModelSpec, source: Source, *, size: int, seen: bool) -> Iterator[PredictBatch]:
        """Iterate over lines that leave the tail or the head open."""
        relations, known = Names(spec.config["relations"]), _known(spec) if seen else None
        for batch in line_batches(source.data, size):
            shown, pairs, fault = list[str](), list[tuple[int, int, int]](), None
            for number, line in batch:
                try:
                    pairs.append((*_parse_query(line, number, source.data, spec.names, relations), -1))
                except UserError as error:
                    # The lines before the faulty one are still answered.
                    fault = error
                    break
                shown.append(line)
            if pairs:
                queries = torch.tensor(pairs)
                yield PredictBatch(shown, queries[:, :2], None if known is None else known.others(queries))
            if fault is not None:
                raise fault


def _parse_query(line: str, number: int, path: Path, entities: Names, relations: Names) -> tuple[int, int]:
    """Return the ids of entity and relation in a line: `head TAB relation`, or `? TAB relation TAB tail`."""
    fields = line.split("\t")
    if len(fields) not in (2, 3) or (len(fields) == 3 and (fields[0] == PLACEHOLDER) == (fields[2] == PLACEHOLDER)):
        raise UserError(
            f"`data` must hold head TAB relation, or a ? in the place of the head or tail of a triple, in each line, "
            f"got {shown(line)} in line {number} of {path}"
        )
    backwards = len(fields) == 3 and fields[0] == PLACEHOLDER
    entity, relation = entities.ids(fields[2] if backwards else fields[0]), relations.ids(fields[1])
    if entity is None or relation is None:
        raise UserError(
            f"`data` must hold entities and relations that the model knows, "
            f"got {shown(line)} in line {number} of {path}"
        )
    return entity, relation + (len(relations) if backwards else 0)


def _known(spec: ModelSpec, more: Tensor | None = None) -> KnownTails:
    """Return the true tails, both ways, of the triples in a spec and of further triples [N, 3]."""
    own, number = spec.config["known"].long(), len(spec.config["relations"])
    triples = own if more is None else torch.cat([own, more])
    return KnownTails.of(both_ways(triples, number), num_relations=2 * number)


def _check_known(known: object, entities: int, relations: int) -> None:
    if not isinstance(known, Tensor) or known.dtype != torch.int32 or known.dim() != 2 or known.shape[1:] != (3,):
        raise ValueError("`known` must be triples, got others")
    most = zip(known.amax(0).tolist(), (entities, relations, entities), strict=True) if len(known) else ()
    if not len(known) or known.amin() < 0 or any(greatest >= number for greatest, number in most):
        raise ValueError("`known` must be triples of its entities and relations, got others")


def _parts(triples: Triples, train: Tensor, valid: Tensor) -> Triples:
    return Triples(triples.train[train], triples.train[valid], triples.test, triples.entities, triples.relations)


def _translated(triples: Tensor, read: Triples, entities: Names, relations: Names) -> tuple[Tensor, int]:
    """Return the triples with a model's ids, and the number of those it does not know."""
    entity = torch.from_numpy(entities.find(read.entities))
    relation = torch.from_numpy(relations.find(read.relations))
    ids = torch.stack([entity[triples[:, 0]], relation[triples[:, 1]], entity[triples[:, 2]]], 1)
    known = (ids >= 0).all(1)
    return ids[known], int((~known).sum())


def _some(number: int, limit: int | None) -> Tensor:
    """Return at most `limit` indices below `number`, evenly spaced."""
    return torch.arange(0, number, 1 if limit is None else max(1, -(-number // limit)))
