"""Class counts of the benchmarks, which follow Zipf's law like words."""

import lzma
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

DATA = Path(os.environ.get("MANYCLASS_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))


def zipf_counts(num_classes: int) -> tuple[Tensor, str]:
    """Return word counts of the One Billion Word corpus, extrapolated by the power law of their tail, and their source.

    Without the corpus file all counts follow a power law.
    """
    path = DATA / "lm1b-counts" / "counts.i32.xz"
    counts = torch.empty(num_classes, dtype=torch.float64)
    if path.exists():
        with lzma.open(path) as file:
            real = np.sort(np.frombuffer(file.read(), dtype="<i4"))[::-1].astype(np.float64)
    else:
        real = 3.6e7 / (np.arange(1000) + 2.0)
    n = min(len(real), num_classes)
    counts[:n] = torch.from_numpy(real[:n].copy())
    if num_classes > n:
        # Fit the slope of log count against log rank over the last half of the ranks.
        slope = np.log(real[n - 1] / real[n // 2 - 1]) / np.log(n / (n // 2))
        rank = torch.arange(n + 1, num_classes + 1, dtype=torch.float64)
        counts[n:] = rank.div_(n).pow_(float(slope)).mul_(float(real[n - 1]))
    return counts, "lm1b" if path.exists() else "power law"
