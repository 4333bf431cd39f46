"""The tasks by kind of data."""

from manyclass.tasks.features import FeaturesTask
from manyclass.tasks.sequences import SequencesTask
from manyclass.tasks.task import Task
from manyclass.tasks.text import TextTask
from manyclass.tasks.triples import TriplesTask

TASKS: dict[str, Task] = {task.kind: task for task in (FeaturesTask(), TextTask(), SequencesTask(), TriplesTask())}
