"""The paper's experiments run, at a scale too small for most verdicts."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from manyclass.lab.cells import Cells
from manyclass.lab.experiment import Lab, Scale
from manyclass.lab.paper import EXPERIMENTS, reproduce
from manyclass.lab.paper.curves import Curves, _first_below
from manyclass.lab.paper.rates import LEARNING_RATES, Sweep
from manyclass.lab.runner import CellRunner
from manyclass.lab.spread import Spread, band
from tests.browser import CHROMIUM, browse

TINY = Scale(seeds=2, iterations=24, short=24, sweep_seeds=1, draws=20)
CLAIMS = {
    "bernoulli-exponent",
    "cost-fifty-fold",
    "normalisation-least-bias",
    "importance-like-bernoulli",
    "margin-log-c-minus-1",
    "margin-one-worse",
    "nce-fixed-z-poor",
    "negative-sampling-poor",
    "signs-mostly-right",
    "gamma-bounded",
    "variance-footnote",
    "taylor-bias",
}


def results(folder):
    """Return a run's results without its times."""
    found = json.loads((folder / "results.json").read_text())
    assert found.pop("time")["seconds"] >= 0
    return found


def test_all_experiments_run_and_write_their_results(tmp_path):
    first = reproduce(tmp_path / "a", scale=TINY, jobs=2)
    found = results(tmp_path / "a")
    ids = [claim["id"] for claim in found["claims"]]
    assert set(ids) >= CLAIMS
    assert len(set(ids)) == len(ids)
    for claim in found["claims"]:
        assert {"id", "statement", "measured", "holds"} <= claim.keys()
        assert isinstance(claim["holds"], bool)
        assert claim["holds"] or claim["reason"] or claim["id"] not in {"variance-footnote", "taylor-bias"}
    verdicts = {claim["id"]: claim["holds"] for claim in found["claims"]}
    # These verdicts do not depend on the length of training.
    assert verdicts["bernoulli-exponent"]
    assert verdicts["cost-fifty-fold"]
    assert verdicts["gamma-bounded"]
    assert not verdicts["variance-footnote"]
    page = first.report.read_text()
    assert all(name in page for name in ids)
    for name in EXPERIMENTS:
        header, *rows = (tmp_path / "a" / f"{name}.csv").read_text().splitlines()
        assert {"seed", "manyclass", "torch"} <= set(header.split(","))
        assert rows
    if CHROMIUM is not None:
        document, log = browse(first.report, tmp_path / "profile")
        figures = len(list((tmp_path / "a" / "figures").glob("*.svg")))
        assert f'data-drawn="{figures}"' in document
        assert all(f"<td>{name}</td>" in document for name in ids)
        assert "CONSOLE" not in log, log


def times_of_cells(folder):
    return {path: path.stat().st_mtime_ns for path in folder.glob("cells/*/*.json")}


def test_a_killed_run_resumes_to_the_same_results(tmp_path):
    program = (
        "from pathlib import Path\n"
        "from manyclass.lab.experiment import Scale\n"
        "from manyclass.lab.paper import reproduce\n"
        "if __name__ == '__main__':\n"
        f"    reproduce(Path({str(tmp_path / 'killed')!r}), scale={TINY!r}, only=['signs'], jobs=1)\n"
    )
    script = tmp_path / "run.py"
    script.write_text(program)
    process = subprocess.Popen([sys.executable, str(script)], start_new_session=True)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and sum(1 for _ in tmp_path.glob("killed/cells/*/*.json")) < 3:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    kept = times_of_cells(tmp_path / "killed")
    assert len(kept) >= 3
    assert not (tmp_path / "killed" / "results.json").exists()
    reproduce(tmp_path / "killed", scale=TINY, only=["signs"], jobs=1)
    reproduce(tmp_path / "whole", scale=TINY, only=["signs"], jobs=2)
    assert results(tmp_path / "killed") == results(tmp_path / "whole")
    assert kept.items() <= times_of_cells(tmp_path / "killed").items()
    # A further run computes no cell and changes nothing.
    found, cells = results(tmp_path / "whole"), times_of_cells(tmp_path / "whole")
    reproduce(tmp_path / "whole", scale=TINY, only=["signs"], jobs=2)
    assert times_of_cells(tmp_path / "whole") == cells
    assert results(tmp_path / "whole") == found


def test_a_changed_setting_recomputes_only_the_cells_it_affects(tmp_path):
    progress = []
    with Cells(tmp_path, jobs=2) as cells:
        lab = Lab(TINY, 0, CellRunner(cells, lambda name, done, total: progress.append((done, total))))
        lab.runner.start("signs")
        EXPERIMENTS["signs"](lab)
        before = set(tmp_path.rglob("*.json"))
        # Only the gradients have a further seed; the sweep still has one.
        more = Lab(Scale(**{**vars(TINY), "seeds": 3}), 0, CellRunner(cells))
        more.runner.start("signs")
        EXPERIMENTS["signs"](more)
    assert len(set(tmp_path.rglob("*.json")) - before) == 1
    assert progress[-1][0] == progress[-1][1]


def test_the_best_rate_has_the_highest_mean_and_never_diverges():
    nan = float("nan")
    sweep = Sweep(
        {
            "a": [-3.0, -1.0, nan, *[-9.0] * (len(LEARNING_RATES) - 3)],
            "b": [-1.0, -2.0, 0.0, *[-9.0] * (len(LEARNING_RATES) - 3)],
        }
    )
    assert sweep.best == LEARNING_RATES[1]


def test_iterations_are_counted_to_the_first_crossing():
    assert _first_below([0, 10, 20, 30], [1.0, 0.5, 0.0, 0.5], 0.25) == 15
    assert str(_first_below([0, 10], [1.0, 0.5], 0.25)) == "nan"
    runs = {
        "exact": [{"bias_true": [-6.0, -7.0, -7.0], "bias_exact": [None, None, None]}],
        "other": [{"bias_true": [-6.0, -6.5, -7.0], "bias_exact": [None, -9.0, -11.0]}],
    }
    curves = Curves([0], [0, 10, 20], {"exact": 1.0, "other": 1.0}, runs)
    assert Scale.points(250) == [*range(0, 201, 20), 250]
    assert curves.iterations("other") == [pytest.approx(19.0)]
    assert curves.mean_bias("other") == [-10.0]


def test_a_spread_skips_missing_values_and_a_band_leaves_a_gap():
    assert Spread.of([1.0, None, 3.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([-1.5, -1.5]).text(".1f") == "−1.5 (−1.5 to −1.5)"
    assert Spread.of([None]).text() == "–"
    curve = band("a", [1, 2], [[1.0, None], [3.0, 1.0]])
    assert curve.y[0] == 2.0
    assert str(curve.y[1]) == "nan"
