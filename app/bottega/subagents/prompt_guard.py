"""A guard that keeps tasks from starting whose prompt an operator does not want (S19)."""

import unicodedata
from collections.abc import Sequence

from pydantic_core import SchemaError, SchemaValidator, ValidationError, core_schema

from bottega.errors import InvalidInputError
from bottega.subagents.plugins import MAX_PROMPT, DispatchRequest, PluginContext, Refused


class PromptGuard:
    """Refuses tasks by what their prompt or instructions hold, or by how long the prompt is.

    The patterns are the operator's. They are matched in linear time (by the regex engine of
    pydantic-core), so no text can make it hang; and against the text both as it is and in plain
    letters, so that full-width or invisible ones do not get around them.

    Args:
        deny: regular expressions, found anywhere, in upper or lower case.
        max_prompt_chars: of the prompt.

    Raises:
        InvalidInputError: a pattern is not understood; look-around and back-references are not.
    """

    guard = True

    def __init__(self, deny: Sequence[str] = (), max_prompt_chars: int = MAX_PROMPT) -> None:
        self._deny = [_matcher(pattern) for pattern in deny]
        self._max_prompt_chars = max_prompt_chars

    async def before_dispatch(self, ctx: PluginContext, params: DispatchRequest) -> Refused | None:
        """Refuse the task, or say nothing. The model is not told which pattern it was."""
        length = len(params.prompt)
        if length > self._max_prompt_chars:
            return Refused(
                f"the prompt has {length} characters; here it may have {self._max_prompt_chars}"
            )
        for text in (params.prompt, params.instructions or ""):
            if any(
                _found(matcher, form) for form in {text, _plain(text)} for matcher in self._deny
            ):
                return Refused("the task asks for what sub-agents may not be asked here")
        return None


def _matcher(pattern: str) -> SchemaValidator:
    try:
        return SchemaValidator(
            core_schema.str_schema(pattern=f"(?i){pattern}", regex_engine="rust-regex")
        )
    except SchemaError:
        raise InvalidInputError(
            f"the pattern {pattern[:100]!r} is not supported: it must be a regular expression "
            "without look-around and back-references"
        ) from None


def _found(matcher: SchemaValidator, text: str) -> bool:
    try:
        matcher.validate_python(text)
    except ValidationError as error:  # of what is no text, nobody knows
        return error.errors(include_input=False)[0]["type"] != "string_pattern_mismatch"
    return True


def _plain(text: str) -> str:
    """In plain letters: no full-width or other variants, and no invisible ones."""
    letters = unicodedata.normalize("NFKC", text)
    return "".join(letter for letter in letters if unicodedata.category(letter) != "Cf")
