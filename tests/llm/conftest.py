"""A fake model over a real socket, and the real provider that calls it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bottega.agents.messages import HumanMessage, StandardMessage, SystemMessage
from bottega.agents.provider import FailedTry, ModelOptions
from bottega.llm.vendors import OpenAIProvider
from tests.fake_model import FakeModel

KEY = "sk-very-secret-0123456789"


@pytest.fixture
async def model() -> AsyncIterator[FakeModel]:
    async with FakeModel() as model:
        yield model


@pytest.fixture
async def asking(model: FakeModel) -> AsyncIterator["Asking"]:
    async with provider_for(model) as asking:
        yield asking


class Asking:
    """Provider that notes its waits instead of waiting, and notes its reports.

    Attributes:
        time: seconds on its clock, which only its waits move.
        slept: seconds, one entry per wait.
        failed: the failed tries that were reported.
        deltas: text as it came.
        warnings: code and text of each warning.
    """

    def __init__(self, base_url: str, **options: Any) -> None:
        self.time = 0.0
        self.slept: list[float] = []
        self.failed: list[FailedTry] = []
        self.deltas: list[str] = []
        self.warnings: list[tuple[str, str]] = []
        options.setdefault("random_unit", lambda: 0.5)
        options.setdefault("patience_s", 600.0)
        options.setdefault("sleep", self._sleep)
        self.provider = OpenAIProvider(
            "some-model",
            api_key=KEY,
            base_url=base_url,
            now=lambda: self.time,
            **options,
        )

    async def __call__(
        self, *messages: StandardMessage | str, tools: Any = (), model: str | None = None
    ) -> Any:
        """Return the provider's message; text stands for a user's message."""
        return await self.provider.invoke(
            [_message(item) for item in messages or ("hi",)],
            tools,
            options=ModelOptions(
                model=model,
                on_failed_try=self.failed.append,
                on_warning=lambda code, text: self.warnings.append((code, text)),
            ),
            on_delta=self.deltas.append,
        )

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds


@asynccontextmanager
async def provider_for(model: FakeModel, **options: Any) -> AsyncIterator[Asking]:
    asking = Asking(model.base_url, **options)
    try:
        yield asking
    finally:
        await asking.provider.aclose()


def _message(item: StandardMessage | str) -> StandardMessage:
    return HumanMessage(content=item) if isinstance(item, str) else item


def conversation(*texts: str) -> list[StandardMessage]:
    """Return a history: system messages, then the user's."""
    return [
        *(SystemMessage(content=text) for text in texts[:-1]),
        HumanMessage(content=texts[-1]),
    ]
