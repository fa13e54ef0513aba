"""JSON knows one kind of number: 5.0 is an integer, as JSON Schema says."""

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

import bottega.main  # noqa: F401  (defines all bodies)
from bottega.json_schema.values import WHOLE


def bodies(base: type[BaseModel] = BaseModel) -> Iterator[type[BaseModel]]:
    for each in base.__subclasses__():
        if each.__module__.startswith("bottega.") and each.model_config.get("strict"):
            yield each
        yield from bodies(each)


def marks(annotation: Any) -> Iterator[tuple[bool, bool]]:
    """List for each member of a type: is it an integer, is it marked?"""
    marked = WHOLE in getattr(annotation, "__metadata__", ())
    if not (inner := get_args(annotation)):
        yield annotation is int, marked
    for each in inner:
        for is_int, own in marks(each):
            yield is_int, own or marked


def test_each_integer_of_a_body_may_have_a_fraction_of_zero() -> None:
    missing = [
        f"{body.__module__}.{body.__name__}.{name}"
        for body in bodies()
        for name, field in body.model_fields.items()
        if WHOLE not in field.metadata
        and any(is_int and not marked for is_int, marked in marks(field.annotation))
    ]
    assert missing == []
    assert sum(1 for _ in bodies()) > 50
