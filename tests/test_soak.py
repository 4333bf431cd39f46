"""A tenth of `make soak`: kills, interrupts, full disks and broken files lose nothing."""

import pytest

from tests.soak.__main__ import PARTS, soak
from tests.soak.states import states

SHARE = 0.1
STATES_SECONDS = 18.0


# Parts that compare with an uninterrupted training run together, since that training takes a while.
@pytest.mark.parametrize("parts", [("kills", "interrupts", "full-disk"), ("checkpoints",), ("files",)], ids="+".join)
def test_nothing_is_lost(tmp_path, parts):
    for name, (outcome, _) in soak(tmp_path, parts, SHARE, seed=0).items():
        assert outcome.cases > 0, name
        assert outcome.faults == []


def test_no_edited_state_crashes_hangs_or_takes_much_memory(tmp_path):
    outcome = states(tmp_path, 1.0, seed=0, seconds=STATES_SECONDS)
    assert outcome.faults == []
    # Most states are refused, yet some changes are within what a training may have.
    assert outcome.seen["refused"] > 10
    assert outcome.seen["used"] > 10


def test_every_part_is_tested():
    assert set(PARTS) == {"kills", "interrupts", "full-disk", "checkpoints", "files", "states"}
