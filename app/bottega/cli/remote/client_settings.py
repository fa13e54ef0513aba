"""Settings of the commands that talk to a server."""

import os
from typing import Annotated

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict


class ClientSettings(BaseSettings):
    """Address of the server and key for it, from environment variables or a ``.env`` file.

    A key from the environment keeps the file from being read: the file of a strange folder must not
    send that key to a server of its own.
    """

    model_config = SettingsConfigDict(
        env_prefix="BOTTEGA_",
        env_file=".env",
        extra="ignore",
        frozen=True,
        env_ignore_empty=True,
        hide_input_in_errors=True,
    )

    url: Annotated[
        str | None, Field(description="Address of the server. Unset: the one of this machine.")
    ] = None
    port: Annotated[int, Field(description="Port of this machine's server.")] = 8400
    key: Annotated[SecretStr | None, Field(description="API key, if the server has keys.")] = None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        has_key = any(name.upper() == "BOTTEGA_KEY" and os.environ[name] for name in os.environ)
        return (env_settings,) if has_key else (env_settings, dotenv_settings)

    @field_validator("url")
    @classmethod
    def _is_address(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("http://", "https://")):
            raise ValueError("must begin with http:// or https://")
        return url

    @field_validator("key")
    @classmethod
    def _fits_a_header(cls, key: SecretStr | None) -> SecretStr | None:
        text = "" if key is None else key.get_secret_value()
        if not (text.isascii() and (text.isprintable() or not text)) or " " in text:
            raise ValueError("is no key: it has spaces, or characters that no key has")
        return key

    @property
    def address(self) -> str:
        """The server's address, without a slash at its end."""
        return (self.url or f"http://127.0.0.1:{self.port}").rstrip("/")
