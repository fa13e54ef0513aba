"""Baseline: tables, indexes and constraints (``0001_baseline.sql``).

The baseline is frozen: each change of the schema is a migration of its own. The revision has a hash
of the baseline and of its functions' signatures, so that a database of an earlier draft of the
baseline is recognised.
"""

from pathlib import Path

from bottega.db.migrate import apply_script

revision = "0001_12762bc125da"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    apply_script(Path(__file__).with_suffix(".sql").read_text(encoding="utf-8"))
