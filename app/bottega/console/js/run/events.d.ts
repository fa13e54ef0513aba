/** The types of a run's events, as the API's document has them. */
import type { Schemas } from "../api.js";

export type KnownEvent = Schemas["KnownEvent"];

/** Events of an area, such as "llm". */
export type EventOf<Area extends string> = Extract<KnownEvent, { type: `${Area}.${string}` }>;

/** A piece of live text. */
export interface LiveText {
  type: "llm.delta" | "subagent.output_chunk";
  seq: null;
  at: string;
  task_id: string | null;
  agent: string | null;
  data: { call: number; attempt: number; offset: number; text: string };
}

export type IsLive = (event: KnownEvent | LiveText) => event is LiveText;
export type IsOf = <Area extends string>(event: KnownEvent, area: Area) => event is EventOf<Area>;
