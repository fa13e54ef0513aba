"""Databases of each release, with data."""

from pathlib import Path

FOLDER = Path(__file__).parent
RELEASES = sorted(path.name.removesuffix(".sql.gz") for path in FOLDER.glob("*.sql.gz"))


def dump_of(release: str) -> Path:
    """Return the path of a release's database, as compressed SQL."""
    return FOLDER / f"{release}.sql.gz"


def answers_of(release: str) -> Path:
    """Return the path of what the API of a release answered about its database."""
    return FOLDER / f"{release}.json"
