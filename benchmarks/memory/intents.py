"""Subjects of tasks, written by hand in several wordings without common words.

``intents.txt`` holds, per intent: ``=`` the wording in stored tasks, ``?`` the wording of later
questions (without content words of ``=``, which a test checks), ``~`` both wordings in Italian.
``{e}`` stands for the entity: a customer, product or service.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Intent:
    """An intent. Its key is unique; phrases hold ``{e}``."""

    key: str
    domain: str
    task_type: str
    stored: tuple[str, ...]
    asked: tuple[str, ...]
    italian_stored: str
    italian_asked: str


@dataclass(frozen=True, slots=True)
class Failure:
    """A kind of failure. ``{n}`` (a number) and ``{e}`` in its message vary."""

    domain: str
    tool: str
    type: str
    message: str


ENTITIES = (
    "Northwind", "Acme Foods", "Harbour Bank", "Lumen", "Blue Pine", "Castor", "Delphi", "Ember",
    "Foxglove", "Granite", "Heron", "Iris", "Juniper", "Kestrel", "Linden", "Mistral", "Nimbus",
    "Orchid", "Pelican", "Quartz", "Raven", "Sorrel", "Tamarind", "Umbra",
)  # fmt: skip


@cache
def intents() -> tuple[Intent, ...]:
    found = []
    for block in Path(__file__).with_suffix(".txt").read_text("utf-8").strip().split("\n\n"):
        head, *lines = block.splitlines()
        key, domain, task_type = head.split()
        says = {line[0]: tuple(part.strip() for part in line[1:].split("|")) for line in lines}
        italian_stored, italian_asked = says["~"]
        found.append(
            Intent(key, domain, task_type, says["="], says["?"], italian_stored, italian_asked)
        )
    return tuple(found)


@cache
def failures() -> tuple[Failure, ...]:
    rows = (line.split("|") for line in _FAILURES.strip().splitlines())
    return tuple(Failure(*(part.strip() for part in row)) for row in rows)


_FAILURES = """
software | run_tests | AssertionError | expected status 200 but got {n} from /{e}/session
software | build | CompileError | cannot resolve symbol Handler{n} in module {e}
software | git_push | RejectedError | remote refused the branch: {n} commits behind
research | web_search | QuotaExceeded | daily quota of {n} searches used up
research | fetch_page | ParseError | no readable text in document {n}
support | crm_lookup | NotFoundError | customer {n} does not exist in {e}
support | send_email | BounceError | mailbox unavailable after {n} attempts
finance | ledger_query | BalanceMismatch | debit and credit of {e} differ by {n} cents
finance | bank_api | ConnectionReset | peer closed the connection after {n} bytes
data | run_sql | UniqueViolation | duplicate key value violates constraint pk_{n}
data | load_csv | DecodeError | invalid byte at position {n} of the file
data | run_sql | StatementTimeout | canceling statement after {n} ms
ops | shell | PermissionDenied | cannot write to /var/lib/{n}
ops | kubectl | ImagePullBackOff | back-off pulling image {e}:{n}
ops | ssh | HostUnreachable | no route to node-{n}
legal | read_pdf | EncryptedError | page {n} is protected by a passphrase
legal | compare_docs | EmptyDiffError | both sides have {n} identical paragraphs
people | calendar | ConflictError | slot {n} is already taken
people | read_sheet | MissingColumn | header row lacks column {n}
marketing | ads_api | RateLimited | retry after {n} seconds
marketing | render_mail | TemplateError | undefined placeholder in block {n}
"""
