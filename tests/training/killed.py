"""A training that is killed at random times and resumed until it ends.

To run it alone: python -m tests.training.killed FOLDER --kills 20
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from manyclass import ClassCounts, ClassHead, storage
from manyclass.optim import RowAdagrad
from manyclass.training import Checkpoints, HeldOut, Training
from tests.storage.trees import difference

C, D, B = 1500, 8, 16
# The default sampler starts a rebuild of its table at step 50, and takes it over at step 63.
STEPS = 70
ROOT = Path(__file__).parents[2]


class Setting:
    """A training with state in every part: dropout, a learning sampler, row optimisers, a shuffling loader."""

    def __init__(self, folder, *, every=0.0, steps=STEPS, callbacks=(), patience=None, restore_best=False):
        torch.manual_seed(11)
        inputs, target = torch.randn(320, D), (torch.rand(320) ** 3 * C).long()
        counts = ClassCounts.from_targets(target, C, smoothing=1.0)
        self.encoder = nn.Sequential(nn.Linear(D, 12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, D))
        self.head = ClassHead(D, C, counts=counts, k=64, sparse=True)
        self.optimizers = [
            RowAdagrad(self.head.parameters(), 0.1),
            torch.optim.Adam(self.encoder.parameters(), lr=0.01),
        ]
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizers[1], 20, gamma=0.5)
        self.checkpoints = Checkpoints(folder, self.state, model=self.model, every=every)
        self.training = Training(
            self.head,
            DataLoader(TensorDataset(inputs, target), batch_size=B, shuffle=True),
            self.optimizers,
            encoder=self.encoder,
            schedulers=self.scheduler,
            steps=steps,
            held_out=HeldOut([(inputs[:40], target[:40])], every=7, patience=patience, restore_best=restore_best),
            probe_every=9,
            report_every=5,
            callbacks=[*callbacks, self.checkpoints],
            seed=3,
        )

    def parts(self):
        return {
            "encoder": self.encoder,
            "head": self.head,
            "rows": self.optimizers[0],
            "dense": self.optimizers[1],
            "scheduler": self.scheduler,
            "training": self.training,
        }

    def state(self, training=None):
        return {name: part.state_dict() for name, part in self.parts().items()}

    def model(self):
        return {"encoder": self.encoder.state_dict(), "head": self.head.state_dict()}

    def resume(self, which="newest"):
        for name, state in self.checkpoints.resume(which).items():
            self.parts()[name].load_state_dict(state)
        return self


def timeless(state):
    """Return a state without its seconds."""
    training = state["training"]
    progress = {**training["progress"], "seconds": None}
    records = [{**record, "seconds": None, "seconds_left": None} for record in training["records"]]
    return {**state, "training": {**training, "progress": progress, "records": records, "spent": None}}


def outcome(folder):
    """Return the files of a training that must be the same after kills."""
    newest = storage.load(folder / "newest.safetensors", content_type="checkpoint")
    return [
        timeless(newest["state"]),
        newest["best_cost"],
        storage.load(folder / "best.safetensors", content_type="model"),
    ]


def killed_and_resumed(folder, *, kills, seed=0):
    """Run the kills in another process; return the number of kills, and of those within a save.

    Raises:
        AssertionError: an outcome differs from that of a training that was never killed.
    """
    command = [sys.executable, "-m", "tests.training.killed", str(folder), "--kills", str(kills), "--seed", str(seed)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _begin(folder, steps=STEPS):
    """Train in a child process that resumes from the folder; a fork is safe because this process has one thread."""
    if child := os.fork():
        return child
    status = 1
    try:
        setting = Setting(folder, steps=steps)
        if (folder / "newest.safetensors").exists():
            setting.resume()
        setting.training.run()
        status = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise
    finally:
        os._exit(status)


def _finish(folder, steps=STEPS):
    _, status = os.waitpid(_begin(folder, steps), 0)
    assert status == 0, f"a training that was not killed ended with {status}"


def _survives(child, seconds):
    """Kill a child after some time; return True if it had ended before."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        gone, status = os.waitpid(child, os.WNOHANG)
        if gone:
            assert status == 0, f"a training that was not killed ended with {status}"
            return True
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return status == 0


def main(folder, kills, seed):
    torch.set_num_threads(1)
    moments = random.Random(seed)
    # Late imports and the build of kernels happen here, before the forks and before time is measured.
    Setting(folder / "first")
    _finish(folder / "first", steps=1)
    started = time.monotonic()
    _finish(folder / "whole")
    duration = time.monotonic() - started
    expected = outcome(folder / "whole")
    counts = {"kills": 0, "within a save": 0, "trainings": 0, "seconds": duration}
    while counts["kills"] < kills:
        torn = folder / "torn"
        while not _survives(_begin(torn), moments.uniform(0, duration)):
            counts["kills"] += 1
            counts["within a save"] += any(torn.glob("*.tmp-*"))
        counts["trainings"] += 1
        assert not (place := difference(outcome(torn), expected)), f"another outcome after {counts}, at {place}"
        left = sorted(path.name for path in torn.iterdir())
        assert left == ["best.safetensors", "newest.safetensors", "previous.safetensors"], left
        shutil.rmtree(torn)
    print(json.dumps(counts))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    main(options.folder, options.kills, options.seed)
