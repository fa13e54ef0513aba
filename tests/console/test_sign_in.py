"""Sign-in at the console with a provider that is not ours: oidc-provider-mock, on loopback."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import flask
import oidc_provider_mock
import pytest
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from oidc_provider_mock import User, _app
from playwright.async_api import BrowserContext, Page, Response, expect

from bottega.settings import Settings
from tests.service import Running, client_of, running
from tests.tenants import holder

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
"""The provider's libraries have some."""
CLAIMS = {
    "tenant": {"value": "acme"},
    "user": {"claim": "email"},
    "roles": {"claim": "groups", "values": {"ops": "approver", "root": "admin"}},
}
PEOPLE = [
    User(sub="1", claims={"email": "ada@acme.example", "name": "Ada L.", "groups": ["ops"]}),
    User(sub="2", claims={"email": "eve@acme.example", "name": "Eve", "groups": ["root"]}),
    User(sub="3", claims={"email": "bob@acme.example", "name": "Bob", "groups": []}),
]


class PublicClients(_app.AuthorizationCodeGrant):  # type: ignore[misc]
    """The provider's grant, for clients without a secret: it checks their proof (PKCE)."""

    TOKEN_ENDPOINT_AUTH_METHODS = ("none",)
    challenges: ClassVar[dict[str, str]] = {}

    def save_authorization_code(self, code: str, request: Any) -> None:
        assert request.payload.data["code_challenge_method"] == "S256"
        self.challenges[code] = request.payload.data["code_challenge"]
        super().save_authorization_code(code, request)

    def query_authorization_code(self, code: str, client: Any) -> Any:
        verifier = flask.request.form["code_verifier"]
        if create_s256_code_challenge(verifier) == self.challenges.get(code):
            return super().query_authorization_code(code, client)
        return None


@dataclass(frozen=True, slots=True)
class Office:
    """A server where people sign in, and a page of its console."""

    server: Running
    tab: Page
    refused: list[str]
    issuer: str

    @property
    def console(self) -> str:
        return f"http://127.0.0.1:{self.server.port}/console/"

    async def sign_in(self, sub: str) -> None:
        await self.tab.get_by_role("button", name="Sign in").first.click()
        await self.tab.wait_for_url(f"{self.issuer}/**")
        await self.tab.get_by_placeholder("sub").fill(sub)
        await self.tab.get_by_role("button", name="Authorize", exact=True).click()
        await self.tab.wait_for_url(f"{self.console}**")


@pytest.fixture
async def office(
    settings: Settings,
    database_url: str,
    profile: BrowserContext,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Office]:
    monkeypatch.setattr(_app, "AuthorizationCodeGrant", PublicClients)
    await holder(database_url, "acme")
    with oidc_provider_mock.run_server_in_thread(user_claims=PEOPLE) as provider:
        issuer = f"http://localhost:{provider.server_port}"
        more = {"oidc_issuer": issuer, "oidc_audience": "console", "oidc_client_id": "console"}
        dumped = settings.model_dump() | more | {"oidc_claims": CLAIMS}
        async with (
            running(Settings.model_validate(dumped), database_url) as server,
            page(profile) as (tab, refused),
        ):
            yield Office(server, tab, refused, issuer)


@asynccontextmanager
async def page(profile: BrowserContext) -> AsyncIterator[tuple[Page, list[str]]]:
    """Yield a page, and the paths of our API that were forbidden to it."""
    refused: list[str] = []

    def note(answer: Response) -> None:
        if answer.status == 403:
            refused.append(answer.url)

    tab = await profile.new_page()
    tab.on("response", note)
    try:
        yield tab, refused
    finally:
        await tab.close()


@pytest.mark.deep
async def test_people_sign_in_see_what_they_may_and_sign_out(office: Office) -> None:
    tab, header = office.tab, office.tab.get_by_role("banner")
    await tab.goto(f"{office.console}#/approvals")
    await office.sign_in("1")
    await expect(header.get_by_text("Ada L.")).to_be_visible()
    assert tab.url == f"{office.console}#/approvals"  # the page from which she went, and no code
    await expect(header.get_by_role("button", name="Key")).to_have_count(0)
    nav = tab.get_by_role("navigation", name="Pages")
    await expect(nav.get_by_role("link", name="Runs")).to_be_visible()
    for name in ("Chat", "Agents", "Operations"):
        await expect(nav.get_by_role("link", name=name)).to_have_count(0)
    await tab.reload()
    await expect(header.get_by_text("Ada L.")).to_be_visible()
    await tab.get_by_role("button", name="Sign out").click()
    await expect(header.get_by_role("button", name="Sign in")).to_be_visible()
    await expect(header.get_by_text("Ada L.")).to_have_count(0)
    kept = await tab.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}])")
    assert "eyJ" not in kept
    ends = await tab.get_by_role("link", name="End the provider's session").get_attribute("href")
    assert (ends or "").startswith(f"{office.issuer}/")
    await office.sign_in("2")
    await expect(header.get_by_text("Eve")).to_be_visible()
    for name in ("Chat", "Agents", "Operations"):
        await expect(nav.get_by_role("link", name=name)).to_be_visible()
    token = await tab.evaluate("Object.values(sessionStorage).find(each => each.startsWith('eyJ'))")
    headers = {"Authorization": f"Bearer {token}"}
    async with client_of(office.server.port, headers=headers) as client:
        log = (await client.get("/v1/audit?action=person.sign_in")).json()["items"]
    assert [each["target"] for each in log] == ["ada@acme.example", "eve@acme.example"]
    assert [each["actor"] for each in log] == [f"user:{each['target']}" for each in log]
    assert "eyJ" not in json.dumps(log)
    assert office.refused == []


@pytest.mark.deep
async def test_a_sign_in_that_the_page_did_not_ask_for_is_refused(office: Office) -> None:
    tab = office.tab
    await tab.goto(f"{office.console}?code=stolen&state=guessed#/")
    await expect(tab.get_by_text("did not ask for that sign-in")).to_be_visible()
    assert "code=" not in tab.url
    await tab.get_by_role("button", name="Sign in").first.click()
    await tab.wait_for_url(f"{office.issuer}/**")
    asked = dict(each.split("=", 1) for each in tab.url.partition("?")[2].split("&"))
    assert asked["code_challenge_method"] == "S256"
    assert len(asked["code_challenge"]) == 43
    await tab.get_by_role("button", name="Deny").click()
    await tab.wait_for_url(f"{office.console}**")
    await expect(tab.get_by_text("You are not signed in.")).to_be_visible()


async def test_codes_are_redeemed_once_and_with_sense(office: Office) -> None:
    redirect = office.console
    good = {"code": "x" * 40, "verifier": "v" * 43, "redirect_uri": redirect}
    wrong: list[tuple[dict[str, Any], int]] = [
        (good, 401),
        (good | {"code": ""}, 422),
        (good | {"code": "x" * 5000}, 422),
        (good | {"verifier": "short"}, 422),
        (good | {"client_id": "another"}, 422),
    ]
    async with client_of(office.server.port) as client:
        for body, status in wrong:
            assert (await client.post("/v1/sign-in", json=body)).status_code == status, body
        shown = (await client.get("/v1/sign-in")).json()
        assert shown["client_id"] == "console"
        assert shown["authorization_endpoint"].startswith(office.issuer)


async def test_without_a_client_nobody_signs_in(settings: Settings, database_url: str) -> None:
    async with running(settings, database_url) as server:
        assert (await server.client.get("/v1/sign-in")).json()["client_id"] is None
        body = {"code": "x", "verifier": "v" * 43, "redirect_uri": "http://127.0.0.1/console/"}
        assert (await server.client.post("/v1/sign-in", json=body)).status_code == 404
