"""Training from a file to a model in a folder, and the errors on the way."""

import csv
import functools
import math
import os
import shutil
from dataclasses import replace

import pytest
import torch

from manyclass import tasks
from manyclass.errors import UserError
from manyclass.samplers import Automatic, Budget
from manyclass.tasks.fit import SPOOL_FOLDER, SPOOL_SIGNATURE, SPOOL_TAG
from manyclass.tasks.optimizers import make_optimizers, make_schedulers
from tests.tasks import problems
from tests.tasks.problems import BEST_BY, KINDS, METRICS, SETTINGS, files, fit


def frequency_loss(model, targets):
    """Return the loss of predicting class frequencies."""
    frequency = model.spec.counts.clamp(min=1)
    return -(frequency / frequency.sum()).log()[targets].mean().item()


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_learns_more_than_frequencies(trained, kind):
    done, _, data = trained(kind)
    assert done.history.stopped == "epochs"
    source = tasks.Source(problems.to_evaluate(kind, data))
    batches = list(tasks.TASKS[kind].evaluation_batches(done.model.spec, source)[0])
    targets = torch.cat([target[target >= 0] for _, target, *_ in batches])
    measured = tasks.measure(done.model, batches)
    assert measured.examples == len(targets)
    assert measured.loss < 0.8 * frequency_loss(done.model, targets)
    assert next(iter(measured.metrics.values())) > 0.3


@pytest.mark.parametrize("kind", KINDS)
def test_the_folder_holds_models_and_a_log_and_no_data(trained, kind):
    _, folder, _ = trained(kind)
    wanted = {"best.safetensors", "fit.json", "log.csv", "newest.safetensors"}
    assert set(files(folder)) - {"previous.safetensors", "index.safetensors"} == wanted
    with (folder / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    metric = METRICS[kind][0]
    evaluated = [row for row in rows if row["held_out_loss"]]
    assert len(evaluated) == SETTINGS[kind].epochs
    assert all(row[metric] for row in evaluated)


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_kept_is_the_best_by_the_criterion_of_the_task(trained, kind):
    done, _, _ = trained(kind)
    by = BEST_BY.get(kind, "loss")
    evaluated = [record for record in done.history.records if record.held_out_loss is not None]
    costs = [record.held_out_loss if by == "loss" else -record.metrics[by] for record in evaluated]
    assert done.history.best_step == evaluated[costs.index(min(costs))].step
    best = evaluated[costs.index(min(costs))]
    # Few examples are held out, so evaluations during the training used all of them.
    assert done.measured.loss == pytest.approx(best.held_out_loss)
    assert done.measured.metrics == pytest.approx(dict(best.metrics))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_opened_is_the_one_that_was_measured(trained, kind):
    done, folder, _ = trained(kind)
    opened = tasks.open_model(folder)
    names = {name for name in opened.state_dict() if not name.startswith("head.sampler.")}
    assert names
    for name in names:
        assert torch.equal(opened.state_dict()[name], done.model.state_dict()[name]), name
    assert list(opened.names) == list(done.model.names)
    assert opened.spec.settings == done.model.spec.settings


@pytest.mark.parametrize("kind", KINDS)
def test_learning_rates_decay_to_zero_where_wanted(trained, kind):
    model = trained(kind)[0].model
    optimizers = make_optimizers(model)
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    schedulers = make_schedulers(optimizers, model.spec.settings, 5)
    assert len(schedulers) == (len(optimizers) if model.spec.settings.decay else 0)
    for _ in range(model.spec.settings.epochs * 5 // 2):
        for optimizer in optimizers:
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    share = 0.5 if schedulers else 1.0
    now = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    assert now == pytest.approx([share * rate for rate in rates])


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_is_trained_by_one_optimizer(trained, kind):
    model = trained(kind)[0].model
    trained_ones = [
        p for optimizer in make_optimizers(model) for group in optimizer.param_groups for p in group["params"]
    ]
    assert {id(p) for p in trained_ones} == {id(p) for p in model.parameters()}
    assert len(trained_ones) == len({id(p) for p in trained_ones})


def test_a_folder_with_a_model_is_refused(trained, tmp_path):
    _, folder, data = trained("features")
    with pytest.raises(UserError, match=r"`--out` must be a folder without a model, got .*--resume goes on with it"):
        tasks.fit("features", tasks.Source(data), SETTINGS["features"], folder, options=tasks.RunOptions())


@pytest.mark.parametrize("name", ["data", "log.csv", "notes.txt"])
def test_a_foreign_folder_is_refused_and_left_alone(tmp_path, name):
    # If the spool folder were called data, the user's folder would be removed at the end.
    data = problems.write_features(tmp_path, name=name if "." in name else "rows.svm")
    if name == "data":
        (tmp_path / "data").mkdir()
        data = data.rename(tmp_path / "data" / "rows.svm")
    before = sorted(tmp_path.rglob("*"))
    source = tasks.Source(data, format="svmlight")
    with pytest.raises(UserError, match=f"`--out` must be a new or empty folder, got .*, which has {name}"):
        tasks.fit("features", source, SETTINGS["features"], tmp_path, options=tasks.RunOptions())
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("written", [0, 1, 20, None])
def test_leftovers_of_a_killed_reader_are_overwritten(tmp_path, written):
    spool = tmp_path / "model" / SPOOL_FOLDER
    spool.mkdir(parents=True)
    if written != 0:
        (spool / SPOOL_TAG).write_text(SPOOL_SIGNATURE[:written])
    if written is None:
        (spool / "half").write_text("?")
    (tmp_path / "model" / "fit.json.tmp-1").touch()
    done, out = fit("features", tmp_path, settings=replace(SETTINGS["features"], epochs=1))
    assert done.history.stopped == "epochs"
    assert SPOOL_FOLDER not in files(out)


def own_folder(path):
    path.mkdir()
    (path / "notes.txt").write_text("mine")


def own_cache(path):
    own_folder(path)
    (path / SPOOL_TAG).write_text(SPOOL_SIGNATURE.splitlines()[0])


def own_pipe(path):
    own_folder(path)
    os.mkfifo(path / SPOOL_TAG)


def own_link(path):
    own_folder(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


@pytest.mark.parametrize("own", [own_folder, own_cache, own_pipe, own_link, lambda path: path.write_text("mine")])
@pytest.mark.parametrize("again", [False, True])
def test_what_fit_did_not_write_is_not_deleted(tmp_path, trained, own, again):
    _, made, data = trained("features")
    out = shutil.copytree(made, tmp_path / "model") if again else tmp_path / "model"
    out.mkdir(exist_ok=True)
    own(out / SPOOL_FOLDER)
    before = sorted(tmp_path.rglob("*"))
    run = tasks.RunOptions()
    start = functools.partial(tasks.fit, "features", tasks.Source(data), SETTINGS["features"], out, options=run)
    if again:
        start = functools.partial(tasks.resume, out, options=run)
    with pytest.raises(UserError, match=r"`--out` must hold no .manyclass-data that `manyclass fit` did not make, got"):
        start()
    assert sorted(tmp_path.rglob("*")) == before


def test_data_that_cannot_be_read_leaves_an_empty_folder(tmp_path):
    data = tmp_path / "rows.svm"
    data.write_text("cat 1:1\ndog one:1\n")
    with pytest.raises(UserError, match=r"must hold features index:value, got 'one:1' in line 2 of"):
        fit("features", tmp_path, data=data)
    assert files(tmp_path / "model") == []


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("features", "cat,dog 1:1\n", "`data` must hold 2 rows with labels, one to hold out, got 1 in"),
        ("features", "cat 1:1\n 1:2\ndog,cow 2:1\n", None),
        ("features", "cat 1:1\ncat 1:2\n", "`data` must have at least two classes, got only 'cat'"),
        ("text", "a b\n", "`data` must hold more than 0 tokens to hold out"),
        ("sequences", "u\ta\nu\tb\nu\tc\n", "`data` must hold a user of 4 items, the last two of which are held out"),
        ("sequences", "u\ta\nu\tb\nv\ta\n", "`data` must hold a user of 4 items, the last two of which are held out"),
        ("sequences", "u\ta\nu\tb\nu\tc\nu\ta\n", None),
        ("triples", "a\tr\tb\n", "`data` must hold 2 triples, one to hold out, got 1 in"),
        ("triples", "a\tr\tb\nb\tr\ta\n", None),
    ],
)
def test_too_little_data_is_refused_and_a_little_is_enough(tmp_path, kind, content, message):
    data = tmp_path / "data.txt"
    data.write_text(content)
    settings = replace(SETTINGS[kind], epochs=1)
    if message is None:
        assert fit(kind, tmp_path, data=data, settings=settings)[0].history.stopped == "epochs"
        return
    with pytest.raises(UserError) as refused:
        fit(kind, tmp_path, data=data, settings=settings)
    assert str(refused.value).startswith(message)
    assert files(tmp_path / "model") == []


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("triples", {"dim": 5}, "`dim` must be even for triples"),
        ("features", {"sampler": "clustered", "k": "auto"}, "`k` must be a number or None for Clustered"),
    ],
)
def test_a_model_that_cannot_be_built_leaves_no_training_behind(tmp_path, monkeypatch, kind, options, message):
    monkeypatch.setattr("manyclass.defaults.K", 8)  # The default k is above the number of classes.
    with pytest.raises(UserError, match=message):
        fit(kind, tmp_path, settings=replace(SETTINGS[kind], **options))
    assert files(tmp_path / "model") == []


def test_a_training_that_diverges_says_what_to_do(tmp_path):
    settings = replace(SETTINGS["triples"], learning_rate=1e15)
    with pytest.raises(
        UserError, match=r"The loss .* NaN.* Start again with a smaller `--learning-rate`, or with `--clip`$"
    ):
        fit("triples", tmp_path, settings=settings)


def test_a_run_of_seconds_has_no_epochs(tmp_path):
    settings = replace(SETTINGS["features"], epochs=None, seconds=0.02)
    done, _ = fit("features", tmp_path, settings=settings, options=tasks.RunOptions(evaluate_seconds=0.01))
    assert done.history.stopped == "seconds"
    assert done.model.spec.settings.epochs is None


def test_k_may_follow_from_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("manyclass.defaults.K", 8)
    for i, (options, expected) in enumerate(
        [
            ({"k": None}, (Automatic, 0.15)),
            ({"k": "auto"}, (Automatic, 0.15)),
            ({"k": None, "rmse_log_z": 0.2}, (Automatic, 0.2)),
            ({"k": "auto", "rmse_log_z": 0.2}, (Automatic, 0.2)),
            ({"k": "auto", "sampler": "learned"}, (Budget, 0.15)),
            ({"k": "auto", "sampler": "learned", "rmse_log_z": 0.2}, (Budget, 0.2)),
        ]
    ):
        (tmp_path / str(i)).mkdir()
        settings = replace(SETTINGS["features"], epochs=1, **options)
        sampler = fit("features", tmp_path / str(i), settings=settings)[0].model.head.sampler
        assert (type(sampler), sampler.rmse_log_z) == expected


def test_patience_ends_a_training_that_gets_no_better(tmp_path):
    settings = replace(SETTINGS["features"], epochs=200, patience=2, learning_rate=2.0)
    assert fit("features", tmp_path, settings=settings)[0].history.stopped == "patience"


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("features", {"dim": 5}, "`--dim` must be left out for features, got 5"),
        ("features", {"tied": False}, "`--untied` must be left out for features, got False"),
        ("text", {"hidden_layers": (5,)}, r"`--hidden` must be left out for text, got \(5,\)"),
        ("text", {"rank": 5}, "`--rank` must be left out for text, got 5"),
        ("sequences", {"regulariser": 0.1}, "`--regulariser` must be left out for sequences, got 0.1"),
        ("triples", {"dropout": 0.1}, "`--dropout` must be left out for triples, got 0.1"),
        ("triples", {"length": 5}, "`--length` must be left out for triples, got 5"),
    ],
)
def test_settings_of_another_kind_are_refused_by_name(tmp_path, kind, options, message):
    with pytest.raises(UserError, match=message):
        fit(kind, tmp_path, settings=tasks.Settings(**options))
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("name", ["adagrad", "adam", "sgd"])
def test_any_optimizer_trains(tmp_path, name):
    done, _ = fit(
        "features", tmp_path, settings=replace(SETTINGS["features"], optimizer=name, learning_rate=None, epochs=1)
    )
    assert done.measured.loss < math.log(problems.CLASSES)


def test_a_network_of_features_learns_too(tmp_path):
    settings = replace(SETTINGS["features"], hidden_layers=(32,), encoder_learning_rate=0.01, epochs=6)
    done, out = fit("features", tmp_path, settings=settings)
    assert done.measured.metrics["accuracy"] > 0.5
    assert tasks.open_model(out).spec.settings.hidden_layers == (32,)
