"""The benchmark of inference runs at a small scale."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def rows_of(path):
    with path.open() as file:
        return {(row["contender"], int(row["num_classes"])): row for row in csv.DictReader(file)}


def test_the_benchmark_writes_every_contender(tmp_path):
    pytest.importorskip("faiss")
    for name, lines in (("train", 300), ("valid", 150)):
        text = (" ".join(f"w{(i * i + j) % 90}" for j in range(9)) for i in range(lines))
        (tmp_path / f"{name}.txt").write_text("\n".join(text) + "\n")
    kept = tmp_path / "inference.csv"
    command = ["benchmarks/inference.py", "--data", tmp_path, "--classes", 2000, "--rounds", 2, "--tokens", 2000]
    done = subprocess.run(
        [sys.executable, *map(str, command), "--out", kept], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "2,000 classes, grown from" in done.stdout
    rows = rows_of(kept)
    assert len(rows) == 4
    for (name, _), row in rows.items():
        assert not row["note"]
        assert float(row["batch_ms"]) > 0
        assert float(row["beyond_gib"]) >= 0
        if name.startswith("index"):
            assert float(row["recall"]) > 0.85
            assert float(row["speed_up"]) > 0
    assert 0.8 <= float(rows["index, estimated", 2000]["coverage"]) <= 1


def test_the_stored_results_are_complete():
    rows = rows_of(ROOT / "benchmarks" / "results" / "inference.csv")
    sizes = {num_classes for _, num_classes in rows}
    assert {10**5, 10**6, 10**7} < sizes
    assert len(rows) == 4 * len(sizes)
    for (name, num_classes), row in rows.items():
        if name.startswith("exact"):
            assert float(row["beyond_gib"]) < 2
        if name == "index" and num_classes > 10**5:
            assert float(row["recall"]) > 0.9
