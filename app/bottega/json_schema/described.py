"""Pydantic models whose field docstrings become the field descriptions of their JSON Schemas.

This module also describes the fields that have the same meaning in all models.
"""

import ast
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from typing_extensions import get_original_bases, is_typeddict

SHARED_FIELDS: Mapping[str, str] = {
    "type": "Kind of the object, which distinguishes the variants.",
    "kind": "Kind of the object, which determines the other fields.",
    "id": "Id of the object, which never changes.",
    "name": "Name of the object.",
    "version": "Version of the definition, from 1.",
    "status": "Status, which may change until the object is final.",
    "agent": "Name of the agent.",
    "agents": "Names of the agents.",
    "graph": "Name of the graph; null if there is none.",
    "mode": "How the agents work together: `orchestrated` or `dag`.",
    "user": "Your own name for the end user; null if there is none.",
    "created_at": "Time of creation.",
    "updated_at": "Time of the last change.",
    "started_at": "Time of the start; null before the start.",
    "ended_at": "Time of the end; null before the end.",
    "at": "Time of the event.",
    "expires_at": "Time at which the validity ends; null if it never ends.",
    "error": "The error of a failure; null without an error.",
    "message": "Text for people, which may change.",
    "code": "Stable code. Programs should compare this code, not the text.",
    "detail": "Text for people: the problem and its solution.",
    "run_id": "Id of the run.",
    "session_id": "Id of the session; null if there is none.",
    "task_id": "Id of the task; null for the run's own agent.",
    "parent_task_id": "Id of the task that dispatched this task; null if the run's own agent did.",
    "interrupt_id": "Id of the interrupt.",
    "message_id": "Id of the user's message.",
    "episode_id": "Id of the episode.",
    "pattern_id": "Id of the pattern.",
    "tool_call_id": "Id of the model's tool call; null if there is none.",
    "tool_calls": "Number of tool calls.",
    "model_calls": "Number of model calls.",
    "arguments": "Arguments of the call, by name.",
    "items": "The items. The description of the operation states their order.",
    "usage": "Tokens and cost; null if unknown.",
    "cost": "Price of the model calls.",
    "input": "Input tokens.",
    "output": "Text of the answer; null without an answer.",
    "tokens": "Number of tokens.",
    "duration_ms": "Duration in milliseconds; null if unknown.",
    "duration_s": "Duration in seconds; null if unknown.",
    "timeout_s": "Maximum duration in seconds.",
    "timeout_ms": "Maximum running time in milliseconds.",
    "retry_after_ms": "Milliseconds after which a new try may succeed.",
    "content": "The text.",
    "text": "The text.",
    "description": "Purpose, in a few words.",
    "reason": "The reason; null without a reason.",
    "category": "Subject of the pattern.",
    "model": "Name of the model; null for the default model.",
    "provider": "Name of the model's provider.",
    "tools": "The tools.",
    "source": "Source of the item: an agent, a pattern, an episode or an insight.",
    "call": "Number of the agent's model call, from 1.",
    "attempt": "The run's attempt, from 1.",
    "tool": "Name of the tool; null if there is none.",
    "domain": "Subject of the task, such as `billing`; null if unknown.",
    "task_type": "Kind of the task, such as `export`; null if unknown.",
    "metadata": "Your own data, or annotations by tools and hooks.",
    "outcome": "Evaluation of the work.",
    "priority": "Priority, from 1 (most urgent) to 10 (least urgent).",
    "insights": "Lessons from the work, in sentences.",
    "failures": "Failures during the work.",
    "score": "Measure of relevance; a higher number is better.",
    "summary": "One or two sentences that a model reads.",
    "state": "State in the life cycle.",
    "confidence": "Probability that the pattern helps, from 0 to 1.",
    "success_rate": "Share of the pattern's applications that succeeded; null if there are none.",
    "uses": "Tools and agents that the pattern mentions, in order.",
    "affects": "Tools and agents whose next call shows the effect; empty for the whole run.",
    "tries": "Number of tries so far.",
    "stop_reason": "Reason of the end, such as `max_iterations`; null for a normal end.",
    "nodes": "Agents of the graph.",
    "edges": "Dependencies of the graph: a target receives its source's answer.",
    "task": "The task, as requested.",
    "steps": "The steps, in order.",
    "pattern": "The pattern.",
    "paused": "True if no runs are started.",
    "applicability": "Conditions under which the pattern applies.",
    "guide": "Advice on applying the pattern.",
    "relations": "Relations to other patterns.",
    "baseline": "Success rate of similar tasks without the pattern.",
    "applications": "Number of applications.",
    "errors": "Errors, one by one.",
    "goals": "Goals of the work.",
    "constraints": "Rules for the work.",
    "success_criteria": "Signs of a good result.",
    "token_budget": "Maximum number of input and output tokens together; null for no limit.",
    "published_at": "Time of the publication.",
    "ttl_s": "Seconds until the node's publication expires; null if it never expires.",
    "policy": "Content that flows along the edge; null for recalled content without an edge.",
    "before": "Value of the run in the path.",
    "after": "Value of the other run in the comparison.",
    "question": "The question for people; null for a request for approval.",
    "resolution": "The decision of people; null before the decision.",
    "comment": "A text for people; null without a text.",
    "complexity": "Difficulty, from 0 (simple) to 1 (hard).",
    "quality": "Measures of the quality, by name.",
    "patterns": "The patterns.",
    "performance": "Measures of the work, by name.",
    "execution": "Record of the work.",
    "reflection": "Lessons from the work; null if there are none yet.",
    "rate": "Share of successful tasks, from 0 to 1.",
    "warnings": "Omissions and changes, with reasons.",
    "p_value": "Probability of such a result if the pattern has no effect; null if unknown.",
    "headers": "Headers of each request. A value is a text or the name of a secret.",
}

SHARED_PARAMETERS: Mapping[str, str] = {
    "name": "Name of the object.",
    "version": "Number of the version.",
    "source": "Agent that sends its answer along the edge.",
    "target": "Agent that receives the answer.",
    "format": "File format of the drawing.",
    "status": "Only items with this status.",
    "agent": "Name of the agent.",
    "session_id": "Only items of this session.",
    "created_after": "Only items created later.",
    "created_before": "Only items created earlier.",
    "kind": "Only items of this kind.",
    "run_id": "Only items of this run.",
    "domain": "Only items of this domain.",
    "task_type": "Only items of this type of task.",
    "tag": "Only items with this tag.",
    "noted_after": "Only entries with a later time.",
    "noted_before": "Only entries with an earlier time.",
    "by": "Field that groups the sums.",
    "state": "Only items in this state.",
    "category": "Only items of this category.",
    "accept": "`text/event-stream`: answer with a stream, like `stream_run_events`.",
    "last-event-id": "Number of the last received event; the stream continues after this event.",
}
"""Descriptions of parameters that do not have their own description."""


class DescribedModel(BaseModel):
    """A model whose JSON Schema takes each field's description from the field's docstring.

    Pydantic's `use_attribute_docstrings` would parse each class at import, which would double the
    start time. This class parses each file once, when the service first makes an OpenAPI document.
    Pydantic builds a model's validator at its first use, because a process uses only few models.

    Attributes:
        shows: model of a request body. Fields without docstrings get their descriptions from it.
    """

    model_config = ConfigDict(defer_build=True)

    shows: ClassVar[type[BaseModel] | None] = None

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        shown = handler(schema)
        names = {
            field.serialization_alias or field.alias or name: name
            for name, field in cls.model_fields.items()
        }
        texts = _field_texts(cls) if cls.shows is None else _shown_texts(cls.shows, cls)
        _describe(handler.resolve_ref_schema(shown), names, texts)
        return shown


TypedDictClass = TypeVar("TypedDictClass", bound=type)


def described(cls: TypedDictClass) -> TypedDictClass:
    """Let the JSON Schema of a ``TypedDict`` take its fields' descriptions from their docstrings.

    See :class:`DescribedModel`.
    """

    def json_schema(schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        shown = handler(schema)
        _describe(handler.resolve_ref_schema(shown), {}, _field_texts(cls))
        return shown

    cls.__get_pydantic_json_schema__ = json_schema  # type: ignore[attr-defined]
    return cls


def _describe(shown: JsonSchemaValue, names: Mapping[str, str], texts: Mapping[str, str]) -> None:
    """Add descriptions to an object's schema. ``names``: fields' names by other names in JSON."""
    for shown_name, member in shown.get("properties", {}).items():
        name = names.get(shown_name, shown_name)
        own = (member, *member.get("anyOf", ()))
        found = (each["description"] for each in own if "description" in each)
        if text := texts.get(name) or next(found, None) or SHARED_FIELDS.get(name):
            member["description"] = text


@functools.cache
def _field_texts(model: type) -> Mapping[str, str]:
    """Return the docstrings of a model's fields by field name, including inherited fields."""
    texts: dict[str, str] = {}
    for base in reversed(_lineage(model)):
        if base.__module__.startswith("bottega."):
            texts |= _file_texts(base.__module__).get(base.__name__.partition("[")[0], {})
    return texts


def _lineage(model: type) -> Sequence[type]:
    """Return a class and its base classes. A ``TypedDict`` does not list its bases as others do."""
    if not is_typeddict(model):
        return model.__mro__
    bases = (base for base in get_original_bases(model) if is_typeddict(base))
    return [model, *(each for base in bases for each in _lineage(base))]


def _shown_texts(body: type[BaseModel], answer: type[BaseModel]) -> Mapping[str, str]:
    members = body.model_json_schema()["properties"]
    texts = {name: str(each.get("description", "")) for name, each in members.items()}
    return {**texts, **_field_texts(answer)}


@functools.cache
def _file_texts(module: str) -> Mapping[str, Mapping[str, str]]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {
        each.name: dict(_texts_below(each)) for each in tree.body if isinstance(each, ast.ClassDef)
    }


def _texts_below(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, below in pairwise(node.body):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                yield name, " ".join(text.split())
