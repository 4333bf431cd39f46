"""Benchmarks run at a small scale."""

import contextlib
import csv
import importlib
import importlib.util
import io
import json
import lzma
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks import contenders, design_cost, gpu, gpu_contenders, gpu_curves, link_prediction, step
from benchmarks.machine import write_csv
from benchmarks.turns import ContenderProcess, NotInstalledError

from manyclass.data.triples import KnownTails
from manyclass.samplers import Exhaustive

ROOT = Path(__file__).parents[1]
CLASSES = 3000
TORCH = sorted({c.build.split(":")[1] for c in step.CONTENDERS.values() if c.build.startswith("contenders:")})


def run(script, *arguments):
    """Return what a script prints, run in this process: another one would take seconds to start."""
    main = importlib.import_module(script.removesuffix(".py").replace("/", ".")).main
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setattr(sys, "argv", [script, *map(str, arguments)])
        main()
    return output.getvalue()


def run_alone(*arguments):
    """Return what a script prints, run as its users do."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def line_of(output, name):
    (line,) = [line for line in output.splitlines() if line.startswith(f"{name}  ")]
    return line.removeprefix(name).split()


@pytest.mark.parametrize("name", ["importance", "bernoulli", "systematic", "minibatch explicit, systematic"])
def test_a_sampler_gives_a_row_of_the_draws(name):
    row = json.loads(run("benchmarks/draws.py", "--row", name, "--sizes", "3e3", "--repeats", 3).splitlines()[-1])
    assert row["num_classes"] == 3000
    assert row["draw_us"] > 0
    assert row["slots"] >= 1000


def test_a_training_on_one_process_and_on_two_gives_a_row_for_each_epoch(tmp_path):
    (tmp_path / "text.txt").write_text("a b c d e f g h\n" * 200)
    out, options = tmp_path / "processes.csv", "--dim 8 --batch-size 8 --length 8"
    given = ("--data", tmp_path / "text.txt", "--epochs", 2, "--options", options, "--out", out)
    assert run("benchmarks/processes.py", *given).count("held-out loss") == 4
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["ranks"], row["epoch"]) for row in rows] == [("1", "1"), ("1", "2"), ("2", "1"), ("2", "2")]
    assert [len(row["peak_gib_by_rank"].split()) for row in rows] == [1, 1, 2, 2]
    assert float(rows[1]["held_out_loss"]) < float(rows[0]["held_out_loss"])


def test_the_stored_results_of_the_draws_are_complete():
    with (ROOT / "benchmarks" / "results" / "draws.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {int(row["num_classes"]) for row in rows} == {10**n for n in range(4, 9)}
    assert {row["huge_pages"] for row in rows} == {"0", "1"}


def test_the_ways_to_the_exact_loss_are_checked_and_timed(tmp_path):
    path = tmp_path / "exact.csv"
    run("benchmarks/exact.py", "--classes", 600, "--batch", 8, "--repeats", 2, "--out", path)
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert {"products", "eager", "closed_form", "chunked", "head"} <= {row["way"] for row in rows}
    assert {row["dtype"] for row in rows} == {"float32", "bfloat16"}
    assert all(float(row["ms"]) > 0 for row in rows)
    assert [row["way"] for row in rows if "default" in row["note"]] == ["closed_form"] * 2
    assert all(float(row["error"]) < 1e-4 for row in rows if row["error"] and row["dtype"] == "float32")


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # from torch.optim.Adagrad
@pytest.mark.parametrize("name", TORCH)
def test_each_contender_makes_steps(name):
    targets = np.random.default_rng(0).integers(0, CLASSES, (3, contenders.BATCH_SIZE))
    make_step = getattr(contenders, name)(CLASSES, 1e6 / np.arange(2.0, CLASSES + 2), targets)
    for _ in range(4):
        make_step()


def test_steps_are_timed_in_turn():
    output = run(
        "benchmarks/step.py", "--sizes", CLASSES, "--huge", 0, "--rounds", 2, "--contenders", "products", "manyclass"
    )
    low, median, high, over_products, over_ours, gib, _ = map(float, line_of(output, "manyclass"))
    assert 0 < low <= median <= high
    assert over_products > 0
    assert over_ours == 1
    assert gib > 0


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_tensorflow_is_timed_in_turn():
    names = [name for name in step.CONTENDERS if name.startswith("TensorFlow")]
    output = run(
        "benchmarks/step.py", "--sizes", CLASSES, "--huge", 0, "--rounds", 2, "--contenders", "products", *names
    )
    for name in names:
        assert float(line_of(output, name)[1]) > 0


def test_a_missing_library_is_named(tmp_path):
    np.save(tmp_path / "counts.npy", np.ones(CLASSES))
    np.save(tmp_path / "targets.npy", np.zeros((1, step.BATCH_SIZE), dtype=np.int64))
    # This module hides the installed one and fails like a missing one.
    (tmp_path / "tensorflow.py").write_text("raise ModuleNotFoundError(name='tensorflow')")
    with pytest.raises(NotInstalledError, match="tensorflow"):
        ContenderProcess("contenders_tensorflow:adagrad", CLASSES, tmp_path, {"PYTHONPATH": str(tmp_path)})


def test_groups_hold_every_contender_once_next_to_the_products_and_ours():
    names = list(step.CONTENDERS)
    groups = list(step.groups(names, 10**6, 8.0))
    assert len(groups) > 1
    assert all(group[:2] == ["products", "manyclass"] for group in groups)
    assert [name for group in groups for name in group[2:]] == names[2:]


def test_groups_leave_ours_out_if_it_takes_too_much_memory():
    names = list(step.CONTENDERS)
    groups = list(step.groups(names, 10**7, 16.0))
    assert [name for group in groups for name in group[1:]] == names[1:]


def test_time_to_quality_trains_and_writes_a_row_per_evaluation(tmp_path):
    """The text is learned quickly, and a step samples fewer classes than there are words."""
    for name, lines in (("train", 400), ("valid", 40)):
        with lzma.open(tmp_path / f"{name}.txt.xz", "wt", encoding="utf-8") as file:
            file.writelines(" ".join(f"w{(i + j) % 90}" for j in range(9)) + "\n" for i in range(lines))
    results = tmp_path / "quality.csv"
    options = ["--data", tmp_path, "--epochs", 1, "--longest", 2, "--k", 64, "--out", results]
    output = run("benchmarks/quality.py", *options, "--sweep-k", 64)
    assert "91 classes" in output
    assert "of exact" in output or "no k of" in output
    with results.open() as file:
        runs = {row["run"]: float(row["perplexity"]) for row in csv.DictReader(file)}
    assert {"k = 64", "exact"} <= set(runs)
    assert all(1 < perplexity < 91 for perplexity in runs.values())


@pytest.mark.parametrize("script", ["benchmarks/quality.py", "benchmarks/link_prediction.py"])
def test_a_missing_data_folder_is_named(script, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        run(script, "--data", tmp_path)
    error = capsys.readouterr().err
    assert exit.value.code == 2
    assert error.count("\n") == 1
    assert str(tmp_path) in error


@pytest.fixture
def graph_files(tmp_path):
    """Files of triples: each of 40 entities is followed by the next two; every tenth triple is held out."""
    triples = [f"e{i}\tfollowed by {step}\te{(i + step) % 40}\n" for i in range(40) for step in (1, 2)]
    triples += [f"e{i}\tin\tgroup {i % 4}\n" for i in range(40)]
    for name, part in (("train", triples), ("valid", triples[::10]), ("test", triples[5::10])):
        (tmp_path / f"{name}.txt").write_text("".join(part))
    return tmp_path


LINKS = ["--rank", 4, "--batch", 32, "--k", 10, "--seeds", 2, "--sweep-epochs", 1, "--rates", 0.1, 0.3, "--reg", 0.01]


def test_link_prediction_beats_chance_with_every_method(graph_files):
    kept = graph_files / "links.csv"
    options = ["--data", graph_files, *LINKS, "--epochs", 20, "--out", kept]
    output = run("benchmarks/link_prediction.py", *options)
    with kept.open() as file:
        rows = list(csv.DictReader(file))
    contenders = 2 + len(link_prediction.SAMPLERS)
    assert sum(row["part"] == "sweep" for row in rows) == 2 * contenders
    assert sum(row["part"] == "run" for row in rows) == 2 * contenders
    # Chance gives about 0.1.
    assert all(float(row["test_mrr"]) > 0.2 for row in rows if row["part"] == "run")
    assert all(row["device"] for row in rows)
    assert "clustered, k = 10, others excluded" in output


def test_link_prediction_resumes(graph_files):
    kept = graph_files / "links.csv"
    options = ["--data", graph_files, *LINKS, "--epochs", 2, "--out", kept, "--methods", "systematic"]
    run("benchmarks/link_prediction.py", *options)
    whole = kept.read_text().splitlines()
    kept.write_text("\n".join(whole[:-1]) + "\n")
    output = run("benchmarks/link_prediction.py", *options, "--resume", "--jobs", 2)
    assert "run 1/1" in output
    assert "sweep" not in output
    assert len(kept.read_text().splitlines()) == len(whole)


def small_graph():
    triples = torch.randint(0, 30, (200, 3), generator=torch.Generator().manual_seed(0)) % torch.tensor([30, 4, 30])
    known = KnownTails.of(triples, num_relations=4)
    return link_prediction.Graph(triples, triples, triples, known, known, 30, 4)


@pytest.mark.parametrize("others", ["negatives", "excluded"])
def test_exact_link_prediction_equals_an_exhaustive_sampler(others):
    graph, gradients = small_graph(), []
    exclude = graph.known.others(graph.train) if others == "excluded" else None
    for sampler in (None, Exhaustive(30)):
        torch.manual_seed(0)
        model = link_prediction.LinkModel(graph, 4, sampler).double()
        model.loss(graph.train, exclude, 0.1).backward()
        gradients.append(torch.cat([model.entities.weight.grad, model.encoder.relations.weight.grad]))
    torch.testing.assert_close(*gradients)


def test_ranks_are_filtered_and_ties_get_their_mean():
    graph = small_graph()
    model = link_prediction.LinkModel(graph, 4, None)
    expected = []
    scores = model.query(graph.test) @ model.entities.weight.T
    for row, (head, relation, tail) in zip(scores, graph.test.tolist(), strict=True):
        true = {t for h, r, t in graph.test.tolist() if (h, r) == (head, relation)} - {tail}
        expected.append(1 + sum(float(row[c] > row[tail]) for c in range(30) if c not in true))
    assert link_prediction.ranks(model, graph.test, graph.known).tolist() == expected
    with torch.no_grad():
        model.entities.weight.zero_()
    number = graph.known.number(graph.test) - 1
    torch.testing.assert_close(link_prediction.ranks(model, graph.test, graph.known), (31 - number).double() / 2)


def test_a_model_of_nans_has_the_worst_ranks():
    graph = small_graph()
    model = link_prediction.LinkModel(graph, 4, None)
    with torch.no_grad():
        model.entities.weight.fill_(torch.nan)
    assert (link_prediction.ranks(model, graph.test, graph.known) > 30).all()


def test_the_cost_of_designs_is_measured():
    names = ["importance", "learned"]
    output = run_alone("benchmarks/design_cost.py", "--classes", 1500, "--rounds", 1, "--designs", *names)
    table, growth = output.split("as C to the power")
    for name in names:
        low, median, high, over_products, setup, rebuild_s, *_ = map(float, line_of(table, name))
        assert 0 < low <= median <= high
        assert over_products > 0
        assert setup > 0
        assert (rebuild_s > 0) == (name != "importance")
        assert line_of(growth, name) == ["–", "–"]  # of one size


def test_the_growth_of_steps_and_of_rebuilds_is_printed():
    costs = [(10**4, 1.0, 0.0), (10**6, 10.0, 0.0)], [(10**4, 2.0, 0.5), (10**6, 2.0, 50.0)]
    rows = [
        {"design": name, "num_classes": size, "step_ms": step_ms, "rebuild_ms_per_step": rebuild_ms, "note": ""}
        for name, points in zip(("importance", "learned"), costs, strict=True)
        for size, step_ms, rebuild_ms in points
    ]
    rows.append({"design": "learned", "num_classes": 10**7, "step_ms": "", "rebuild_ms_per_step": "", "note": "none"})
    table = design_cost.growth(rows)
    assert line_of(table, "importance") == ["0.50", "–"]
    assert line_of(table, "learned") == ["0.00", "1.00"]


@pytest.mark.parametrize("name", design_cost.DESIGNS)
def test_each_design_is_set_up_rebuilt_and_makes_steps(name, monkeypatch):
    monkeypatch.setenv("DESIGN", name)
    counts = 1e6 / np.arange(2.0, CLASSES + 2)
    targets = np.random.default_rng(0).integers(0, CLASSES, (3, design_cost.BATCH_SIZE))
    for build in (design_cost.steps, design_cost.builds):
        make_step = build(CLASSES, counts, targets)
        for _ in range(3):
            make_step()


def test_a_scan_and_probes_are_timed_beside_their_error(tmp_path):
    run("benchmarks/tailored.py", "--sizes", 3000, "--repeats", 2, "--out", tmp_path / "tailored.csv")
    with (tmp_path / "tailored.csv").open() as file:
        rows = {row["design"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"systematic", "scan", "probes"}
    assert all(float(row["draw_ms"]) > 0 for row in rows.values())
    assert float(rows["scan"]["rmse_log_z"]) < float(rows["systematic"]["rmse_log_z"])


def test_growth_is_the_slope_of_the_logarithms():
    assert design_cost.exponent([(10, 3.0), (100, 30.0), (1000, 300.0)]) == pytest.approx(1)
    assert design_cost.exponent([(10, 0.0), (100, 0.0)]) is None


def small_results(folder):
    rows = []
    for num_classes in step.SIZES:
        for huge in (0, 1):
            for i, name in enumerate(step.CONTENDERS, 1):
                measured = step.StepCost([i * 1e-3] * 3, 1e-3, setup_s=1.0, peak_gib=0.5 * i)
                slow = name == "torch exact" and num_classes == step.SIZES[-1]
                columns = step.columns("would need 41 GiB" if slow else measured, measured)
                rows.append({"contender": name, "num_classes": num_classes, **columns, "huge_pages": huge})
    write_csv(folder / "step.csv", rows)
    designs = []
    for num_classes in design_cost.SIZES:
        for i, name in enumerate(design_cost.DESIGNS, 1):
            seconds = (0.1,) * len(design_cost.DESIGNS[name].every)
            measured = design_cost.DesignCost([i * 1e-3] * 3, 1e-3, setup_s=1.0, rebuild_s=seconds, beyond_gib=0.5)
            columns = design_cost.columns(name, num_classes, measured)
            designs.append({"design": name, "num_classes": num_classes, **columns, "huge_pages": 1})
    write_csv(folder / "design_cost.csv", designs)


def test_the_table_is_printed(tmp_path):
    small_results(tmp_path)
    output = run("benchmarks/plots.py", "--table", "--results", tmp_path)
    assert "| manyclass | 2.00 | 2.00 | 1.00 |" in output
    assert "| torch exact | 11.0 | 11.0 | 5.50 | 11.0 | 11.0 | 5.50 | – | – | – |" in output


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_the_plots_are_written(tmp_path):
    small_results(tmp_path)
    run("benchmarks/plots.py", "--results", tmp_path)
    for name in ("step_time", "step_memory", "step_floor", "design_cost"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        assert (tmp_path / f"{name}.svg").read_text().rstrip().endswith("</svg>")


def test_the_steps_of_a_gpu_can_be_tried_on_the_cpu(tmp_path):
    out = tmp_path / "gpu.csv"
    options = ["--device", "cpu", "--settings", "words", "--shrink", 32, "--repeats", 2, "--out", out]
    # The compiler would take most of the time of this test; it compiles the function of "exact".
    names = [name for name in gpu_contenders.CONTENDERS if name != "exact, compiled"]
    output = run("benchmarks/gpu.py", *options, "--contenders", *names)
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["contender"] for row in rows] == names
    for row in rows:
        if row["absent"]:
            assert f"{row['contender']:18}{row['absent']}" in output
            assert row["ms"] == ""
        else:
            assert float(row["ms_p20"]) <= float(row["ms"]) <= float(row["ms_p80"])
            assert float(row["of_bandwidth"]) > 0
    present = {row["contender"] for row in rows if not row["absent"]}
    assert {"floor", "eager", "auto", "default", "plain torch", "exact"} <= present
    assert float(next(row for row in rows if row["contender"] == "auto")["auto_over_best"]) > 0


def test_auto_is_compared_with_the_better_implementation():
    rows = [
        {"setting": "items", "auto_over_best": 1.02},
        {"setting": "words", "auto_over_best": 1.03},
        {"setting": "words", "auto_over_best": ""},
    ]
    assert gpu.slow_choices(rows) == ["1.03 × the better implementation is the time of auto in the setting 'words'"]


def test_a_step_that_scores_all_classes_does_more_operations_and_stores_no_scores():
    setting = gpu_contenders.Setting(classes=1000, dim=8, batch=4, k=10)
    assert gpu_contenders.floating_operations(setting, scores_all=False) == 3 * 2 * 4 * 10 * 8
    assert gpu_contenders.floating_operations(setting, scores_all=True) == 3 * 2 * 4 * 1000 * 8
    rows, scores = 2 * 4 * 14 * 8, 2 * 3 * 40
    assert gpu_contenders.traffic_bytes(setting, scores_all=False) == rows + scores


def test_the_curves_of_a_gpu_can_be_tried_on_the_cpu(tmp_path):
    out = tmp_path / "gpu_curves.csv"
    sizes = ["--classes", 200, "--batch", 16, "--k", 20, "--steps", 40, "--seeds", 2]
    output = run("benchmarks/gpu_curves.py", "--device", "cpu", "--impls", "eager", "auto", *sizes, "--out", out)
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(gpu_curves.PRECISIONS) * 2 * 2 * gpu_curves.EVALUATIONS
    for precision in gpu_curves.PRECISIONS:
        assert f"between seeds: {precision}" in output
        losses = [float(row["loss"]) for row in rows if row["precision"] == precision and row["impl"] == "eager"]
        assert losses[gpu_curves.EVALUATIONS - 1] < losses[0]


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_the_plots_of_a_gpu_are_written(tmp_path):
    times = [
        {"setting": setting, "contender": name, "ms_p20": ms, "ms": ms + 1, "ms_p80": ms + 2, "device": "a GPU"}
        for setting in gpu_contenders.SETTINGS
        for ms, name in enumerate(gpu_contenders.CONTENDERS, 1)
    ]
    # Absent contenders have no time.
    times[-1] |= dict.fromkeys(("ms_p20", "ms", "ms_p80"), "")
    write_csv(tmp_path / "gpu.csv", times)
    losses = [
        {"precision": precision, "impl": impl, "seed": seed, "step": step, "loss": 9 - step / 300 + seed / 10}
        for precision in gpu_curves.PRECISIONS
        for impl in ("eager", "triton")
        for seed in range(3)
        for step in range(50, 2001, 50)
    ]
    write_csv(tmp_path / "gpu_curves.csv", losses)
    run("benchmarks/plots.py", "--results", tmp_path)
    for name in ("gpu_steps", "gpu_curves"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        assert (tmp_path / f"{name}.svg").read_text().rstrip().endswith("</svg>")


def test_curves_are_compared_at_their_last_step():
    losses = {("eager", 0): 2.0, ("eager", 1): 2.5, ("triton", 0): 2.1, ("triton", 1): 2.2}
    rows = [
        {"precision": "float32", "impl": impl, "seed": seed, "step": step, "loss": loss if step == 9 else 7.0}
        for (impl, seed), loss in losses.items()
        for step in (1, 9)
    ]
    ((precision, distance, spread),) = gpu_curves.differences(rows)
    assert precision == "float32"
    assert (distance, spread) == (pytest.approx(0.1), pytest.approx(0.5))


def test_the_memory_of_a_gpu_can_be_tried_on_the_cpu(tmp_path):
    out = tmp_path / "gpu_memory.csv"
    sizes = ["--classes", 300, "--dim", 4, "--batch", 8, "--k", 10]
    run("benchmarks/gpu_memory.py", "--device", "cpu", "--impl", "eager", *sizes, "--out", out)
    with out.open() as file:
        parts = [row["part"] for row in csv.DictReader(file)]
    assert parts == ["table", "sampler", "optimiser", "rest", "rebuild"]
