// What was typed and not sent: kept in this browser for each box until it is sent, for all tabs.

import { useEffect, useState } from "./vendor/hooks.js";

const PREFIX = "mlx-mtp.typed.";
const unstored = new Map(); // what the storage has no room for

export function read(id) {
  try {
    return unstored.get(id) ?? JSON.parse(localStorage.getItem(PREFIX + id));
  } catch {
    return null; // not ours
  }
}

/** Keep a value; null and an empty text are none. */
export function write(id, value) {
  unstored.delete(id);
  if (value === null || value === "" || value.length === 0) return localStorage.removeItem(PREFIX + id);
  try {
    localStorage.setItem(PREFIX + id, JSON.stringify(value));
  } catch {
    unstored.set(id, value);
  }
}

/** Forget all boxes whose names begin so. */
export function drop(prefix) {
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX + prefix));
  for (const key of keys) write(key.slice(PREFIX.length), null);
}

/** A state that is kept under a name, and follows other tabs while nobody types here. */
export function useTyped(id, initial = "") {
  const [value, setValue] = useState(() => read(id) ?? initial);
  useEffect(() => {
    const take = ({ key }) => key === PREFIX + id && !document.hasFocus() && setValue(read(id) ?? initial);
    addEventListener("storage", take);
    return () => removeEventListener("storage", take);
  }, [id]);
  return [value, (next) => (write(id, next), setValue(next))];
}
