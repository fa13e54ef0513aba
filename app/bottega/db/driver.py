"""The database driver below SQLAlchemy, for statements that SQLAlchemy cannot send."""

from sqlalchemy import Connection


def run_script(connection: Connection, sql: str) -> None:
    """Run several statements without parameters, in the transaction that has begun."""
    proxied = connection.connection.dbapi_connection
    proxied.run_async(lambda driver: driver.execute(sql))  # type: ignore[union-attr]
