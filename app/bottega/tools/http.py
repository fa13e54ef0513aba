"""User-defined tools that send an HTTP request."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    field_validator,
    model_validator,
)

from bottega.agents.messages import ToolCall, ToolResult
from bottega.agents.people.approval import Approval
from bottega.agents.tools import ToolBase, error_result, success_result
from bottega.errors import InvalidInputError, UnavailableError
from bottega.json_schema.arguments import ArgumentSchema, argument_schema
from bottega.json_schema.output import output_schema
from bottega.json_schema.values import WHOLE
from bottega.redaction import Redactor
from bottega.tools.approvals import Approvable
from bottega.tools.egress import Egress, Reply
from bottega.tools.headers import carries_credentials, check_header, is_credential_in_query
from bottega.tools.replies import (
    body_of,
    content_type,
    excerpt,
    failure_of,
    is_redirect,
    media_of,
    redirect_target,
    text_of,
)
from bottega.tools.url_template import UrlTemplate
from bottega.trace_context import with_trace

Secrets = Callable[[str], Awaitable[str]]
"""Returns a secret's value by name, or raises InvalidInputError."""

UPPER_NAME = r"^[A-Z](_?[A-Z0-9])*$"
"""Pattern of a secret's name, at most 64 characters."""
_LONGEST_REQUEST = 1_000_000
_SHORTEST_READ = 16_384
_GRACE_S = 5.0
_IN_QUERY = ("GET", "DELETE")


class SecretHeader(BaseModel):
    """Reference to a secret."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    secret: Annotated[
        str,
        StringConstraints(pattern=UPPER_NAME, max_length=64),
        Field(
            description="`NAME` is the tenant's secret of this name (`PUT /v1/secrets/NAME`); if "
            "there is none, the operator's BOTTEGA_UPPER_NAME (other tenants than `default`: "
            "BOTTEGA_SECRET_TENANT__NAME). It is sent unchanged."
        ),
    ]


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
    Field(description="JSON Schema (2020-12) of the arguments, an object."),
]


class HttpToolDefinition(Approvable):
    """A tool that sends an HTTP request.

    Arguments replace their placeholders in the URL. Others go to the query (GET, DELETE) or, as a
    JSON object, to the body.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        hide_input_in_errors=True,
        # ``type`` selects the kind of tool in a JSON list; in Python the class does.
        json_schema_extra=lambda schema: schema["required"].append("type"),
    )

    type: Literal["http"] = "http"
    name: ToolName
    description: ToolPurpose
    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"] = "GET"
    url: Annotated[
        str,
        Field(
            description="Template such as `https://api.example.com/items/{id}?q={q}`; a "
            "placeholder is one argument, percent-encoded."
        ),
    ]
    headers: Annotated[
        dict[str, str | SecretHeader],
        Field(max_length=50, description='Text, or `{"secret": "NAME"}`.'),
    ] = Field(default_factory=dict)
    parameters: ToolParameters = Field(default_factory=dict)
    output_schema: Annotated[
        dict[str, JsonValue] | None,
        Field(
            description="JSON Schema (2020-12) of the answer's body. A call whose answer does not "
            "fit has failed."
        ),
    ] = None
    timeout_s: Annotated[
        float, Field(gt=0, le=120, strict=False, description="Seconds for the whole request.")
    ] = 30.0
    max_bytes: Annotated[
        int, Field(ge=1, le=1_000_000, description="Largest answer, decoded."), WHOLE
    ] = 100_000
    idempotent: Annotated[
        bool | None,
        Field(
            description="Repeat a call that a crash interrupted; null: only GET, PUT and DELETE."
        ),
    ] = None

    @field_validator("url")
    @classmethod
    def _is_template(cls, url: str) -> str:
        _said(UrlTemplate.parse, url)
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
            raise ValueError("a header is given twice")
        for name, value in headers.items():
            text = value if isinstance(value, str) else "secret"
            _said(check_header, name, text)
            if isinstance(value, str) and carries_credentials(name):
                raise ValueError(
                    f"the value of {name} is a secret: store it with PUT /v1/secrets/NAME and "
                    'refer to it by {"secret": "NAME"}'
                )
            if name.lower() == "content-type" and "json" not in text.lower():
                raise ValueError("the body is sent as JSON: leave content-type out")
        return headers

    @property
    def origin(self) -> str:
        """The URL's scheme, host and port; no argument can change them."""
        return UrlTemplate.parse(self.url).origin

    @property
    def secrets(self) -> Mapping[str, str]:
        """The names of the secrets that it sends, by header."""
        return {
            header: value.secret
            for header, value in self.headers.items()
            if isinstance(value, SecretHeader)
        }

    @field_validator("parameters")
    @classmethod
    def _is_schema(cls, parameters: dict[str, JsonValue]) -> dict[str, JsonValue]:
        _said(_schema, parameters)
        return parameters

    @field_validator("output_schema")
    @classmethod
    def _is_output_schema(cls, schema: dict[str, JsonValue] | None) -> dict[str, JsonValue] | None:
        if schema is not None:
            _said(output_schema, schema)
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
        found = {"/parameters": _schema(self.parameters).patterns}
        if self.output_schema is not None:
            found["/output_schema"] = output_schema(self.output_schema).patterns
        return {
            f"{place}{pointer}": pattern
            for place, patterns in found.items()
            for pointer, pattern in patterns.items()
        }

    @property
    def repeatable(self) -> bool:
        """True if a call may be repeated after a crash."""
        if self.idempotent is not None:
            return self.idempotent
        return self.method in ("GET", "PUT", "DELETE")


def _said(check: Callable[..., Any], *arguments: Any) -> None:
    """Run a check and convert its error for Pydantic."""
    try:
        check(*arguments)
    except InvalidInputError as error:
        raise ValueError(error.detail) from None


def _schema(parameters: Mapping[str, Any]) -> ArgumentSchema:
    return argument_schema(json.dumps(parameters))


class HttpTool(ToolBase):
    """An :class:`HttpToolDefinition` as a tool.

    Args:
        secrets: looks up the values of secret headers, at each call.
        egress: sends the requests.
        known: redacts known secrets from answers, besides the secrets that the tool sends.
        tenant: the tenant that sends the requests.
        approval: which calls a person must approve.
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
        self.timeout_s = definition.timeout_s + _GRACE_S  # the inner timeout has the clearer error
        self.idempotent = definition.repeatable
        self._arguments = _schema(definition.parameters)
        wanted = definition.output_schema
        self._output = None if wanted is None else output_schema(wanted)
        self._template = UrlTemplate.parse(definition.url)
        self._secrets = secrets
        self._egress = egress
        self._known = known
        self._tenant = tenant

    def __repr__(self) -> str:
        return f"HttpTool({self.name!r}, {self.definition.method} {self._template.origin})"

    @property
    def unchecked(self) -> Sequence[str]:
        """The places of patterns in its schemas that are not checked."""
        output = () if self._output is None else self._output.unchecked
        return [
            *(f"/parameters{place}" for place in self._arguments.unchecked),
            *(f"/output_schema{place}" for place in output),
        ]

    def create_schema(self) -> dict[str, Any]:
        return self._arguments.schema

    async def execute(self, tool_call: ToolCall) -> ToolResult:
        """Send the request. Any status but 2xx is an ERROR with the start of the body.

        An image, audio or a PDF becomes a part of the result.
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
                # A truncated body could end in half a secret, which redaction misses.
                max_bytes=max(self.definition.max_bytes, _SHORTEST_READ),
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
        if violations := await self._violations(body, len(reply.body)):
            return error_result(tool_call, clean(violations), "invalid_answer")
        found = {"status": reply.status, "content_type": content_type(reply), "body": body}
        return success_result(tool_call, clean(found), [] if media is None else [media])

    async def _violations(self, body: Any, length: int) -> str | None:
        """Return an error text if the answer's body does not fit its schema."""
        schema = self._output
        if schema is None:
            return None
        check = partial(schema.problems, body)
        problems = check() if schema.is_quick(length) else await asyncio.to_thread(check)
        if not problems:
            return None
        lines = [f"{each.pointer or 'the whole body'}: {each.message}" for each in problems]
        return f"the answer does not fit the tool's output_schema: {'; '.join(lines)}"

    async def _request(self, arguments: dict[str, Any]) -> tuple[str, bytes | None]:
        if not self._arguments.is_flat:
            await asyncio.to_thread(self._arguments.check, arguments)
        else:
            self._arguments.check(arguments)
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
        """Check that all secrets may be sent, before a model calls the tool.

        Raises:
            InvalidInputError: as the look-up of the secrets.
        """
        try:
            for name in self.definition.secrets.values():
                await self._secrets(name)
        except InvalidInputError as error:
            detail = f"the tool '{self.name}': {error.detail}"
            raise InvalidInputError(detail, code=error.code) from None

    async def _headers(self, content: bytes | None) -> tuple[dict[str, str], list[str]]:
        headers = {"content-type": "application/json"} if content else {}
        sent: list[str] = []
        for name, value in self.definition.headers.items():
            if isinstance(value, SecretHeader):
                secret = (await self._secrets(value.secret)).strip()
                sent.append(secret)
                headers[name.lower()] = secret
            else:
                headers[name.lower()] = value
        return dict(with_trace(headers)), sent

    def _failure(self, reply: Reply, url: str, clean: Callable[[str], str]) -> str | None:
        """Return the error text for the model; ``None`` if the answer is a success."""
        if is_redirect(reply):
            target = redirect_target(reply, url)
            where = clean(target.host) if target else "an invalid address"
            return (
                f"{failure_of(reply)}, a redirect to {where}; redirects are not followed: the "
                "tool's URL has to be the final one"
            )
        if (failure := failure_of(reply)) is not None:
            # Redact before shortening: redaction does not find half a secret.
            said = excerpt(clean(text_of(reply) or "").strip())
            return f"{failure}: {said}" if said else failure
        if reply.truncated or len(reply.body) > self.definition.max_bytes:
            return f"the answer is larger than {self.definition.max_bytes} bytes"
        return None
