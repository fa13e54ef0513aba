"""Privacy of texts in patterns: only texts of several owners may appear."""

from bottega.memory.patterns.owners import OwnedFeatures, owner_of, public_features


def test_owner_of_an_episode() -> None:
    assert owner_of("alice", "s") == owner_of("alice", None)
    assert owner_of(None, "alice") != owner_of("alice", None)
    assert owner_of(None, None) == owner_of(None, "resp-1") == owner_of(None, "resp-2")


def test_texts_of_few_owners_are_removed_from_features() -> None:
    def told(owner: str | None, domain: str, task_type: str = "clerk") -> OwnedFeatures:
        return OwnedFeatures(
            {"domain": domain, "task_type": task_type, "complexity": 0.5}, owner, "clerk"
        )

    shown = public_features(
        [
            *(told(f"user:{n}", "billing") for n in range(3)),
            *(told(f"user:{n % 2}", "alice's divorce", "secret") for n in range(9)),
            told(None, "said with the pattern"),
        ]
    )
    assert shown[0] == {"domain": "billing", "task_type": "clerk", "complexity": 0.5}
    assert shown[3] == {"complexity": 0.5}
    assert shown[-1]["domain"] == "said with the pattern"


def test_features_that_a_client_sends_belong_to_the_episodes_user() -> None:
    def told(owner: str, **features: object) -> OwnedFeatures:
        return OwnedFeatures(
            {"tools_required": ["fetch"], "urgent": True, **features}, owner, "clerk"
        )

    shown = public_features(
        [
            *(told("user:alice", customer="Alice Smith", cards=["4111", "eu"]) for _ in range(5)),
            *(told(f"user:{n}", customer="a firm", cards=["eu"]) for n in range(3)),
        ]
    )
    assert shown[0] == {"tools_required": ["fetch"], "urgent": True, "cards": ["eu"]}
    assert shown[-1]["customer"] == "a firm"
