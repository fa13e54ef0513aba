"""Baseline: tables, indexes and constraints (``0001_baseline.sql``).

Until 0.1.0 is released there is no other migration: a change of the schema edits the baseline. Its
revision is a hash, so a database of another baseline is recognised.
"""

from pathlib import Path

from alembic import op

from bottega.db.migrate import head
from bottega.db.sessions import run_script

revision = head()
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    tables = Path(__file__).with_suffix(".sql").read_text(encoding="utf-8")
    run_script(op.get_bind(), tables)
