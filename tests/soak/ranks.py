"""Trainings on two processes, one of which is killed at random moments, or hangs; torchrun starts them again."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

from tests.cli.launched import ENVIRONMENT, torchrun
from tests.soak.commands import ROOT, ended, started
from tests.soak.outcome import Outcome
from tests.soak.trainings import rows, write_data

KILLS = 10
SEEDS = 3  # of trainings of one process, whose spread a killed training must keep to
SLACK = 0.02  # nats, beside the spread
LIMIT_SECONDS = 300
SLACK_SECONDS = 10  # of a busy machine
TIMEOUT = 5  # seconds after which a process gives up another one that hangs
_OPTIONS = ("--text", "--dim", 16, "--batch-size", 5, "--length", 16, "--k", 64, "--clip", 1.0, "--no-report")
STEPS = (*_OPTIONS, "--epochs", 2, "--checkpoint-every", 0.2)


def ranks(folder: Path, share: float, seed: int) -> Outcome:
    """Kill one of two processes again and again; the training must end as if nothing had happened."""
    outcome, draw = Outcome(), random.Random(f"{seed} ranks")
    data = write_data("text", folder / "ranks.txt")
    losses, steps = [], 0
    for number in range(SEEDS):
        out = folder / f"ranks-{number}"
        done = ended(started("fit", data, "--out", out, *STEPS, "--seed", number))
        assert done.code == 0, done.err
        last = last_row(out)
        steps, losses = int(last["step"]), [*losses, float(last["held_out_loss"])]
    out = folder / "ranks-killed"
    kills = max(1, round(KILLS * share))
    # A killed process counts as one restart, and the step after the last checkpoint is the first to be repeated.
    options = ("--max-restarts", kills + 1, "--monitor-interval", 0.1)
    command = torchrun("manyclass", "fit", data, "--out", out, *STEPS, "--auto-resume", options=options)
    agent = subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        _kill(agent, out, kills, draw, outcome)
        _, err = agent.communicate(timeout=LIMIT_SECONDS)
    finally:
        agent.kill()
    faults = [] if agent.returncode == 0 else [f"ended with {agent.returncode}: {err[-500:]!r}"]
    if not faults:
        last, low, high = last_row(out), min(losses), max(losses)
        if int(last["step"]) != steps:
            faults.append(f"ended at step {last['step']}, not {steps}")
        if not 2 * low - high - SLACK <= float(last["held_out_loss"]) <= 2 * high - low + SLACK:
            faults.append(f"held-out loss {last['held_out_loss']}, but that of other seeds is {low:.4f} to {high:.4f}")
    outcome.add(f"{outcome.seen.get('killed', 0)} kills", faults)
    outcome.add("a process that hangs", [_hang(folder, data, outcome)])
    if outcome.seen.get("killed", 0) < kills:
        outcome.faults.append(f"the training ended before kill {outcome.seen.get('killed', 0) + 1} of {kills}")
    return outcome


def _kill(agent: "subprocess.Popen[str]", out: Path, kills: int, draw: random.Random, outcome: Outcome) -> None:
    """Kill one of the processes, each time some moments after the training has gone on."""
    newest = out / "newest.safetensors"
    for _ in range(kills):
        before, begin = _changed(newest), time.monotonic()
        while agent.poll() is None and time.monotonic() - begin < LIMIT_SECONDS:
            workers = workers_of(agent.pid)
            # Some kills come before a checkpoint: while the processes start, read or build the model.
            if len(workers) == 2 and (_changed(newest) != before or draw.random() < 0.0005):
                time.sleep(draw.random() * 0.5)
                os.kill(draw.choice(workers), signal.SIGKILL)
                outcome.saw("killed")
                break
            time.sleep(0.005)
        # The agent notices before the next kill, and ends the other process.
        gone = set(workers_of(agent.pid))
        while agent.poll() is None and gone & set(workers_of(agent.pid)) and time.monotonic() - begin < LIMIT_SECONDS:
            time.sleep(0.05)


def _hang(folder: Path, data: Path, outcome: Outcome) -> str:
    """Stop one of two processes without ending it: the other must end within the time-out, and torchrun name it."""
    out = folder / "ranks-hung"
    options = (*STEPS, "--epochs", 100_000, "--timeout", TIMEOUT)
    command = torchrun("manyclass", "fit", data, "--out", out, *options)
    agent = subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    stopped = None
    try:
        while not (out / "previous.safetensors").exists() and agent.poll() is None:
            time.sleep(0.05)
        stopped, other = sorted(workers_of(agent.pid))
        os.kill(stopped, signal.SIGSTOP)
        outcome.saw("hung")
        begin = time.monotonic()
        while other in workers_of(agent.pid) and time.monotonic() - begin < LIMIT_SECONDS:
            time.sleep(0.05)
        seconds = time.monotonic() - begin
        # torchrun asks it to end before it kills it.
        os.kill(stopped, signal.SIGCONT)
        _, err = agent.communicate(timeout=LIMIT_SECONDS)
    finally:
        agent.kill()
        if stopped in workers_of(agent.pid):
            os.kill(stopped, signal.SIGKILL)
    if seconds > 2 * TIMEOUT + SLACK_SECONDS:
        return f"the other process ended after {seconds:.1f} s"
    lost = f"another process was lost, or did not answer within {TIMEOUT} s"
    return "" if agent.returncode and lost in err and str(other) in err else f"not named: {err[-800:]!r}"


def workers_of(pid: int) -> list[int]:
    """Return the processes that torchrun's agent has started."""
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in found.read_text().split()] if found.exists() else []


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def last_row(out: Path) -> dict[str, str]:
    header = (out / "log.csv").read_text().splitlines()[0].split(",")
    return dict(zip([name for name in header if name != "seconds"], rows(out)[-1], strict=True))
