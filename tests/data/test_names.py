"""Labels as text and as ids, and the JSON of a schema."""

import json

import pytest

from manyclass.data import Column, Names, Schema
from manyclass.data.names import label_fault
from manyclass.errors import UserError


def test_labels_are_numbered_as_they_first_appear():
    names = Names(["b"])
    assert names.number(["a", "b", "a", "c"]).tolist() == [1, 0, 1, 2]
    assert list(names) == ["b", "a", "c"]
    assert names[0] == "b"
    assert names[1:] == ["a", "c"]
    assert names.ids("c") == 2


def test_looking_up_adds_nothing():
    names = Names(["a"])
    assert names.ids("b") is None
    assert names.find(["b", "a"]).tolist() == [-1, 0]
    assert len(names) == 1


def test_text_that_looks_alike_stays_apart():
    assert Names().number(["3", "3.0", "03", " 3"]).tolist() == [0, 1, 2, 3]


def test_a_name_twice_is_refused():
    with pytest.raises(ValueError, match="`names` must be different from each other, got 'a' twice"):
        Names(["a", "b", "a"])


def test_no_labels_have_no_ids():
    assert Names().number([]).shape == (0,)


@pytest.mark.parametrize(
    ("label", "fault"), [("", "empty"), ("a" * 1001, "1,001"), ("\ud800", "Unicode"), ("a\0", "NUL")]
)
def test_impossible_labels_have_a_fault(label, fault):
    assert fault in label_fault(label)
    assert label_fault("a" * 1000) is None


SCHEMA = Schema("csv", 17, True, label="y", columns=(Column("a", "number", 1.5, 2.0), Column("b", "text")), width=16)


def test_a_schema_goes_through_json_unchanged():
    assert Schema.from_json(json.loads(json.dumps(SCHEMA.to_json()))) == SCHEMA


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "xml"}, "a format among svmlight"),
        ({"num_features": -1}, "a whole number as num_features"),
        ({"num_features": "17"}, "a whole number as num_features"),
        ({"num_features": 18}, "17 features, got '18'"),
        ({"sparse": 1}, "true or false as sparse"),
        ({"label": 3}, "a string or null as label"),
        ({"columns": "ab"}, "a list of columns"),
        ({"columns": [{"name": "a"}]}, "the key 'type'"),
        ({"columns": [{"name": "a", "type": "date"}]}, "columns of the types"),
        ({"columns": [{"name": "a", "type": "number", "mean": float("nan")}]}, "finite numbers"),
        ({"columns": [{"name": "a", "type": "number", "scale": 0.0}]}, "positive scales"),
        ({"colour": "red"}, "must have the keys .* got 'colour'"),
    ],
)
def test_an_impossible_schema_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        Schema.from_json({**SCHEMA.to_json(), **change})


@pytest.mark.parametrize("data", [None, [], "text", {}, {"format": "csv"}])
def test_other_data_than_a_schema_is_refused(data):
    with pytest.raises(UserError, match="`schema` must"):
        Schema.from_json(data)
