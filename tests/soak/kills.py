"""Trainings that are killed at random moments and resumed until they are done."""

import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from manyclass import storage
from manyclass.errors import UserError
from tests.soak.commands import Ended, ended, started
from tests.soak.outcome import Outcome
from tests.soak.trainings import DATA, Reference, fit_command, left, reference
from tests.storage.trees import difference

KILLS = 20
KINDS = ("text", "features")
_MOMENTS = ("reading", "training", "save", "any", "training", "end", "save", "training", "report", "any")


def kills(folder: Path, share: float, seed: int) -> Outcome:
    """Kill trainings of each kind; each must leave the same files as an uninterrupted training."""
    outcome = Outcome()
    number = max(1, round(KILLS * share))
    for kind in KINDS if number > 2 else KINDS[:1]:
        whole = reference(kind, folder, share >= 1)
        draw = random.Random(f"{seed} {kind}")
        known = [moment for moment in _MOMENTS if whole.report or moment != "report"]
        first = draw.randrange(len(known))
        moments = [known[(first + i) % len(known)] for i in range(number)]
        turn = 0
        while moments and turn < 10 * number:
            out = folder / f"{kind}-killed-{turn}"
            turn += 1
            _one(outcome, kind, out, whole, moments, draw)
        outcome.faults += [f"{kind}: no kill came at the moment {moment!r}" for moment in moments]
    return outcome


def _one(outcome: Outcome, kind: str, out: Path, whole: Reference, moments: list[str], draw: random.Random) -> None:
    """Kill and resume one training until it is done, or until no moment is left to kill it in."""
    killed_in: list[str] = []
    while True:
        begun = (out / "fit.json").exists()
        command = whole.resume(out) if begun else fit_command(kind, whole.data, out, report=whole.report)
        process = started(*command)
        moment = moments[0] if moments else None
        if moment is not None and _is_there(process, _event(moment, out, whole, draw)):
            process.kill()
            done = ended(process)
            if done.code == -9:
                moments.pop(0)
                torn = any(out.glob("*.tmp-*"))
                killed_in.append(f"{moment} of a run that {'goes on' if begun else 'begins'}")
                outcome.saw(f"killed: {moment}")
                if torn:
                    outcome.saw("within a save")
                outcome.add(f"{kind}, killed in {killed_in[-1]}", _damaged_checkpoints(out))
                continue
        else:
            done = ended(process)
        break
    outcome.saw("done")
    case = f"{kind}, killed in {', '.join(killed_in) or 'no moment'}"
    outcome.add(case, [*_faults(done, out, whole)])


def _event(moment: str, out: Path, whole: Reference, draw: random.Random) -> Callable[[float], bool]:
    """Return a function of the seconds since the start that is True once the process must be killed."""
    drawing = whole.seconds - whole.trained
    wait = draw.random()

    def at(seconds: float) -> bool:
        return seconds > wait * whole.seconds

    def since(there: Callable[[], bool], longest: float) -> Callable[[float], bool]:
        first: list[float] = []

        def event(seconds: float) -> bool:
            if not first and there():
                first.append(seconds)
            return bool(first) and seconds - first[0] > wait * longest

        return event

    begun = time.time()
    log, newest, page = out / "log.csv", out / "newest.safetensors", out / "figures"
    training = since(lambda: _changed(log, begun) or _changed(newest, begun), whole.trained - whole.begun)
    events = {
        "any": at,
        "reading": since(lambda: _changed(out / DATA, begun), 0.05),
        "training": training,
        "save": lambda seconds: training(seconds) and any(out.glob("newest.safetensors.tmp-*")),
        "end": since(lambda: log.exists() and f"\n{whole.last_step}," in log.read_text(), 0.2),
        "report": since(lambda: _changed(page, begun), drawing / 2),
    }
    return events[moment]


def _changed(path: Path, since: float) -> bool:
    try:
        return path.stat().st_mtime > since
    except OSError:
        return False


def _is_there(process: "subprocess.Popen[str]", event: Callable[[float], bool]) -> bool:
    """Wait for an event; False: the process ended first."""
    begin = time.monotonic()
    while process.poll() is None:
        if event(time.monotonic() - begin):
            return True
        time.sleep(0.0005)
    return False


def _damaged_checkpoints(out: Path) -> list[str]:
    """Return the faults of a killed training: each of its checkpoints must be whole."""
    faults = []
    for name, content_type in (("newest", "checkpoint"), ("previous", "checkpoint"), ("best", "model")):
        path = out / f"{name}.safetensors"
        if path.exists():
            try:
                storage.check(path, content_type=content_type)
            except UserError as error:
                faults.append(str(error))
    return faults


def _faults(done: Ended, out: Path, whole: Reference) -> list[str]:
    if done.code != 0:
        return [f"ended with {done.code}: {done.err[-500:]!r}"]
    faults = []
    if place := difference(left(out), whole.left):
        faults.append(f"another outcome, at {place}")
    if other := {path.name for path in out.iterdir()} ^ whole.files():
        faults.append(f"other files: {sorted(other)}")
    return faults
