"""One training at a time in a folder: a second one is told about the first."""

import errno
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from manyclass import tasks
from manyclass.errors import Notice, UserError
from manyclass.tasks.lock import LOCK, locked
from manyclass.training import Callback
from tests.tasks import problems
from tests.tasks.problems import SETTINGS, Interrupts, files, fit

SHORT = replace(SETTINGS["features"], epochs=1)
HELD = (
    r"`--out` must be a folder that no other training writes to, got {folder}: process {pid} on {host} has trained in "
    r"it since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
)
HOLDS = "import sys, time, pathlib; from manyclass.tasks.lock import locked; lock = locked(pathlib.Path(sys.argv[1])); "
HOLDS += "lock.__enter__(); print(flush=True); time.sleep(600)"


def message(folder, pid):
    host = re.escape(socket.gethostname())
    return HELD.format(folder=re.escape(str(folder)), pid=pid, host=host)


class During(Callback):
    """A callback that calls a function in the second step."""

    def __init__(self, function):
        self.function = function

    def on_step(self, training):
        if training.progress.step == 2:
            self.function()


def test_a_second_training_in_a_folder_is_told_who_holds_it(tmp_path):
    data, out, options = problems.write_features(tmp_path), tmp_path / "model", tasks.RunOptions()
    refused = []

    def second():
        for start in (lambda: fit("features", tmp_path, data=data), lambda: tasks.resume(out, options=options)):
            with pytest.raises(UserError, match=message(out, os.getpid())) as error:
                start()
            refused.append(error)

    options = replace(options, callbacks=[During(second)])
    done, _ = fit("features", tmp_path, data=data, settings=SHORT, options=options)
    assert len(refused) == 2
    assert done.history.stopped == "epochs"
    assert LOCK not in files(out)


def test_a_resumed_training_holds_its_folder(tmp_path):
    _, out = fit("features", tmp_path, settings=SHORT, options=tasks.RunOptions(callbacks=[Interrupts(1)]))
    refused = []

    def second():
        with pytest.raises(UserError, match=message(out, os.getpid())) as error:
            tasks.resume(out, options=tasks.RunOptions())
        refused.append(error)

    assert tasks.resume(out, options=tasks.RunOptions(callbacks=[During(second)])).history.stopped == "epochs"
    assert refused
    assert LOCK not in files(out)


def test_the_lock_of_a_killed_process_is_no_obstacle(tmp_path):
    out = tmp_path / "model"
    out.mkdir()
    with subprocess.Popen([sys.executable, "-c", HOLDS, out], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline()
            with pytest.raises(UserError, match=message(out, process.pid)):
                fit("features", tmp_path)
        finally:
            process.send_signal(signal.SIGKILL)
    assert files(out) == [LOCK]
    assert fit("features", tmp_path, settings=SHORT)[0].history.stopped == "epochs"
    assert LOCK not in files(out)


@pytest.mark.parametrize("content", [b"", b"\0" * 80])
def test_a_lock_file_that_was_never_written_is_no_obstacle(tmp_path, content):
    (tmp_path / LOCK).write_bytes(content)
    with locked(tmp_path):
        assert json.loads((tmp_path / LOCK).read_bytes())["pid"] == os.getpid()
    assert files(tmp_path) == []


@pytest.mark.parametrize("content", [b"mine", b"[" * 4000, b'{"host": "a\\n", "pid": 1, "since": ""}', b"\0mine"])
def test_a_file_of_the_user_is_no_lock_and_is_left_alone(tmp_path, content):
    (tmp_path / LOCK).write_bytes(content)
    with pytest.raises(UserError, match=r"`--out` must hold no \.manyclass-lock that `manyclass fit` did not write"):
        locked(tmp_path).__enter__()
    assert (tmp_path / LOCK).read_bytes() == content


def test_a_pipe_or_a_link_is_no_lock(tmp_path):
    os.mkfifo(tmp_path / LOCK)
    with pytest.raises(UserError, match="`--out` must"):
        locked(tmp_path).__enter__()
    (tmp_path / LOCK).unlink()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / LOCK).symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match="`--out` must be a folder that can be written to"):
        locked(tmp_path).__enter__()
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_lock_removed_while_it_was_opened_is_made_again(tmp_path, monkeypatch):
    lock, removed = fcntl.flock, []

    def slow(number, how):
        if not removed:
            removed.append((tmp_path / LOCK).unlink())
        lock(number, how)

    monkeypatch.setattr(fcntl, "flock", slow)
    with locked(tmp_path), pytest.raises(UserError, match=message(tmp_path, os.getpid())):
        locked(tmp_path).__enter__()
    assert removed


def test_a_file_system_without_locks_is_a_notice(tmp_path, monkeypatch):
    def unsupported(number, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.warns(Notice, match="cannot be locked, No locks available: start no second training in it"):
        locked(tmp_path).__enter__()


def test_a_folder_without_a_training_gets_no_lock(tmp_path, monkeypatch):
    monkeypatch.setattr("manyclass.tasks.fit.locked", lambda folder: pytest.fail("it was locked"), raising=False)
    with pytest.raises(UserError, match="`MODEL` must be a folder that `manyclass fit` made"):
        tasks.resume(tmp_path, options=tasks.RunOptions())
    assert files(tmp_path) == []
