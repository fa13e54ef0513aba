"""Settings of what operators see: the log and metrics."""

import re
from typing import Annotated

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings


class ObservingSettings(BaseSettings):
    """A group of :class:`bottega.settings.Settings`."""

    log_level: Annotated[
        str,
        Field(pattern="^(debug|info|warning|error)$", description="Lowest level that is logged."),
    ] = "info"
    metrics_token: Annotated[
        SecretStr | None,
        Field(
            description="Opens GET /metrics, as a bearer token. Unset: only this machine may read "
            "metrics, and only until the first key exists."
        ),
    ] = None
    metrics_port: Annotated[
        int | None,
        Field(
            ge=0,
            le=65535,
            description="Port on which `bottega worker` serves its metrics; 0 picks a free one. "
            "Unset: none.",
        ),
    ] = None

    @field_validator("metrics_token")
    @classmethod
    def _a_token(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None and not re.fullmatch(r"[!-~]{8,256}", token.get_secret_value()):
            raise ValueError(
                "BOTTEGA_METRICS_TOKEN must be 8 to 256 visible ASCII characters without spaces: "
                "openssl rand -hex 32"
            )
        return token
