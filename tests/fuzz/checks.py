"""Own checks for schemathesis, and the failures that it need not report."""

import itertools
import os
import re
from typing import Any, cast
from uuid import UUID

import schemathesis
from schemathesis import Case, CheckContext, HookContext, Response
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    ensure_resource_availability,
    positive_data_acceptance,
    use_after_free,
)

CODES = {
    "version_conflict": "which version is current is no matter of a request's form",
    "invalid_cursor": "a cursor is opaque: only the server's own are good",
    "idempotency_key_reused": "whether a key was used before is no matter of a request's form",
    "unknown_agent": "which agents there are is no matter of a request's form",
    "unknown_graph": "which graphs there are is no matter of a request's form",
    "missing_description": "what other agents say of themselves is in their definitions",
    "too_deep": "how deep sub-agents go is in the definitions of other agents",
    "invalid_condition": "conditions have a grammar of their own, which JSON Schema cannot bound",
    "message_too_large": "no keyword bounds the bytes of a text or of several fields",
    "no_webhook_secret": "whether the tenant has a secret is no matter of a request's form",
    "url_too_long": "how long a URL gets depends on how its characters are written, all together",
    "egress_forbidden": "which addresses are public is more than a pattern can say",
    "secret_host_unset": "which hosts a secret has is a setting",
    "secret_not_for_host": "which hosts a secret has is a setting",
    "secret_needs_https": "the scheme of another field, with the settings",
    "unknown_provider": "which providers there are is no matter of a request's form",
    "unknown_model": "which models a provider has is in its definition",
    "unknown_run": "which runs a session has is no matter of a request's form",
    "unknown_plugin": "which plugins there are is no matter of a request's form",
    "unknown_file": "which files there are is no matter of a request's form",
    "unsupported_param": "which parameters a model's API has is no matter of a request's form",
    "unsupported_part": "which parts a model's API has is no matter of a request's form",
    "reserved_field": "which fields a model's API reserves is no matter of a request's form",
    "unknown_command": "which programs there are is a setting",
    "egress_refused": "which addresses are public is more than a pattern can say",
}
"""Refusals of valid requests, for reasons that no schema can state."""
DETAILS = {
    r"^: ": "several fields depend on each other: the rule names none of them",
    r"of the graph's nodes": "what a field names must be in a list",
    r"belongs to (the )?mode|or allow .anonymous": "a member depends on the value of another",
    r"give an? .* from 1 to": "which events there are is no matter of a request's form",
    r"more than \d+ points": "no keyword bounds a time",
    r"valid IPv[46] ": "networks have a grammar of their own",
    r"tools and sub-agents share a name": "no two of two lists' members may be the same",
    r"is defined twice": "no two members of a list may have the same name",
    r"exit_on_success and tool_policy name": "what a list names must be in another list",
    r"(^|[_/])(after|before|at|since|until|from|to): Input should be (greater|less)": (
        "no keyword bounds a time"
    ),
    r"this time is in the future|from since to until": "no keyword bounds a time",
    r"tool_choice names a tool": "what a field names must be in a list",
    r"the name in the body differs": "a body cannot refer to its path",
    r"output_schema: |/output_schema": "the grammar of JSON Schema is more than a schema can bound",
    r"success_check/\d+/(schema|value)|/input_schema: ": (
        "the grammar of JSON Schema is more than a schema can bound"
    ),
    r"/approval: ": "conditions have a grammar of their own, which JSON Schema cannot bound",
    r"send the version to change": "in the body or in a header",
    r"patterns? .*(can be merged|is deprecated|is replaced)": "states and categories of others",
    r"without input, output and trace": "no keyword bounds the bytes of several fields",
    r"turns must end with one of the role": "the value of a list's last member",
    r"is not a type of event": "a list with commas in a query parameter",
    r"a cron expression|this cron expression": "cron's grammar is no pattern",
    r"/hosts/\d+: must be a host": "what is a host is more than a pattern can say",
    r"/value: is shorter than": "the length of the last word of several",
    r"the content is missing|may have tool_calls|tool_call_id": (
        "a message's fields depend on each other"
    ),
    r"/headers: ": "names and values of header fields have a grammar, and some are reserved",
    r"a part needs exactly one of|data needs its media": "a part's fields depend on each other",
    r"'steer' needs a text|cannot be steered": "a run's fields depend on each other",
    r"send all fields in the application/json body": "parameters depend on the type of the body",
    r"budget: Invalid JSON": "JSON in a query parameter",
    r"give either items or a file|name either an agent": (
        "a batch's fields depend on each other, and on the type of the body"
    ),
    r"a node of type|an edge has either|/(nodes|edges)/\d+": (
        "the fields of a node depend on its type, and those of an edge on its nodes"
    ),
    r"send a baseline_rate only": "a report's fields depend on each other",
    r"a ticket for 'sse' opens one run": "a ticket's fields depend on each other",
    r"time zone": "which time zones there are changes every year",
    r"the expiry is in the past": "time goes on",
    r"nested deeper than": "JSON Schema cannot count depth",
    r"the character NUL|lone surrogates": "true of every string: said once, in the description",
    r"url: ": "what is a URL, in detail, is more than a pattern can say",
    r"/tools/\d+(/url|/headers|/parameters)?: Value error": "templates of URLs, headers and JSON "
    "Schemas have grammars of their own, and must fit each other",
}
"""The same for the code ``invalid``: the detail's beginning, or a later part."""
KEY_ID = "BOTTEGA_KEY_ID"
"""Variable with the id of the key in use: the only object that must not be deleted."""
_NUMBERS = itertools.count()
SECURITY = (
    "x-content-type-options",
    "referrer-policy",
    "cross-origin-resource-policy",
    "content-security-policy",
)


@schemathesis.hook
def before_call(context: HookContext, case: Case[Any], kwargs: dict[str, Any]) -> None:
    """Send no value that is good only if the server returned it before.

    Otherwise hardly a request would get past it.
    """
    if (case.path_parameters or {}).get("key_id") == os.environ[KEY_ID] and case.method == "DELETE":
        case.path_parameters["key_id"] = str(UUID(int=0))
    for name, value in (case.path_parameters or {}).items():
        if value in (None, "None"):  # taken from a nullable field of an answer
            case.path_parameters[name] = str(UUID(int=0))
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    for name in ("cursor", "types"):
        (case.query or {}).pop(name, None)
    if isinstance(case.body, dict):
        _make_sense(case.body)
        if isinstance(case.body.get("run"), dict):
            _make_sense(cast(dict[str, Any], case.body["run"]))
    for name in list(case.headers or {}):
        if name.lower() == "if-match":
            case.headers[name] = "*"
        elif name.lower() == "idempotency-key":
            # A key already used for the same body would return an object that is deleted by now.
            case.headers[name] = f"fuzz-{next(_NUMBERS)}"


def _make_sense(body: dict[str, Any]) -> None:
    """Make most names new, and let an agent's lists name its own tools."""
    if isinstance(body.get("name"), str) and (number := next(_NUMBERS)) % 4:
        body["name"] = f"{body['name'][:40]}-{number}"
    if "input" in body:
        body["webhook_url"] = None
        if body.get("mode") == "dag":
            body["agent"] = None  # the dictionary of names fills it in
    if "cron" in body and not re.match("[0-9*]", body["cron"]):
        body |= {"cron": "30 8 * * 1", "timezone": "UTC"}
    for tool in body.get("tools") or []:
        if tool["type"] == "http":
            tool |= {"url": "https://api.example.com/", "headers": {}, "parameters": {}}
    if "url" in body:
        body["url"] = "https://mcp.example.com/mcp"
    tools = [tool["name"] for tool in body.get("tools") or [] if "name" in tool]
    if "exit_on_success" in body:
        body["exit_on_success"] = tools[:1]
    if not tools:
        body.pop("tool_policy", None)
    for rule in body.get("tool_policy") or []:
        rule["tool_name"] = tools[0]


def _argued(problem: dict[str, Any]) -> bool:
    if problem["code"] in CODES:
        return True
    said = [
        f"{error['pointer'] or error['parameter'] or ''}: {error['detail']}"
        for error in problem["errors"]
    ]
    return all(
        any(re.search(detail, one) for detail in DETAILS) for one in said or [problem["detail"]]
    )


@schemathesis.check
def accepts_what_it_documents(
    ctx: CheckContext, response: Response, case: Case[Any]
) -> bool | None:
    """Check that a valid request is accepted, or refused for a reason that no schema can state."""
    if response.status_code in (412, 414, 422) and _argued(response.json()):
        return None
    return positive_data_acceptance(ctx, response, case)


@schemathesis.check
def has_no_error_of_its_own(ctx: CheckContext, response: Response, case: Case[Any]) -> bool | None:
    """Check that the server does not fail; an MCP server that cannot be reached is told by 502."""
    if response.status_code == 502 and response.json()["code"] == "mcp_unreachable":
        return None
    return not_a_server_error(ctx, response, case)


@schemathesis.check
def forgets_what_was_deleted(ctx: CheckContext, response: Response, case: Case[Any]) -> bool | None:
    """Check that deleted objects are gone, except keys and users.

    A revoked key can still be read, since the owners of keys are part of the record. A user can be
    read until the erasure is complete.
    """
    if case.operation.path in ("/v1/keys/{key_id}", "/v1/users/{user}"):
        return None
    return use_after_free(ctx, response, case)


@schemathesis.check
def finds_what_was_created(ctx: CheckContext, response: Response, case: Case[Any]) -> bool | None:
    """Check that created objects are found.

    Except optional parts, as a run may have no graph, and others that the body names.
    """
    if response.status_code == 404:
        problem = response.json()
        replaced_by = isinstance(case.body, dict) and case.body.get("replaced_by")
        if problem["code"] == "no_graph":
            return None
        if replaced_by and str(replaced_by) in problem["detail"]:
            return None
    return ensure_resource_availability(ctx, response, case)


@schemathesis.check
def refuses_with_a_problem(ctx: CheckContext, response: Response, case: Case[Any]) -> None:
    """Check that every refusal is a problem with a stable code and a detail."""
    if response.status_code >= 400:
        assert response.headers["content-type"] == ["application/problem+json"], response.headers
        problem = response.json()
        assert problem["status"] == response.status_code, problem
        assert problem["code"], problem
        assert problem["code"] != "internal", problem
        assert problem["detail"], problem


@schemathesis.check
def has_security_headers(ctx: CheckContext, response: Response, case: Case[Any]) -> None:
    """Check that every answer has the security headers, once, and none names the server."""
    for name in SECURITY:
        assert len(response.headers[name]) == 1, (name, response.headers)
    assert "server" not in response.headers, response.headers
