"""Redaction of secrets just before a run's log and the service's own log are written."""

import subprocess
import sys

from bottega.db.pool import Database
from bottega.db.tables import DEFAULT_TENANT
from bottega.redaction import Redactor
from bottega.settings import Settings
from tests.growing import growing
from tests.service import running
from tests.steps import append

KEY = 'sk-1234567890/"x'
LOGGING = f"""
import logging
from bottega.logger import Logger
from bottega.redaction import Redactor
from bottega.logs import configure_logging

KEY = {KEY!r}
configure_logging("debug", Redactor([KEY]))
Logger("bottega.a").warning("said", key=KEY, more={{"deep": [KEY]}}, raw=KEY.encode())
logging.getLogger("another's").error("the key %s", KEY)
try:
    raise ValueError(KEY)
except ValueError:
    Logger("bottega.a").exception("failed")
print("done")
"""


async def test_a_run_s_log_holds_no_known_secret(
    settings: Settings, database_url: str, database: Database
) -> None:
    async with running(settings, database_url) as server, growing(server) as run:
        event = {"type": "warning", "agent": "coordinator", "data": {"code": KEY, "other": [KEY]}}
        blank = dict.fromkeys(("task_id", "parent_task_id", "depth"))
        outcome = {"status": "completed", "output": f"it is {KEY}", "usage": None}
        final = {**blank, "type": "run.completed", "agent": None, "data": {"error": KEY}}
        await append(
            database.pool,
            DEFAULT_TENANT,
            run.run_id,
            attempt=run.attempt,
            after=run.seq,
            events=[{**blank, **event}, final],
            outcome=outcome,
            known=Redactor([KEY]),
        )
        events = (await server.client.get(f"{run.path}/events")).json()["items"]
        stored = (await server.client.get(run.path)).json()
    assert events[-2]["data"] == {"code": "[secret]", "other": ["[secret]"]}
    assert stored["output"] == "it is [secret]"
    assert "1234567890" not in str(events) + str(stored)


def test_the_service_s_log_holds_no_known_secret() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LOGGING], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "done\n"
    assert len(ended.stderr.splitlines()) == 3
    assert ended.stderr.count("[secret]") >= 5
    assert "1234567890" not in ended.stderr
