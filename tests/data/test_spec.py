"""What a network must know about its inputs, as JSON and back."""

import json
from typing import Any

import pytest

from unflip.data import DataError, ImageSet, InputSpec

PLAIN: dict[str, Any] = {
    "shape": [3, 4, 5],
    "classes": ["cat", "dog"],
    "mean": [0.1, 1 / 3, 0],
    "std": [0.2, 2 / 3, 1],
}


def test_json_and_back_to_the_last_bit(digits: ImageSet) -> None:
    for spec in (digits.spec, InputSpec.from_plain(PLAIN)):
        assert InputSpec.from_plain(json.loads(json.dumps(spec.plain()))) == spec
    assert InputSpec.from_plain(PLAIN).plain() == PLAIN


def test_the_spec_of_a_set(digits: ImageSet) -> None:
    assert digits.spec.shape == (1, 8, 8)
    assert (digits.spec.classes, digits.spec.mean) == (digits.classes, digits.mean)
    assert digits.split(300).spec == digits.spec


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [3, 4]}, r"shape=\(3, 4\) must be three whole numbers"),
        ({"shape": [3, 4, 0]}, r"shape=\(3, 4, 0\) must be"),
        ({"shape": [3, 4, 5.0]}, "shape=.* must be"),
        ({"shape": [3, True, 5]}, "shape=.* must be"),
        ({"shape": 32}, "shape=32 must be a list"),
        ({"classes": []}, r"classes=\(\) must be one name per class"),
        ({"classes": ["cat", 1]}, "classes=.* must be"),
        ({"classes": "cat"}, "classes='cat' must be a list"),
        ({"mean": [0.1]}, r"mean=\(0\.1,\) must have one value for each of the 3 channels"),
        ({"mean": [0.1, 0.2, None]}, "mean=.* must be finite numbers"),
        ({"mean": [0.1, 0.2, float("nan")]}, "mean=.* must be finite numbers"),
        ({"std": [0.1, 0.2, "0.3"]}, "std=.* must be finite numbers"),
        ({"std": [0.1, 0.2, 0]}, "std=.* must be positive"),
        ({"std": None}, "std=None must be a list"),
        ({"means": [1]}, "'means' is not a field of the input spec; its fields are shape, classes"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        InputSpec.from_plain({**PLAIN, **change})


@pytest.mark.parametrize("field", PLAIN)
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(DataError, match=f"'{field}' is missing from the input spec"):
        InputSpec.from_plain({k: v for k, v in PLAIN.items() if k != field})


def test_what_is_not_a_mapping_is_refused() -> None:
    with pytest.raises(DataError, match="must be a mapping of fields, not 3"):
        InputSpec.from_plain(3)  # type: ignore[arg-type]
