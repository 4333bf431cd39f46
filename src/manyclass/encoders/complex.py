"""ComplEx: pairs of an entity and a relation to the vectors that predict the other entity."""

import torch
from torch import Tensor, nn

START = 1e-3  # the scale of first entries: larger ones fit the training triples before they have learnt anything


class ComplEx(nn.Module):
    """s(t) = Re Σ h r t̄ as an inner product of a query and the tail's row.

    Rows are 2·rank reals, the real parts and then the imaginary ones. Inputs are int64 [B, 2], head and relation, which
    give queries [B, 2·rank].

    Args:
        entities: [E, 2·rank]; a head may be tied to it. To learn from nothing its rows should be small, of a scale of
            `START`, as those of relations are made.
        num_relations: reciprocal ones included.
    """

    def __init__(self, entities: nn.Embedding, num_relations: int) -> None:
        super().__init__()
        self.entities = entities
        self.relations = nn.Embedding(num_relations, entities.embedding_dim, sparse=entities.sparse)
        nn.init.normal_(self.relations.weight, std=START)

    def forward(self, pairs: Tensor) -> Tensor:
        (a, b), (c, d) = (
            table(ids).chunk(2, -1)
            for table, ids in zip((self.entities, self.relations), pairs.unbind(-1), strict=True)
        )
        return torch.cat([a * c - b * d, a * d + b * c], -1)

    def cubes(self, pairs: Tensor, tails: Tensor) -> Tensor:
        """Σ |z|³ over the complex numbers of all rows of the triples, a mean over them: the nuclear 3-norm (N3)."""
        rows = torch.cat([self.entities(torch.stack([pairs[:, 0], tails])), self.relations(pairs[:, 1:].T)])
        real, imaginary = rows.chunk(2, -1)
        return (real.square() + imaginary.square()).pow(1.5).sum() / len(tails)
