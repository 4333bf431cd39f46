"""ComplEx, an encoder of pairs of an entity and a relation."""

import torch
from torch import Tensor, nn

INITIAL_STD = 1e-3  # of the entries: with larger ones the model fits the training triples before it generalises


class ComplEx(nn.Module):
    """The ComplEx score s(t) = Re Σ h r t̄, as an inner product of a query and the tail's row.

    Rows are 2·rank reals, first the real and then the imaginary parts. Inputs are int64 [B, 2], head and relation;
    outputs are queries [B, 2·rank].

    Args:
        entities: [E, 2·rank], with an initial standard deviation of `INITIAL_STD`; a head may be tied to it.
        num_relations: number of relations, reciprocal ones included.
    """

    def __init__(self, entities: nn.Embedding, num_relations: int) -> None:
        super().__init__()
        self.entities = entities
        self.relations = nn.Embedding(num_relations, entities.embedding_dim, sparse=entities.sparse)
        nn.init.normal_(self.relations.weight, std=INITIAL_STD)

    def forward(self, pairs: Tensor) -> Tensor:
        """Return the queries [B, 2·rank] of pairs [B, 2]."""
        (a, b), (c, d) = (
            table(ids).chunk(2, -1)
            for table, ids in zip((self.entities, self.relations), pairs.unbind(-1), strict=True)
        )
        return torch.cat([a * c - b * d, a * d + b * c], -1)

    def cubes(self, pairs: Tensor, tails: Tensor) -> Tensor:
        """Return the N3 regulariser: Σ |z|³ over the complex entries of the rows of triples, a mean over triples."""
        rows = torch.cat([self.entities(torch.stack([pairs[:, 0], tails])), self.relations(pairs[:, 1:].T)])
        real, imaginary = rows.chunk(2, -1)
        return (real.square() + imaginary.square()).pow(1.5).sum() / len(tails)
