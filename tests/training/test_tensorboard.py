"""TensorBoard reads back the records of a training."""

import importlib.util
import sys

import pytest

from manyclass.training import HeldOut, TensorBoardLog
from tests.training.problems import batches, trained
from tests.training.test_logs import history, record

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"),
    # These warnings come from protobuf and from an optional import of TensorBoard.
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:(tensorboard|google|torch.utils.tensorboard|distutils)"),
]


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_scalars_are_read_back(tmp_path):
    held_out = HeldOut(batches(1), metrics={"half": lambda hidden, batch: 0 * batch.target + 0.5})
    log = TensorBoardLog(tmp_path / "board")
    records = trained(epochs=2, report_every=3, held_out=held_out, probe_every=6, callbacks=[log])[2].records
    found = scalars(tmp_path / "board")
    assert set(found) == {"loss/training", "loss/held_out", "error/rmse_log_z", "held_out/half"}
    for name, values in (
        ("loss/training", [(r.step, r.loss) for r in records]),
        ("loss/held_out", [(r.step, r.held_out_loss) for r in records if r.held_out_loss is not None]),
        ("error/rmse_log_z", [(r.step, r.rmse_log_z) for r in records if r.rmse_log_z is not None]),
        ("held_out/half", [(r.step, 0.5) for r in records if r.held_out_loss is not None]),
    ):
        assert [step for step, _ in found[name]] == [step for step, _ in values]
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in values], rel=1e-6)


def test_events_of_repeated_steps_are_purged(tmp_path):
    for steps, loss in (((1, 2, 3), 2.0), ((2, 3, 4), 1.0)):
        log = TensorBoardLog(tmp_path)
        for step in steps:
            log.on_record(None, record(step, held_out_loss=loss))
        log.on_end(None, history(stopped="steps"))
    assert scalars(tmp_path)["loss/held_out"] == [(1, 2.0), (2, 1.0), (3, 1.0), (4, 1.0)]


def test_the_folder_is_made_at_the_first_record(tmp_path):
    log = TensorBoardLog(tmp_path / "board")
    log.on_end(None, history(stopped="failed"))
    assert not (tmp_path / "board").exists()


def test_a_library_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match=r"a log for TensorBoard needs it: pip install 'manyclass\[tensorboard\]'"):
        TensorBoardLog(tmp_path)
