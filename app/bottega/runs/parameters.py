"""Checks of model parameters and inputs against the dialects of an agent's models. Pure.

The parts that each dialect takes, for checks before a run.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from bottega.agents.params import merged
from bottega.agents.parts import FileContent, Part
from bottega.errors import InvalidInputError, UnknownAgentError
from bottega.files.inputs import RunInput, parts_of
from bottega.llm.dialects import anthropic, chat, gemini, responses
from bottega.llm.dialects.parts import Media, WritePart, loaded
from bottega.llm.params import reserved_in, supported
from bottega.llm.server import DialectName

Dialects = Mapping[DialectName, Collection[str]]
"""Parameters that an agent's models have, by dialect."""


def dialects_of(servers: Iterable[tuple[DialectName, Mapping[str, Any]]]) -> Dialects:
    """Return the dialects of an agent's models, each with the parameters that all of them have.

    Args:
        servers: dialect and headers of each model's server.
    """
    found: dict[DialectName, frozenset[str]] = {}
    for dialect, headers in servers:
        texts = {name: value for name, value in headers.items() if isinstance(value, str)}
        known = supported(dialect, texts)
        found[dialect] = found.get(dialect, known) & known
    return found


def refuse_unsupported(
    params: Mapping[str, Any] | None, dialects: Dialects, place: str, *, whose: str
) -> None:
    """Check that every one of an agent's models takes its parameters.

    Args:
        place: JSON Pointer to the parameters.
        whose: the agent's name.

    Raises:
        InvalidInputError: ``unsupported_param``, or ``reserved_field`` of ``extra_body``.
    """
    given = merged(params, None)
    for dialect, known in dialects.items():
        if lacking := sorted(given.keys() - set(known)):
            raise InvalidInputError(
                f"the agent '{whose}' has a model of the dialect '{dialect}', which has no "
                f"parameter '{lacking[0]}': leave it out, or name another model",
                code="unsupported_param",
                pointer=f"{place}/{lacking[0]}",
            )
        if reserved := reserved_in(dialect, given.get("extra_body") or {}):
            raise InvalidInputError(
                f"extra_body must not set '{reserved[0]}', which the run sets itself",
                code="reserved_field",
                pointer=f"{place}/extra_body/{reserved[0].replace('.', '/')}",
            )


def refuse_overrides(
    overrides: Mapping[str, Mapping[str, Any]],
    own: Mapping[str, Mapping[str, Any] | None],
    tools: Mapping[str, Collection[str]],
    dialects: Mapping[str, Dialects],
) -> None:
    """Check a run's overrides.

    Args:
        own: the parameters of each of the run's agents.
        tools: the names of each agent's tools.
        dialects: of each agent's models.

    Raises:
        UnknownAgentError: an agent is not in the run.
        InvalidInputError: see :func:`refuse_unsupported`; ``duplicate_tool``: a tool is named like
            one of the agent; ``unknown_tool``: its ``tool_choice`` names one.
    """
    for name, change in overrides.items():
        if name not in own:
            raise UnknownAgentError(
                f"the agent '{name}' is not in this run: its agents are {', '.join(sorted(own))}",
                pointer=f"/overrides/{name}",
            )
        given = merged(own[name], change.get("params"))
        place = f"/overrides/{name}/params"
        refuse_unsupported(given, dialects.get(name, {}), place, whose=name)
        names = [tool["name"] for tool in change.get("tools") or ()]
        for number, tool in enumerate(names):
            if tool in tools[name]:
                raise InvalidInputError(
                    f"the agent '{name}' has a tool '{tool}' of its own: give yours another name",
                    code="duplicate_tool",
                    pointer=f"/overrides/{name}/tools/{number}/name",
                )
        choice = given.get("tool_choice")
        if isinstance(choice, Mapping) and choice["name"] not in {*names, *tools[name]}:
            raise InvalidInputError(
                f"neither the request nor the agent '{name}' has a tool '{choice['name']}'",
                code="unknown_tool",
                pointer=f"{place}/tool_choice",
            )


def refuse_parts(asked: RunInput, dialects: Iterable[DialectName]) -> None:
    """Check that every dialect has a form for each part of a stored input.

    Raises:
        InvalidInputError: ``unsupported_part``, at the part.
    """
    for at, part in parts_of(asked):
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


_WRITERS: Mapping[DialectName, WritePart] = {
    "chat": chat.write_media,
    "responses": responses.write_media,
    "anthropic": anthropic.write_media,
    "gemini": gemini.write_media,
}


def takes(dialect: DialectName, part: Part, media_type: str | None = None) -> bool:
    """Return true if a dialect has a form for a part.

    Args:
        media_type: of a part that is a stored file.
    """
    if part.text is not None:
        return True
    kind = media_type or part.media_type or ""
    files = {} if part.file is None else {part.file: FileContent(b"", kind)}
    found = loaded(part, files)
    return not isinstance(found, Media) or _WRITERS[dialect](found) is not None
