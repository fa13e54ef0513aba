/** What the editors of an agent offer to choose from. */
import { useSchemas } from "../forms/schemas.js";
import { useData } from "../load.js";

const names = ({ data }) => (data && !data.next_cursor ? data.items.map((each) => each.name) : undefined);

/** `[known, error]`; `known` is null while the schemas are read. */
export function useKnown() {
  const [schemas, error] = useSchemas();
  const agents = names(useData("/v1/agents?limit=200"));
  const servers = names(useData("/v1/mcp-servers?limit=200"));
  const providers = useData("/v1/providers?view=full&limit=100");
  const models = providers.data?.items.flatMap((each) => (each.models ?? []).map((model) => `${each.name}/${model}`));
  return [schemas && { schemas, agents, servers, models: models ?? [] }, error];
}
