"""An LSTM encoder of sequences of classes."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from manyclass import _check


class Recurrent(nn.Module):
    """An embedding of ids followed by an LSTM; the vector of a position depends on all ids up to it.

    Inputs are ids [B, T], which give vectors [B, T, D]; or a dict of `ids` and one of
    - `last`: int64 [B], the position wanted of each sequence, which gives vectors [B, D];
    - `places`: int64 [N], the positions wanted, counted through all sequences of length T, which gives vectors [N, D];
    - `skip`: number of leading positions that are context only, which gives vectors [B, T - skip, D].
    With `lengths`, B numbers from 1 to T, the positions beyond the length of a sequence are not computed.

    Args:
        embedding: embedding [C, D] of the ids; a head may be tied to it.
        layers: layers of the LSTM, D units each.
        dropout: dropout of the embeddings, between layers and of the output.
    """

    def __init__(self, embedding: nn.Embedding, *, layers: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        _check.integer("layers", layers, 1)
        _check.fraction("dropout", dropout)
        dim = embedding.embedding_dim
        self.embedding = embedding
        self.dropout = nn.Dropout(dropout)
        # torch warns about dropout between layers if there is only one layer.
        self.lstm = nn.LSTM(dim, dim, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0)

    def forward(self, inputs: Tensor | dict[str, Any]) -> Tensor:
        """Return the vectors of the wanted positions."""
        ids = inputs if isinstance(inputs, Tensor) else inputs["ids"]
        hidden = self.dropout(self.embedding(ids))
        if isinstance(inputs, dict) and "lengths" in inputs:
            lengths, total = torch.tensor(inputs["lengths"], device="cpu"), ids.shape[1]
            packed = pack_padded_sequence(hidden, lengths, batch_first=True, enforce_sorted=False)
            hidden = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=total)[0]
        else:
            hidden = self.lstm(hidden)[0]
        if isinstance(inputs, dict) and "last" in inputs:
            hidden = hidden[torch.arange(len(hidden), device=hidden.device), inputs["last"]]
        elif isinstance(inputs, dict) and "places" in inputs:
            hidden = hidden.flatten(0, 1).index_select(0, inputs["places"])
        elif isinstance(inputs, dict):
            hidden = hidden[:, inputs["skip"] :]
        return self.dropout(hidden)  # type: ignore[no-any-return]
