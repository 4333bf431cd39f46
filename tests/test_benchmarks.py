"""Benchmarks run, in small, so that none rots."""

import csv
import importlib.util
import json
import lzma
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks import contenders, step
from benchmarks.machine import write_csv
from benchmarks.turns import NotInstalledError, Turns

ROOT = Path(__file__).parents[1]
CLASSES = 3000
TORCH = sorted({c.build.split(":")[1] for c in step.CONTENDERS.values() if c.build.startswith("contenders:")})


def run(*arguments):
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def line_of(output, name):
    (line,) = [line for line in output.splitlines() if line.startswith(f"{name}  ")]
    return line.removeprefix(name).split()


@pytest.mark.parametrize("name", ["importance", "bernoulli", "systematic", "minibatch explicit, systematic"])
def test_a_row_of_the_draws(name):
    row = json.loads(run("benchmarks/draws.py", "--row", name, "--sizes", "3e3", "--repeats", 3).splitlines()[-1])
    assert row["num_classes"] == 3000
    assert row["draw_us"] > 0
    assert row["slots"] >= 1000


def test_the_results_of_the_draws_are_whole():
    with (ROOT / "benchmarks" / "results" / "draws.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {int(row["num_classes"]) for row in rows} == {10**n for n in range(4, 9)}
    assert {row["huge_pages"] for row in rows} == {"0", "1"}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch.optim.Adagrad's own
@pytest.mark.parametrize("name", TORCH)
def test_each_contender_makes_steps(name):
    targets = np.random.default_rng(0).integers(0, CLASSES, (3, contenders.BATCH))
    make_step = getattr(contenders, name)(CLASSES, 1e6 / np.arange(2.0, CLASSES + 2), targets)
    for _ in range(4):
        make_step()


def test_steps_in_turn():
    output = run(
        "benchmarks/step.py", "--sizes", CLASSES, "--huge", 0, "--rounds", 2, "--contenders", "products", "manyclass"
    )
    low, median, high, over_products, over_ours, gib, _ = map(float, line_of(output, "manyclass"))
    assert 0 < low <= median <= high
    assert over_products > 0
    assert over_ours == 1
    assert gib > 0


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_tensorflow_in_turn():
    names = [name for name in step.CONTENDERS if name.startswith("TensorFlow")]
    output = run(
        "benchmarks/step.py", "--sizes", CLASSES, "--huge", 0, "--rounds", 2, "--contenders", "products", *names
    )
    for name in names:
        assert float(line_of(output, name)[1]) > 0


def test_a_peer_that_is_missing_is_named(tmp_path):
    np.save(tmp_path / "counts.npy", np.ones(CLASSES))
    np.save(tmp_path / "targets.npy", np.zeros((1, step.BATCH), dtype=np.int64))
    # A module that hides the installed one and fails as a missing one does.
    (tmp_path / "tensorflow.py").write_text("raise ModuleNotFoundError(name='tensorflow')")
    with pytest.raises(NotInstalledError, match="tensorflow"):
        Turns("contenders_tensorflow:adagrad", CLASSES, tmp_path, {"PYTHONPATH": str(tmp_path)})


def test_groups_hold_every_contender_once_beside_the_products_and_ours():
    names = list(step.CONTENDERS)
    groups = list(step.groups(names, 10**6, 8.0))
    assert len(groups) > 1
    assert all(group[:2] == ["products", "manyclass"] for group in groups)
    assert [name for group in groups for name in group[2:]] == names[2:]


def test_groups_leave_ours_out_where_it_would_take_all_the_room():
    names = list(step.CONTENDERS)
    groups = list(step.groups(names, 10**7, 16.0))
    assert [name for group in groups for name in group[1:]] == names[1:]


def test_time_to_quality(tmp_path):
    """On a text that is soon learned, with fewer classes than words to sample."""
    for name, lines in (("train", 400), ("valid", 40)):
        with lzma.open(tmp_path / f"{name}.txt.xz", "wt", encoding="utf-8") as file:
            file.writelines(" ".join(f"w{(i + j) % 90}" for j in range(9)) + "\n" for i in range(lines))
    kept = tmp_path / "quality.csv"
    options = ["--data", tmp_path, "--epochs", 1, "--longest", 2, "--k", 64, "--out", kept]
    output = run("benchmarks/quality.py", *options, "--sweep-k", 64)
    assert "91 classes" in output
    assert "of exact" in output or "no k of" in output
    with kept.open() as file:
        runs = {row["run"]: float(row["perplexity"]) for row in csv.DictReader(file)}
    assert {"k = 64", "exact"} <= set(runs)
    assert all(1 < perplexity < 91 for perplexity in runs.values())


def test_time_to_quality_says_where_it_looks_for_data(tmp_path):
    command = [sys.executable, "benchmarks/quality.py", "--data", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert str(tmp_path) in done.stderr


def small_results(folder):
    rows = []
    for num_classes in step.SIZES:
        for huge in (0, 1):
            for i, name in enumerate(step.CONTENDERS, 1):
                measured = step.Measured([i * 1e-3] * 3, 1e-3, setup_s=1.0, peak_gib=0.5 * i)
                slow = name == "torch exact" and num_classes == step.SIZES[-1]
                columns = step.columns("would need 41 GiB" if slow else measured, measured)
                rows.append({"contender": name, "num_classes": num_classes, **columns, "huge_pages": huge})
    write_csv(folder / "step.csv", rows)


def test_the_table(tmp_path):
    small_results(tmp_path)
    output = run("benchmarks/plots.py", "--table", "--results", tmp_path)
    assert "| manyclass | 2.00 | 2.00 | 1.00 |" in output
    assert "| torch exact | 11.0 | 11.0 | 5.50 | 11.0 | 11.0 | 5.50 | – | – | – |" in output


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_the_plots(tmp_path):
    small_results(tmp_path)
    run("benchmarks/plots.py", "--results", tmp_path)
    for name in ("step_time", "step_memory", "step_floor"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        assert (tmp_path / f"{name}.svg").read_text().rstrip().endswith("</svg>")
