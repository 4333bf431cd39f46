"""Cross entropy over all classes with its gradient in closed form.

One pass turns the products of a run of classes into exp(s - shift) in place; probabilities are these times
exp(shift - log Z), a factor of each example that the smaller operands of the backward products take. The table is read
where it is: nothing of size [C, D] is made but its gradient. Probabilities that are kept are one run; if they are
computed again, runs are small.
"""

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from manyclass.kernels import cpu, triton
from manyclass.kernels.eager import at_least_float32, eager_cross_entropy

RUN_SCORES = {"cpu": 1 << 21, "cuda": 1 << 25}  # of a run that is not kept, all examples together
MIN_RUN_CLASSES = 1 << 8  # a product with fewer columns is slow


def closed_form_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, exclude: Tensor | None, *, keep: bool
) -> Tensor:
    """Return the losses [B] of plain tensors.

    Args:
        hidden: [B, D].
        weight: the table [C, D].
        bias: [C], or None.
        target: int64 [B].
        exclude: int64 [B, E], padded with -1, or None.
        keep: whether the probabilities [B, C] are kept for the backward pass, or computed again.
    """
    differentiated = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, weight, bias))
    loss: Tensor = _CrossEntropy.apply(hidden, weight, bias, target, exclude, keep and differentiated)  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        exclude: Tensor | None,
        keep: bool,
    ) -> Tensor:
        runs = _Runs(hidden, weight, bias, target, exclude, keep=keep, dtype=product_dtype(hidden))
        # The products have their dtype already, and their sums need a wider one.
        with torch.autocast(hidden.device.type, enabled=False):
            log_z, loss, kept = runs.sum_up()
        ctx.save_for_backward(hidden, weight, bias, target, exclude, log_z, *kept)
        ctx.keep, ctx.dtype = keep, runs.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, exclude, log_z, *kept = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            operands = (hidden, weight, bias, target, exclude)
            return *_differentiable(operands, grad, wanted, ctx.dtype), None, None, None
        runs = _Runs(hidden, weight, bias, target, exclude, keep=ctx.keep, dtype=ctx.dtype)
        runs.kept = kept
        with torch.autocast(hidden.device.type, enabled=False):
            return *runs.pull_back(grad, log_z, wanted), None, None, None


class _Runs:
    """The classes in runs.

    Args:
        hidden, weight, bias, target, exclude: as in `closed_form_cross_entropy`.
        keep: whether the probabilities are kept: then all classes are one run.
        dtype: dtype of the products.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        exclude: Tensor | None,
        *,
        keep: bool,
        dtype: torch.dtype,
    ) -> None:
        self.dtype = dtype
        self.wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.hidden, self.hidden_dtype = hidden.to(dtype).contiguous(), hidden.dtype
        self.weight = weight
        self.bias = None if bias is None else bias.to(self.wide).contiguous()
        self.bias_dtype = None if bias is None else bias.dtype
        self.target = target.contiguous()
        self.exclude = exclude.contiguous() if exclude is not None and exclude.shape[1] else None
        self.batch, self.classes, self.keep = hidden.shape[0], weight.shape[0], keep
        size = max(MIN_RUN_CLASSES, RUN_SCORES[hidden.device.type] // max(1, self.batch))
        self.size = self.classes if keep else min(size, self.classes)
        self.starts = range(0, self.classes, self.size)
        self.kernels = _kernels_for(hidden, weight) if dtype == weight.dtype == self.wide else None
        self.kept: tuple[Tensor, ...] | list[Tensor] = ()
        self._buffer: Tensor | None = None

    def rows(self, start: int) -> Tensor:
        """Return the class vectors of a run, in the dtype of the products: a view if it is the table's."""
        return self.weight[start : start + self.size].to(self.dtype)

    def sum_up(self) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Return log Z [B], the losses [B] and what the backward pass needs of a run that is kept."""
        # The loss of a target outside [0, C) is NaN.
        target_score = self.hidden.new_full((self.batch,), math.nan, dtype=self.wide)
        kept: tuple[Tensor, ...] = ()
        log_sums = []
        for start in self.starts:
            u, shift, log_sum = self._exponentials(start, target_score)
            log_sums.append(log_sum)
            if self.keep:
                kept = self._finish(u, shift - log_sum)
        log_z = log_sums[0] if len(log_sums) == 1 else torch.stack(log_sums).logsumexp(0)
        # Both come from the same products, and rounding is monotonic: a loss is never below 0.
        return log_z, log_z - target_score, kept

    def _exponentials(self, start: int, target_score: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return exp(s - shift) [B, n] of a run, shift [B] and log Σ exp s [B]; note the scores of its targets."""
        if self.kernels is not None:
            u = self._products(start)
            shift, log_sum = u.new_empty(self.batch), u.new_empty(self.batch)
            self._exponentials_(u, start, shift=shift, log_sum=log_sum, target_score=target_score)
            return u, shift, log_sum
        scores = self._scores(start)
        column, inside = self._columns(start, scores.shape[1])
        own = scores.gather(1, column.unsqueeze(1)).squeeze(1)
        target_score.copy_(torch.where(inside, own, target_score))
        most, place = scores.max(1, keepdim=True)
        u = scores.softmax(1)
        # The largest probability is exp(most) / Σ exp s.
        log_sum = (most - u.gather(1, place).log()).squeeze(1)
        if self.exclude is not None or self.bias is not None:
            # An example may exclude all classes of a run, or their biases be -inf.
            empty = most.isneginf()
            u, log_sum = u.masked_fill_(empty, 0.0), torch.where(empty.squeeze(1), -math.inf, log_sum)
        return u, log_sum, log_sum

    def _finish(self, u: Tensor, log_factor: Tensor) -> tuple[Tensor, Tensor]:
        """Return ∂loss/∂s [B, C] up to a factor of each example, in place of exp(s - shift), and this factor [B]."""
        u.scatter_add_(1, self.target.unsqueeze(1), -(-log_factor).exp_().unsqueeze(1))
        # The target's entry is p - 1 only now, so rounding to 16 bits keeps it precise. The gradient of a loss that is
        # scaled for float16 would lose small probabilities, so they are kept in float32.
        return u.to(self.dtype) if self.dtype == torch.bfloat16 else u, log_factor.exp_()

    def pull_back(self, grad: Tensor, log_z: Tensor, wanted: tuple[bool, ...]) -> list[Tensor | None]:
        """Return the gradients of hidden, weight and bias from those of the losses [B]."""
        hidden = self.hidden
        grad_hidden = hidden.new_zeros(hidden.shape, dtype=self.wide) if wanted[0] else None
        grad_weight = torch.empty_like(self.weight, memory_format=torch.contiguous_format) if wanted[1] else None
        grad_bias = None if self.bias is None or not wanted[2] else torch.empty_like(self.bias)
        for start in self.starts:
            part = slice(start, start + self.size)
            gradient, factor = self._score_gradient(start, grad.to(self.wide), log_z)
            if grad_hidden is not None:
                product = (gradient @ self.rows(start)).to(self.wide)
                grad_hidden.addcmul_(product, factor.unsqueeze(1))
            scaled = (hidden * factor.unsqueeze(1)).to(self.dtype)
            if grad_weight is not None and grad_weight.dtype == self.dtype:
                torch.mm(gradient.T, scaled, out=grad_weight[part])
            elif grad_weight is not None:
                grad_weight[part] = gradient.T @ scaled
            if grad_bias is not None:
                grad_bias[part] = gradient.T @ factor.to(self.dtype)
        return [
            None if grad_hidden is None else grad_hidden.to(self.hidden_dtype),
            grad_weight,
            None if grad_bias is None else grad_bias.to(self.bias_dtype),
        ]

    def _score_gradient(self, start: int, grad: Tensor, log_z: Tensor) -> tuple[Tensor, Tensor]:
        """Return ∂loss/∂s [B, n] of a run up to a factor of each example, and this factor [B] times `grad`."""
        if self.keep:
            gradient, factor = self.kept
            factor = grad * factor
        else:
            gradient, factor = self._probabilities(start, log_z), grad
            column, inside = self._columns(start, gradient.shape[1])
            gradient.scatter_add_(1, column.unsqueeze(1), -inside.to(gradient.dtype).unsqueeze(1))
        if self.dtype == torch.float16:
            # Scaled before the cast, as autograd does: small probabilities vanish in float16.
            return (gradient * factor.unsqueeze(1)).half(), torch.ones_like(factor)
        return gradient.to(self.dtype), factor

    def _probabilities(self, start: int, log_z: Tensor) -> Tensor:
        if self.kernels is not None:
            u = self._products(start)
            self._exponentials_(u, start, shift=log_z)
            return u
        return self._scores(start).sub_(log_z.unsqueeze(1)).exp_()

    def _exponentials_(self, u: Tensor, start: int, **sums: Tensor) -> None:
        """Turn the products of a run into exp(s - shift) in place, by a kernel."""
        bias = None if self.bias is None else self.bias[start : start + self.size]
        if self.kernels is cpu:
            cpu.exponentials_(u, start, bias=bias, target=self.target, exclude=self.exclude, **sums)
            return
        from manyclass.kernels.triton.exponentials import exponentials_

        self._exclude_(u, start)
        exponentials_(u, start, bias=bias, target=self.target, **sums)

    def _products(self, start: int) -> Tensor:
        """Return the products [B, n] of a run, in the memory of the run before."""
        rows = self.rows(start)
        if self._buffer is None:
            self._buffer = self.hidden.new_empty(self.batch * self.size)
        out = self._buffer[: self.batch * rows.shape[0]].view(self.batch, rows.shape[0])
        return torch.mm(self.hidden, rows.T, out=out)

    def _scores(self, start: int) -> Tensor:
        """Return the scores [B, n] of a run in float32 or better, -inf where an example excludes the class."""
        rows, bias = self.rows(start).T, None if self.bias is None else self.bias[start : start + self.size]
        if bias is not None and bias.dtype == self.dtype:
            scores = torch.addmm(bias, self.hidden, rows)
        else:
            # The bias is added after a product in half precision: it need not be.
            scores = self.hidden @ rows
            scores = at_least_float32(scores) if bias is None else scores + bias
        self._exclude_(scores, start)
        return scores

    def _exclude_(self, scores: Tensor, start: int) -> None:
        """Set the scores [B, n] of a run to -inf where an example excludes the class."""
        if self.exclude is None:
            return
        columns = self.exclude - start
        inside = (columns >= 0) & (columns < scores.shape[1])
        # A minimum with inf changes nothing, so columns of other runs need no mask [B, n].
        bound = torch.where(inside, -math.inf, math.inf).to(scores.dtype)
        scores.scatter_reduce_(1, columns.clamp(0, scores.shape[1] - 1), bound, "amin")

    def _columns(self, start: int, n: int) -> tuple[Tensor, Tensor]:
        """Return the columns [B] of the targets, in [0, n), and a mask [B] of those that are in this run."""
        column = self.target - start
        return column.clamp(0, n - 1), (column >= 0) & (column < n)


def _kernels_for(*tensors: Tensor) -> ModuleType | None:
    """Return the package of kernels that can work on these tensors; None if there is none."""
    return next((room for room in (cpu, triton) if room.is_available(*tensors)), None)


def product_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype of matrix products: autocast's, if it is enabled, but float64 stays float64."""
    device = hidden.device.type
    if hidden.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return hidden.dtype
    return torch.get_autocast_dtype(device)


def _differentiable(
    operands: tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None],
    grad: Tensor,
    wanted: tuple[bool, ...],
    dtype: torch.dtype,
) -> list[Tensor | None]:
    """Return the gradients of hidden, weight and bias by autograd, which can be differentiated again."""
    device = operands[0].device.type
    with torch.autocast(device, dtype, enabled=dtype in (torch.float16, torch.bfloat16)):
        loss = eager_cross_entropy(*operands)
    needed = [x for x, want in zip(operands[:3], wanted, strict=True) if want and x is not None]
    found = iter(torch.autograd.grad(loss, needed, grad, create_graph=True))
    return [next(found) if want else None for want in wanted]
