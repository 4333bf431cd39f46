"""Tensors and plain data in one safetensors file, replaced by atomic rename and read without running code."""

from manyclass.storage.atomic import atomic_write as atomic_write
from manyclass.storage.file import check as check
from manyclass.storage.file import from_tensor as from_tensor
from manyclass.storage.file import load as load
from manyclass.storage.file import outline as outline
from manyclass.storage.file import save as save
from manyclass.storage.file import to_tensor as to_tensor
from manyclass.storage.file import write_json as write_json
from manyclass.storage.strings import pack_strings as pack_strings
from manyclass.storage.strings import unpack_strings as unpack_strings
from manyclass.storage.text import read_text as read_text
