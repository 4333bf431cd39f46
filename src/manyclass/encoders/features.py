"""Rows of features, dense or sparse, to vectors."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyclass import _check

FULL = 2048  # sparse features from which on classes have no weight for each of them
RANK = 256

Inputs = Tensor | dict[str, Tensor]


class FeatureBag(nn.Module):
    """Σ_f x(f) v(f) + b over the features of a sparse row: [B, dim]. A gradient holds the rows of present features.

    Args:
        num_features: F.
        dim: of the vectors v.
        bias: whether there is a b.
    """

    bias: nn.Parameter | None

    def __init__(self, num_features: int, dim: int, *, bias: bool) -> None:
        super().__init__()
        # Rows of the length that nn.Linear gives the vectors of a few dozen present features.
        self.weight = nn.Parameter(torch.empty(num_features, dim).uniform_(-1, 1) / math.sqrt(min(num_features, 64)))
        self.register_parameter("bias", nn.Parameter(torch.zeros(dim)) if bias else None)

    def forward(self, inputs: Inputs) -> Tensor:
        if isinstance(inputs, Tensor):
            hidden = inputs.to(self.weight.dtype) @ self.weight
        else:
            values = inputs["values"].to(self.weight.dtype)
            hidden = F.embedding_bag(
                inputs["columns"], self.weight, inputs["starts"], mode="sum", sparse=True, per_sample_weights=values
            )
        return hidden if self.bias is None else hidden + self.bias


class FeatureEncoder(nn.Module):
    """The vector of a row of features: the row itself, a projection of it, or what a network makes of it.

    Args:
        num_features: F.
        sparse: whether inputs are mostly sparse, `{"columns", "starts", "values"}`, rather than matrices [B, F]. It
            takes either, and gives the same for both.
        rank: project to so many dimensions, linearly. None: only where inputs are sparse and F is above 2,048, to 256:
            a class then has a weight for each dimension, not for each feature.
        hidden_layers: the widths of a network, each layer followed by a ReLU.

    Attributes:
        dim: of the vectors.
    """

    def __init__(
        self, num_features: int, *, sparse: bool, rank: int | None = None, hidden_layers: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self.num_features = _check.whole("num_features", num_features, 1)
        widths = [_check.whole("hidden_layers", width, 1) for width in hidden_layers]
        if rank is not None:
            _check.whole("rank", rank, 1)
        elif sparse and num_features > FULL and not widths:
            rank = RANK
        self.sparse = sparse
        layers: list[nn.Module] = []
        dim = num_features
        for width, bent in [*([] if rank is None else [(rank, False)]), *((width, True) for width in widths)]:
            first = not layers
            layers.append(FeatureBag(dim, width, bias=bent) if sparse and first else nn.Linear(dim, width))
            layers += [nn.ReLU()] if bent else []
            dim = width
        self.layers = nn.Sequential(*layers)
        self.dim = dim

    def forward(self, inputs: Inputs) -> Tensor:
        if isinstance(inputs, dict) and not (self.layers and isinstance(self.layers[0], FeatureBag)):
            inputs = self._matrix(inputs)
        hidden: Tensor = self.layers(inputs)
        return hidden

    def sparse_parameters(self) -> list[nn.Parameter]:
        """Those whose gradients hold touched rows alone: they are for a row optimiser."""
        return [layer.weight for layer in self.layers if isinstance(layer, FeatureBag)]

    def _matrix(self, inputs: dict[str, Tensor]) -> Tensor:
        """A batch [B, F] of few features."""
        columns, starts = inputs["columns"], inputs["starts"]
        # Nothing here waits for a GPU: how many there are is known without a look at the numbers.
        number = F.pad(starts[1:], (0, 1), value=len(columns)) - starts
        row = torch.arange(len(starts), device=starts.device).repeat_interleave(number, output_size=len(columns))
        matrix = inputs["values"].new_zeros(len(starts), self.num_features)
        return matrix.index_put_((row, columns), inputs["values"], accumulate=True)
