"""The kinds of data, by name."""

from manyclass.tasks.features import FeaturesKind
from manyclass.tasks.sequences import SequencesKind
from manyclass.tasks.task import Kind
from manyclass.tasks.text import TextKind
from manyclass.tasks.triples import TriplesKind

KINDS: dict[str, Kind] = {
    "features": FeaturesKind(),
    "text": TextKind(),
    "sequences": SequencesKind(),
    "triples": TriplesKind(),
}
