"""A cell is computed once, and again only if its settings or its code changed."""

import json
import os
import time

import pytest

from manyclass.lab import cells as cells_module
from manyclass.lab.cells import Cells


def square(*, number, mark=None):
    if mark is not None:
        with open(mark, "a") as file:
            file.write(f"{number}\n")
    if number < 0:
        raise ValueError(f"cannot take {number}")
    return {"square": number * number, "process": os.getpid()}


def threads():
    import torch

    return {"threads": torch.get_num_threads()}


@pytest.fixture
def cells(tmp_path):
    with Cells(tmp_path / "cells", jobs=1) as cells:
        yield cells


def squares(cells, numbers, mark):
    seen = []
    results = cells.map(square, [{"number": n, "mark": str(mark)} for n in numbers], on_done=seen.append)
    return [result["square"] for result in results], seen


def test_results_come_in_order_and_only_once_each(tmp_path):
    mark = tmp_path / "mark"
    with Cells(tmp_path / "cells", jobs=2) as cells:
        found, seen = squares(cells, [3, 1, 2, 1], mark)
    assert found == [9, 1, 4, 1]
    assert seen[-1] == 4
    assert sorted(mark.read_text().split()) == ["1", "2", "3"]
    # A second run computes only the new cells.
    with Cells(tmp_path / "cells", jobs=1) as cells:
        assert squares(cells, [3, 4], mark)[0] == [9, 16]
    assert sorted(mark.read_text().split()) == ["1", "2", "3", "4"]


def test_a_truncated_file_is_computed_again(cells, tmp_path):
    mark = tmp_path / "mark"
    squares(cells, [5], mark)
    (path,) = (tmp_path / "cells").rglob("*.json")
    path.write_text(path.read_text()[:10])
    assert squares(cells, [5], mark)[0] == [25]
    assert mark.read_text().split() == ["5", "5"]
    assert json.loads(path.read_text())["result"]["square"] == 25


def test_cells_finished_before_an_error_are_kept(cells, tmp_path):
    mark = tmp_path / "mark"
    with pytest.raises(ValueError, match="cannot take -1"):
        squares(cells, [6, -1], mark)
    assert squares(cells, [6], mark)[0] == [36]
    assert mark.read_text().split().count("6") == 1


def test_changed_code_is_computed_again(cells, tmp_path, monkeypatch):
    mark = tmp_path / "mark"
    squares(cells, [7], mark)
    monkeypatch.setattr(cells_module, "_code_digest", lambda module: "another version")
    squares(cells, [7], mark)
    assert mark.read_text().split() == ["7", "7"]


def test_the_digest_covers_a_module_and_its_imports():
    digest = cells_module._code_digest.__wrapped__
    assert digest("manyclass.lab.problem") != digest("manyclass.lab.objectives")
    sources = set(cells_module._sources("manyclass.lab.problem"))
    assert {"manyclass.lab.problem", "manyclass.counts", "manyclass._check"} <= sources
    assert not any(name.startswith("manyclass.report") for name in sources)


def test_a_job_has_one_thread(tmp_path):
    with Cells(tmp_path, jobs=1) as cells:
        assert cells.map(threads, [{}])[0]["threads"] == 1


def nap(*, seconds):
    time.sleep(seconds)
    return {}


@pytest.mark.machine
def test_an_interruption_waits_for_a_long_cell_only_briefly(tmp_path, monkeypatch):
    monkeypatch.setattr(cells_module, "SHUTDOWN_SECONDS", 0.5)

    def interrupt(done):
        if done:
            raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), Cells(tmp_path / "cells", jobs=2) as cells:
        cells.map(nap, [{"seconds": 0}, {"seconds": 300}], on_done=interrupt)
    assert time.monotonic() - start < 100
    assert len(list((tmp_path / "cells").rglob("*.json"))) == 1


def echo(*, number, folder):
    return {"number": number, "folder": folder}


def test_unkeyed_arguments_do_not_change_the_cell(tmp_path):
    with Cells(tmp_path / "cells", jobs=1) as cells:
        (first,) = cells.map(echo, [{"number": 1}], unkeyed={"folder": "here"})
        (again,) = cells.map(echo, [{"number": 1}], unkeyed={"folder": "there"})
    assert first["folder"] == again["folder"] == "here"
