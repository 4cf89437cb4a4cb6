"""The words for pydantic's errors come from the codes and values of the errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from cpmcu.serving.validation_words import wanted


class Thing(BaseModel):
    """An object."""

    model_config = ConfigDict(strict=True)


def _refuses(value: Any) -> Any:
    raise ValueError("have at most 3 ids")


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (int, "5", "must be an integer"),
        (int, 1.5, "must be an integer"),
        (float, "hot", "must be a number"),
        (bool, 3, "must be true or false"),
        (str, 3, "must be a text"),
        (list[int], "a", "must be a list"),
        (dict[str, int], "a", "must be a JSON object"),
        (Thing, "a", "must be a JSON object"),
        (None, 3, "must be null"),
        (Annotated[float, Field(allow_inf_nan=False)], float("inf"), "must be a finite number"),
        (Literal["a", "b", "c"], "d", "must be 'a', 'b' or 'c'"),
        (Annotated[float, Field(gt=0)], 0, "must be above 0"),
        (Annotated[float, Field(ge=-2)], -3, "must be at least -2"),
        (Annotated[float, Field(lt=1.5)], 2, "must be below 1.5"),
        (Annotated[int, Field(le=1 << 64)], 1 << 65, "must be at most 18446744073709551616"),
        (Annotated[list[int], Field(min_length=1)], [], "must have at least 1 item"),
        (Annotated[list[int], Field(max_length=2)], [1, 2, 3], "must have at most 2 items"),
        (Annotated[str, Field(min_length=1)], "", "must have at least 1 character"),
        (Annotated[str, Field(max_length=2)], "abc", "must have at most 2 characters"),
        (Annotated[int, BeforeValidator(_refuses)], 1, "must have at most 3 ids"),
        (tuple[int, int], "a", "is not valid (tuple_type)"),
    ],
)
def test_words(kind, value, words):
    with pytest.raises(ValidationError) as failed:
        TypeAdapter(kind).validate_python(value, strict=True)
    error = failed.value.errors()[0]
    assert wanted(error["type"], error.get("ctx", {})) == words
