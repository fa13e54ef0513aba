/** What all browsers have, and Node 20 lacks. */
Map.groupBy ??= (items, keyOf) => {
  const found = new Map();
  for (const each of items) found.set(keyOf(each), [...(found.get(keyOf(each)) ?? []), each]);
  return found;
};
