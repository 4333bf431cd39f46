"""Checkpoints: when they are saved, on a full disk, and loading them."""

import dataclasses
import os
import signal
import warnings

import pytest
import torch

from manyclass import storage
from manyclass.errors import NotSavedWarning, UserError
from manyclass.training import Checkpoints, History, Progress, Record, Training, _stopping, load_checkpoint
from tests.storage.trees import same
from tests.training.killed import Setting, timeless
from tests.training.problems import Recorder, batches, model

CHECKPOINT_NAMES = ("newest", "previous", "best")
NAMES = ["best.safetensors", "newest.safetensors", "previous.safetensors"]


def recorded(step, held_out_loss):
    return Record(step, 0, step, 0.0, 1.0, held_out_loss=held_out_loss)


def ended(step=9, stopped="steps"):
    return History((), Progress(step=step), None, None, stopped)


def counted(folder, **options):
    """Return a state that is one number, and checkpoints of it."""
    now = {"number": 0}
    return now, Checkpoints(folder, lambda training: now, model=lambda: now, **options)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def numbers(folder):
    return {which: load_checkpoint(folder, which)[0]["number"] for which in CHECKPOINT_NAMES}


# When checkpoints are saved.


def test_a_checkpoint_is_saved_when_it_is_due(tmp_path, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr("manyclass.training.checkpoints.time.monotonic", lambda: clock[0])
    now, checkpoints = counted(tmp_path, every=60)
    seen = []
    for number in range(1, 8):
        now["number"] = number
        clock[0] += 25
        checkpoints.on_step(None)
        seen.append(
            {path.stem: load_checkpoint(tmp_path, path.stem)[0]["number"] for path in sorted(tmp_path.iterdir())}
        )
    third, sixth = {"newest": 3}, {"newest": 6, "previous": 3}
    assert seen == [{}, {}, third, third, third, sixth, sixth]


@pytest.mark.parametrize(("stopped", "saves"), [("steps", True), ("interrupted", True), ("failed", False)])
def test_a_training_that_ends_is_saved_unless_it_failed(tmp_path, stopped, saves):
    now, checkpoints = counted(tmp_path)
    now["number"] = 5
    checkpoints.on_end(None, ended(stopped=stopped))
    assert names(tmp_path) == (["newest.safetensors"] if saves else [])


def test_half_a_step_is_not_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(_stopping, "DOUBLE_PRESS_SECONDS", -1)

    class Presses(torch.nn.Module):
        pressed = 0

        def forward(self, inputs):
            self.pressed += 1
            if self.pressed > 5:
                # The second Ctrl-C raises at once.
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
            return inputs

    head = model()[1]
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    recorder = Recorder()
    checkpoints = Checkpoints(tmp_path, Training.state_dict, model=head.state_dict, every=0)
    callbacks = [recorder, checkpoints]
    training = Training(head, batches(), optimizer, encoder=Presses(), epochs=2, callbacks=callbacks)
    with pytest.raises(KeyboardInterrupt):
        training.run()
    assert recorder.history.stopped == "failed"
    assert load_checkpoint(tmp_path)[0]["progress"]["step"] == 5


@pytest.mark.parametrize("times", [1, 3])
def test_ctrl_c_saves_the_current_step(tmp_path, times):
    """Pressing it several times in a row changes nothing."""

    class Presses(Recorder):
        def on_step(self, training):
            if training.progress.step == 7:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)

    setting = Setting(tmp_path, every=1e9, callbacks=[Presses()])
    assert setting.training.run().stopped == "interrupted"
    assert load_checkpoint(tmp_path)[0]["training"]["progress"]["step"] == 7


def test_ctrl_c_waits_for_the_last_checkpoint(tmp_path, monkeypatch):
    save, pressed = storage.save, []

    def presses(*arguments, **options):
        pressed.append(signal.raise_signal(signal.SIGINT))
        save(*arguments, **options)

    setting = Setting(tmp_path, every=1e9)
    monkeypatch.setattr(storage, "save", presses)
    history = setting.training.run()
    assert pressed
    assert history.stopped == "interrupted"
    assert load_checkpoint(tmp_path)[0]["training"]["progress"] == dataclasses.asdict(history.progress)


def test_the_best_model_is_the_one_that_is_kept(tmp_path):
    now, checkpoints = counted(tmp_path)
    for number, loss in enumerate([3.0, None, 2.0, 2.5, 2.0, 1.0, 1.5]):
        now["number"] = number
        checkpoints.on_record(None, recorded(number, loss))
    assert load_checkpoint(tmp_path, "best")[0] == {"number": 5}
    checkpoints.on_end(None, ended())
    now, resumed = counted(tmp_path)
    assert resumed.resume() == {"number": 6}
    now["number"] = 7
    resumed.on_record(None, recorded(7, 1.2))
    assert load_checkpoint(tmp_path, "best")[0] == {"number": 5}
    resumed.on_record(None, recorded(7, 0.9))
    assert load_checkpoint(tmp_path, "best")[0] == {"number": 7}


def test_a_new_training_overwrites_the_best_model_of_another(tmp_path):
    storage.save(tmp_path / "best.safetensors", {"number": 99}, content_type="model")
    now, checkpoints = counted(tmp_path)
    now["number"] = 1
    checkpoints.on_record(None, recorded(1, 1e6))
    assert load_checkpoint(tmp_path, "best")[0] == {"number": 1}


def test_the_folder_is_made(tmp_path):
    counted(tmp_path / "a" / "b")[1].on_end(None, ended())
    assert load_checkpoint(tmp_path / "a" / "b") == ({"number": 0}, tmp_path / "a" / "b" / "newest.safetensors")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot make the folder .*file: "):
        counted(tmp_path / "file")
    with pytest.raises(ValueError, match="`every` must be finite and at least 0, got -1"):
        counted(tmp_path, every=-1)


# A full disk.


@pytest.fixture
def disk(monkeypatch):
    """Return a switch that makes the disk full."""
    state = {"full": False}
    sync = os.fsync

    def fsync(number):
        if state["full"]:
            raise OSError(28, "No space left on device")
        sync(number)

    monkeypatch.setattr("manyclass.storage.atomic.os.fsync", fsync)
    return state


def test_a_full_disk_does_not_end_a_training(tmp_path, disk):
    now, checkpoints = counted(tmp_path, every=0)
    for number in (1, 2):
        now["number"] = number
        checkpoints.on_step(None)
    checkpoints.on_record(None, recorded(2, 3.0))
    disk["full"] = True
    now["number"] = 3
    expected = r"disk full while saving .*newest.safetensors: nothing was overwritten; .*\. Training goes on"
    with pytest.warns(NotSavedWarning, match=expected):
        checkpoints.on_step(None)
    # There is one warning only: a second one would fail the test.
    checkpoints.on_step(None)
    assert names(tmp_path) == NAMES
    assert numbers(tmp_path) == {"newest": 2, "previous": 1, "best": 2}
    disk["full"] = False
    checkpoints.on_step(None)
    assert numbers(tmp_path) == {"newest": 3, "previous": 2, "best": 2}
    disk["full"] = True
    with pytest.warns(NotSavedWarning, match="Training goes on and will try again"):
        checkpoints.on_step(None)


def test_a_full_disk_is_an_error_at_the_end(tmp_path, disk):
    now, checkpoints = counted(tmp_path)
    checkpoints.on_end(None, ended())
    now["number"] = 1
    disk["full"] = True
    with pytest.raises(UserError, match="disk full while saving"):
        checkpoints.on_end(None, ended())
    assert load_checkpoint(tmp_path)[0] == {"number": 0}


def test_a_best_model_that_could_not_be_saved_does_not_count_as_the_best(tmp_path, disk):
    now, checkpoints = counted(tmp_path)
    checkpoints.on_record(None, recorded(1, 3.0))
    disk["full"] = True
    now["number"] = 2
    with pytest.warns(NotSavedWarning, match=r"best.safetensors"):
        checkpoints.on_record(None, recorded(2, 1.0))
    disk["full"] = False
    now["number"] = 3
    checkpoints.on_record(None, recorded(3, 2.0))
    assert load_checkpoint(tmp_path, "best")[0] == {"number": 3}


@pytest.mark.parametrize(("step", "best"), [(2, 2), (3, 1)])
def test_a_best_model_that_could_not_be_saved_is_saved_at_the_end_if_it_is_still_there(tmp_path, disk, step, best):
    now, checkpoints = counted(tmp_path)
    now["number"] = 1
    checkpoints.on_record(None, recorded(1, 3.0))
    disk["full"] = True
    now["number"] = 2
    with pytest.warns(NotSavedWarning, match=r"best.safetensors"):
        checkpoints.on_record(None, recorded(2, 1.0))
    disk["full"] = False
    checkpoints.on_end(None, ended(step=step))
    assert load_checkpoint(tmp_path, "best")[0] == {"number": best}


def test_a_training_on_a_full_disk_is_the_same_training(tmp_path, disk):
    whole = Setting(tmp_path / "whole", every=1e9)
    whole.training.run()

    class Fills(Recorder):
        def on_step(self, training):
            disk["full"] = 10 <= training.progress.step < 60

    filled = Setting(tmp_path / "filled", every=0, callbacks=[Fills()])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        filled.training.run()
    assert 1 <= len(caught) <= 2
    assert same(timeless(filled.state()), timeless(whole.state()))


def test_a_value_that_cannot_be_saved_is_an_error_at_once(tmp_path):
    checkpoints = Checkpoints(tmp_path, lambda training: {"generator": torch.Generator()}, model=dict, every=0)
    with pytest.raises(TypeError, match=r"`content\['state'\]\['generator'\]` must be .*, got a Generator"):
        checkpoints.on_step(None)


# Loading.


def three(folder):
    now, checkpoints = counted(folder, every=0)
    for number in (1, 2):
        now["number"] = number
        checkpoints.on_record(None, recorded(number, 1.0 / number))
        checkpoints.on_step(None)
    return folder


def damage(folder, *which):
    for name in which:
        path = folder / f"{name}.safetensors"
        path.write_bytes(path.read_bytes()[:-3])


@pytest.mark.parametrize(
    ("damaged", "offered"),
    [
        (["newest"], r"/previous.safetensors can be read: `checkpoint` may be 'previous'$"),
        (
            ["newest", "previous"],
            r"/best.safetensors can be read, though it is the model alone: `checkpoint` may be 'best'$",
        ),
        (["newest", "previous", "best"], r"; nothing else in .* can be read$"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_another_offered(tmp_path, damaged, offered):
    damage(three(tmp_path), *damaged)
    with pytest.raises(UserError, match=r"^cannot read .*/newest.safetensors: it is cut off.*" + offered):
        load_checkpoint(tmp_path)
    with pytest.raises(UserError, match=offered):
        counted(tmp_path)[1].resume()


def test_other_checkpoints_can_be_loaded(tmp_path):
    three(tmp_path)
    assert numbers(tmp_path) == {"newest": 2, "previous": 1, "best": 2}
    damage(tmp_path, "newest")
    assert counted(tmp_path)[1].resume("previous") == {"number": 1}
    with pytest.raises(ValueError, match="`checkpoint` must be one of 'newest', 'previous', 'best', got 'last'"):
        load_checkpoint(tmp_path, "last")


def test_after_a_damaged_checkpoint_the_previous_one_stays_until_there_is_a_new_one(tmp_path, disk):
    damage(three(tmp_path), "newest")
    now, checkpoints = counted(tmp_path, every=0)
    now.update(checkpoints.resume("previous"))
    disk["full"] = True
    with pytest.warns(NotSavedWarning, match="disk full"):
        checkpoints.on_step(None)
    assert load_checkpoint(tmp_path, "previous")[0] == {"number": 1}
    disk["full"] = False
    checkpoints.on_step(None)
    assert load_checkpoint(tmp_path)[0] == {"number": 1}


def test_a_folder_without_checkpoints(tmp_path):
    with pytest.raises(UserError, match=r"newest.safetensors: there is no such file; nothing else in .* can be read"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"state": {}},
        {"state": [], "best_cost": 1.0},
        {"state": {}, "best_cost": "1"},
        {"state": {}, "best_cost": float("nan")},
    ],
)
def test_a_checkpoint_of_something_else_is_refused(tmp_path, content):
    storage.save(tmp_path / "newest.safetensors", content, content_type="checkpoint")
    with pytest.raises(UserError, match="it has no state of a training"):
        load_checkpoint(tmp_path)


def test_a_model_is_not_loaded_as_a_checkpoint(tmp_path):
    three(tmp_path)
    os.replace(tmp_path / "best.safetensors", tmp_path / "newest.safetensors")
    with pytest.raises(UserError, match=r"its content type is 'model', not 'checkpoint'; .*previous"):
        load_checkpoint(tmp_path)
