"""Settings of how often clients may ask."""

from typing import Annotated

from pydantic import Field
from pydantic_settings import BaseSettings


class RateSettings(BaseSettings):
    """A group of :class:`bottega.settings.Settings`."""

    keyless_per_s: Annotated[
        float,
        Field(
            gt=0,
            description="Requests per second of an address without a valid key, to each API "
            "process, while there are keys. A burst may have four seconds' worth.",
        ),
    ] = 50.0
    requests_per_s: Annotated[
        float,
        Field(
            gt=0,
            description="Requests per second of a tenant with keys, to each API process. A burst "
            "may have two seconds' worth.",
        ),
    ] = 100.0
    max_streams: Annotated[
        int,
        Field(
            ge=1,
            description="Concurrent streams and requests that wait for a run, of a tenant with "
            "keys, in each API process.",
        ),
    ] = 1000
