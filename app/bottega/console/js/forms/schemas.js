/** The API's own description of what it stores. */
import { useEffect, useState } from "preact/hooks";

import { get } from "../api.js";
import { useData } from "../load.js";

let read = null;

/** The schemas of `/openapi.json`, by name; read once. */
function apiSchemas() {
  read ??= get("/openapi.json").then((document) => document.components.schemas, (error) => {
    read = null;
    throw error;
  });
  return read;
}

/** `[schemas, error]`; both are null while they are read. */
export function useSchemas() {
  const [schemas, setSchemas] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => void apiSchemas().then(setSchemas, setError), []);
  return [schemas, error];
}

const names = ({ data }) => (data && !data.next_cursor ? data.items.map((each) => each.name) : undefined);

/** What the editors of an agent offer to choose from: `[known, error]`; `known` is null while the schemas are read. */
export function useKnown() {
  const [schemas, error] = useSchemas();
  const agents = names(useData("/v1/agents?limit=200"));
  const servers = names(useData("/v1/mcp-servers?limit=200"));
  const providers = useData("/v1/providers?view=full&limit=100");
  const models = providers.data?.items.flatMap((each) => (each.models ?? []).map((model) => `${each.name}/${model}`));
  return [schemas && { schemas, agents, servers, models: models ?? [] }, error];
}
