"""Sequences of classes to the vectors that predict what comes next."""

from typing import Any

import torch
from torch import Tensor, nn

from manyclass import _check


class Recurrent(nn.Module):
    """Embeds the ids of a sequence and reads them with an LSTM; a position's vector knows all that came before it.

    Inputs are ids [B, T], which give vectors [B, T, D]; or a dict of `ids` and one of
    - `last`: int64 [B], the position of each sequence that is wanted, which gives vectors [B, D];
    - `skip`: how many positions only set the scene, which gives vectors [B, T - skip, D].

    Args:
        embedding: of the ids, [C, D]; a head may be tied to it.
        layers: of the LSTM, each of D units.
        dropout: of embeddings, between layers and of what comes out.
    """

    def __init__(self, embedding: nn.Embedding, *, layers: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        _check.whole("layers", layers, 1)
        _check.fraction("dropout", dropout)
        dim = embedding.embedding_dim
        self.embedding = embedding
        self.dropout = nn.Dropout(dropout)
        # torch warns of dropout between layers where there is one.
        self.lstm = nn.LSTM(dim, dim, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0)

    def forward(self, inputs: Tensor | dict[str, Any]) -> Tensor:
        ids = inputs if isinstance(inputs, Tensor) else inputs["ids"]
        hidden: Tensor = self.lstm(self.dropout(self.embedding(ids)))[0]
        if isinstance(inputs, dict) and "last" in inputs:
            hidden = hidden[torch.arange(len(hidden), device=hidden.device), inputs["last"]]
        elif isinstance(inputs, dict):
            hidden = hidden[:, inputs["skip"] :]
        out: Tensor = self.dropout(hidden)
        return out
