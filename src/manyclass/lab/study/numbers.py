"""What follows from what was measured."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from manyclass.lab.spread import shown
from manyclass.lab.study.designs import BASELINE, CHOSEN, PAPER, PLAIN

K = 256


class Numbers:
    """The results of a study, means over seeds, and what they say.

    Args:
        results: as `study` writes them.
    """

    def __init__(self, results: dict[str, Any]) -> None:
        self.results = results
        self.designs: list[str] = results["settings"]["designs"]
        self.ks: list[int] = sorted({row["k"] for row in results["errors"]})
        self._times = {(row["design"], row["k"]): row["step_ms"] + row["upkeep_ms"] for row in results["times"]}

    def sizes(self, design: str) -> list[int]:
        """The numbers of classes that a design was measured with."""
        return [k for k in self.ks if (design, k) in self._times]

    def error(self, design: str, k: int, measure: str = "rmse_log_z") -> float:
        """A measure of a design's error, mean over seeds."""
        rows = [row for row in self.results["errors"] if row["design"] == design and row["k"] == k]
        return float(np.mean([row[measure] for row in rows]))

    def milliseconds(self, design: str, k: int) -> float:
        """Of a step, with its share of what is renewed now and then."""
        return float(self._times[design, k])

    def error_at(self, design: str, milliseconds: float) -> float | None:
        """A design's error with the k that fits a time: between those measured, or None outside of them.

        Straight lines between the logarithms of both.
        """
        points = sorted((self.milliseconds(design, k), self.error(design, k)) for k in self.sizes(design))
        x, y = (np.log([point[i] for point in points]) for i in (0, 1))
        at = math.log(milliseconds)
        if at > x[-1] + 1e-9 or at < x[0] - 1e-9:
            return None
        # More classes never have a greater error: what a noisy clock says of their times is smoothed by that.
        return float(np.exp(np.interp(at, x, np.minimum.accumulate(y))))

    @property
    def middle_k(self) -> int:
        """The k that designs are compared at: 256, or the nearest one that was measured."""
        return min(self.ks, key=lambda k: abs(math.log(k / K)))

    def best_error(self) -> str:
        """The design of the least error at that k."""
        return min(self.designs, key=lambda design: self.error(design, self.middle_k))

    def best_at_time(self, milliseconds: float) -> tuple[str, float] | None:
        """The design of the least error among those that some k of theirs fits a time, and that error."""
        found = {design: self.error_at(design, milliseconds) for design in self.designs}
        known = {design: error for design, error in found.items() if error is not None}
        if not known:
            return None
        best = min(known, key=known.__getitem__)
        return best, known[best]

    def curves(self, design: str, k: int) -> list[dict[str, Any]]:
        """The trainings of a design, one for each seed."""
        return [
            row for row in self.results["curves"] if row["design"] == design and (row["k"] == k or design == "exact")
        ]

    def trained(self) -> list[tuple[str, int]]:
        """Every design and k that was trained, exact training first."""
        found = dict.fromkeys((row["design"], row["k"]) for row in self.results["curves"])
        return sorted(found, key=lambda pair: (pair[0] != "exact", pair[1]))

    def perplexity(self, design: str, k: int) -> float:
        """Exact and held out, at the end: of the mean loss over seeds."""
        return math.exp(float(np.mean([row["loss"][-1] for row in self.curves(design, k)])))

    def seconds(self, design: str, k: int) -> float:
        """Of training, mean over seeds."""
        return float(np.mean([row["train_seconds"][-1] for row in self.curves(design, k)]))

    def training_rows(self) -> list[dict[str, Any]]:
        """A row for each evaluation."""
        return [
            {
                "design": row["design"],
                "k": row["k"],
                "rate": row["rate"],
                "seed": row["seed"],
                "step": step,
                "examples": examples,
                "train_seconds": round(seconds, 3),
                "perplexity": round(math.exp(loss), 3),
            }
            for row in self.results["curves"]
            for step, examples, seconds, loss in zip(
                row["step"], row["examples"], row["train_seconds"], row["loss"], strict=True
            )
        ]

    def summary(self) -> list[str]:
        """What it says, in sentences."""
        found = [self._of_errors(), *self._of_times(), self._of_training()]
        return [sentence for sentence in found if sentence]

    def _of_errors(self) -> str:
        k, best = self.middle_k, self.best_error()
        beside = [
            f"{self.error(best, k) / self.error(design, k):.2f} of {what}"
            for design, what in ((BASELINE, "importance sampling's"), (PAPER, "the paper's Bernoulli sampling's"))
            if design in self.designs and design != best
        ]
        text = f"With {k} classes the least error of log Z̃ is {self.error(best, k):.3f}, of {best!r}"
        return text + (f": {' and '.join(beside)}." if beside else ".")

    def _of_times(self) -> list[str]:
        if PLAIN not in self.designs:
            return []
        found = []
        if CHOSEN in self.designs:
            parts = []
            for k in self.ks:
                time = self.milliseconds(CHOSEN, k)
                plain = self.error_at(PLAIN, time)
                if plain is not None:
                    parts.append(f"{self.error(CHOSEN, k):.3f} and {plain:.3f} in {time:.2f} ms (its k = {k:,})")
            if parts:
                found.append(f"Errors of {CHOSEN!r} and of {PLAIN!r} at equal time: {'; '.join(parts)}.")
        winners = [
            f"{best[0]!r} in {time:.2f} ms"
            for time in (self.milliseconds(PLAIN, k) for k in self.ks)
            if (best := self.best_at_time(time))
        ]
        return [*found, f"The least error at the time of {PLAIN!r} with k = {_listed(self.ks)}: {', '.join(winners)}."]

    def _of_training(self) -> str:
        exact = self.perplexity("exact", 0)
        k = self.results["settings"]["k"]
        designs = [design for design, size in self.trained() if size == k and design != "exact"]
        best = min(designs, key=lambda design: self.perplexity(design, k))
        others = [f"{design!r} {self.perplexity(design, k):.1f}" for design in (BASELINE, PAPER) if design in designs]
        least = self.perplexity(best, k)
        text = (
            f"Trained with k = {k} for {self.results['settings']['epochs']} epochs {best!r} ends at a held-out "
            f"perplexity of {least:.1f}, {shown(100 * (least / exact - 1), '+.2f')} % from exact training's {exact:.1f}"
        )
        return text + (f"; {', '.join(others)}." if others else ".")


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(f"{number:,}" for number in numbers)
