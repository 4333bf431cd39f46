"""The benchmark of Trainer runs at a small scale."""

import csv
import lzma
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_contenders_take_turns_and_give_a_row_each(tmp_path):
    for part, lines in (("train", 300), ("valid", 60)):
        with lzma.open(tmp_path / f"{part}.txt.xz", "wt") as file:
            file.write("the quick brown fox jumps over the lazy dog\n" * lines)
    sizes = {"layers": 1, "dim": 8, "length": 32, "batch": 1, "steps": 4, "turn": 2, "held-out": 2}
    options = [part for name, value in sizes.items() for part in (f"--{name}", value)]
    out = tmp_path / "results.csv"
    command = [sys.executable, "-m", "benchmarks.transformers_trainer", "--data", tmp_path, "--out", out, *options]
    command += ["--contenders", "plain", "k = 1024, RowAdagrad"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.count("ms a step") == 2
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["contender"] for row in rows] == ["plain", "k = 1024, RowAdagrad"]
    for row in rows:
        assert row["generates_equally"] == "True"
        assert 0 < float(row["start_gib"]) <= float(row["peak_gib"])
        assert 0 < float(row["step_ms_p20"]) <= float(row["step_ms"]) <= float(row["step_ms_p80"])
