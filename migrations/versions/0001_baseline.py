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

# An administrator may have to install it.
EXTENSION = """
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_extension WHERE extname = 'vector') THEN
        CREATE EXTENSION vector;
    END IF;
    IF (SELECT extnamespace FROM pg_extension WHERE extname = 'vector')
            <> 'public'::regnamespace THEN
        RAISE EXCEPTION 'Bottega looks for pgvector in the schema public, where it is not: run '
            'ALTER EXTENSION vector SET SCHEMA public in this database';
    END IF;
EXCEPTION
    WHEN insufficient_privilege OR undefined_file OR feature_not_supported THEN
        RAISE EXCEPTION 'Bottega keeps vectors with pgvector (0.8.4 or newer), and % may not '
            'install it or it is not there (%): have an administrator install it and run '
            'CREATE EXTENSION vector in this database', quote_ident(current_user), SQLERRM;
END $$
"""


def upgrade() -> None:
    op.execute(EXTENSION)
    tables = Path(__file__).with_suffix(".sql").read_text(encoding="utf-8")
    run_script(op.get_bind(), tables)
