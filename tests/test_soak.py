"""A twentieth of `make soak`: kills, interrupts, full disks and broken files lose nothing."""

import pytest

from tests.soak.__main__ import PARTS, soak
from tests.soak.states import FILES, states

SHARE = 0.05
STATES_SHARE = 0.02


# Parts that compare with an uninterrupted training run together, since that training takes a while.
@pytest.mark.parametrize(
    "parts", [("kills", "interrupts", "full-disk"), ("checkpoints",), ("files",), ("ranks",), ("nodes",)], ids="+".join
)
def test_nothing_is_lost(tmp_path, parts):
    for name, (outcome, _) in soak(tmp_path, parts, SHARE, seed=0).items():
        assert outcome.cases > 0, name
        assert outcome.faults == []


@pytest.mark.parametrize("files", [False, True], ids=["library", "command line"])
def test_no_edited_state_crashes_hangs_or_takes_much_memory(tmp_path, files):
    def chosen(subject):
        # A training of each kind of data would take longer than all the cases.
        return subject.endswith(tuple(FILES)) == files and (not files or subject.startswith("svmlight"))

    outcome = states(tmp_path, STATES_SHARE, seed=0, only=chosen)
    assert outcome.faults == []
    # Some changes are refused, others are within what a training may have.
    assert outcome.seen["refused"] > 0
    assert outcome.seen["used"] > 0


def test_every_part_is_tested():
    assert set(PARTS) == {"kills", "interrupts", "full-disk", "checkpoints", "files", "states", "ranks", "nodes"}
