"""Saved content is loaded equal, and content that cannot be saved is refused by its place."""

import json
from collections import Counter, OrderedDict

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from manyclass import storage
from manyclass.errors import UserError
from manyclass.storage import _digest, _tree
from tests.storage.trees import CONTENT, round_trip, same, saved

DTYPES = sorted(_tree.DTYPES.values(), key=str)

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda part: (
        st.lists(part)
        | st.lists(part).map(tuple)
        | st.dictionaries(st.integers() | st.text(st.characters()), part, max_size=4)
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=60)
@given(content=st.dictionaries(st.text(), PLAIN, max_size=4))
def test_plain_data_comes_back_equal_and_of_its_type(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "plain.safetensors"
    storage.save(path, content, content_type="thing")
    assert same(storage.load(path, content_type="thing"), content)
    assert same(storage.outline(path, content_type="thing"), content)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_and_shape_come_back(tmp_path, dtype):
    data = torch.randint(0, 2, (3, 5, 2 * dtype.itemsize), dtype=torch.uint8)
    full = data.bool()[..., :2] if dtype == torch.bool else data.view(dtype)
    content = {"full": full, "empty": full[:0], "none": full[:, :0], "scalar": full[0, 0, 0], "strided": full[:, ::2]}
    found = round_trip(tmp_path, content)
    assert list(found) == list(content)
    for name, tensor in content.items():
        assert (found[name].dtype, found[name].shape) == (dtype, tensor.shape)
        assert found[name].contiguous().view(-1).view(torch.uint8).equal(tensor.contiguous().view(-1).view(torch.uint8))


def test_special_values_come_back(tmp_path):
    content = {
        "floats": [float("inf"), float("-inf"), float("nan"), -0.0, 5e-324, 0.1],
        "ints": [2**63, -(2**200), 1 << 20000, 0],
        # Two surrogates must not become the one character that they encode.
        "text": ["\ud83d\ude00", "😀", "\udcff", "\x00", "\u2028", ""],
        "keys": {1: "int", "1": "str", -1: (), "": []},
        "nested": ((), [], {}, ((1,), [(2,)])),
    }
    found = round_trip(tmp_path, content)
    assert same(found, content)
    assert str(found["floats"][3]) == "-0.0"


def test_subclasses_of_plain_types_come_back_as_their_base(tmp_path):
    content = {"o": OrderedDict(a=1), "c": Counter({3: 2}), "p": nn.Parameter(torch.ones(2)), "f": np.float64(0.5)}
    found = round_trip(tmp_path, content)
    assert same(found, {"o": {"a": 1}, "c": {3: 2}, "p": torch.ones(2), "f": 0.5})
    assert not found["p"].requires_grad


def test_state_dicts_of_torch_come_back(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, 9)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    found = round_trip(tmp_path, {name: part.state_dict() for name, part in parts.items()})
    for name, part in parts.items():
        before = part.state_dict()
        part.load_state_dict(found[name])
        assert str(part.state_dict()) == str(before)


def test_a_tensor_in_several_places_is_stored_once_and_comes_back_as_one(tmp_path):
    table = torch.randn(1000, 8)
    content = {
        "a": table,
        "b": [table.detach()],
        "c": {"x": nn.Parameter(table)},
        "rows": table[:10],
        "copy": table.clone(),
    }
    path = saved(tmp_path, content)
    assert path.stat().st_size < 2.1 * table.nbytes
    found = storage.load(path, content_type="thing")
    assert found["a"] is found["b"][0] is found["c"]["x"]
    assert found["copy"] is not found["a"]
    assert same(found["rows"], table[:10])
    outline = storage.outline(path, content_type="thing")
    assert outline["a"] is outline["b"][0]


def test_an_outline_reads_no_tensors(tmp_path):
    path = saved(tmp_path)
    data = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    # Damage within the first tensor is not seen.
    data[begin + 3] ^= 1
    path.write_bytes(data)
    outline = storage.outline(path, content_type="thing")
    assert outline["names"] == CONTENT["names"]
    assert outline["table"].is_meta
    assert (outline["table"].shape, outline["table"].dtype) == ((3, 4), torch.float32)
    with pytest.raises(UserError, match="its digest is another than when it was written"):
        storage.load(path, content_type="thing")


def test_other_readers_of_safetensors_can_read_it(tmp_path):
    content = {"a.b": torch.ones(2), "a": {"b": torch.zeros(3, dtype=torch.int16), "\ud800": torch.tensor(True)}}
    path = saved(tmp_path, {**content, "content": {"json": torch.ones(1)}})
    found = safetensors.torch.load_file(path)
    assert set(found) == {"a.b", "a.b#2", "a.?", "content.json", "content.json#2"}
    assert same(found["a.b"], content["a.b"])
    assert same(found["a.b#2"], content["a"]["b"])
    assert json.loads(found["content.json"].numpy().tobytes().decode("utf-8", "surrogatepass"))
    with safetensors.safe_open(path, "pt") as opened:
        assert json.loads(opened.metadata()["manyclass"])["content_type"] == "thing"


def test_a_loaded_tensor_outlives_its_file(tmp_path):
    path = saved(tmp_path)
    found = storage.load(path, content_type="thing")
    path.write_bytes(b"")
    found["table"] += 1
    assert same(found["table"], CONTENT["table"] + 1)


def test_a_tensor_may_have_any_name(tmp_path):
    content = {"__metadata__": torch.ones(2), "content.json": torch.zeros(3), "": torch.ones(1)}
    assert same(round_trip(tmp_path, content), content)


def test_the_same_content_gives_the_same_bytes(tmp_path):
    assert saved(tmp_path).read_bytes() == saved(tmp_path).read_bytes()


def test_strings_come_back(tmp_path):
    strings = ["the", "", "naïve", "😀", "\ud83d\ude00", "\udcff", "a\x00b", "\n"]
    packed = round_trip(tmp_path, storage.pack_strings(strings))
    assert {name: tensor.dtype for name, tensor in packed.items()} == {"bytes": torch.uint8, "ends": torch.int64}
    assert storage.unpack_strings(packed) == strings
    assert storage.unpack_strings(round_trip(tmp_path, storage.pack_strings([]))) == []
    assert storage.unpack_strings(storage.pack_strings(["", ""])) == ["", ""]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ends": torch.tensor([3, 2])}, ValueError, "ends that rise to the 2 bytes"),
        ({"ends": torch.tensor([1])}, ValueError, "ends that rise to the 2 bytes"),
        ({"ends": torch.tensor([-1, 2])}, ValueError, "ends that rise to the 2 bytes"),
        ({"ends": torch.tensor([1.0])}, ValueError, "got .* of torch.float32"),
        ({"bytes": torch.tensor([255, 255], dtype=torch.uint8)}, ValueError, "must hold UTF-8"),
        ({"bytes": None}, TypeError, r"`packed\['bytes'\]` must be a Tensor, got NoneType"),
    ],
)
def test_malformed_packed_strings_are_refused(change, error, message):
    packed = storage.pack_strings(["a", "b"])
    with pytest.raises(error, match=message):
        storage.unpack_strings({**packed, **change})


@pytest.mark.parametrize("strings", ["ab", ["a", 3]])
def test_only_strings_are_packed(strings):
    with pytest.raises(TypeError, match="`strings` must"):
        storage.pack_strings(strings)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": [0, 1, 2, torch.Generator()]}, r"`content\['a'\]\[3\]` must be a dict, .* or Tensor, got a Generator"),
        ({"a": {1: {2, 3}}}, r"`content\['a'\]\[1\]` must be .*, got a set"),
        ({"a": b"bytes"}, "got a bytes"),
        ({"a": np.zeros(3)}, "got a ndarray"),
        ({"a": {True: 1}}, r"`content\['a'\]` must have keys that are str or int, got a bool"),
        ({"a": {(1, 2): 1}}, "keys that are str or int, got a tuple"),
        ({"a": torch.ones(2, device="meta")}, r"`content\['a'\]` must be a dense tensor .* on meta"),
        ({"a": torch.eye(2).to_sparse()}, "dense tensor .* torch.sparse_coo"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, "a dtype that safetensors has, got torch.complex128"),
    ],
)
def test_other_types_are_refused_by_their_place(tmp_path, content, message):
    path = saved(tmp_path)
    before = path.read_bytes()
    with pytest.raises(TypeError, match=message):
        storage.save(path, content, content_type="thing")
    assert path.read_bytes() == before


def test_content_that_contains_itself_is_refused(tmp_path):
    loop = []
    loop.append(loop)
    with pytest.raises(ValueError, match=r"nested at most 100 deep, got more at `content\['loop'\]\[0\]\[0\]`"):
        storage.save(tmp_path / "x", {"loop": loop}, content_type="thing")


def test_more_tensors_than_a_header_holds_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(_digest, "_MAX_HEADER_BYTES", 2000)
    with pytest.raises(ValueError, match="`content` must have fewer tensors, got 101"):
        storage.save(tmp_path / "x", {"many": [torch.tensor(i) for i in range(100)]}, content_type="thing")
    assert not list(tmp_path.iterdir())


def test_long_lists_and_strings_do_not_burden_the_header(tmp_path):
    path = saved(tmp_path, {"text": "x" * 10**6, "list": list(range(10**5))})
    assert int.from_bytes(path.read_bytes()[:8], "little") < 1000
