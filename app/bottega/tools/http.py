"""User-defined tools that send an HTTP request.

A tool has a template of its URL. The arguments of a call replace the template's placeholders, and
cannot change anything else in the URL. The module also converts HTTP answers for models.
"""

import codecs
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, Self
from urllib.parse import quote

import httpx2
from pydantic import (
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    field_validator,
    model_validator,
)

from bottega.agents.approval import Approval
from bottega.agents.messages import ToolCall, ToolResult
from bottega.agents.parts import Part
from bottega.agents.threads import run_in_thread
from bottega.agents.tools import ToolBase, error_result, success_result
from bottega.errors import InvalidInputError, UnavailableError
from bottega.events.data import PartType
from bottega.json_schema.arguments import ArgumentSchema, argument_schema
from bottega.json_schema.described import DescribedModel
from bottega.json_schema.output import output_schema
from bottega.json_schema.values import WHOLE, depth_of
from bottega.outside import OutsideError, check_json
from bottega.redaction import Redactor
from bottega.tools.egress import Egress, EgressRefusedError, Reply, checked_url
from bottega.tools.media import HEAD_BYTES, media_type_of
from bottega.tools.people import Approvable
from bottega.tools.secrets import carries_credentials, check_header, is_credential_in_query
from bottega.trace_context import with_trace

LONGEST_URL = 2000
"""Maximum number of characters of a URL in a definition or an input."""
_ORIGIN = re.compile(r"(https?://[^/?#\\{}@\s]+)(/[^?#]*)?(?:\?([^#]*))?")
_GAP = re.compile(r"\{([A-Za-z_][A-Za-z0-9_-]{0,63})\}")
_FIXED_PATH = re.compile(r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})*")
_FIXED_QUERY = re.compile(r"(?:[A-Za-z0-9._~!$'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})*")
_DOTS = (".", "..")

Pieces = tuple[str, ...]
"""Fixed text, name of a placeholder, fixed text, and so on; fixed texts may be empty."""


@dataclass(frozen=True, slots=True)
class UrlTemplate:
    """A parsed template such as ``https://host/items/{id}?q={q}``.

    Attributes:
        origin: scheme, host and port, without placeholders.
        segments: segments of the path.
        query: pairs of key and value. The URL omits a pair if an argument of the pair is missing.
    """

    origin: str
    segments: tuple[Pieces, ...]
    query: tuple[tuple[str, Pieces], ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a template.

        Raises:
            InvalidInputError: the template is not valid.
        """
        match = _ORIGIN.fullmatch(text) if len(text) <= LONGEST_URL else None
        if match is None:
            raise InvalidInputError(
                "the URL must look like https://host/path/{name}?key={name}, with placeholders in "
                f"path and query only, no fragment, and at most {LONGEST_URL} characters"
            )
        origin, path, query = match[1], match[2] or "/", match[3]
        checked_url(origin)
        segments = tuple(_pieces(segment, _FIXED_PATH) for segment in path[1:].split("/"))
        if any(_is_dots("".join(pieces)) for pieces in segments):  # placeholders have no dots
            raise InvalidInputError("the URL's path must not contain the segments '.' and '..'")
        return cls(origin, segments, _pairs(query) if query else ())

    @property
    def path_names(self) -> frozenset[str]:
        return frozenset(name for pieces in self.segments for name in pieces[1::2])

    @property
    def names(self) -> frozenset[str]:
        return self.path_names | {name for _, pieces in self.query for name in pieces[1::2]}

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(key for key, _ in self.query)

    def fill(self, arguments: Mapping[str, Any], extra: Mapping[str, Any]) -> str:
        """Return the URL: ``arguments`` replace the placeholders, and ``extra`` is in the query.

        Arguments cannot change scheme, host, port, the number of path segments, or fixed texts.

        Raises:
            InvalidInputError: an argument is not allowed in its part of the URL.
        """
        path = "/".join(_segment(pieces, arguments) for pieces in self.segments)
        pairs: list[str] = []
        for key, pieces in self.query:
            if not pieces:
                pairs.append(key)
            elif len(pieces) == 3 and pieces[0] == pieces[2] == "":
                pairs += _repeated(key, arguments.get(pieces[1]))
            elif all(arguments.get(name) is not None for name in pieces[1::2]):
                pairs.append(f"{key}={_filled(pieces, arguments)}")
        for name, value in extra.items():
            key = _quoted(name)
            if key in self.keys:
                raise InvalidInputError(f"the tool's URL already sets '{name}'")
            pairs += _repeated(key, value)
        return f"{self.origin}/{path}" + (f"?{'&'.join(pairs)}" if pairs else "")


def _pieces(text: str, allowed: re.Pattern[str]) -> Pieces:
    pieces = tuple(_GAP.split(text))
    for fixed in pieces[::2]:
        if not allowed.fullmatch(fixed):
            raise InvalidInputError(
                f"'{fixed[:60]}' is neither a placeholder such as {{name}} nor valid in a URL: "
                "percent-encode it"
            )
    return pieces


def _pairs(query: str) -> tuple[tuple[str, Pieces], ...]:
    pairs = []
    for pair in query.split("&"):
        key, equals, value = pair.partition("=")
        if not key or not _FIXED_QUERY.fullmatch(key):
            raise InvalidInputError("the URL's query must look like key=value&key={name}")
        pairs.append((key, _pieces(value, _FIXED_QUERY) if equals else ()))
    return tuple(pairs)


def _segment(pieces: Pieces, arguments: Mapping[str, Any]) -> str:
    for name in pieces[1::2]:
        text = _as_text(name, arguments.get(name))
        if not text:
            raise InvalidInputError(f"'{name}' must not be empty: it is a part of the URL's path")
        # Treat encoded slashes as slashes: some servers decode slashes before they look for "..".
        if any(part in _DOTS for part in re.split(r"[/\\]", text)) or not text.isprintable():
            raise InvalidInputError(f"the value of '{name}' cannot be a part of a URL's path")
    return _filled(pieces, arguments)


def _is_dots(segment: str) -> bool:
    return re.sub("%2e", ".", segment, flags=re.IGNORECASE) in _DOTS


def _filled(pieces: Pieces, arguments: Mapping[str, Any]) -> str:
    return "".join(
        _quoted(_as_text(piece, arguments.get(piece))) if index % 2 else piece
        for index, piece in enumerate(pieces)
    )


def _repeated(key: str, value: Any) -> list[str]:
    """Return a value's query pairs: one for each item of a list, none for null, otherwise one."""
    values = value if isinstance(value, list) else [value]
    return [f"{key}={_quoted(_as_text(key, item))}" for item in values if item is not None]


def _as_text(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError):
        raise InvalidInputError(f"the value of '{name}' cannot be written into a URL") from None


def _quoted(text: str) -> str:
    try:
        return quote(text, safe="")
    except UnicodeEncodeError:
        raise InvalidInputError("lone surrogates (U+D800 to U+DFFF) are not text") from None


_EXCERPT = 1000

_CHARSET = re.compile(r"charset\s*=\s*[\"']?([A-Za-z0-9._:-]{1,40})", re.IGNORECASE)
# Python's other codecs are not used: some are very slow, and some do not decode to text.
_TEXT_CODECS = re.compile(
    r"utf-(8|16|32)(-[bl]e)?|ascii|iso8859-\d+|cp\d+|koi8-[ru]|shift_jis|euc_(jp|kr)|gb\w+|big5"
)
_KINDS: dict[str, PartType] = {
    "image": "image",
    "audio": "audio",
    "application/pdf": "document",
}
_SVG = "image/svg+xml"
"""Media type of SVG, which counts as text, because model servers do not accept SVG as an image."""
_TEXT_TYPES = re.compile(r"text/.*|.*[/+](json|xml|javascript|yaml|x-www-form-urlencoded)")


def content_type(reply: Reply) -> str:
    """Return the header ``Content-Type``, cut to 200 characters, or "" if it is missing."""
    return reply.headers.get("content-type", "")[:200]


def _media_type(reply: Reply) -> str:
    return content_type(reply).partition(";")[0].strip().lower()


def text_of(reply: Reply) -> str | None:
    """Decode an answer's body as text, or return ``None`` if the body is not text."""
    claims_text = _TEXT_TYPES.fullmatch(_media_type(reply)) is not None
    codec = _codec(content_type(reply))
    errors = "replace" if claims_text or codec else "strict"
    decoder = codecs.getincrementaldecoder(codec or "utf-8")(errors)
    try:
        text = decoder.decode(reply.body, final=not reply.truncated)
    except UnicodeDecodeError:
        return None
    if "\x00" in text and not claims_text:
        return None
    return text.removeprefix("\ufeff")


def _codec(header: str) -> str | None:
    if match := _CHARSET.search(header):
        try:
            name = codecs.lookup(match[1]).name
        except LookupError:
            return None
        if _TEXT_CODECS.fullmatch(name):
            return name
    return None


def body_of(reply: Reply) -> Any:
    """Decode a body as JSON or text, by its media type; ``None``: the body is empty or not text."""
    text = text_of(reply)
    if not text:
        return None
    media_type = _media_type(reply)
    if media_type == "application/json" or media_type.endswith("+json"):
        return _decoded(text)
    return text


def _decoded(text: str) -> Any:
    try:
        check_json(text)
        value = json.loads(text, parse_constant=lambda _: None)
    except (OutsideError, ValueError, RecursionError):
        return text
    return value if depth_of(value) <= 64 else text


def media_of(reply: Reply) -> Part | None:
    """Return a body that is a complete image, audio file or PDF as a part of a message."""
    media_type = media_type_of(reply.body[:HEAD_BYTES])
    kind = _KINDS.get(media_type) or _KINDS.get(media_type.partition("/")[0])
    if kind is None or reply.truncated or media_type == _SVG:
        return None
    return Part(kind, data=reply.body, media_type=media_type)


def failure_of(reply: Reply) -> str | None:
    """Return an error text that contains the status, or ``None`` if the status is 2xx."""
    if 200 <= reply.status < 300:
        return None
    message = f"the server answered {reply.status} {httpx2.codes.get_reason_phrase(reply.status)}"
    wait = reply.headers.get("retry-after", "")
    if wait.isdecimal() and len(wait) < 8:
        message += f" and asks to wait {wait} s"
    return message.rstrip()


def excerpt(text: str) -> str:
    return text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}…"


def is_redirect(reply: Reply) -> bool:
    return 300 <= reply.status < 400 and "location" in reply.headers


def redirect_target(reply: Reply, url: str) -> httpx2.URL | None:
    """Return a redirect's target without user, password and fragment; ``None``: not valid."""
    try:
        target = httpx2.URL(url).join(reply.headers["location"]).copy_with(userinfo=b"")
        return checked_url(str(target))
    except (httpx2.InvalidURL, EgressRefusedError):
        return None


Secrets = Callable[[str], Awaitable[str]]
"""Function from a secret's name to its value; raises InvalidInputError for an unknown secret."""

UPPER_NAME = r"^[A-Z](_?[A-Z0-9])*$"
"""Pattern of a secret's name, at most 64 characters."""
_LONGEST_REQUEST = 1_000_000
_IN_QUERY = ("GET", "DELETE")


class SecretHeader(DescribedModel):
    """Reference to a secret."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    secret: Annotated[str, StringConstraints(pattern=UPPER_NAME, max_length=64)]
    """Name of a secret of the tenant (`PUT /v1/secrets/NAME`). If there is no such secret,
    Bottega uses the operator's variable BOTTEGA_SECRET_NAME (for tenants other than `default`:
    BOTTEGA_SECRET_TENANT__NAME). Bottega sends the value unchanged."""


ToolName = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$"),
    Field(description="Name of the tool, for the model."),
]
ToolPurpose = Annotated[
    str,
    StringConstraints(min_length=1, max_length=2000),
    Field(description="Purpose of the tool, for the model."),
]
ToolParameters = Annotated[
    dict[str, JsonValue],
    Field(description="JSON Schema (2020-12) of the arguments, whose type is `object`."),
]


class HttpToolDefinition(Approvable):
    """A tool that sends an HTTP request.

    An argument replaces the placeholder of the same name in the URL. Bottega sends all other
    arguments in the query (GET, DELETE), or in the body, as a JSON object.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        hide_input_in_errors=True,
        # In JSON, ``type`` is required, because it selects the class; in Python, it has a default.
        json_schema_extra=lambda schema: schema["required"].append("type"),
    )

    type: Literal["http"] = "http"
    """Kind of the tool."""
    name: ToolName
    description: ToolPurpose
    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"] = "GET"
    """HTTP method."""
    url: str
    """Template such as `https://api.example.com/items/{id}?q={q}`. Each placeholder is one
    argument, which is percent-encoded."""
    headers: Annotated[dict[str, str | SecretHeader], Field(max_length=50)] = Field(
        default_factory=dict
    )
    """Headers. A value is a text, or `{"secret": "NAME"}`."""
    parameters: ToolParameters = Field(default_factory=dict)
    output_schema: dict[str, JsonValue] | None = None
    """JSON Schema (2020-12) of the answer's body. A call fails if its answer does not fit."""
    timeout_s: Annotated[float, Field(gt=0, le=120, strict=False)] = 30.0
    """Time limit of the whole request, in seconds."""
    max_bytes: Annotated[int, Field(ge=1, le=1_000_000), WHOLE] = 100_000
    """Maximum size of the decoded answer, in bytes."""
    idempotent: bool | None = None
    """If true, a call that a crash interrupted is repeated. Null: true for GET, PUT, DELETE."""

    @field_validator("url")
    @classmethod
    def _is_template(cls, url: str) -> str:
        _check_by(UrlTemplate.parse, url)
        for key, pieces in UrlTemplate.parse(url).query:
            if any(pieces[::2]) and is_credential_in_query(key):
                raise ValueError(
                    f"the value of {key} in the URL's query is a secret: store it with PUT "
                    '/v1/secrets/NAME and send it in a header, as {"secret": "NAME"}'
                )
        return url

    @field_validator("headers")
    @classmethod
    def _may_be_set(cls, headers: dict[str, str | SecretHeader]) -> dict[str, str | SecretHeader]:
        if len({name.lower() for name in headers}) < len(headers):
            raise ValueError("the same header occurs twice: case makes no difference in names")
        for name, value in headers.items():
            text = value if isinstance(value, str) else "secret"
            _check_by(check_header, name, text)
            if isinstance(value, str) and carries_credentials(name):
                raise ValueError(
                    f"the value of {name} is a secret: store it with PUT /v1/secrets/NAME and "
                    'refer to it by {"secret": "NAME"}'
                )
            if name.lower() == "content-type" and "json" not in text.lower():
                raise ValueError("the body is sent as JSON: remove the header content-type")
        return headers

    @property
    def origin(self) -> str:
        """The URL's scheme, host and port, which arguments cannot change."""
        return UrlTemplate.parse(self.url).origin

    @property
    def secrets(self) -> Mapping[str, str]:
        """Names of the secrets that the tool sends, by header."""
        return {
            header: value.secret
            for header, value in self.headers.items()
            if isinstance(value, SecretHeader)
        }

    @field_validator("parameters")
    @classmethod
    def _is_schema(cls, parameters: dict[str, JsonValue]) -> dict[str, JsonValue]:
        _check_by(_schema, parameters)
        return parameters

    @field_validator("output_schema")
    @classmethod
    def _is_output_schema(cls, schema: dict[str, JsonValue] | None) -> dict[str, JsonValue] | None:
        if schema is not None:
            _check_by(output_schema, schema)
        return schema

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        template, schema = UrlTemplate.parse(self.url), _schema(self.parameters)
        if unknown := sorted(template.names - schema.names):
            raise ValueError(f"the URL has placeholders without a parameter: {unknown}")
        if optional := sorted(template.path_names - schema.required):
            raise ValueError(f"parameters in the URL's path must be required: {optional}")
        if self.method in _IN_QUERY and (fixed := (schema.names - template.names) & template.keys):
            raise ValueError(f"the URL's query already sets these parameters: {sorted(fixed)}")
        return self

    @property
    def patterns(self) -> Mapping[str, str]:
        used_patterns = {"/parameters": _schema(self.parameters).patterns}
        if self.output_schema is not None:
            used_patterns["/output_schema"] = output_schema(self.output_schema).patterns
        return {
            f"{place}{pointer}": pattern
            for place, patterns in used_patterns.items()
            for pointer, pattern in patterns.items()
        }

    @property
    def repeatable(self) -> bool:
        """True if a call may be repeated after a crash."""
        if self.idempotent is not None:
            return self.idempotent
        return self.method in ("GET", "PUT", "DELETE")


def _check_by(check: Callable[..., Any], *arguments: Any) -> None:
    try:
        check(*arguments)
    except InvalidInputError as error:
        raise ValueError(error.detail) from None


def _schema(parameters: Mapping[str, Any]) -> ArgumentSchema:
    return argument_schema(json.dumps(parameters))


class HttpTool(ToolBase):
    """An :class:`HttpToolDefinition` as a tool.

    Args:
        secrets: function that returns a secret's value; called in each call of the tool.
        egress: HTTP client that sends the requests.
        known: redactor that removes known secrets from answers. Secrets that the tool sends are
            always removed.
        tenant: name of the tenant that sends the requests.
        approval: rule that says which calls a person must approve.
    """

    def __init__(
        self,
        definition: HttpToolDefinition,
        *,
        secrets: Secrets,
        egress: Egress,
        known: Redactor = Redactor(()),
        tenant: str = "",
        approval: Approval | None = None,
    ) -> None:
        self.approval = approval
        self.expires_s = definition.expires_s
        self.definition = definition
        self.name = definition.name
        self.description = definition.description
        self.timeout_s = definition.timeout_s + 5.0  # the HTTP client times out first and says why
        self.idempotent = definition.repeatable
        self._arguments = _schema(definition.parameters)
        schema = definition.output_schema
        self._output = None if schema is None else output_schema(schema)
        self._template = UrlTemplate.parse(definition.url)
        self._secrets = secrets
        self._egress = egress
        self._known = known
        self._tenant = tenant

    def __repr__(self) -> str:
        return f"HttpTool({self.name!r}, {self.definition.method} {self._template.origin})"

    @property
    def unchecked(self) -> Sequence[str]:
        """JSON Pointers to those patterns in the tool's schemas that checks of values ignore."""
        output = () if self._output is None else self._output.unchecked
        return [
            *(f"/parameters{place}" for place in self._arguments.unchecked),
            *(f"/output_schema{place}" for place in output),
        ]

    def create_schema(self) -> dict[str, Any]:
        return self._arguments.schema

    async def execute(self, tool_call: ToolCall) -> ToolResult:
        """Send the request. For a status other than 2xx, return an error with the body's start.

        If the answer is an image, an audio file or a PDF, it is a part of the result.
        """
        clean = self._known.value
        try:
            url, content = await self._request(tool_call.arguments)
            headers, sent = await self._headers(content)
            clean = Redactor(sent, beside=self._known).value
            reply = await self._egress.request(
                self.definition.method,
                url,
                headers=headers,
                content=content,
                timeout_s=self.definition.timeout_s,
                # Read at least 16 KB of the body: redaction finds only whole secrets, and an error
                # text quotes the body's start.
                max_bytes=max(self.definition.max_bytes, 16_384),
                tenant=self._tenant,
            )
        except (InvalidInputError, UnavailableError) as error:
            return error_result(tool_call, clean(error.detail), error.code)
        if (failure := self._failure(reply, url, clean)) is not None:
            refused = failure_of(reply) is not None
            kind, status = ("http_error", reply.status) if refused else ("invalid_answer", None)
            return error_result(tool_call, failure, kind, status)
        media = media_of(reply)
        body = body_of(reply) if media is None else None
        if violations := await self._violations(body):
            return error_result(tool_call, clean(violations), "invalid_answer")
        value = {"status": reply.status, "content_type": content_type(reply), "body": body}
        return success_result(tool_call, clean(value), [] if media is None else [media])

    async def _violations(self, body: Any) -> str | None:
        schema = self._output
        if schema is None:
            return None
        problems = await run_in_thread(partial(schema.problems, body))
        if not problems:
            return None
        lines = [f"{each.pointer or 'the whole body'}: {each.message}" for each in problems]
        return f"the answer does not fit the tool's output_schema: {'; '.join(lines)}"

    async def _request(self, arguments: dict[str, Any]) -> tuple[str, bytes | None]:
        await run_in_thread(partial(self._arguments.check, arguments))
        rest = {key: arguments[key] for key in arguments if key not in self._template.names}
        if self.definition.method in _IN_QUERY:
            return self._template.fill(arguments, rest), None
        url = self._template.fill(arguments, {})
        if not rest and self._arguments.names <= self._template.names:
            return url, b""
        try:
            text = json.dumps(rest, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
            content = text.encode()
        except (ValueError, RecursionError):
            raise InvalidInputError("the arguments cannot be written as JSON") from None
        if len(content) > _LONGEST_REQUEST:
            raise InvalidInputError(f"the arguments are longer than {_LONGEST_REQUEST} bytes")
        return url, content

    async def check_secrets(self) -> None:
        """Check that the tool may send all its secrets; called before calls of the tool.

        Raises:
            InvalidInputError: a secret is missing, or must not be sent to the tool's server.
        """
        try:
            for name in self.definition.secrets.values():
                await self._secrets(name)
        except InvalidInputError as error:
            detail = f"the tool '{self.name}': {error.detail}"
            raise InvalidInputError(detail, code=error.code) from None

    async def _headers(self, content: bytes | None) -> tuple[dict[str, str], list[str]]:
        headers = {"content-type": "application/json"} if content else {}
        names: list[str] = []
        for name, value in self.definition.headers.items():
            if isinstance(value, SecretHeader):
                secret = (await self._secrets(value.secret)).strip()
                names.append(secret)
                headers[name.lower()] = secret
            else:
                headers[name.lower()] = value
        return dict(with_trace(headers)), names

    def _failure(self, reply: Reply, url: str, clean: Callable[[str], str]) -> str | None:
        if is_redirect(reply):
            target = redirect_target(reply, url)
            where = clean(target.host) if target else "an invalid address"
            return (
                f"{failure_of(reply)}, a redirect to {where}; redirects are not followed: the "
                "tool's URL has to be the target's URL"
            )
        if (failure := failure_of(reply)) is not None:
            # Redact the whole text and then cut it, because redaction finds only whole secrets.
            text = excerpt(clean(text_of(reply) or "").strip())
            return f"{failure}: {text}" if text else failure
        if reply.truncated or len(reply.body) > self.definition.max_bytes:
            return f"the answer is larger than {self.definition.max_bytes} bytes"
        return None
