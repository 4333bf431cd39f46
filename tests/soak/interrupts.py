"""Ctrl-C at random moments of a training, which is then continued as its message says."""

import random
import shlex
import signal
import time
from pathlib import Path

from tests.soak.commands import Ended, ended, started
from tests.soak.outcome import Outcome
from tests.soak.trainings import Reference, fit_command, left, reference
from tests.storage.trees import difference

INTERRUPTS = 16
KINDS = ("text", "features")


def interrupts(folder: Path, share: float, seed: int) -> Outcome:
    """Interrupt trainings, some of them twice in a row, and continue each as its message says."""
    outcome = Outcome()
    for i in range(max(1, int(INTERRUPTS * share))):
        kind = KINDS[i % len(KINDS) if share >= 1 else 0]
        whole = reference(kind, folder, share >= 1)
        draw = random.Random(f"{seed} {i}")
        command = fit_command(kind, whole.data, folder / f"{kind}-interrupted-{i}", report=whole.report)
        _one(outcome, command, whole, draw, f"{kind} {i}")
    return outcome


def _one(outcome: Outcome, command: tuple[object, ...], whole: Reference, draw: random.Random, case: str) -> None:
    out = Path(str(command[command.index("--out") + 1]))
    going, twice = command, draw.random() < 0.25
    for wait in (*([draw.random(), draw.random()] if whole.report else [draw.random()]), None):
        process = started(*going, ready=True)
        assert process.stdout is not None
        process.stdout.readline()
        if wait is not None:
            # A share of the duration, without the time of imports.
            time.sleep(0.01 + wait * (whole.seconds - 0.7 * whole.begun))
            process.send_signal(signal.SIGINT)
            if twice:
                time.sleep(draw.random() * 0.05)
                process.send_signal(signal.SIGINT)
        done = ended(process)
        if done.code == 0:
            break
        outcome.saw("interrupted twice in a row" if twice else "interrupted")
        message = done.err.strip().splitlines()[-1] if done.err.strip() else ""
        outcome.add(f"{case}: {message}", [_fault(done, message)])
        if done.code != 2:
            return
        if "manyclass fit" in message:
            outcome.saw("it said how to go on")
            going = tuple(shlex.split(message[message.index("manyclass fit") :])[1:])
            going += () if whole.report else ("--no-report",)
        else:
            outcome.saw("nothing was kept yet")
            going = command
    outcome.saw("done")
    place = difference(left(out), whole.left) if done.code == 0 else ""
    outcome.add(case, [f"another outcome, at {place}" if place else ""])


def _fault(done: Ended, message: str) -> str:
    if done.code != 2:
        return f"exit code {done.code}: {done.err[-500:]!r}"
    if "Traceback" in done.err or not message.startswith("manyclass: interrupted"):
        return f"it did not end in one line: {done.err[-500:]!r}"
    return "" if "manyclass fit" in message or "the same command" in message else "it does not say how to go on"
