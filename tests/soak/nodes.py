"""A training on two nodes, one of which is lost with its agent: the other goes on alone from the last checkpoint."""

import os
import random
import signal
import socket
import subprocess
import time
from pathlib import Path

from tests.cli.launched import ENVIRONMENT, torchrun
from tests.soak.commands import ROOT
from tests.soak.outcome import Outcome
from tests.soak.ranks import LIMIT_SECONDS, STEPS, last_row, workers_of
from tests.soak.trainings import write_data

LOSSES = 3
ALL_STEPS = 248
# Seconds that the nodes of a round wait for more of them, and after which a silent one is given up.
_PATIENCE = "last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=3"


def nodes(folder: Path, share: float, seed: int) -> Outcome:
    """Kill the agent that does not host the rendezvous, with its process; the training must end on the other node."""
    outcome, draw = Outcome(), random.Random(f"{seed} nodes")
    data = write_data("text", folder / "nodes.txt")
    for number in range(max(1, round(LOSSES * share))):
        outcome.add(f"loss {number + 1}", _lose_one(data, folder / f"nodes-{number}", draw, outcome))
    return outcome


def _lose_one(data: Path, out: Path, draw: random.Random, outcome: Outcome) -> list[str]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        endpoint = f"localhost:{free.getsockname()[1]}"
    agents = [_agent(data, out, endpoint, hosts=hosts) for hosts in (True, False)]
    try:
        first, second = agents
        newest, begin = out / "newest.safetensors", time.monotonic()
        while (
            not newest.exists() and first.poll() is second.poll() is None and time.monotonic() - begin < LIMIT_SECONDS
        ):
            time.sleep(0.05)
        time.sleep(0.3 * draw.random())
        for process in (*workers_of(second.pid), second.pid):
            os.kill(process, signal.SIGKILL)
        outcome.saw("lost")
        _, err = first.communicate(timeout=LIMIT_SECONDS)
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()
    if first.returncode:
        return [f"ended with {first.returncode}: {err[-500:]!r}"]
    faults = [] if f"after {ALL_STEPS} steps" in err else [f"ended at step {last_row(out)['step']}, not {ALL_STEPS}"]
    # The lost node had a part in the first run, and none in the second.
    return faults if "another process was lost" in err else [*faults, f"nothing was lost: {err[-500:]!r}"]


def _agent(data: Path, out: Path, endpoint: str, *, hosts: bool) -> "subprocess.Popen[str]":
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-id", "soak", "--rdzv-endpoint", endpoint)
    patience = ("--rdzv-conf", f"is_host={int(hosts)},{_PATIENCE}")
    options = ("--nnodes", "1:2", "--max-restarts", 3, "--monitor-interval", 0.1, *rendezvous, *patience)
    command = torchrun("manyclass", "fit", data, "--out", out, *STEPS, "--auto-resume", processes=1, options=options)
    return subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
