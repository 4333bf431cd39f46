"""Triton's compiler accepts every kernel for the GPUs of today: the interpreter does not see what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
# All variants for an H200, and the first few of each kernel for an A100.
VARIANTS = {90: 1000, 80: 2}
# The compiler moves up to six numbers of a pair sum to memory while it has registers left: that is no lack of them.
MAX_SPILLED_BYTES = 32


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The answers of `compile_kernels` by compute capability; it needs a process without the interpreter."""
    cache = tmp_path_factory.mktemp("triton")
    running = {
        capability: subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.compile_kernels", str(capability), str(variants)],
            cwd=ROOT,
            # What is in a cache is not compiled, so that nothing is known of its registers.
            env={**os.environ, "TRITON_INTERPRET": "", "TRITON_CACHE_DIR": str(cache / str(capability))},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for capability, variants in VARIANTS.items()
    }
    answers = {}
    for capability, process in running.items():
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err[-3000:]
        answers[capability] = json.loads(out)
    return answers


@pytest.mark.parametrize("capability", VARIANTS)
def test_every_kernel_is_compiled(compiled, capability):
    answer = compiled[capability]
    assert set(answer["launched"]) == {variant["kernel"] for variant in answer["compiled"]}


@pytest.mark.parametrize("capability", VARIANTS)
def test_no_kernel_runs_out_of_registers(compiled, capability):
    assert [v for v in compiled[capability]["compiled"] if v["spilled_bytes"] > MAX_SPILLED_BYTES] == []


def test_kernels_are_in_one_place():
    """Elsewhere `compile_kernels` would not find them."""
    source = ROOT / "src" / "manyclass"
    found = {path.parent for path in source.rglob("*.py") if "@triton.jit" in path.read_text()}
    assert found == {source / "kernels" / "triton"}
