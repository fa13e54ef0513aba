"""Check of a run's input against the dialects of the model that gets it. Pure."""

from collections.abc import Iterable

from bottega.agents.parts import Part
from bottega.errors import InvalidInputError
from bottega.files.inputs import RunInput, parts_of
from bottega.llm.server import DialectName


def refuse_parts(asked: RunInput, dialects: Iterable[DialectName]) -> None:
    """Check that every dialect has a form for each part of a stored input.

    Raises:
        InvalidInputError: ``unsupported_part``, at the part.
    """
    for at, part in parts_of(asked):
        from bottega.llm.dialects.known_parts import takes  # of little use to most runs

        for dialect in dialects:
            if not takes(dialect, Part.from_dict(part)):
                kind = part.get("media_type") or "unknown type"
                raise InvalidInputError(
                    f"a model of the dialect '{dialect}' takes no part '{part['type']}' of "
                    f"{kind} by {'url' if part.get('url') else 'file'}: name another model, or "
                    "send it in another form",
                    code="unsupported_part",
                    pointer=f"/input{at}",
                )
