"""Baseline: tables, indexes and constraints (``0001_baseline.sql``).

Until 0.1.0 is released there is no other migration: a change of the schema edits the baseline, and
``python -m tests.upgrade`` writes its revision, which has a hash of it, so that a database of
another baseline is recognised.
"""

from pathlib import Path

from bottega.db.migrate import apply_script

revision = "0001_12762bc125da"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    apply_script(Path(__file__).with_suffix(".sql").read_text(encoding="utf-8"))
