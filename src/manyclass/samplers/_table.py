"""Masses of C classes as a cumulative sum, searched in a few local steps."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

_CHUNK = 1 << 24


class MassTable(nn.Module):
    """Class c owns the interval [start(c), end(c)) of the line [0, total); its mass is the interval's length.

    Masses are read back as differences of the stored sum, so a class is drawn with exactly the probability that
    its weight is later divided by, whatever rounding did to the sum. A guide table holds, for each of C equal
    stretches of the line, a class at or before its first one: the binary search that follows is a few steps long
    and stays local, where one over the whole sum would miss the cache at each of its 27 steps for 10⁸ classes.

    Args:
        mass: float64 [C], finite and not negative. A class of mass 0 is never located.
        name: what the caller's user knows the masses as, for the error.

    Raises:
        ValueError: a mass so small beside the others that their sum cannot hold it.
    """

    _cumulative_bits: Tensor
    _guide: Tensor

    def __init__(self, mass: Tensor, *, name: str = "weights") -> None:
        super().__init__()
        self.register_buffer("_cumulative_bits", torch.empty(0, dtype=torch.int64))
        self.register_buffer("_guide", torch.empty(0, dtype=torch.int32), persistent=False)
        self.fill(mass, name=name)
        self.register_load_state_dict_post_hook(lambda table, _: table._index())

    def fill(self, mass: Tensor, *, name: str = "weights") -> None:
        """Build the table anew."""
        cumulative = mass.new_zeros(len(mass) + 1)
        torch.cumsum(mass, 0, out=cumulative[1:])
        if mass.device.type != "cpu":
            # A parallel sum may round a later entry below an earlier one.
            cumulative = cumulative.cummax(0).values
        for start in range(0, len(mass), _CHUNK):
            part, ends = mass[start : start + _CHUNK], cumulative[start : start + _CHUNK + 1]
            lost = (part > 0) & (ends[1:] == ends[:-1])
            if lost.any():
                c = start + int(lost.nonzero()[0])
                raise ValueError(
                    f"`{name}` must not span more than 15 orders of magnitude, got {mass[c].item():g} at position {c}, "
                    f"which is lost beside a total of {cumulative[-1].item():g}"
                )
        # As int64 the bits are safe from `.half()` and `.to(dtype)`, which convert every floating buffer of a model.
        self._cumulative_bits = cumulative.view(torch.int64)
        self._index()

    def _index(self) -> None:
        """Derive the guide and the constants of the search. The only place that waits for the device."""
        cumulative = self._cumulative
        self.num_classes = n = len(cumulative) - 1
        self.total = float(cumulative[-1])
        if self.total == 0:
            self._scale, self._last, self._steps = 0.0, 0.0, 0
            return
        self._scale = n / self.total
        self._last = math.nextafter(self.total, 0.0)
        # Stretches are told by the same rounded product as in `locate`, so that no position falls between two.
        stretch = (cumulative[:-1] * self._scale).floor_()
        guide = torch.empty(n + 2, dtype=torch.int32 if n < 2**31 else torch.int64, device=cumulative.device)
        for start in range(0, n + 2, _CHUNK):
            part = guide[start : start + _CHUNK]
            firsts = torch.arange(start, start + len(part), dtype=torch.float64, device=cumulative.device)
            part.copy_(torch.searchsorted(stretch, firsts).sub_(1).clamp_(min=0))
        self._guide = guide
        widest = max(int((part[1:] - part[:-1]).max()) for part in _overlapping(guide))
        self._steps = widest.bit_length()

    @property
    def _cumulative(self) -> Tensor:
        return self._cumulative_bits.view(torch.float64)

    def start(self, ids: Tensor) -> Tensor:
        return self._cumulative.take(ids)

    def end(self, ids: Tensor) -> Tensor:
        return self._cumulative.take(ids + 1)

    def mass(self, ids: Tensor) -> Tensor:
        return self.end(ids) - self.start(ids)

    def locate(self, position: Tensor) -> Tensor:
        """int64 ids of the classes that own these positions, float64 of any shape in [0, total]."""
        position = position.clamp(max=self._last)
        ids = self._guide.take((position * self._scale).long()).long()
        cumulative, last = self._cumulative, self.num_classes - 1
        for step in reversed(range(self._steps)):
            probe = (ids + (1 << step)).clamp_(max=last)
            ids = torch.where(cumulative.take(probe) <= position, probe, ids)
        return ids

    @property
    def device(self) -> torch.device:
        return self._cumulative_bits.device

    def parts(self) -> Iterator[Tensor]:
        """The masses of all classes, a stretch at a time."""
        cumulative = self._cumulative
        for start in range(0, self.num_classes, _CHUNK):
            yield cumulative[start : start + _CHUNK + 1].diff()


def _overlapping(guide: Tensor) -> list[Tensor]:
    return [guide[start : start + _CHUNK + 1] for start in range(0, len(guide) - 1, _CHUNK)]
