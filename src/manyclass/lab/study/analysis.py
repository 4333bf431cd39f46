"""Numbers and sentences derived from the measurements of a study."""

import math
from typing import Any

import numpy as np

from manyclass.lab.spread import format_number
from manyclass.lab.study.designs import BASELINE_DESIGN, DEFAULT_DESIGN, PAPER_DESIGN, SYSTEMATIC_DESIGN

COMPARED_K = 256


class Analysis:
    """Means over seeds of a study's results, and sentences that summarise them.

    Args:
        results: the content of results.json.
    """

    def __init__(self, results: dict[str, Any]) -> None:
        self.results = results
        self.designs: list[str] = results["settings"]["designs"]
        self.ks: list[int] = sorted({row["k"] for row in results["errors"]})
        self._times = {(row["design"], row["k"]): row["step_ms"] + row["rebuild_ms"] for row in results["times"]}

    def measured_ks(self, design: str) -> list[int]:
        """Return the values of k at which a design was measured."""
        return [k for k in self.ks if (design, k) in self._times]

    def error(self, design: str, k: int, measure: str = "rmse_log_z") -> float:
        """Return an error measure of a design, mean over seeds."""
        rows = [row for row in self.results["errors"] if row["design"] == design and row["k"] == k]
        return float(np.mean([row[measure] for row in rows]))

    def milliseconds(self, design: str, k: int) -> float:
        """Return the milliseconds per step, periodic rebuilds included in proportion."""
        return float(self._times[design, k])

    def error_at(self, design: str, milliseconds: float) -> float | None:
        """Return a design's error at a step time, by log-log interpolation; None outside the times measured."""
        points = sorted((self.milliseconds(design, k), self.error(design, k)) for k in self.measured_ks(design))
        x, y = (np.log([point[i] for point in points]) for i in (0, 1))
        at = math.log(milliseconds)
        if at > x[-1] + 1e-9 or at < x[0] - 1e-9:
            return None
        # The error never grows with k, so the running minimum removes artefacts of noisy times.
        return float(np.exp(np.interp(at, x, np.minimum.accumulate(y))))

    @property
    def middle_k(self) -> int:
        """The k at which designs are compared: 256, or the nearest one measured."""
        return min(self.ks, key=lambda k: abs(math.log(k / COMPARED_K)))

    def most_accurate(self) -> str:
        """Return the design with the lowest error at `middle_k`."""
        return min(self.designs, key=lambda design: self.error(design, self.middle_k))

    def best_at_time(self, milliseconds: float) -> tuple[str, float] | None:
        """Return the design with the lowest error at a step time, and that error; None if no design covers it."""
        found = {design: self.error_at(design, milliseconds) for design in self.designs}
        known = {design: error for design, error in found.items() if error is not None}
        if not known:
            return None
        best = min(known, key=known.__getitem__)
        return best, known[best]

    def curves(self, design: str, k: int) -> list[dict[str, Any]]:
        """Return the training curves of a design, one per seed."""
        return [
            row for row in self.results["curves"] if row["design"] == design and (row["k"] == k or design == "exact")
        ]

    def trained(self) -> list[tuple[str, int]]:
        """Return every design and k that was trained, exact training first."""
        found = dict.fromkeys((row["design"], row["k"]) for row in self.results["curves"])
        return sorted(found, key=lambda pair: (pair[0] != "exact", pair[1]))

    def perplexity(self, design: str, k: int) -> float:
        """Return the final exact held-out perplexity, from the mean loss over seeds."""
        return math.exp(float(np.mean([row["loss"][-1] for row in self.curves(design, k)])))

    def seconds(self, design: str, k: int) -> float:
        """Return the training seconds, mean over seeds."""
        return float(np.mean([row["train_seconds"][-1] for row in self.curves(design, k)]))

    def training_rows(self) -> list[dict[str, Any]]:
        """Return one row per evaluation."""
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
        """Return sentences that summarise the study."""
        found = [self._error_sentence(), *self._time_sentences(), self._training_sentence()]
        return [sentence for sentence in found if sentence]

    def _error_sentence(self) -> str:
        k, best = self.middle_k, self.most_accurate()
        names = {BASELINE_DESIGN: "importance sampling's", PAPER_DESIGN: "the paper's Bernoulli sampling's"}
        ratios = [
            f"{self.error(best, k) / self.error(design, k):.2f} of {name}"
            for design, name in names.items()
            if design in self.designs and design != best
        ]
        text = f"{self.error(best, k):.3f} is the lowest error of log Z̃ with {k} classes scored, by {best!r}"
        return text + (f": {' and '.join(ratios)}." if ratios else ".")

    def _time_sentences(self) -> list[str]:
        if SYSTEMATIC_DESIGN not in self.designs:
            return []
        found = []
        if DEFAULT_DESIGN in self.designs:
            parts = []
            for k in self.ks:
                time = self.milliseconds(DEFAULT_DESIGN, k)
                plain = self.error_at(SYSTEMATIC_DESIGN, time)
                if plain is not None:
                    parts.append(f"{self.error(DEFAULT_DESIGN, k):.3f} and {plain:.3f} at {time:.2f} ms (k = {k:,})")
            if parts:
                names = f"{DEFAULT_DESIGN!r} and of {SYSTEMATIC_DESIGN!r}"
                found.append(f"Errors of {names} at the step time of the former: {'; '.join(parts)}.")
        winners = [
            f"{best[0]!r} at {time:.2f} ms"
            for time in (self.milliseconds(SYSTEMATIC_DESIGN, k) for k in self.ks)
            if (best := self.best_at_time(time))
        ]
        ks = ", ".join(f"{k:,}" for k in self.ks)
        times = f"at the step time of {SYSTEMATIC_DESIGN!r} with k = {ks}"
        return [*found, f"The lowest error {times} has: {', '.join(winners)}."]

    def _training_sentence(self) -> str:
        exact = self.perplexity("exact", 0)
        k = self.results["settings"]["k"]
        designs = [design for design, size in self.trained() if size == k and design != "exact"]
        best = min(designs, key=lambda design: self.perplexity(design, k))
        compared = [design for design in (BASELINE_DESIGN, PAPER_DESIGN) if design in designs]
        others = [f"{design!r} {self.perplexity(design, k):.1f}" for design in compared]
        least, epochs = self.perplexity(best, k), self.results["settings"]["epochs"]
        text = (
            f"{least:.1f} is the lowest held-out perplexity after {epochs} epochs with k = {k}, by {best!r}, "
            f"{format_number(100 * (least / exact - 1), '+.2f')} % from exact training's {exact:.1f}"
        )
        return text + (f"; {', '.join(others)}." if others else ".")
