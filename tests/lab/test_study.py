"""The study of sampling designs runs at a small scale."""

import csv
import json
import math

import pytest
import torch

from manyclass.data import Text
from manyclass.errors import UserError
from manyclass.lab.study import StudyScale, redraw, study
from manyclass.lab.study.analysis import Analysis
from manyclass.lab.study.designs import DESIGN_DESCRIPTIONS, DESIGNS
from tests.browser import CHROMIUM, browse

TINY = StudyScale(tokens=4_000, held_out=2_100, epochs=1, seeds=2, ks=(16, 64), draws=2, parts=2)


@pytest.fixture(scope="module")
def text():
    """A text in which each token is mostly followed by its neighbour."""
    generator = torch.Generator().manual_seed(0)
    steps = (torch.rand(8_000, generator=generator) * 3).long().cumsum(0)
    ids = steps % 300
    return Text(ids[:5_000], ids[5_000:], tuple(map(str, range(300))), "steps")


@pytest.fixture(scope="module")
def done(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("study") / "out"
    progress = []
    designs = ["importance", "learned", "clustered, groups of 32"]
    result = study(text, out, scale=TINY, designs=designs, on_progress=lambda *step: progress.append(step))
    return result, progress, designs


def test_every_design_is_explained():
    assert DESIGN_DESCRIPTIONS.keys() == DESIGNS.keys()


def test_it_measures_errors_times_and_trainings_of_every_design(done):
    result, progress, designs = done
    found = json.loads(result.results.read_text())
    assert {(row["design"], row["k"], row["seed"]) for row in found["errors"]} == {
        (design, k, seed) for design in designs for k in TINY.ks for seed in (0, 1)
    }
    assert all(row["rmse_log_z"] > 0 and math.isfinite(row["bias_log_z"]) for row in found["errors"])
    assert {(row["design"], row["k"]) for row in found["times"]} == {(d, k) for d in designs for k in TINY.ks}
    assert all(row["step_ms"] > 0 for row in found["times"])
    assert {row["design"] for row in found["curves"]} == {"exact", *designs}
    # Every training ends below the loss of a uniform guess.
    assert all(row["loss"][-1] < math.log(300) for row in found["curves"])
    assert {name for name, *_ in progress} == {"rates", "exact", "errors", "training", "times"}
    for name in ("errors", "times", "training"):
        with (result.results.parent / f"{name}.csv").open() as file:
            assert list(csv.DictReader(file))


def test_the_summary_names_the_lowest_error_and_compares_with_exact_training(done):
    result, _, _ = done
    assert any("lowest error of log Z̃" in sentence for sentence in result.summary)
    assert any("exact training's" in sentence for sentence in result.summary)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_opens_and_draws(done, tmp_path):
    result, _, _ = done
    assert result.page is not None
    document, log = browse(result.page, tmp_path / "profile")
    assert "CONSOLE" not in log
    assert "error by step time" in document


def test_a_second_run_reuses_all_cells(done, text):
    result, _, designs = done
    before = result.results.read_text()
    again = study(text, result.results.parent, scale=TINY, designs=designs)
    first, second = (json.loads(content) for content in (before, again.results.read_text()))
    for run in (first, second):
        run.pop("seconds")
    assert first == second
    assert redraw(result.results.parent).summary == again.summary


def test_more_classes_have_less_error(done):
    result, _, _ = done
    numbers = Analysis(json.loads(result.results.read_text()))
    assert numbers.error("learned", 64) < numbers.error("learned", 16)
    assert numbers.error("learned", 64) < numbers.error("importance", 64)


def test_the_error_at_a_time_lies_between_those_measured():
    errors = [{"design": "systematic", "k": k, "seed": 0, "rmse_log_z": 8 / k} for k in (8, 32)]
    times = [{"design": "systematic", "k": k, "step_ms": k / 8, "rebuild_ms": 0.0} for k in (8, 32)]
    numbers = Analysis({"settings": {"designs": ["systematic"]}, "errors": errors, "times": times})
    assert numbers.error_at("systematic", 2.0) == pytest.approx(0.5)
    assert numbers.error_at("systematic", 0.5) is None
    assert numbers.best_at_time(4.0) == ("systematic", pytest.approx(0.25))
    assert numbers.best_at_time(9.0) is None


def test_a_text_that_is_too_short_is_refused_before_anything_is_written(text, tmp_path):
    short = Text(text.train[:100], text.held_out, text.vocabulary, "short")
    with pytest.raises(UserError, match=r"`data` must have at least 2,053 tokens to train on, got 100"):
        study(short, tmp_path / "out", scale=TINY)
    assert not (tmp_path / "out").exists()


def test_a_k_above_half_of_the_classes_is_refused(text, tmp_path):
    with pytest.raises(UserError, match=r"`k` must be at most half of the 300 classes, got 200"):
        study(text, tmp_path / "out", scale=TINY, k=200)


def test_redrawing_needs_results(tmp_path):
    with pytest.raises(UserError, match=r"must hold the results\.json of a study"):
        redraw(tmp_path)
