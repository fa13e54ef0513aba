"""The arguments of the tools, as a model gives them."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from bottega.subagents.file_tools import MAX_CONTENT
from bottega.subagents.files import MAX_PATH_BYTES
from bottega.subagents.plugins import checked_metadata
from bottega.subagents.waits import Mode

MOST_TASKS = 50
"""Tasks that one call may name or dispatch."""
USUAL_PRIORITY, LAST_PRIORITY = 5, 10

TaskId = Annotated[str, Field(max_length=100)]
TaskIds = Annotated[
    list[TaskId],
    Field(min_length=1, max_length=MOST_TASKS, description="Ids that a dispatch answered."),
]

FilePath = Annotated[str, Field(min_length=1, max_length=MAX_PATH_BYTES)]


def checked_input(files: dict[str, str]) -> dict[str, str]:
    """Check that files have at most ``MAX_CONTENT`` characters together."""
    if sum(map(len, files.values())) > MAX_CONTENT:
        raise ValueError(f"the files of input may have {MAX_CONTENT} characters together")
    return files


class Arguments(BaseModel):
    """Base of all arguments."""

    model_config = ConfigDict(extra="forbid")


class DispatchArguments(Arguments):
    """One task."""

    prompt: str = Field(min_length=1, max_length=10_000, description="What the task is to do.")
    instructions: str | None = Field(
        default=None, max_length=5_000, description="How it is to work: its system message."
    )
    agent: str | None = Field(default=None, max_length=64)
    priority: int = Field(
        default=USUAL_PRIORITY, ge=1, le=LAST_PRIORITY, description="1 goes first, 10 last."
    )
    timeout_ms: int | None = Field(default=None, ge=5_000, le=600_000)
    token_budget: int | None = Field(
        default=None, ge=1, le=10**12, description="Tokens it may spend."
    )
    metadata: Annotated[dict[str, Any], AfterValidator(checked_metadata)] = Field(
        default_factory=dict
    )
    input: Annotated[dict[FilePath, str], AfterValidator(checked_input)] = Field(
        default_factory=dict,
        max_length=20,
        description="Files for it, by path below its folder's input/.",
    )
    retries: int = Field(
        default=0, ge=0, le=3, description="Further tries if its model or a tool fails."
    )


class FanOutArguments(Arguments):
    """Several tasks; each is checked by itself."""

    tasks: list[Any] = Field(
        min_length=1, max_length=MOST_TASKS, description="As for dispatch_subagent."
    )


class PollArguments(Arguments):
    """A choice of tasks and of what to report."""

    task_ids: TaskIds | None = Field(default=None, description="Without it: all your tasks.")
    include_partial_output: bool = True
    max_partial_output_length: int = Field(default=2_000, ge=0, le=10_000)


class AwaitArguments(Arguments):
    """A wait."""

    task_id: TaskId | None = None
    task_ids: TaskIds | None = None
    mode: Mode = Field(
        default="all", description="any_success: until one has completed, or all are over."
    )
    quorum: int | None = Field(
        default=None, ge=1, le=MOST_TASKS, description="How many, in that mode."
    )
    timeout_ms: int = Field(default=300_000, ge=1_000, le=600_000)


class CancelArguments(Arguments):
    """Tasks to cancel."""

    task_ids: TaskIds


class SendArguments(Arguments):
    """A message to a task."""

    task_id: TaskId
    message: str = Field(min_length=1, max_length=10_000)


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON Schema without titles and descriptions of classes, which cost tokens."""
    schema = model.model_json_schema()
    for field in schema["properties"].values():
        field.pop("title", None)
    del schema["title"], schema["description"]
    return schema
