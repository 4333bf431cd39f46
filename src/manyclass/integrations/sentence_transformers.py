"""A loss for sentence-transformers whose in-batch negatives are corrected for how often each of them is in a batch.

Users of `MultipleNegativesRankingLoss` number the positives and replace the loss:

    train, counts = number_positives(train)
    loss = InBatchLoss(model, counts)
    SentenceTransformerTrainer(model, args, train_dataset=train, loss=loss).train()
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import CachedLossMixin, has_static_embedding_input
from sentence_transformers.util import SimilarityFunction
from torch import Tensor, nn

from manyclass import _check
from manyclass.candidates import Candidates
from manyclass.counts import ClassCounts
from manyclass.objectives import Likelihood, Objective
from manyclass.samplers import InBatch

SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
LABEL_COLUMNS = ("label", "labels", "score", "scores")  # the trainer takes the first of them as labels
NEVER_DRAWN = 1e-6  # count of a text that is no positive


class InBatchLoss(CachedLossMixin, nn.Module):  # type: ignore[misc]
    """Negative log-likelihood of each anchor's positive, estimated from the other positives of the batch.

        loss = -s(x, c) + log(exp s(x, c) + Σ_j κ_j exp s(x, c_j) + Σ_h exp s(x, h)),  s = scale · similarity
        κ_j = 1 / ((B - 1) f(c_j))

    Class c_j is the positive of another example j, f its frequency among the positives of the training set. Frequent
    positives are in many batches: without κ, as in `MultipleNegativesRankingLoss`, exp s learns p(c | x) / f(c), and
    frequent positives rank too low; with κ it learns p(c | x). If all positives are equally frequent, κ is a constant,
    and the scores that are best with it rank as those without it. Other copies of an example's positive in the batch
    are no negatives of it. Hard negatives h are candidates of one example, the one they come with; each class among
    them counts once, and its copies among the c_j do not count.

    The trainer passes class ids as labels, from a column "label": the positive's id, or, with hard negatives, a list of
    the ids of the positive and of each negative, -1 for a negative to leave out. `number_positives` makes this column
    and the counts. Leave the batch sampler at its default: κ is that of examples drawn independently, so
    `BatchSamplers.NO_DUPLICATES` would bias it. In a distributed training the B positives are those of one process.

    Without hard negatives and without repeated positives in a batch, the objective `SubsetSoftmax` gives
    `MultipleNegativesRankingLoss`.

    Args:
        model: the SentenceTransformer that is trained.
        counts: ClassCounts of the positives, or C counts.
        scale: factor of the similarity, 1 / temperature.
        similarity: "cosine", "dot", "euclidean" or "manhattan".
        mini_batch_size: texts to embed at a time, with gradient caching: activations take no more memory for a larger
            batch, and the model runs twice; None embeds a whole column at once.
        objective: the training objective. Default: `Likelihood`; `SubsetSoftmax` leaves κ out.

    Raises:
        ValueError: an option has none of its allowed values, or `mini_batch_size` is given and the model embeds its
            texts by StaticEmbedding, whose inputs cannot be cut into mini-batches.
        TypeError: `counts` is neither a Tensor nor ClassCounts.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        counts: ClassCounts | Tensor,
        *,
        scale: float = 20.0,
        similarity: str = "cosine",
        mini_batch_size: int | None = None,
        objective: Objective | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        _check.choice("similarity", similarity, SIMILARITIES)
        if objective is not None and objective.keeps_hits:
            raise ValueError(
                f"`objective` must be one that sums the target explicitly, such as Likelihood, got {objective!r}"
            )
        if mini_batch_size is not None:
            _check.integer("mini_batch_size", mini_batch_size, 1)
            if has_static_embedding_input(model):
                raise ValueError(
                    "`mini_batch_size` must be None for a model with StaticEmbedding, whose inputs cannot be cut into "
                    f"mini-batches, got {mini_batch_size}"
                )
        self.scale = _check.number("scale", scale, low=0, strict=True)
        self.similarity = similarity
        self.mini_batch_size = mini_batch_size
        self.uses_gradient_cache = mini_batch_size is not None
        self.objective = Likelihood() if objective is None else objective
        self.sampler = InBatch(counts)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None) -> Tensor:
        """Return the mean loss of a batch.

        Args:
            sentence_features: inputs of the anchors, of the positives and of each column of hard negatives.
            labels: class ids int64 [B] of the positives; with N columns of negatives [B, 1 + N], -1 for no negative.
        """
        columns = list(sentence_features)
        if len(columns) < 2:
            raise ValueError(
                f"`sentence_features` must hold anchors, positives and any hard negatives, got {len(columns)} column(s)"
            )
        if self.uses_gradient_cache:
            loss: Tensor = CachedLossMixin.forward_cached(self, columns, labels)
            return loss
        return self.calculate_loss([[self.model(column)["sentence_embedding"]] for column in columns], labels)

    def calculate_loss(self, reps: list[list[Tensor]], labels: Tensor | None, *, with_backward: bool = False) -> Tensor:
        """Return the mean loss of a batch from its embeddings; `forward_cached` and `MatryoshkaLoss` call it too.

        Args:
            reps: embeddings [b, D] of each part of each column.
            labels: class ids, see `forward`.
            with_backward: whether to backpropagate the loss, part by part, and return it without its graph.
        """
        # Half precision, which autocast would take, is too coarse for scaled scores and their log-sum-exp.
        with torch.autocast(reps[0][0].device.type, enabled=False):
            anchors, positives, *negatives = (_at_least_float32(torch.cat(column)) for column in reps)
            batch = len(anchors)
            candidates = self._candidates(self._class_ids(labels, batch, 1 + len(negatives)))
            total = anchors.new_zeros(())
            for start in range(0, batch, self.mini_batch_size or batch):
                rows = slice(start, start + (self.mini_batch_size or batch))
                loss = self._losses(anchors, positives, negatives, rows, candidates).sum() / batch
                if with_backward:
                    loss.backward()
                    loss = loss.detach()
                total = total + loss
        return total

    def _class_ids(self, labels: Tensor | None, batch: int, columns: int) -> Tensor:
        """Return checked class ids [B, columns]."""
        if labels is None:
            raise ValueError(
                "`labels` must hold class ids, got None: the dataset needs a column 'label', see number_positives"
            )
        _check.tensor("labels", labels)
        labels = labels.unsqueeze(1) if labels.dim() == 1 else labels
        if labels.shape != (batch, columns):
            raise ValueError(
                f"`labels` must have shape [{batch}, {columns}], ids of the positives and of any hard negatives, "
                f"got {list(labels.shape)}"
            )
        _check.ids("labels", labels[:, :1], self.sampler.num_classes)
        return _check.ids("labels", labels, self.sampler.num_classes, pads=True)

    def _candidates(self, ids: Tensor) -> Candidates:
        """Return the draw of InBatch for the positives, with the hard negatives as included classes."""
        target, negatives = ids[:, 0].contiguous(), ids[:, 1:]
        # `include` of a sampler would sort the ids of an example, but the columns must keep the order of the texts.
        earlier = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril(-1)
        repeated = ((ids.unsqueeze(2) == ids.unsqueeze(1)) & earlier).any(2)
        included = negatives.masked_fill(repeated[:, 1:], -1)
        candidates: Candidates = self.sampler(target, exclude=torch.cat([target.unsqueeze(1), included], 1))
        return replace(candidates, included=included) if included.shape[1] else candidates

    def _losses(
        self, anchors: Tensor, positives: Tensor, negatives: list[Tensor], rows: slice, candidates: Candidates
    ) -> Tensor:
        """Return the losses [b] of some rows of the batch."""
        similarity = SimilarityFunction.to_similarity_fn(self.similarity)
        similarity_of_pairs = SimilarityFunction.to_similarity_pairwise_fn(self.similarity)
        anchors, candidates = anchors[rows], _of_rows(candidates, rows)
        scores = self.scale * similarity(anchors, positives)
        hits = candidates.block_hits(candidates.blocks[0])
        own = [self.scale * similarity_of_pairs(anchors, negative[rows]).unsqueeze(1) for negative in negatives]
        return self.objective(
            scores.diagonal(rows.start), torch.cat([scores.masked_fill(hits, -torch.inf), *own], 1), candidates
        )

    def get_config_dict(self) -> dict[str, Any]:
        """Return the options for the model card."""
        return {
            "num_classes": self.sampler.num_classes,
            "scale": self.scale,
            "similarity": self.similarity,
            "mini_batch_size": self.mini_batch_size,
            "objective": repr(self.objective),
        }

    @property
    def citation(self) -> str:
        """The paper of the correction, for the model card."""
        return """
@inproceedings{yi2019samplingbias,
    title = "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations",
    author = "Yi, Xinyang and Yang, Ji and Hong, Lichan and Cheng, Derek Zhiyuan and Heldt, Lukasz and
        Kumthekar, Aditee and Zhao, Zhe and Wei, Li and Chi, Ed",
    booktitle = "Proceedings of the 13th ACM Conference on Recommender Systems",
    year = "2019",
    pages = "269--277",
}
"""


def number_positives(train: Dataset, *others: Dataset) -> tuple[Any, ...]:
    """Number the distinct texts of positives and hard negatives as classes, and count the positives of `train`.

    Columns are those of the losses of sentence-transformers: the anchor first, then the positive, then hard negatives.
    Equal texts are one class. If texts differ though they mean the same, such as titles of one product, number them in
    a column "label" of the dataset instead, and count it by `ClassCounts.from_targets`.

    Args:
        train: the dataset to train on.
        others: further datasets, for evaluation; their ids are those of `train`. A positive that is new counts once.

    Returns:
        Each dataset with a column "label" of class ids, and the ClassCounts.

    Raises:
        TypeError: an argument is no Dataset, or a column holds something else than texts.
        ValueError: a dataset has a column of labels already, less than two columns, or no rows to train on.
    """
    if len(_checked("train", train)) == 0:
        raise ValueError("`train` must have rows, got none")
    number: dict[str, int] = {}
    numbered, positives = [], []
    for name, dataset in (("train", train), *(("others", _checked("others", other)) for other in others)):
        columns = [
            [number.setdefault(text, len(number)) for text in _texts(name, dataset, column)]
            for column in dataset.column_names[1:]
        ]
        labels = columns[0] if len(columns) == 1 else [list(row) for row in zip(*columns, strict=True)]
        numbered.append(dataset.add_column("label", labels))
        positives.append(torch.tensor(columns[0], dtype=torch.int64))
    counts = torch.bincount(positives[0], minlength=len(number)).double()
    for found in positives[1:]:
        counts[found] = counts[found].clamp(min=1)
    # A text that is a negative only is never drawn: counting it would lower the frequencies of the others.
    return *numbered, ClassCounts(counts, smoothing=NEVER_DRAWN)


def _checked(name: str, dataset: Dataset) -> Dataset:
    """Return a dataset that has columns of anchors and of positives, and none of labels."""
    if not isinstance(dataset, Dataset):
        raise TypeError(f"`{name}` must be a datasets.Dataset, got {type(dataset).__name__}")
    if labels := [column for column in dataset.column_names if column in LABEL_COLUMNS]:
        raise ValueError(f"`{name}` must have no column of labels, got {labels[0]!r}: remove or rename it")
    if len(dataset.column_names) < 2:
        raise ValueError(f"`{name}` must have columns of anchors and of positives, got {dataset.column_names}")
    return dataset


def _texts(name: str, dataset: Dataset, column: str) -> Iterator[str]:
    for row, text in enumerate(dataset[column][:]):
        if not isinstance(text, str):
            raise TypeError(f"`{name}` must hold texts in column {column!r}, got {type(text).__name__} in row {row}")
        yield text


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _of_rows(candidates: Candidates, rows: slice) -> Candidates:
    """Return the candidates of some rows of a batch whose rows share their blocks."""
    included, of_target = candidates.included, candidates.target_log_kappa
    return replace(
        candidates,
        excluded=candidates.excluded[rows],
        included=None if included is None else included[rows],
        target_log_kappa=None if of_target is None else lambda: of_target()[rows],
    )
