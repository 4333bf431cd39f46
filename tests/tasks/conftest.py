import pytest

from tests.tasks import problems
from tests.training.conftest import one_thread as one_thread


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Return a function from a kind to the result of `tasks.fit`, its folder and its data; it trains once."""
    kept = {}

    def of(kind):
        if kind not in kept:
            folder = tmp_path_factory.mktemp(kind)
            data = problems.WRITERS[kind](folder)
            kept[kind] = (*problems.fit(kind, folder, data=data), data)
        return kept[kind]

    return of
