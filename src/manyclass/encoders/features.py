"""An encoder of rows of features, dense or sparse."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyclass import _check, _ranks

MOST_FULL_FEATURES = 2048  # sparse features up to which a class has a weight for each
DEFAULT_RANK = 256

Inputs = Tensor | dict[str, Tensor]


class FeatureBag(nn.Module):
    """A sum Σ_f x(f) v(f) + b [B, dim] over the features of sparse rows; gradients hold the rows of present features.

    Args:
        num_features: F.
        dim: dimension of the vectors v.
        bias: whether to add b.
    """

    bias: nn.Parameter | None

    def __init__(self, num_features: int, dim: int, *, bias: bool) -> None:
        super().__init__()
        # The scale matches nn.Linear with a few dozen inputs, as many as features are present.
        self.weight = nn.Parameter(torch.empty(num_features, dim).uniform_(-1, 1) / math.sqrt(min(num_features, 64)))
        self.register_parameter("bias", nn.Parameter(torch.zeros(dim)) if bias else None)

    def forward(self, inputs: Inputs) -> Tensor:
        """Return the sums [B, dim]."""
        if isinstance(inputs, Tensor):
            hidden = inputs.to(self.weight.dtype) @ self.weight
        else:
            _ranks.check_prepared(self)
            values = inputs["values"].to(self.weight.dtype)
            hidden = F.embedding_bag(
                inputs["columns"], self.weight, inputs["starts"], mode="sum", sparse=True, per_sample_weights=values
            )
        return hidden if self.bias is None else hidden + self.bias

    def sparse_parameters(self) -> list[nn.Parameter]:
        """Return the parameter whose gradient is sparse if inputs are."""
        return [self.weight]


class FeatureEncoder(nn.Module):
    """An encoder of rows of features: the row itself, a linear projection of it, or the output of a network.

    Args:
        num_features: F.
        sparse: whether inputs are mostly `{"columns", "starts", "values"}`, not matrices [B, F]; both are accepted.
        rank: project linearly to this many dimensions. None: 256 if inputs are sparse and F is above 2,048, so that a
            class has a weight per dimension instead of per feature; else no projection.
        hidden_layers: widths of a network, each layer followed by a ReLU.

    Attributes:
        dim: dimension of the vectors.
    """

    def __init__(
        self, num_features: int, *, sparse: bool, rank: int | None = None, hidden_layers: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self.num_features = _check.integer("num_features", num_features, 1)
        widths = [_check.integer("hidden_layers", width, 1) for width in hidden_layers]
        if rank is not None:
            _check.integer("rank", rank, 1)
        elif sparse and num_features > MOST_FULL_FEATURES and not widths:
            rank = DEFAULT_RANK
        self.sparse = sparse
        layers: list[nn.Module] = []
        dim = num_features
        for width, has_relu in [*([] if rank is None else [(rank, False)]), *((width, True) for width in widths)]:
            first = not layers
            layers.append(FeatureBag(dim, width, bias=has_relu) if sparse and first else nn.Linear(dim, width))
            layers += [nn.ReLU()] if has_relu else []
            dim = width
        self.layers = nn.Sequential(*layers)
        self.dim = dim

    def forward(self, inputs: Inputs) -> Tensor:
        """Return the vectors [B, dim]."""
        if isinstance(inputs, dict) and not (self.layers and isinstance(self.layers[0], FeatureBag)):
            inputs = self._matrix(inputs)
        return self.layers(inputs)  # type: ignore[no-any-return]

    def sparse_parameters(self) -> list[nn.Parameter]:
        """Return the parameters with sparse gradients, for a row optimiser."""
        return [layer.weight for layer in self.layers if isinstance(layer, FeatureBag)]

    def _matrix(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return sparse inputs as a matrix [B, F]."""
        columns, starts = inputs["columns"], inputs["starts"]
        # The output size is given, so that nothing syncs with a GPU.
        number = F.pad(starts[1:], (0, 1), value=len(columns)) - starts
        row = torch.arange(len(starts), device=starts.device).repeat_interleave(number, output_size=len(columns))
        matrix = inputs["values"].new_zeros(len(starts), self.num_features)
        return matrix.index_put_((row, columns), inputs["values"], accumulate=True)
