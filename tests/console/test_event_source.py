"""A page's own EventSource, which cannot send a key."""

from tests.console.conftest import Console
from tests.fake_model import text

LISTEN = """async ([path, ticket]) => {
  const types = [];
  let opened = 0;
  const source = new EventSource(`${path}/events?event=message&ticket=${ticket}`);
  await new Promise((resolve) => {
    source.onopen = () => opened++;
    source.onmessage = ({data}) => types.push(JSON.parse(data).type);
    source.addEventListener("end", () => types.push("end"));
    source.onerror = () => source.readyState === EventSource.CLOSED && resolve();
  });
  return [types, opened];
}"""


async def test_an_event_source_gets_all_events_and_does_not_come_back(
    console: Console,
) -> None:
    await console.open()
    console.model.script(text("Done."))
    run_id = await console.run()
    made = await console.server.client.post("/v1/ws-tickets", json={"for": "sse", "run_id": run_id})
    types, opened = await console.page.evaluate(
        LISTEN, [f"/v1/runs/{run_id}", made.json()["ticket"]]
    )
    assert types[0] == "run.queued"
    assert types[-2:] == ["run.completed", "end"]
    assert opened == 1
