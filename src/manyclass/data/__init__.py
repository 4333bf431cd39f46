"""Files to batches."""

from manyclass.data.source import standard_library as standard_library
from manyclass.data.text import Text as Text
from manyclass.data.text import encode as encode
from manyclass.data.text import read_text as read_text
