/** The API's own description of what it stores. */
import { useEffect, useState } from "preact/hooks";

import { get } from "../api.js";

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
