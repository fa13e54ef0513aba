"""A plugin that refuses tasks whose texts match an operator's patterns."""

from collections.abc import Sequence

from pydantic_core import SchemaError, SchemaValidator, ValidationError, core_schema

from bottega.errors import InvalidInputError
from bottega.subagents.handle import DispatchParams
from bottega.subagents.plugins import MAX_PROMPT, PluginContext, Refused
from bottega.subagents.shared_context import plain_form


class PromptGuard:
    """Guard that refuses tasks whose prompt or instructions match a pattern or are too long.

    No text can make the guard hang, because pydantic-core's regex engine needs linear time. The
    guard applies the patterns to the original text and to its :func:`plain_form`, because
    full-width, look-alike or invisible characters could hide a match.

    Args:
        deny: regular expressions, which match at any position and ignore case.
        max_prompt_chars: maximum number of characters of prompt and instructions together.

    Raises:
        InvalidInputError: a pattern is invalid. Look-around and back-references are not supported.
    """

    guard = True

    def __init__(self, deny: Sequence[str] = (), max_prompt_chars: int = MAX_PROMPT) -> None:
        self._deny = [_matcher(pattern) for pattern in deny]
        self._max_prompt_chars = max_prompt_chars

    async def before_dispatch(self, ctx: PluginContext, params: DispatchParams) -> Refused | None:
        """Return a refusal, whose text does not contain the pattern, or ``None``."""
        length = len(params.prompt) + len(params.instructions or "")
        if length > self._max_prompt_chars:
            return Refused(
                f"the prompt and instructions have {length} characters; they may have at most "
                f"{self._max_prompt_chars}"
            )
        for text in (params.prompt, params.instructions or ""):
            if any(
                _found(matcher, form) for form in {text, plain_form(text)} for matcher in self._deny
            ):
                return Refused("the task has words that are not allowed in tasks of this service")
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
    except ValidationError as error:  # invalid Unicode counts as a match
        return error.errors(include_input=False)[0]["type"] != "string_pattern_mismatch"
    return True
