"""Readers of data files, and training batches."""

from manyclass.data.chunks import Chunk as Chunk
from manyclass.data.chunks import Reader as Reader
from manyclass.data.names import Names as Names
from manyclass.data.readers import open_rows as open_rows
from manyclass.data.rows import RowBatches as RowBatches
from manyclass.data.rows import Rows as Rows
from manyclass.data.rows import as_inputs as as_inputs
from manyclass.data.rows import class_counts as class_counts
from manyclass.data.schema import Column as Column
from manyclass.data.schema import Schema as Schema
from manyclass.data.sequences import LastBatches as LastBatches
from manyclass.data.sequences import SequenceBatches as SequenceBatches
from manyclass.data.sequences import Sequences as Sequences
from manyclass.data.sequences import read_sequences as read_sequences
from manyclass.data.share import WHOLE as WHOLE
from manyclass.data.share import Share as Share
from manyclass.data.source import standard_library as standard_library
from manyclass.data.spool import open_spool as open_spool
from manyclass.data.spool import spool as spool
from manyclass.data.text import Text as Text
from manyclass.data.text import encode as encode
from manyclass.data.text import read_text as read_text
from manyclass.data.triples import KnownTails as KnownTails
from manyclass.data.triples import Triples as Triples
from manyclass.data.triples import read_triples as read_triples
