"""A tenth of `make soak`: kills, interrupts, full disks and broken files lose nothing."""

import pytest

from tests.soak.__main__ import PARTS, soak

SHARE = 0.1


# Parts that compare with an uninterrupted training run together, since that training takes a while.
@pytest.mark.parametrize("parts", [("kills", "interrupts", "full-disk"), ("checkpoints",), ("files",)], ids="+".join)
def test_nothing_is_lost(tmp_path, parts):
    for name, (outcome, _) in soak(tmp_path, parts, SHARE, seed=0).items():
        assert outcome.cases > 0, name
        assert outcome.faults == []


def test_every_part_is_tested():
    assert set(PARTS) == {"kills", "interrupts", "full-disk", "checkpoints", "files"}
