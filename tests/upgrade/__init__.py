"""The baseline that is released, and a database of it with data."""

from pathlib import Path

_FOLDER = Path(__file__).parent
DUMP = _FOLDER / "0.1.0.sql.gz"
"""The database, as SQL."""
READ = _FOLDER / "0.1.0.json"
"""What the API said about it."""
