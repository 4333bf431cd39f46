from tests.tasks.conftest import one_thread as one_thread
from tests.tasks.conftest import trained as trained
