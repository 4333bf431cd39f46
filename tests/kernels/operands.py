"""Operands of the exact loss, and its reference."""

import math

import torch
import torch.nn.functional as F

B, C, D = 9, 700, 5
OWN = ["eager", "closed_form", "chunked"]


def operands(dtype=torch.float64, *, batch=B, bias=True, excluded=0, scale=1.0):
    torch.manual_seed(0)
    hidden = (scale * torch.randn(batch, D, dtype=dtype)).requires_grad_()
    weight = torch.randn(C, D, dtype=dtype).requires_grad_()
    target = torch.randint(C, (batch,))
    exclude = torch.randint(-1, C, (batch, excluded))
    return {
        "hidden": hidden,
        "weight": weight,
        "bias": torch.randn(C, dtype=dtype).requires_grad_() if bias else None,
        "target": target,
        "exclude": exclude.masked_fill(exclude == target.unsqueeze(1), -1) if excluded else None,
    }


def parameters(given):
    return [given[name] for name in ("hidden", "weight", "bias") if given[name] is not None]


def gradients(loss, given, **options):
    upstream = torch.linspace(-1, 2, len(loss), dtype=loss.dtype)
    return torch.autograd.grad(loss, parameters(given), upstream, **options)


def reference(given):
    scores = F.linear(given["hidden"], given["weight"], given["bias"])
    if given["exclude"] is not None:
        hit = (torch.arange(C) == given["exclude"].unsqueeze(2)).any(1)
        scores = scores.masked_fill(hit, -math.inf)
    return F.cross_entropy(scores, given["target"], reduction="none")


def distance(ours, theirs):
    with torch.no_grad():
        return max(float((a - b).abs().max() / (1 + b.abs().max())) for a, b in zip(ours, theirs, strict=True))
