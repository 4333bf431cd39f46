"""The cheapest design whose error of log Z̃ is small on the data and the device at hand."""

import copy
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import astuple, fields, replace

import torch
from torch import Tensor, nn

from manyclass import _check, _ranks, defaults
from manyclass._plain_state import load_state, move_state, save_state, saved_vector
from manyclass._shard import Shard
from manyclass.candidates import Candidates
from manyclass.counts import ClassCounts
from manyclass.kernels import EXACT_WAYS
from manyclass.samplers._sampler import Observation, StepClock, checked_draw, replayable
from manyclass.samplers.budget import TOO_HIGH, TOO_LOW
from manyclass.samplers.costs import EXACT, SHARED, TAILORED, Costs, checked_costs, milliseconds
from manyclass.samplers.error_probe import POOLED_PROBES, STATE_LENGTH, WARNED_ERROR, ErrorProbe
from manyclass.samplers.exhaustive import Exhaustive
from manyclass.samplers.learned import Learned
from manyclass.samplers.tailored import Tailored

log = logging.getLogger("manyclass")

DESIGNS = (EXACT, SHARED, TAILORED)
CLASSES_PER_EXAMPLE = 2  # that shares a draw, at least: fewer would add to the gradient's noise
# The error falls with this power of k.
POWERS = {SHARED: 0.5, TAILORED: 1.0}
TRIALS = 4
ALARM_PROBES = 2  # that suffice if their error is twice the highest
MAX_EXACT_COST = 1.25  # times that of the shared design: up to there no draw is worth its error
CHEAPER = 0.9  # of the present cost: no design is left for a smaller gain
LOWER = 2 / 3  # of the chosen error: a cheaper design must keep below that
MAX_DOUBLINGS = 8  # of the probes after which a small error is looked at


class Automatic(nn.Module):
    """A choice, made and reviewed in training, among three designs: the cheapest with a small error of log Z̃.

    The designs are exact (`Exhaustive`), shared (`Learned`: one set of probabilities for all batches) and tailored
    (`Tailored`: probabilities made for each batch). The first training step measures the time of each before it draws,
    but for compiled code, reentrant checkpoints and passes under `no_sync()`, which draw until the first measurement.
    It starts with the shared design, or with the exact one if that is cheaper. When the error over eight probes is
    above 4/3 of `rmse_log_z`, or over two probes above 8/3 of it, it doubles k, or takes the cheapest design that is
    accurate enough; below 7/15 of it, it halves k or takes a cheaper design. Each rise doubles the number of probes
    that a fall awaits: the error has heavy tails, and k would go up and down for ever. Each decision is logged and kept
    in `decisions`. The error is never looked at with an objective that has no Z̃.

    Args:
        counts: ClassCounts, or C positive counts; more classes than `least`.
        rmse_log_z: the error of log Z̃ to keep below.
        least: the least k, 1,024 by default, where it starts. At most half as many examples share a draw.
        every: training steps between two probes. Default: as few as cost 1 % of the time.
        costs: the seconds of a step by design, as another training measured them: given these, all decisions follow
            from the seed, until a resize. Only `tailored` may be NaN. None: they are measured.

    Raises:
        TypeError: `costs` is not a `Costs`.
        ValueError: there are at most `least` classes, a number is out of range, or one of the costs is missing.

    Example:
        >>> from manyclass import ClassHead
        >>> head = ClassHead(8, 5000, sampler=Automatic(torch.ones(5000)))
        >>> for _ in range(2):
        ...     head(torch.randn(16, 8), torch.arange(16)).backward()
        >>> head.sampler.design in ("exact", "shared"), head.sampler.costs.exact > 0
        (True, True)
    """

    unbiased = True
    renormalises = False
    learns = True
    saved = ("progress",)
    _apply, _save_to_state_dict, _load_from_state_dict = move_state, save_state, load_state

    def __init__(
        self,
        counts: Tensor | ClassCounts,
        rmse_log_z: float = defaults.RMSE_LOG_Z,
        *,
        least: int = defaults.K,
        every: int | None = None,
        costs: Costs | None = None,
    ) -> None:
        super().__init__()
        counts = counts if isinstance(counts, ClassCounts) else ClassCounts(counts)
        self._least = _check.integer("least", least, 1)
        _check.integer("num_classes", counts.num_classes, least + 1)
        self.rmse_log_z = _check.number("rmse_log_z", rmse_log_z, low=0, strict=True)
        # The order by clusters of class vectors lowers the error by a tenth at almost no cost.
        group_size = max(1, least // CLASSES_PER_EXAMPLE)
        self.shared = Learned(counts, least, order="cluster", group_size=group_size)
        self.tailored = Tailored(counts, least, group_size=group_size)
        self.exact = Exhaustive(counts.num_classes)
        self.costs = Costs() if costs is None else checked_costs(costs)
        self.design = SHARED
        # An error that it is about to mend needs no warning.
        self.probe = ErrorProbe(every=every, warns=TOO_HIGH * rmse_log_z > WARNED_ERROR)
        self.decisions: list[str] = []
        # The number of probes at the last look, how often the error was too high, and the design and k that begin with
        # the next step.
        self._probes_at_review = 0
        self._rises = 0
        self._next: tuple[str, int] | None = None
        # True in the first step of a design.
        self._has_begun = False

    @property
    def k(self) -> int:
        """The present number of classes drawn for an example."""
        return self._k(self.design)

    @property
    def least(self) -> int:
        """The least number of classes drawn for an example."""
        return min(self._least, int(self.num_classes))

    def _k(self, design: str) -> int:
        return self.num_classes if design == EXACT else int(getattr(self, design).k)

    @property
    def live(self) -> Exhaustive | Learned | Tailored:
        """The sampler of the present design."""
        found: Exhaustive | Learned | Tailored = getattr(self, self.design)
        return found

    num_classes = property(lambda self: self.shared.num_classes)
    device = property(lambda self: self.shared.device)

    forward = checked_draw

    def draw(
        self, target: Tensor, exclude: Tensor, *, hidden: Tensor | None, generator: torch.Generator | None
    ) -> Candidates:
        """Draw for checked arguments, with the present design."""
        return self.live.draw(target, exclude, hidden=hidden, generator=generator)

    def divide(self, shard: Shard) -> None:
        """Divide the classes of all designs. Costs that are not given follow from the classes scored, not from time."""
        self.shared.divide(shard)
        self.tailored.divide(shard)
        self.exact.divide(shard)

    def attach(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Attach class vectors to the designs that use them."""
        self.shared.attach(weight, bias)
        self.tailored.attach(weight, bias)

    def advance(self) -> None:
        """Begin with the design that the last step has chosen, and count a training step in it."""
        if self._has_begun:
            # A compiled graph takes up a design one step later, and has probed the one before once more.
            self.probe.restart_pool()
        self._has_begun = self._next is not None
        if self._next is not None:
            design, k = self._next
            self._set_k(design, k)
            self.design, self._next = design, None
            self.probe.restart_pool()
        self.live.advance()

    def begin(self, clock: StepClock) -> None:
        """Measure the times before the first draw: where all classes are cheapest, no step draws any.

        Adagrad moves a row that it has never updated by its whole learning rate. If only the classes of a draw moved
        so in the first step, and all others in the second, they would differ for the rest of the training.
        """
        if math.isnan(self.costs.exact):
            self._measure(clock)
        if self.design != EXACT and self._next is None and self._exact_is_cheapest():
            self._take_exact(self.probe.steps + 1)
            self.design, self._next = EXACT, None

    def observe(self, observation: Observation) -> None:
        """Let the designs learn, and look at the pooled error."""
        # A compiled graph takes up a design one step later: until then it may show a draw of all classes.
        if self.live.learns and not observation.candidates.is_exhaustive:
            self.live.observe(observation)
        if math.isnan(self.costs.exact):
            # A compiled graph cannot measure before its first draw.
            self._measure(observation.clock)
        if self._exact_is_cheapest():
            if self.design != EXACT and self._next is None:
                self._take_exact(self.probe.steps)
        elif self._review_is_due():
            self._probes_at_review = self.probe.number
            self._review(observation)

    def is_settled(self, draws: int) -> bool:
        """Return True unless the next step takes another design, measures times, looks at the error or is tailored."""
        if self._next is not None or self._has_begun or math.isnan(self.costs.exact):
            return False
        if self.design != EXACT if self._exact_is_cheapest() else self._review_is_due():
            return False
        return hasattr(self.live, "pinned") and replayable(self.live).is_settled(draws)

    def pinned(self, *, compiled: bool) -> tuple[object, ...]:
        """Return the design, and what it pins."""
        return self.design, *replayable(self.live).pinned(compiled=compiled)

    def _review_is_due(self) -> bool:
        error = self.probe.error
        if error is None or self._next is not None:
            return False
        waited = self.probe.number - self._probes_at_review
        if self.probe.pooled < POOLED_PROBES or waited < POOLED_PROBES:
            return self._alarm() > 0
        if error > TOO_HIGH * self.rmse_log_z:
            return True
        return error < TOO_LOW * self.rmse_log_z and waited >= POOLED_PROBES << min(self._rises, MAX_DOUBLINGS)

    def _alarm(self) -> float:
        """Return the error of the last two probes if it is twice the highest, and else 0.

        Eight probes may span thousands of steps, in which a model that becomes sure of rare classes goes wrong.
        """
        recent = self.probe.recent_error(ALARM_PROBES)
        return recent if recent is not None and recent > 2 * TOO_HIGH * self.rmse_log_z else 0.0

    def _cost(self, design: str, k: int) -> float:
        return self.costs.of(design, k - self.least)

    def _exact_is_cheapest(self) -> bool:
        """Return True if no draw is worth its error, whatever that is: the loss is only a part of the step."""
        return self.costs.exact <= MAX_EXACT_COST * self.costs.shared

    def _review(self, observation: Observation) -> None:
        error = self._alarm() or self.probe.error
        assert error is not None
        present, is_high = self._cost(self.design, self.k), error > self.rmse_log_z
        errors = {self.design: error}
        options: list[tuple[float, str, int, float]] = []
        for design in DESIGNS:
            if design not in errors:
                if not is_high and not self._can_be_cheaper(design):
                    continue
                errors[design] = 0.0 if design == EXACT else self._try(design, observation)
            # Costs of a design that was never tried are measured in that trial.
            bound = self.rmse_log_z * (1.0 if is_high or design == self.design else LOWER)
            for k, predicted in self._options(design, errors[design], is_high=is_high):
                cost = self._cost(design, k)
                if predicted <= bound and (is_high or design == self.design or cost < CHEAPER * present):
                    options.append((cost, design, k, predicted))
                    break
        if not options:
            # Fewer classes than the least cannot be drawn, and no other design is cheaper.
            return
        cost, design, k, predicted = min(options)
        if cost >= self.costs.exact:
            cost, design, k, predicted = self.costs.exact, EXACT, self.num_classes, 0.0
        if design == self.design and design != EXACT:
            # A change by more than a factor of 2 would rest on the power law alone.
            k = min(k, 2 * self.k)
        if (design, k) == (self.design, self.k):
            return
        measured = ", ".join(
            f"{errors[name]:.2g} with {_design_text(name, k)} ({self._shown(self._cost(name, k))})"
            for name, k in ((name, self._k(name)) for name in DESIGNS if name in errors)
        )
        self._rises += is_high
        self._take(design, k, f"the error of log Z̃ is {measured}")

    def _can_be_cheaper(self, design: str) -> bool:
        """Return False if a design is too dear, even at the least k, to leave the present one for it."""
        least = self._cost(design, self.least)
        # Not measured yet, but a draw that is made for its batch takes longer than one that is not.
        least = self.costs.shared if math.isnan(least) else least
        return least < CHEAPER * self._cost(self.design, self.k)

    def _options(self, design: str, error: float, *, is_high: bool) -> Iterator[tuple[int, float]]:
        """Yield numbers of classes in ascending order, and the error to expect of each."""
        if design == EXACT:
            yield self.num_classes, 0.0
            return
        k, most = self._k(design), self.num_classes // 2
        number = self.least if design != self.design else 2 * k if is_high else max(self.least, k // 2)
        while number <= most:
            yield number, error * (k / number) ** POWERS[design]
            number *= 2

    def _try(self, design: str, observation: Observation) -> float:
        """Return the error that a design, which is not the present one, would have in this step."""
        sampler: Learned | Tailored = getattr(self, design)
        if isinstance(sampler, Tailored):
            # A sketch of the present hidden vectors, as it would be if this were the present design.
            sampler.learn(observation)
            sampler.renew_sketch()
        if math.isnan(getattr(self.costs, design)):
            self._measure_one(design, observation.clock)
        squares = [observation.trial(sampler, self.probe.steps + i) for i in range(TRIALS)]
        square = _ranks.mean_over_ranks(math.fsum(square / TRIALS for square in squares), observation.hidden.device)
        return math.sqrt(square) if square >= 0 else math.inf

    def _measure(self, clock: StepClock) -> None:
        """Measure what exact and shared steps take; the tailored design is measured when it is first tried."""
        more = min(4 * self.least, self.num_classes)
        way, seconds = clock.exact()
        exact = self._agreed(seconds, self.num_classes, clock)
        self.exact.way = _way_of_first_rank(way, clock.device)
        # A copy: a training that is given these costs, and measures nothing, must draw the same.
        self.shared.order_if_stale()
        measured = copy.copy(self.shared)
        measured.schedule = copy.copy(measured.schedule)
        measured.set_k(self.least)
        shared = self._agreed(clock.seconds(measured), self.least, clock)
        measured.set_k(more)
        larger = self._agreed(clock.seconds(measured), more, clock)
        per_class = max(0.0, larger - shared) / max(1, more - self.least)
        self.costs = Costs(exact, shared, math.nan, per_class)
        # A sampler that was resized may have reached it already.
        if self.design == TAILORED:
            self._measure_one(TAILORED, clock)

    def _measure_one(self, design: str, clock: StepClock) -> None:
        sampler: Learned | Tailored = getattr(self, design)
        # A sketch scans all classes, at about an eighth of a score for each.
        classes = sampler.k + (self.num_classes / 8 if design == TAILORED else 0)
        seconds = self._agreed(clock.seconds(sampler), classes, clock)
        seconds += self.costs.per_class * (self.least - sampler.k)
        self.costs = replace(self.costs, **{design: max(0.0, seconds)})

    def _agreed(self, seconds: float, classes: float, clock: StepClock) -> float:
        """Return the mean of the seconds that ranks have measured, or without any the number of classes scored."""
        seconds = _ranks.mean_over_ranks(seconds, clock.device)
        return float(classes) if math.isnan(seconds) else seconds

    def _shown(self, seconds: float) -> str:
        """Return a cost as text: processes that divide the classes measure no times, but count classes."""
        divided = self.exact.shard is not None
        return f"the time of {seconds:,.0f} classes" if divided else milliseconds(seconds)

    def _take_exact(self, step: int) -> None:
        """Take the exact design because of the times that were measured in a step."""
        exact, shared = self._shown(self.costs.exact), self._shown(self.costs.shared)
        reason = f"a step takes {exact} with all classes, {shared} with {self.least:,} drawn ones"
        self._take(EXACT, self.num_classes, reason, step=step)

    def _take(self, design: str, k: int, reason: str, *, step: int | None = None) -> None:
        self._next = (design, k)
        step = self.probe.steps if step is None else step
        line = f"step {step:,}: {reason}; from now on {_design_text(design, k)}"
        self.decisions.append(line)
        log.info(line)

    def _set_k(self, design: str, k: int) -> None:
        if design != EXACT and self._k(design) != k:
            getattr(self, design).set_k(k)

    def refresh(self) -> None:
        """Rebuild the tables from the counts."""
        self.shared.refresh()
        self.tailored.refresh()

    def resize(self, num_classes: int) -> None:
        """Resize the counts, and lower k if fewer classes are left."""
        _check.integer("num_classes", num_classes, 1)
        for design in (SHARED, TAILORED):
            self._set_k(design, min(self._k(design), num_classes))
            getattr(self, design).resize(num_classes)
            self._set_k(design, max(self._k(design), self.least))
        self.exact.resize(num_classes)
        # A step with another number of classes takes another time, and has another error.
        self.costs, self._next = Costs(), None
        self.probe.restart_pool()
        self._probes_at_review = self.probe.number

    @property
    def progress(self) -> Tensor:
        """float64: the designs now and next, their k, the last look, the rises, the exact way, costs and the probe."""
        design, k = (self.design, self.k) if self._next is None else self._next
        chosen = [DESIGNS.index(self.design), self._k(SHARED), self._k(TAILORED), DESIGNS.index(design), k]
        costs = [-1.0 if math.isnan(cost) else cost for cost in astuple(self.costs)]
        way = -1 if self.exact.way is None else EXACT_WAYS.index(self.exact.way)
        stage = [self._next is not None, self._has_begun, self._probes_at_review, self._rises, way]
        values = [*chosen, *stage, *costs, *self.probe.state()]
        return torch.tensor(values, dtype=torch.float64, device="cpu")

    def move(self, device: torch.device) -> None:
        """Do nothing: the designs move their tables."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved choice, its costs and the probes so far."""
        length = _CHOICE_LENGTH + len(fields(Costs)) + STATE_LENGTH
        values = saved_vector("progress", state["progress"], torch.float64, length, low=-1.0).tolist()
        if not max(values) < math.inf:
            raise ValueError(f"`progress` must be finite, got {max(values)}")
        design, shared, tailored, next_design, k, *stage = map(int, values[:_CHOICE_LENGTH])
        has_next, has_begun, reviewed, rises, way = stage
        _check.integer("way", way, -1, len(EXACT_WAYS) - 1)
        for index in (design, next_design):
            _check.integer("design", index, 0, len(DESIGNS) - 1)
        for number in (shared, tailored, k):
            _check.integer("k", number, 1, self.num_classes)
        costs, probe = values[_CHOICE_LENGTH:-STATE_LENGTH], values[-STATE_LENGTH:]
        self.probe.load_state(probe)
        # The states of the designs, loaded next, belong to these numbers of classes.
        self._set_k(SHARED, shared)
        self._set_k(TAILORED, tailored)
        self.design, self._probes_at_review, self._rises = DESIGNS[design], max(0, reviewed), max(0, rises)
        self.exact.way = None if way < 0 else EXACT_WAYS[way]
        self._next, self._has_begun = (DESIGNS[next_design], k) if has_next > 0 else None, has_begun > 0
        self.costs = Costs(*(math.nan if cost < 0 else cost for cost in costs))

    def extra_repr(self) -> str:
        """Return the options shown by `repr`."""
        return f"design={self.design!r}, k={self.k}, rmse_log_z={self.rmse_log_z:g}"


_CHOICE_LENGTH = 10


def _way_of_first_rank(way: str | None, device: torch.device) -> str | None:
    """Return the exact way that the first rank has measured: a training is resumed from the state of one rank."""
    index = torch.tensor([-1 if way is None else EXACT_WAYS.index(way)], device=device)
    first = int(_ranks.from_ranks(index)[0][0])
    return None if first < 0 else EXACT_WAYS[first]


def _design_text(design: str, k: int) -> str:
    return "all classes" if design == EXACT else f"the {design} design, k = {k:,}"
