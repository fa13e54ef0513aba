"""Conversion of model servers' failures to :class:`ModelError`. Delays between tries.

Codes: ``model_unauthorized``, ``model_forbidden``, ``model_not_found``, ``model_bad_request``,
``model_context_too_long``, ``model_filtered``, ``model_quota_exhausted``, ``model_rate_limited``,
``model_timeout``, ``model_unavailable``, ``model_stream_broken``, ``model_bad_response``,
``egress_forbidden``.
"""

import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

from bottega.errors import ModelError
from bottega.llm.server import DEFAULT, ServerSpec
from bottega.llm.vendor_words import ERROR_CODES, error_code
from bottega.network import AddressRefusedError
from bottega.redaction import Redactor

SAID = ". It said: "
"""Separator between Bottega's text and the server's own words in an error."""
_LONGEST_QUOTE = 300

_RETRYABLE_CODES = frozenset(
    {"model_rate_limited", "model_timeout", "model_unavailable", "model_stream_broken"}
)

_BY_STATUS = {
    401: "model_unauthorized",
    402: "model_quota_exhausted",
    403: "model_forbidden",
    404: "model_not_found",
    408: "model_timeout",
    409: "model_unavailable",
    413: "model_context_too_long",
    429: "model_rate_limited",
    504: "model_timeout",
}

# Codes in a server's error that replace the less specific code for the HTTP status.
_REFINING = frozenset(
    {
        "model_quota_exhausted",
        "model_context_too_long",
        "model_filtered",
        "model_not_found",
        "model_unauthorized",
    }
)

_ADVICE = {
    "model_unauthorized": "refused the API key; check {key}",
    "model_forbidden": "does not allow this request with this key; check the key's permissions",
    "model_not_found": "does not know this model or address; check the model's name and {base_url}",
    "model_bad_request": "rejected the request",
    "model_context_too_long": "got more text than the model can read; shorten the conversation",
    "model_filtered": "blocked the answer by its content filter; rephrase the request",
    "model_quota_exhausted": "has no quota left for this key; check plan and billing",
    "model_rate_limited": "received more requests than it allows; lower the concurrency",
    "model_timeout": "took too long",
    "model_unavailable": "is down or overloaded",
    "model_bad_response": "sent a response that is not a model's answer; check {base_url}",
}


STREAM_BROKEN, BAD_RESPONSE = "model_stream_broken", "model_bad_response"
BROKEN_ANSWERS = frozenset((STREAM_BROKEN, BAD_RESPONSE))
"""Codes of an answer that broke off, and of an unreadable answer. Such answers may cost money."""
MOST_BROKEN = 5
"""Maximum number of broken answers per call. A broken answer may cost as much as a complete one."""


class Places(NamedTuple):
    """Names of the settings that contain the key and the base URL of a server."""

    key: str
    base_url: str


_PLACES = {
    "chat": Places("OPENAI_API_KEY", "OPENAI_BASE_URL (most end in /v1)"),
    "responses": Places("OPENAI_API_KEY", "OPENAI_BASE_URL (most end in /v1)"),
    "anthropic": Places("ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL (without /v1)"),
    "gemini": Places("GEMINI_API_KEY", "GOOGLE_GEMINI_BASE_URL (it ends in /v1beta)"),
}


def places_of(spec: ServerSpec) -> Places:
    if spec.name == DEFAULT:
        return _PLACES[spec.dialect]
    hint = _PLACES[spec.dialect].base_url.partition(" ")[2]
    return Places(
        f"the key of the provider '{spec.name}'",
        f"the base_url of the provider '{spec.name}' {hint}",
    )


class ErrorMapper:
    """Factory of errors for one model server.

    Args:
        address: the server's URL, without credentials.
        secret: the key, which errors must not show; empty if there is no key.
        places: names of the settings for key and base URL, which error texts mention.
        hidden: more secrets that errors must not show.
    """

    def __init__(
        self,
        address: str,
        secret: str,
        places: Places | None = None,
        *,
        hidden: Iterable[str] = (),
    ) -> None:
        self._address = address
        self._places = places or _PLACES["chat"]
        # The pattern has word boundaries, because a short key may be part of ordinary words.
        pattern = rf"(?<![A-Za-z0-9]){re.escape(secret)}(?![A-Za-z0-9])" if secret else r"(?!)"
        self._secret = re.compile(pattern)
        self._hidden = Redactor(hidden)

    def refused(
        self, status: int, body: object, headers: Mapping[str, str], now: datetime
    ) -> ModelError:
        """Make the error for a response whose HTTP status says that the request failed."""
        code = _refined(_BY_STATUS.get(status) or _code_of_other_status(status), body)
        wait_s = retry_after_s(headers, now)
        return self._error(
            code, f"HTTP {status}", body, _retry_delay_s(body) if wait_s is None else wait_s
        )

    def failed_in_stream(self, body: object) -> ModelError:
        """Make the error for a server's error message within the stream of an answer."""
        status = _status_of(body)
        code = _code_by_word(body)
        if code is None and status is not None:
            code = _BY_STATUS.get(status) or _code_of_other_status(status)
        return self._error(_refined(code or "model_unavailable", body), "error in its stream", body)

    def unreachable(self, error: BaseException) -> ModelError:
        """Make the error for a connection that failed before the answer began."""
        if is_timeout(error):
            return self._error("model_timeout", "no answer in time", None)
        refused = getattr(error, "os_error", error)
        if isinstance(refused, AddressRefusedError):
            return ModelError(str(refused), code="egress_forbidden")
        return ModelError(
            f"cannot reach the model's API at {self._address} ({_kind(error)}); check "
            f"{self._places.base_url}, the network, and that the server is running",
            code="model_unavailable",
            retryable=True,
        )

    def broken(self, what: str) -> ModelError:
        """Make the error for a stream that ended before the answer was complete."""
        return ModelError(
            f"the answer of the model's API at {self._address} broke off: {what}",
            code=STREAM_BROKEN,
            retryable=True,
        )

    def unreadable(self, what: str) -> ModelError:
        """Make the error for an invalid answer. Circuit breakers do not count this error."""
        return ModelError(
            f"the answer of the model's API at {self._address} cannot be read: {what}",
            code=BAD_RESPONSE,
            retryable=True,
        )

    def interrupted(self, error: BaseException) -> ModelError:
        """Make the error for a connection that failed during the answer."""
        if is_timeout(error):
            return self._error("model_timeout", "no data during its answer", None)
        return self.broken(f"the connection failed ({_kind(error)})")

    def no_completion(self, what: str) -> ModelError:
        """Make the error for a successful response with unusable content, such as a web page."""
        return self._error("model_bad_response", f"it sent {self._clean(what)}", None)

    def _error(
        self, code: str, what: str, body: object, retry_after: float | None = None
    ) -> ModelError:
        advice = _ADVICE[code].format(key=self._places.key, base_url=self._places.base_url)
        detail = f"the model's API at {self._address} {advice} ({what})"
        if said := self._quote(body):
            detail = f"{detail}{SAID}{said}"
        return ModelError(
            detail, code=code, retryable=code in _RETRYABLE_CODES, retry_after_s=retry_after
        )

    def _quote(self, body: object) -> str:
        return self._clean(_error_text(body))

    def _clean(self, text: str) -> str:
        """Convert a text to one short printable line without secrets."""
        text = " ".join(self._secret.sub("[key]", self._hidden.text(text)).split())
        text = "".join(char if char.isprintable() else "?" for char in text)
        return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}…"


def retry_after_s(headers: Mapping[str, str], now: datetime) -> float | None:
    """Return the seconds to wait, from ``retry-after-ms`` or ``Retry-After`` (seconds or date)."""
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    value = headers.get("retry-after")
    seconds = _number(value)
    if seconds is not None or value is None:
        return seconds
    try:
        return max(0.0, (parsedate_to_datetime(value) - now).total_seconds())
    except (ValueError, TypeError):
        return None


def is_timeout(error: BaseException) -> bool:
    """Return true if a timeout caused the error.

    The function checks the chain of causes, not only the outermost type, because the transport also
    reports a refused connection as a timeout.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TimeoutError):
            return True
        cause = cause.__cause__
    return False


def _number(value: str | None) -> float | None:
    try:
        number = float(value or "")
    except ValueError:
        return None
    return number if 0 <= number < float("inf") else None


def _refined(code: str, body: object) -> str:
    """Return a more specific code if the server's error contains one; otherwise ``code``."""
    word = _code_by_word(body)
    if word in _REFINING:
        return word
    if code == "model_unauthorized" or word == "model_rate_limited":
        return code
    return error_code(_error_text(body)) or code


def _code_of_other_status(status: int) -> str:
    if status >= 500:
        return "model_unavailable"
    return "model_bad_request" if status >= 400 else "model_bad_response"


def _error_part(body: object) -> Any:
    """Return the part of a response's body that describes the error.

    Most vendors send this part as ``error``. Mistral's whole body is this part. Gemini may put the
    part into a list.
    """
    if isinstance(body, list) and body:
        body = body[0]
    if isinstance(body, dict):
        return body.get("error") or body
    return body


def _error_text(body: object) -> str:
    """Return the text of the server's error: ``message``, or ``detail`` (FastAPI, Mistral)."""
    error = _error_part(body)
    if not isinstance(error, dict):
        return error if isinstance(error, str) else ""
    found = error.get("message") or error.get("detail")
    if isinstance(found, list) and found and isinstance(found[0], dict):
        where = ".".join(map(str, found[0].get("loc") or ()))
        found = f"{where}: {found[0].get('msg')}"
    return found if isinstance(found, str) else ""


def _details(error: dict[str, Any]) -> list[dict[str, Any]]:
    found = error.get("details")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _retry_delay_s(body: object) -> float | None:
    """Return the seconds to wait from Google's ``RetryInfo``, such as ``"34.07s"``."""
    error = _error_part(body)
    for each in _details(error) if isinstance(error, dict) else ():
        delay = each.get("retryDelay")
        if isinstance(delay, str):
            return _number(delay.removesuffix("s"))
    return None


def _code_by_word(body: object) -> str | None:
    error = _error_part(body)
    if not isinstance(error, dict):
        return None
    words = [error.get(field) for field in ("code", "type")]
    inner = error.get("innererror") or error.get("inner_error")  # Azure
    words += [inner.get("code")] if isinstance(inner, dict) else []
    words += [each.get("reason") for each in _details(error)] + [error.get("status")]
    found = [code for word in words if (code := ERROR_CODES.get(str(word).lower()))]
    return next((code for code in found if code in _REFINING), found[0] if found else None)


def _status_of(body: object) -> int | None:
    error = _error_part(body)
    code = error.get("code") if isinstance(error, dict) else None
    text = str(code)
    return int(text) if text.isdecimal() and len(text) == 3 else None


def _kind(error: BaseException) -> str:
    """Return the type of the innermost cause. The outer errors come from transport layers."""
    while error.__cause__ is not None:
        error = error.__cause__
    return type(error).__name__


_FIRST_S = 0.5


def delay_s(number: int, error: ModelError, unit: float) -> float:
    """Compute the seconds before the next try. Pure.

    The delay doubles from try to try up to 30 s, and half of the delay is random. After each of the
    first three tries, the server's ``Retry-After`` replaces the delay. After later tries,
    ``Retry-After`` can only lengthen the delay, because some servers always send "0".

    Args:
        number: number of the failed try, from 1.
        unit: random number in [0, 1).
    """
    longest = min(30.0, _FIRST_S * 2.0 ** min(number - 1, 10))
    own = longest * (1 + unit) / 2
    if error.retry_after_s is None:
        return own
    asked = error.retry_after_s + unit * _FIRST_S
    return asked if number <= 3 else max(asked, own)


def next_delay_s(number: int, error: ModelError, unit: float, left_s: float) -> float | None:
    """Compute the seconds before the next try; ``None``: no try may follow. Pure.

    A call is repeated until its patience ends; the last try starts at this time. No try follows if
    the server requests a wait that is longer than the remaining patience.

    Args:
        left_s: remaining patience in seconds.
    """
    if left_s <= 0 or (error.retry_after_s or 0.0) > left_s:
        return None
    return min(left_s, delay_s(number, error, unit))


def out_of_patience(number: int, error: ModelError, patience_s: float) -> ModelError:
    """Make the error for a call that used up its patience, from the last try's error. Pure."""
    asked = error.retry_after_s
    until = "" if asked is None else f"; the server asks to wait {asked:g} s"
    return ModelError(
        f"no answer after {number} tries within model_patience_s ({patience_s:g} s){until}: "
        f"{error.detail}",
        code="model_unavailable",
        retryable=True,
        retry_after_s=asked,
        last_code=error.code,
    )
