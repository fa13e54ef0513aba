"""Numbers of examples for properties: few in the gate, many in the deep tests."""

from hypothesis import settings

USUAL = 100
"""Examples of a property that does not say its own number, in neither profile."""

settings.register_profile("gate", max_examples=USUAL // 4, deadline=None)
settings.register_profile("deep", max_examples=USUAL * 20, deadline=None)


def examples(usual: int) -> int:
    """Scale a property's own number of examples as the chosen profile scales the usual one."""
    return usual * settings().max_examples // USUAL
