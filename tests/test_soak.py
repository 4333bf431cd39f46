"""A tenth of what `make soak` does: whatever happens to a training, a checkpoint or a file, nothing is lost."""

import pytest

from tests.soak.__main__ import PARTS, soak

SHARE = 0.1


# What is compared with the same training that was never stopped goes together: that one takes a while.
@pytest.mark.parametrize("parts", [("kills", "interrupts", "full-disk"), ("checkpoints",), ("files",)], ids="+".join)
def test_nothing_is_lost(tmp_path, parts):
    for name, (outcome, _) in soak(tmp_path, parts, SHARE, seed=0).items():
        assert outcome.cases > 0, name
        assert outcome.faults == []


def test_every_part_is_done():
    assert set(PARTS) == {"kills", "interrupts", "full-disk", "checkpoints", "files"}
