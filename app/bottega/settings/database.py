"""Settings of the database."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings


class DatabaseSettings(BaseSettings):
    """A group of :class:`bottega.settings.Settings`."""

    database_url: Annotated[
        SecretStr | None,
        Field(
            validation_alias="DATABASE_URL",
            description="URL or key=value form of your own PostgreSQL. Unset: the embedded one.",
        ),
    ] = None
    listen_url: Annotated[
        SecretStr | None,
        Field(
            description="Address of PostgreSQL itself, if DATABASE_URL is that of a pooler in "
            "transaction mode, such as PgBouncer."
        ),
    ] = None
    data_dir: Annotated[
        Path | None,
        Field(description="Folder of the embedded database. Unset: the platform's data folder."),
    ] = None

    @model_validator(mode="after")
    def _pooler_has_an_address(self) -> Self:
        if self.listen_url is not None and self.database_url is None:
            raise ValueError("BOTTEGA_LISTEN_URL needs DATABASE_URL, the pooler's address")
        return self

    @property
    def server_url(self) -> str | None:
        """Address of PostgreSQL itself; ``None``: the embedded one."""
        url = self.listen_url or self.database_url
        return None if url is None else url.get_secret_value()

    @property
    def pooler_url(self) -> str | None:
        """Address of the pooler before it; ``None``: there is none."""
        if self.listen_url is None or self.database_url is None:
            return None
        return self.database_url.get_secret_value()
