"""Damaged, foreign and hostile files are refused in one line that says why, and none of their code runs."""

import contextlib
import hashlib
import io
import json
import os
import pickle
import random
import resource
import time
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

from manyclass import storage
from manyclass.errors import UserError
from manyclass.storage import file
from tests.storage.trees import CONTENT, round_trip, same, saved


def refused(path, *, content_type="thing"):
    with pytest.raises(UserError) as caught:
        storage.load(path, content_type=content_type)
    message = str(caught.value)
    assert message.startswith(f"cannot read {path}: ")
    assert "\n" not in message
    with pytest.raises(UserError):
        storage.check(path, content_type=content_type)
    return message


def test_a_missing_file_a_folder_and_a_pipe_are_refused(tmp_path):
    assert "no such file" in refused(tmp_path / "it.safetensors")
    assert "no file" in refused(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "no file" in refused(tmp_path / "pipe")


def test_files_of_others_are_refused_and_never_unpickled(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    path = tmp_path / "it.safetensors"
    zipped = io.BytesIO()
    torch.save({"a": Bomb()}, zipped)
    legacy = io.BytesIO()
    torch.save({"a": Bomb()}, legacy, _use_new_zipfile_serialization=False)
    for data, message in [
        (b"", "it is empty"),
        (b"abc", "cut off"),
        (pickle.dumps(Bomb()), "no safetensors file but a pickle: loading one could run code"),
        (pickle.dumps(Bomb(), protocol=0), "no safetensors file"),
        (zipped.getvalue(), "a zip, as torch.save writes it: loading one could run code"),
        (legacy.getvalue(), "no safetensors file but a pickle"),
        (b"label,text\n1,hello\n" * 100, "no safetensors file"),
        (safetensors.torch.save({"a": torch.ones(3)}), "a safetensors file, but not one of manyclass"),
        (safetensors.torch.save({"a": torch.ones(3)}, {"kind": "thing"}), "not one of manyclass"),
    ]:
        path.write_bytes(data)
        assert message in refused(path)
    assert not (tmp_path / "exploded").exists()


def test_a_pickle_within_a_sound_file_stays_bytes(tmp_path):
    attack = pickle.dumps(print)
    found = round_trip(
        tmp_path, {"text": repr(attack), "bytes": torch.frombuffer(bytearray(attack), dtype=torch.uint8)}
    )
    assert found["bytes"].numpy().tobytes() == attack


def test_another_content_type_is_refused(tmp_path):
    assert "its content type is 'model', not 'thing'" in refused(saved(tmp_path, content_type="model"))


def test_a_newer_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(file, "_FORMAT", 7)
    path = saved(tmp_path)
    assert storage.load(path, content_type="thing")
    monkeypatch.undo()
    expected = "it was written by a newer version, format 7; this one reads format 2: upgrade manyclass"
    assert refused(path).endswith(expected)


@pytest.mark.parametrize(
    "metadata", [{"manyclass_format": "1", "kind": "thing"}, {"manyclass": '{"format":1,"content_type":"thing"}'}]
)
def test_an_earlier_format_is_refused(tmp_path, metadata):
    path = tmp_path / "it.safetensors"
    path.write_bytes(safetensors.torch.save({"a": torch.ones(3)}, metadata))
    assert refused(path).endswith("it was written by an earlier version of manyclass; train it again")


def written(path, header, data=b""):
    """Write a file with this header, valid or not, and the right digest."""
    metadata = json.dumps({"format": 2, "content_type": "thing", "digest": "0" * 64}, separators=(",", ":"))
    text = json.dumps({"__metadata__": {"manyclass": metadata}, **header}, separators=(",", ":")).encode()
    whole = len(text).to_bytes(8, "little") + text + data
    path.write_bytes(whole.replace(b"0" * 64, hashlib.sha256(whole).hexdigest().encode(), 1))
    return path


def tree(text, **others):
    data = text if isinstance(text, bytes) else text.encode()
    return {**others, "content.json": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}, data


def test_a_file_made_elsewhere_in_this_format_is_read(tmp_path):
    assert storage.load(written(tmp_path / "x", *tree('{"dict":[["a",[1,{"tuple":[]}]]]}')), content_type="thing") == {
        "a": [1, ()]
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "its JSON cannot be read"),
        ('{"dict":[', "its JSON cannot be read"),
        (b'{"dict":["\xff"]}', "its JSON cannot be read"),
        ("[" * 100_000, "nested too deeply"),
        ('{"dict":[["a",' * 400 + "1" + "]]}" * 400, "nested too deeply"),
        ("3", "does not begin with a dict"),
        ("[]", "does not begin with a dict"),
        ('{"dict":{}}', "unknown object"),
        ('{"dict":[],"tuple":[]}', "unknown object"),
        ('{"dict":[],"dict":[]}', "its JSON has a key twice"),
        ('{"dict":[["a"]]}', "a malformed dict item"),
        ('{"dict":[[true,1]]}', "a malformed dict item"),
        ('{"dict":[["a",1],["a",2]]}', "a malformed dict item"),
        ('{"dict":[["a",{"tensor":"gone"}]]}', "a tensor 'gone' that is not there"),
        ('{"dict":[["a",{"tensor":3}]]}', "unknown object"),
        ('{"dict":[["a",{"float":"3"}]]}', "unknown object"),
        ('{"dict":[["a",{"int":"zz"}]]}', "invalid literal"),
        ('{"dict":[["a",{"object":"os.system"}]]}', "unknown object"),
        ('{"dict":[["a",' + "1" * 5000 + "]]}", "damaged"),
    ],
)
def test_json_of_an_impossible_tree_is_refused(tmp_path, text, message):
    assert message in refused(written(tmp_path / "x", *tree(text)))


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({}, "it has no JSON"),
        ({"content.json": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}, "it has no JSON"),
        ({"a": {**ENTRY, "dtype": "F128"}}, "unknown variant `F128`"),
        ({"a": {**ENTRY, "dtype": ["F32"]}}, "invalid type: sequence"),
        ({"a": {**ENTRY, "shape": [-2]}}, "invalid value: integer `-2`"),
        ({"a": {**ENTRY, "shape": [True, 2]}}, "invalid type: boolean `true`"),
        ({"a": {**ENTRY, "shape": [2.0]}}, "invalid type: floating point"),
        ({"a": {**ENTRY, "data_offsets": [0]}}, "expected a tuple of size 2"),
        ({"a": {**ENTRY, "data_offsets": [0, 8, 8]}}, "damaged"),
        ({"a": {"dtype": "F8_E8M0", "shape": [0], "data_offsets": [0, 0]}}, "has the dtype F8_E8M0"),
        ({"a": "F32"}, "invalid type: string"),
        ({"a": None}, "invalid type: null"),
        ({"a": {**ENTRY, "data_offsets": [8, 16]}}, "invalid offset for tensor `a`"),
        ({"a": {**ENTRY, "shape": [1 << 60]}}, "overflow computing buffer size"),
        ({"a": {"dtype": "U8", "shape": [1 << 50], "data_offsets": [0, 1 << 50]}}, "it is cut off"),
        ({"a": {"dtype": "U8", "shape": [0, 1 << 62, 1 << 62], "data_offsets": [0, 0]}}, "impossible shape"),
        ({"a": {"dtype": "U8", "shape": [0, 1 << 63], "data_offsets": [0, 0]}}, "impossible shape"),
    ],
)
def test_an_impossible_header_is_refused_before_memory_is_taken(tmp_path, header, message):
    assert message in refused(written(tmp_path / "x", header))


def test_a_tensor_named_twice_is_refused(tmp_path):
    path = written(tmp_path / "x", *tree('{"dict":[]}', a={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}))
    assert storage.load(path, content_type="thing") == {}
    data = path.read_bytes()
    begin, end = data.index(b'"a":'), data.index(b'"content.json"')
    length = int.from_bytes(data[:8], "little") + end - begin
    path.write_bytes(length.to_bytes(8, "little") + data[8:end] + data[begin:])
    assert "its JSON has a key twice" in refused(path)


def test_more_tensors_than_are_ever_saved_are_refused_before_they_are_read(tmp_path):
    entry = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    path = written(tmp_path / "x", *tree('{"dict":[]}', **{f"t{i}": entry for i in range(20_000)}))
    begin = time.process_time()
    assert "it names 20,001 tensors, which are more than 20,000" in refused(path)
    assert time.process_time() - begin < 1
    with pytest.raises(ValueError, match="`content` must have fewer tensors, got 20001"):
        storage.save(path, {"many": [torch.empty(0) for _ in range(20_000)]}, content_type="thing")


@pytest.mark.parametrize("tensor", [torch.ones(9), torch.ones(3, 3).byte(), torch.ones(9).bfloat16()])
def test_a_tensor_that_holds_no_bytes_is_refused(tensor):
    with pytest.raises(ValueError, match=r"`tensor` must be bytes \[N\] of uint8, got \["):
        storage.from_tensor(tensor)


def test_the_reason_is_short_even_if_names_in_the_file_are_long(tmp_path):
    entry = {"dtype": "F8_E8M0", "shape": [0], "data_offsets": [0, 0]}
    path = written(tmp_path / "x", {"a" * 10**6: entry})
    assert len(refused(path)) < 1000
    assert len(refused(saved(tmp_path, content_type="b" * 10**6))) < 1000


@contextlib.contextmanager
def memory_left(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_a_file_for_which_memory_does_not_suffice_is_refused(tmp_path):
    size = 1 << 33
    header, data = tree('{"dict":[]}')
    header["content.json"]["data_offsets"] = [size, size + len(data)]
    path = written(tmp_path / "x", {"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}, **header})
    start = path.stat().st_size
    with path.open("r+b") as opened:
        opened.seek(start + size)
        opened.write(data)
    expected = "needs more memory than there is"
    with memory_left(1 << 29), pytest.raises(UserError, match=expected):
        storage.load(path, content_type="thing")
    assert storage.outline(path, content_type="thing") == {}


@pytest.mark.parametrize("text", ["[]", "3", '{"__metadata__":3}', '{"__metadata__":{"a":1}}', "{", '{"a":' * 5000])
def test_a_malformed_header_is_refused(tmp_path, text):
    path = tmp_path / "x"
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode())
    refused(path)


def test_a_file_cut_off_anywhere_is_refused(tmp_path):
    path = saved(tmp_path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert "it is cut off" in refused(path) or length == 0
    path.write_bytes(whole + b"\0")
    assert "it is cut off or damaged" in refused(path)


def test_a_file_cut_off_while_it_is_read_is_refused(tmp_path, monkeypatch):
    def accept(*args):
        os.truncate(path, path.stat().st_size - 1)

    path = saved(tmp_path)
    monkeypatch.setattr(file, "_accept", accept)
    assert "it is cut off" in refused(path)


def test_a_flipped_bit_anywhere_is_refused(tmp_path):
    path = saved(tmp_path)
    whole = path.read_bytes()
    bits = random.Random(0)
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << bits.randrange(8)
        path.write_bytes(damaged)
        refused(path)


def test_random_damage_is_refused(tmp_path):
    path = saved(tmp_path)
    whole = path.read_bytes()
    noise = random.Random(1)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(noise.randrange(1, 5)):
            begin = noise.randrange(len(damaged))
            end = begin + noise.randrange(40)
            damaged[begin:end] = noise.choice([b"", noise.randbytes(end - begin), damaged[begin:end] * 2, b"\0" * 8])
        path.write_bytes(damaged)
        if damaged == whole:
            assert same(storage.load(path, content_type="thing"), CONTENT)
        else:
            refused(path)


@pytest.mark.machine
@pytest.mark.parametrize("value", ["[]", '["a",1]', '"ab"'])
def test_json_of_too_many_values_is_refused_in_little_memory(tmp_path, value):
    size = 60_000_000 // (len(value) + 1)
    path = written(tmp_path / "x", *tree('{"dict":[["a",[' + ",".join([value] * size) + "]]]}"))
    # Read as values it took from 1 to 3 GiB.
    with memory_left(1 << 28):
        assert "its JSON must have at most 8,388,608 values, got" in refused(path)


def test_what_could_not_be_read_is_not_saved(tmp_path, monkeypatch):
    monkeypatch.setattr("manyclass.storage._tree.MAX_VALUES", 100)
    with pytest.raises(ValueError, match="`content` must have at most 100 values, got 206: save long lists as tensors"):
        storage.save(tmp_path / "x", {"a": [0] * 202}, content_type="thing")
    monkeypatch.setattr("manyclass.storage._tree.MAX_JSON_BYTES", 100)
    with pytest.raises(ValueError, match="`content` must have at most 100 bytes, got 219: save long lists as tensors"):
        storage.save(tmp_path / "x", {"a": "b" * 200}, content_type="thing")
    assert not (tmp_path / "x").exists()


def test_a_header_of_a_petabyte_costs_nothing(tmp_path):
    path = tmp_path / "x"
    path.write_bytes((1 << 50).to_bytes(8, "little") + b'{"a":1}')
    begin = time.monotonic()
    assert "no safetensors file" in refused(path)
    assert time.monotonic() - begin < 1
    assert Path(path).stat().st_size == 15
