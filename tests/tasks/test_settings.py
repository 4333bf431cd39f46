"""Settings are plain values that a file can hold."""

import json
from dataclasses import fields, replace

import pytest

from manyclass import tasks
from manyclass.errors import UserError
from tests.tasks.problems import KINDS, SETTINGS

EVERY = tasks.Settings(
    epochs=3,
    seconds=1.5,
    patience=2,
    batch_size=8,
    optimizer="adam",
    learning_rate=0.1,
    encoder_learning_rate=0.2,
    clip=1.0,
    decay=False,
    sampler="systematic",
    objective="black_out",
    k="auto",
    rmse_log_z=0.2,
    at=(10, 20),
    dim=4,
    hidden_layers=(5, 6),
    rank=7,
    layers=2,
    dropout=0.5,
    length=9,
    tied=False,
    regulariser=0.0,
    seed=11,
)


@pytest.mark.parametrize("settings", [tasks.Settings(), EVERY, *SETTINGS.values()])
def test_settings_round_trip_through_json(settings):
    assert tasks.Settings.from_json(json.loads(json.dumps(settings.to_json()))) == settings


def test_settings_are_shown_as_they_are_given():
    assert tasks.Settings(epochs=3, hidden_layers=(), at=(10, 20), tied=False).shown() == (
        "epochs 3, at 10,20, tied False, seed 0"
    )


def test_every_setting_was_tried():
    assert all(getattr(EVERY, field.name) is not None for field in fields(tasks.Settings))


@pytest.mark.parametrize("kind", KINDS)
def test_given_settings_stay_and_the_others_are_the_defaults(kind):
    defaults = tasks.TASKS[kind].defaults
    assert tasks.Settings().over(defaults) == defaults
    assert tasks.Settings(seed=5).over(defaults) == replace(defaults, seed=5)
    assert EVERY.over(defaults) == EVERY
    given = tasks.Settings(learning_rate=0.7, decay=not defaults.decay)
    assert given.over(defaults) == replace(defaults, learning_rate=0.7, decay=not defaults.decay)


def test_a_limit_in_seconds_replaces_the_default_epochs():
    defaults = tasks.TASKS["text"].defaults
    assert tasks.Settings(seconds=5).over(defaults).epochs is None
    assert tasks.Settings(seconds=5, epochs=2).over(defaults).epochs == 2


@pytest.mark.parametrize("kind", KINDS)
def test_another_optimiser_has_its_own_learning_rate(kind):
    defaults = tasks.TASKS[kind].defaults
    assert tasks.Settings(optimizer=defaults.optimizer).over(defaults).learning_rate == defaults.learning_rate
    assert tasks.Settings(optimizer="sgd").over(defaults).learning_rate is None
    assert tasks.Settings(optimizer="sgd", learning_rate=0.3).over(defaults).learning_rate == 0.3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "`epochs` must be at least 1, got 0"),
        ({"learning_rate": -1.0}, "`learning_rate` must be finite and above 0, got -1.0"),
        ({"learning_rate": float("nan")}, "`learning_rate` must be finite and above 0, got nan"),
        ({"dropout": 1.0}, r"`dropout` must lie in \[0, 1\), got 1.0"),
        ({"regulariser": -0.1}, "`regulariser` must be finite and at least 0, got -0.1"),
        ({"hidden_layers": (5, 0)}, "`hidden_layers` must be at least 1, got 0"),
        ({"at": (5, 0)}, "`at` must be at least 1, got 0"),
        ({"at": (5, 5)}, r"`at` must be one or more different numbers, got \(5, 5\)"),
        ({"at": ()}, r"`at` must be one or more different numbers, got \(\)"),
        ({"k": "all"}, "`k` must be .*'auto'.*, got 'all'"),
        ({"k": 0}, "`k` must be at least 1, got 0"),
        ({"seed": 2**63}, "`seed` must be at most 4294967295, got 9223372036854775808"),
        ({"learning_rate": 10**400}, "`learning_rate` must be finite and above 0, got 1000"),
        (
            {"rmse_log_z": 0.1, "sampler": "learned"},
            "`rmse_log_z` must come with `k` 'auto' if a `sampler` is given, got 0.1 with sampler = 'learned'",
        ),
        ({"rmse_log_z": 0.1, "k": 5}, "`rmse_log_z` must come without `k`, or with `k` 'auto', got 0.1 with k = 5"),
        ({"optimizer": "lion"}, "`optimizer` must be .*, got 'lion'"),
        ({"sampler": "magic"}, "`sampler` must be .*, got 'magic'"),
        ({"objective": "magic"}, "`objective` must be .*, got 'magic'"),
        ({"seed": -1}, "`seed` must be at least 0, got -1"),
    ],
)
def test_values_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        tasks.Settings(**options)
    with pytest.raises(UserError, match=f"the settings of a training are damaged: {message}"):
        tasks.Settings.from_json(options)


@pytest.mark.parametrize("data", [None, [], {"colour": "red"}])
def test_data_that_is_no_settings_is_refused(data):
    with pytest.raises(
        UserError, match="the settings of a training must have no other names than at, batch_size, clip"
    ):
        tasks.Settings.from_json(data)


@pytest.mark.parametrize(
    "data", [{"epochs": "3"}, {"hidden_layers": 5}, {"at": 5}, {"at": "10"}, {"learning_rate": []}]
)
def test_values_of_another_type_are_refused(data):
    with pytest.raises(UserError, match="the settings of a training are damaged"):
        tasks.Settings.from_json(data)


def test_a_number_too_long_to_be_printed_is_refused():
    with pytest.raises(UserError, match="`epochs` must have fewer digits"):
        tasks.Settings.from_json({**EVERY.to_json(), "epochs": 16**5000})
