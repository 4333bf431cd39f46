"""Hundreds of kills, interrupts, full disks and broken files, and edited states: python -m tests.soak --part kills."""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.soak.checkpoints import checkpoints
from tests.soak.files import files
from tests.soak.full_disk import full_disk
from tests.soak.interrupts import interrupts
from tests.soak.kills import kills
from tests.soak.nodes import nodes
from tests.soak.outcome import Outcome
from tests.soak.ranks import ranks
from tests.soak.states import states

PARTS = {
    "kills": kills,
    "interrupts": interrupts,
    "full-disk": full_disk,
    "checkpoints": checkpoints,
    "files": files,
    "states": states,
    "ranks": ranks,
    "nodes": nodes,
}


def soak(folder: Path, parts: Sequence[str], share: float, seed: int) -> dict[str, tuple[Outcome, float]]:
    """Run a share of the cases of these parts; return the outcome of each part, and its seconds."""
    done = {}
    for name in parts:
        begin = time.monotonic()
        print(f"{name}: …", flush=True)
        outcome = PARTS[name](folder, share, seed)
        done[name] = outcome, time.monotonic() - begin
        seen = ", ".join(f"{what} {number}" for what, number in sorted(outcome.seen.items()))
        print(f"{name}: {seen}", flush=True)
    return done


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("--share", type=float, default=1.0, help="Share of the cases to run; default: all")
    parser.add_argument("--seed", type=int, default=0, help="Random seed")
    parser.add_argument("--part", action="append", choices=[*PARTS], help="Run only this part; may be repeated")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="manyclass-soak-") as folder:
        done = soak(Path(folder), options.part or [*PARTS], options.share, options.seed)
    print(f"\n{'part':12} {'cases':>6} {'faults':>7} {'seconds':>8}")
    for name, (outcome, seconds) in done.items():
        print(f"{name:12} {outcome.cases:6} {len(outcome.faults):7} {seconds:8.1f}")
    faults = [f"{name}: {fault}" for name, (outcome, _) in done.items() for fault in outcome.faults]
    if faults:
        print("\n" + "\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
