// The part of the URL after the #: #/pools/default?sort=usage. Names in the path are encoded; the query is what the user
// chose.

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export function parse(hash = location.hash) {
  const [where, search = ""] = hash.replace(/^#/, "").split("?");
  return { parts: where.split("/").filter(Boolean).map(decode), query: new URLSearchParams(search) };
}

export const currentQuery = () => parse().query;

// This page's address with other parts of the query; null removes one.
export function hrefWith(changes) {
  const [where] = location.hash.split("?");
  const query = currentQuery();
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === undefined) query.delete(name);
    else query.set(name, value);
  }
  return `${where || "#/"}${query.size ? `?${query}` : ""}`;
}

// Changes parts of the query; loads nothing. Makes an entry in the browser's history where `isStep`.
export const setQuery = (changes, isStep = false) => history[isStep ? "pushState" : "replaceState"](null, "", hrefWith(changes));

// to("pools", "default", {sort: "name"}) -> "#/pools/default?sort=name"
export function to(...parts) {
  const query = typeof parts[parts.length - 1] === "object" ? parts.pop() : null;
  return `#/${parts.map(encodeURIComponent).join("/")}${query ? `?${new URLSearchParams(query)}` : ""}`;
}

// The token of an address #token=TOKEN, "" for any other; it goes out of the address and of the browser's history.
export function takeToken() {
  const given = /^#token=(.+)$/.exec(location.hash)?.[1] ?? "";
  if (given) history.replaceState(null, "", location.pathname + location.search);
  return decode(given);
}
