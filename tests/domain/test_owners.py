"""Privacy of texts in patterns: only texts of several owners may appear."""

from bottega.memory.episodes.scope import owner_of
from bottega.memory.patterns.refinement import Applied, narrowing


def test_owner_of_an_episode() -> None:
    assert owner_of("alice", "s") == owner_of("alice", None)
    assert owner_of(None, "alice") != owner_of("alice", None)
    assert owner_of(None, None) == owner_of(None, "resp-1") == owner_of(None, "resp-2")


def narrowed_by(value: object, *owners: str | None, name: str = "domain") -> bool:
    """Check if a pattern that fails with a value of some owners becomes an anti-condition."""
    good = [Applied({"urgent": n}, good=True, owner=f"user:{n}") for n in range(20)]
    bad = [
        Applied({name: value}, good=False, owner=owners[n % len(owners)], agent="clerk")
        for n in range(20)
    ]
    return narrowing([*good, *bad]) is not None


def test_texts_of_few_owners_narrow_no_pattern() -> None:
    assert not narrowed_by("alice's divorce", "user:alice", "user:bob")
    assert not narrowed_by(["4111", "eu"], "user:alice", name="cards")
    assert narrowed_by("billing", "user:alice", "user:bob", "user:carol")
    assert narrowed_by("said with the pattern", None)


def test_names_and_truth_values_are_no_texts_of_users() -> None:
    assert narrowed_by("clerk", "user:alice", name="task_type")
    assert narrowed_by(["fetch"], "user:alice", name="tools_required")
    assert narrowed_by(True, "user:alice", name="urgent")
