"""The fastest way to the exact cross entropy on this machine, by measurement."""

import logging
import statistics

import torch
from torch import Tensor

from manyclass.kernels.exact import available_ways, default_way, exact_cross_entropy, is_bounded
from manyclass.kernels.seconds import seconds_of

MAX_TIMED_CLASSES = 1 << 17
MAX_TIMED_SCORES = 1 << 22  # on the CPU, where a large product takes as long for each of its scores as a larger one
MIN_TIMED_EXAMPLES = 256  # the time of each is within a tenth of that in a larger batch; of 128, up to 40 % above
SLOW_ON_CPU = ("linear_cross_entropy",)  # 8 to 30 times as long as the others, and seconds to start, in torch 2.13
TIMED_RUNS = 3
SLOW = 2.0  # times the shortest first run: such a way is not measured again where a first run compiles nothing
MUCH_FASTER = 0.7  # of the time of the way without measurement: on the CPU it is not left for a smaller gain

log = logging.getLogger("manyclass")


def fastest_way(
    hidden: Tensor,
    weight: Tensor,
    *,
    target: Tensor,
    bias: Tensor | None = None,
    exclude: Tensor | None = None,
) -> tuple[str, float]:
    """Measure the ways on these operands; return the fastest and its seconds for a forward and a backward pass.

    On the CPU another way than `default_way` must be much faster, so that the same seed gives the same training.
    A large table is measured on some of its classes, a large batch on the CPU on some of its examples, and the seconds
    are scaled. If the probabilities [B, C] of the whole table are too many to keep, only ways of bounded memory take
    part. It synchronises with the device, and adds nothing to the gradients of the operands. Under autocast it measures
    what autocast computes. The operands are those of `exact_cross_entropy`.
    """
    usual, batch = default_way(hidden, weight), len(hidden)
    classes = min(weight.shape[0], MAX_TIMED_CLASSES)
    if not hidden.is_cuda:
        some = slice(max(MIN_TIMED_EXAMPLES, MAX_TIMED_SCORES // classes))
        hidden, target, exclude = hidden[some], target[some], None if exclude is None else exclude[some]
    target = target % classes
    if exclude is not None:
        exclude = torch.where((exclude < classes) & (exclude != target.unsqueeze(1)), exclude, -1)
    ways = available_ways(hidden, weight, exclude=exclude)
    if not hidden.is_cuda:
        ways = tuple(way for way in ways if way not in SLOW_ON_CPU)
    if usual == "chunked":
        ways = tuple(filter(is_bounded, ways))
    hidden, weight_part = (x.detach().requires_grad_() for x in (hidden, weight[:classes]))
    bias = None if bias is None else bias[:classes].detach().requires_grad_()
    wanted = [hidden, weight_part] if bias is None else [hidden, weight_part, bias]

    def measure(way: str) -> float:
        def run() -> None:
            with torch.enable_grad():
                loss = exact_cross_entropy(hidden, weight_part, target=target, bias=bias, exclude=exclude, way=way)
                torch.autograd.grad(loss.mean(), wanted)

        return seconds_of(run, hidden.device)

    seconds: dict[str, list[float]] = {}
    for way in ways:
        try:
            # The first run allocates memory and may compile.
            seconds[way] = [measure(way)]
        except Exception as error:
            # A package that is installed need not support this GPU or this version of torch.
            log.info("the exact loss is not computed by %r, which failed here: %s", way, error)
    if not hidden.is_cuda:
        # A step of few classes takes a hundredth of an exact one, so slow ways would make the first step very long.
        shortest = min(first for (first,) in seconds.values())
        seconds = {way: times for way, times in seconds.items() if times[0] <= SLOW * shortest or way == usual}
    # All take turns, so that changes of the machine's speed affect all alike.
    for _ in range(TIMED_RUNS):
        for way, times in seconds.items():
            times.append(measure(way))
    medians = {way: statistics.median(times[1:]) for way, times in seconds.items()}
    best = min(medians, key=lambda way: medians[way])
    # Ways differ in rounding, and on the CPU the same seed must give the same training: noise must not choose a way.
    if not hidden.is_cuda and usual in medians and medians[best] > MUCH_FASTER * medians[usual]:
        best = usual
    return best, medians[best] * weight.shape[0] / classes * batch / max(1, len(hidden))
