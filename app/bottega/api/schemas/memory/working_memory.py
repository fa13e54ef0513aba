"""A run's working memory, on the wire."""

from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import Field

from bottega.api.schemas.base import Answer

SectionName = Literal["system", "task", "state", "intermediate", "retrieved"]
ScopeName = Literal["global", "task", "execution", "intermediate", "metadata"]


class MemorySection(Answer):
    """A section of the working memory, within its token budget."""

    name: SectionName
    budget: Annotated[int, Field(description="Tokens, at 4 bytes each.")]
    tokens: Annotated[int, Field(description="Tokens in use.")]
    content: str


class MemoryReference(Answer):
    """An answer of a tool, of a sub-agent or, in a DAG, of an agent."""

    reference: Annotated[str, Field(description="Argument of the tool `recall_memory`.")]
    name: Annotated[str, Field(description="Name of the tool or agent.")]
    seq: Annotated[int, Field(description="Number of the event with the whole answer.")]
    tokens: int
    failed: bool
    excerpt: Annotated[str, Field(description="At most 60 tokens of it.")]


class MemoryPrompt(Answer):
    """The last prompt of the run's own agent, if it got less than its whole history."""

    tokens: Annotated[int, Field(description="Approximate total.")]
    shrunk: Annotated[int, Field(description="Answers shortened to a summary and a reference.")]
    left: Annotated[int, Field(description="Messages left out, which can be recalled.")]


class WorkingMemory(Answer):
    """A run's working memory, computed from its log."""

    run_id: UUID
    limit: Annotated[int, Field(description="Tokens of all sections together.")]
    tokens: int
    sections: list[MemorySection]
    variables: Annotated[
        dict[ScopeName, dict[str, Any]], Field(description="By scope, then by name.")
    ]
    results: Annotated[int, Field(description="Number of references: m1, m2 and so on.")]
    references: Annotated[list[MemoryReference], Field(description="The newest 50, newest first.")]
    prompt: Annotated[
        MemoryPrompt | None, Field(description="Null: the prompt had the whole history.")
    ]
