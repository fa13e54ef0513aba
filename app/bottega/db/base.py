"""Metadata of all tables, with a naming convention that names every constraint."""

from uuid import UUID

from sqlalchemy import MetaData

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

DEFAULT_TENANT = UUID("00000000-0000-7000-8000-000000000001")
"""The tenant of a server without keys; the first migration creates it."""
