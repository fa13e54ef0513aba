"""A page's own EventSource, which cannot send a key."""

from tests.console.conftest import Console
from tests.fake_model import text

LISTEN = """async ([path, ticket]) => {
  const types = [];
  const source = new EventSource(`${path}/events?event=message&ticket=${ticket}`);
  await new Promise((resolve, reject) => {
    source.onmessage = ({data}) => {
      types.push(JSON.parse(data).type);
      if (types.at(-1) === "run.completed") resolve();
    };
    source.onerror = () => source.readyState === EventSource.CLOSED && reject(Error("closed"));
  });
  source.close();
  return types;
}"""


async def test_an_event_source_gets_all_events_by_a_ticket(console: Console) -> None:
    await console.open()
    console.model.script(text("Done."))
    run_id = await console.run()
    made = await console.server.client.post("/v1/ws-tickets", json={"for": "sse", "run_id": run_id})
    types = await console.page.evaluate(LISTEN, [f"/v1/runs/{run_id}", made.json()["ticket"]])
    assert types[0] == "run.queued"
    assert types[-1] == "run.completed"
