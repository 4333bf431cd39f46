"""A resumed training equals an uninterrupted one."""

import contextlib
import csv
import json
import math
import os
import shutil
import signal
import sys
from dataclasses import asdict, replace

import pytest
import torch

from manyclass import storage, tasks
from manyclass.errors import UserError
from manyclass.tasks.manifest import with_digest
from tests.tasks import problems
from tests.tasks.problems import KINDS, SETTINGS, Interrupts, fit, same_state

OPTIONS = tasks.RunOptions(probe_every=7, checkpoint_every=1000)
SHORT = {kind: replace(SETTINGS[kind], epochs=3) for kind in KINDS}


@pytest.fixture
def fixed_costs(monkeypatch):
    """Let the default decide among a few classes, by costs that are not measured."""
    monkeypatch.setattr("manyclass.defaults.K", 8)
    monkeypatch.setattr("manyclass.heads._learning.step_seconds", lambda *arguments: 0.1)
    monkeypatch.setattr("manyclass.heads._learning.exact_seconds", lambda *arguments: (None, 1.0))


def stopped(kind, folder, step=5, **options):
    """Interrupt a training after a step, and return its folder."""
    run = replace(OPTIONS, callbacks=[Interrupts(step)])
    done, out = fit(kind, folder, **{"settings": SHORT[kind], "options": run, **options})
    assert done.history.stopped == "interrupted"
    assert done.history.progress.step == step
    assert done.measured is None
    return out


def timeless(folder):
    """Return the rows of a log without the seconds."""
    with (folder / "log.csv").open() as file:
        return [{**row, "seconds": None} for row in csv.DictReader(file)]


def newest(folder):
    return storage.load(folder / "newest.safetensors", content_type="checkpoint")["state"]


def steps_of(kind, folder):
    whole, out = fit(kind, folder, settings=SHORT[kind], options=OPTIONS)
    return whole, out, whole.history.progress.step


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_training_goes_on_bit_for_bit(tmp_path, kind):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    whole, whole_out, steps = steps_of(kind, tmp_path / "one")
    # Within the second epoch, and then within the third.
    out = stopped(kind, tmp_path / "other", step=steps // 2 - 1)
    again = tasks.resume(out, options=replace(OPTIONS, callbacks=[Interrupts(steps - 2)]))
    assert again.history.stopped == "interrupted"
    done = tasks.resume(out, options=OPTIONS)
    assert done.history.stopped == "epochs"
    assert same_state(done.model, whole.model)
    assert asdict(done.measured) == asdict(whole.measured)
    assert timeless(out) == timeless(whole_out)
    one, other = newest(out), newest(whole_out)
    for name in ("loss", "draws", "rng_now", "best"):
        one_value, other_value = one["training"][name], other["training"][name]
        torch.testing.assert_close(one_value, other_value, rtol=0, atol=0)
    assert storage_equal(one["optimizers"], other["optimizers"])
    assert storage_equal(one["schedulers"], other["schedulers"])
    assert storage_equal(one["state_dict"], other["state_dict"])


def storage_equal(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(storage_equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(storage_equal, one, other))
    return one == other


@pytest.mark.parametrize(
    "options",
    [
        *(
            {"sampler": name}
            for name in ("learned", "systematic", "clustered", "tailored", "importance", "bernoulli", "exact")
        ),
        {"k": "auto", "rmse_log_z": 0.3},
        {"sampler": "importance", "objective": "noise_contrastive"},
        {"optimizer": "adam"},
        {"optimizer": "sgd"},
        {"hidden_layers": (8,)},
        {"patience": 1},
    ],
    ids=str,
)
def test_an_interrupted_training_of_other_settings_goes_on_bit_for_bit(tmp_path, fixed_costs, options):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    settings = replace(SHORT["features"], **options)
    whole, _ = fit("features", tmp_path / "one", settings=settings, options=OPTIONS)
    done = tasks.resume(stopped("features", tmp_path / "other", step=20, settings=settings), options=OPTIONS)
    assert same_state(done.model, whole.model)
    assert asdict(done.measured) == asdict(whole.measured)


def test_a_training_that_decides_does_not_depend_on_the_probes_recorded(tmp_path, fixed_costs):
    settings, found = replace(SHORT["features"], k=None, rmse_log_z=0.005), []
    for every in (None, 0, 7, 20):
        (tmp_path / str(every)).mkdir()
        done, _ = fit("features", tmp_path / str(every), settings=settings, options=tasks.RunOptions(probe_every=every))
        found.append((done, [record.decision for record in done.history.records if record.decision is not None]))
    (first, decisions), *others = found
    assert len(decisions) == 1
    for done, same in others:
        assert same == decisions
        assert same_state(done.model, first.model)


@pytest.mark.parametrize("probe_every", [None, 0, 7])
@pytest.mark.parametrize("step", [5, 8, 20])
def test_a_resumed_training_takes_the_same_decisions(tmp_path, fixed_costs, step, probe_every):
    settings = replace(SHORT["features"], k=None, rmse_log_z=0.005)
    options = replace(OPTIONS, probe_every=probe_every)
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    whole, whole_out = fit("features", tmp_path / "one", settings=settings, options=options)
    run = replace(options, callbacks=[Interrupts(step)])
    out = stopped("features", tmp_path / "other", step=step, settings=settings, options=run)
    done = tasks.resume(out, options=options)
    assert same_state(done.model, whole.model)
    decisions = [record.decision for record in whole.history.records if record.decision is not None]
    assert [line.split(":")[0] for line in decisions] == ["step 8"]
    assert timeless(out) == timeless(whole_out)


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_that_was_killed_goes_on_from_its_checkpoint(tmp_path, kind):
    class Killed(BaseException):
        pass

    class Kills(Interrupts):
        def on_step(self, training):
            if training.progress.step == self.step:
                raise Killed

    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    whole, whole_out, steps = steps_of(kind, tmp_path / "one")
    run = replace(OPTIONS, checkpoint_every=0, callbacks=[Kills(steps - 3)])
    with pytest.raises(Killed):
        fit(kind, tmp_path / "other", settings=SHORT[kind], options=run)
    out = tmp_path / "other" / "model"
    assert newest(out)["training"]["progress"]["step"] == steps - 4
    done = tasks.resume(out, options=OPTIONS, checkpoint="previous")
    assert same_state(done.model, whole.model)
    assert timeless(out) == timeless(whole_out)


def test_a_training_stopped_before_a_checkpoint_starts_from_the_beginning(tmp_path):
    out = stopped("features", tmp_path)
    for path in out.glob("*.safetensors"):
        path.unlink()
    assert tasks.resume(out, options=OPTIONS).history.stopped == "epochs"


def test_a_finished_training_is_finished(tmp_path):
    whole, out = fit("features", tmp_path, settings=SHORT["features"], options=OPTIONS)
    log = (out / "log.csv").read_text()
    done = tasks.resume(out, options=OPTIONS)
    assert done.history.progress.step == whole.history.progress.step
    assert done.history.records == whole.history.records
    assert asdict(done.measured) == asdict(whole.measured)
    assert same_state(done.model, whole.model)
    assert (out / "log.csv").read_text() == log
    assert ".manyclass-data" not in problems.files(out)


def test_a_training_may_be_given_more_epochs_and_keeps_them(tmp_path):
    out = stopped("features", tmp_path)
    more = replace(OPTIONS, callbacks=[Interrupts(40)])
    assert tasks.resume(out, given={"epochs": 5}, options=more).history.stopped == "interrupted"
    done = tasks.resume(out, options=OPTIONS)
    assert done.history.progress.epoch == 5
    assert done.model.spec.settings.epochs == 5


def test_without_decay_more_epochs_are_those_of_a_longer_run(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    whole, _ = fit("features", tmp_path / "one", settings=SETTINGS["features"], options=OPTIONS)
    _, out = fit("features", tmp_path / "other", settings=SHORT["features"], options=OPTIONS)
    done = tasks.resume(out, given={"epochs": SETTINGS["features"].epochs}, options=OPTIONS)
    assert same_state(done.model, whole.model)


def test_seconds_take_the_place_of_epochs(tmp_path):
    out = stopped("features", tmp_path)
    done = tasks.resume(out, given={"seconds": 1e-6}, options=OPTIONS)
    assert done.history.stopped == "seconds"
    assert done.model.spec.settings.epochs is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"learning_rate": 0.5},
            "`learning_rate` must be left out, or what it was when the training began, 0.1, got 0.5",
        ),
        ({"seed": 1}, "`seed` must be left out, or what it was when the training began, 0, got 1"),
        ({"dim": 4}, "`dim` must be left out, or what it was when the training began, None, got 4"),
    ],
)
def test_other_settings_are_refused(tmp_path, given, message):
    out = stopped("features", tmp_path)
    with pytest.raises(UserError) as refused:
        tasks.resume(out, given=given, options=OPTIONS)
    assert str(refused.value) == message
    assert tasks.resume(out, given={"learning_rate": 0.1, "k": 8}, options=OPTIONS).history.stopped == "epochs"


def test_another_kind_is_refused(tmp_path):
    out = stopped("features", tmp_path)
    with pytest.raises(UserError, match=r"`--text` must be left out: the training in .* is of features"):
        tasks.resume(out, kind="text", options=OPTIONS)


def test_data_that_has_changed_is_refused(tmp_path):
    out = stopped("features", tmp_path)
    data = tmp_path / "rows.svm"
    held = data.read_text()
    data.write_text(held.replace("1:1", "1:2", 1))
    before = problems.files(out)
    with pytest.raises(UserError, match=r"`data` must be what the training began with, got .*rows.svm, which differs"):
        tasks.resume(out, options=OPTIONS)
    data.unlink()
    with pytest.raises(UserError, match=r"`data` must be what the training began with, got .*rows.svm: No such file"):
        tasks.resume(out, options=OPTIONS)
    assert problems.files(out) == before
    data.write_text(held)
    assert tasks.resume(out, options=OPTIONS).history.stopped == "epochs"


def test_data_may_have_moved_and_stays_where_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = problems.write_features(tmp_path).relative_to(tmp_path)
    out = stopped("features", tmp_path, data=data)
    (tmp_path / "elsewhere").mkdir()
    # A resume may start in another folder.
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = replace(OPTIONS, callbacks=[Interrupts(8)])
    assert tasks.resume(out, options=again).history.progress.step == 8
    moved = shutil.move(tmp_path / data, tmp_path / "elsewhere" / "other.svm")
    assert (
        tasks.resume(out, source=tasks.Source(moved), options=replace(OPTIONS, callbacks=[Interrupts(9)])).measured
        is None
    )
    assert tasks.resume(out, options=OPTIONS).history.stopped == "epochs"


def test_data_is_read_as_before(tmp_path):
    out = stopped("text", tmp_path, split="words", min_count=2)
    data = tmp_path / "text"
    with pytest.raises(UserError, match=r"`--min-count` must be left out, or what it was .*, got 3"):
        tasks.resume(out, source=tasks.Source(data, min_count=3), options=OPTIONS)
    with pytest.raises(UserError, match=r"`held-out` must be what the training began with, got .*, which differs"):
        tasks.resume(out, source=tasks.Source(data, held_out=data / "valid.txt"), options=OPTIONS)
    assert (
        tasks.resume(out, source=tasks.Source(data, split="words", min_count=2), options=OPTIONS).measured is not None
    )


def test_damaged_settings_are_refused(tmp_path):
    out = stopped("features", tmp_path)
    manifest = json.loads((out / "fit.json").read_text())
    manifest["settings"]["learning_rate"] = 0.3
    (out / "fit.json").write_text(json.dumps(with_digest(manifest)))
    with pytest.raises(UserError, match=r"cannot go on from .*newest.safetensors: .* trained with other settings"):
        tasks.resume(out, options=OPTIONS)


def test_a_manifest_with_another_number_is_refused(tmp_path):
    out = stopped("features", tmp_path)
    text = (out / "fit.json").read_text()
    assert text.count('"seed": 0') == 1
    (out / "fit.json").write_text(text.replace('"seed": 0', '"seed": 8'))
    with pytest.raises(UserError, match=r"cannot read .*fit.json: it is damaged: its digest is another"):
        tasks.resume(out, options=OPTIONS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda manifest: manifest.update(format=3),
            "it was written by a newer version, format 3; this one reads up to 2",
        ),
        (
            lambda manifest: manifest.update(format=1),
            "it was written by an earlier version of manyclass; train it again",
        ),
        (lambda manifest: manifest.update(kind="pictures"), "it is damaged: it does not describe a training"),
        (lambda manifest: manifest["source"].update(held_out=5), "it is damaged: it does not describe a training"),
        (lambda manifest: manifest["source"].update(min_count="x"), "it is damaged: it does not describe a training"),
        (lambda manifest: manifest["source"].update(colour="x"), "it is damaged: it does not describe a training"),
        (lambda manifest: manifest.pop("files"), "it is damaged: it does not describe a training"),
        (lambda manifest: manifest.pop("options"), "it is damaged: it does not say when to evaluate"),
        (lambda manifest: manifest["settings"].update(learning_rate="x"), "the settings of a training are damaged"),
        (lambda manifest: manifest.pop("settings"), "the settings of a training"),
        (lambda manifest: manifest["options"].update(evaluate_seconds=math.inf), "it is damaged: it is no JSON"),
        (lambda manifest: manifest.update(more=math.nan), "it is damaged: it is no JSON"),
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path, change, message):
    out = stopped("features", tmp_path)
    manifest = json.loads((out / "fit.json").read_text())
    change(manifest)
    (out / "fit.json").write_text(json.dumps(with_digest(manifest)))
    with pytest.raises(UserError, match=message):
        tasks.resume(out, options=OPTIONS)


def test_a_folder_without_a_training_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"`MODEL` must be a folder that `manyclass fit` made, got .*: No such file"):
        tasks.resume(tmp_path, options=OPTIONS)
    (tmp_path / "fit.json").write_text("{")
    with pytest.raises(UserError, match="it is damaged: it is no JSON"):
        tasks.resume(tmp_path, options=OPTIONS)


@pytest.mark.parametrize("name", ["fit.json", "log.csv", "rows.svm"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_pipe_or_a_device_is_refused_without_waiting(tmp_path, name, make):
    out = stopped("features", tmp_path)
    path = tmp_path / name if name == "rows.svm" else out / name
    path.unlink(missing_ok=True)
    make(path)
    before = path.lstat()
    with in_seconds(20), pytest.raises(UserError, match=rf"{name}: it is no file"):
        tasks.resume(out, options=OPTIONS)
    assert path.lstat() == before


@contextlib.contextmanager
def in_seconds(limit):
    """Fail a test that waits, instead of waiting with it."""

    def late(*_):
        pytest.fail(f"it waited for {limit} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(limit)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_a_huge_manifest_is_refused(tmp_path):
    (tmp_path / "fit.json").touch()
    os.truncate(tmp_path / "fit.json", 1 << 40)
    with pytest.raises(UserError, match=r"fit\.json: it has more than 1,048,576 bytes"):
        tasks.resume(tmp_path, options=OPTIONS)


@pytest.mark.parametrize("kind", ["text", "sequences"])
@pytest.mark.parametrize(("first", "then"), [({"epochs": 3}, {"seconds": 0.2}), ({"seconds": 0.2}, {"epochs": 1})])
def test_a_limit_may_become_one_of_the_other_kind(tmp_path, kind, first, then):
    """Learning rates decay over epochs, but not over seconds."""
    settings = replace(SETTINGS[kind], **{"epochs": None, **first})
    out = stopped(kind, tmp_path, step=2, settings=settings)
    done = tasks.resume(out, given=then, options=OPTIONS)
    assert done.history.stopped == next(iter(then))
    assert done.measured is not None


def test_a_training_with_a_negative_loss_is_resumed(tmp_path):
    """The loss of plain importance sampling may be negative."""
    settings = replace(SHORT["features"], objective="plain_importance", sampler="importance")
    out = stopped("features", tmp_path, settings=settings)
    state = storage.load(out / "newest.safetensors", content_type="checkpoint")
    state["state"]["training"]["loss"] = -0.25
    storage.save(out / "newest.safetensors", state, content_type="checkpoint")
    assert tasks.resume(out, options=OPTIONS).history.stopped == "epochs"


def test_a_training_is_resumed_on_its_device(tmp_path):
    out = stopped("features", tmp_path)
    manifest = json.loads((out / "fit.json").read_text())
    assert manifest["options"]["device"] == "cpu"
    manifest["options"]["device"] = "cuda:77"
    (out / "fit.json").write_text(json.dumps(with_digest(manifest)))
    with pytest.raises(UserError, match="`device` must be one that torch finds here, got 'cuda:77'"):
        tasks.resume(out, options=OPTIONS)
    message = "`device` must be left out, or of the type it was when the training began, cuda:77, got cpu"
    with pytest.raises(UserError, match=message):
        tasks.resume(out, options=replace(OPTIONS, device="cpu"))


def test_a_read_only_folder_is_refused_before_the_training(tmp_path, monkeypatch):
    out = stopped("features", tmp_path)

    def refuses(path, content):
        raise UserError(f"cannot save {path}: Read-only file system")

    # The function of the same name hides the module.
    monkeypatch.setattr(sys.modules["manyclass.tasks.fit"], "write_json", refuses)
    output = Interrupts(0)
    output.on_step = lambda training: pytest.fail("it trained")
    with pytest.raises(UserError, match="Read-only file system"):
        tasks.resume(out, options=replace(OPTIONS, callbacks=[output]))
