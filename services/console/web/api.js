// Asks the console's API. An answer that is none becomes an `ApiError`, which names what is away.

export class ApiError extends Error {
  constructor(message, status, away = []) {
    super(message);
    this.status = status;
    this.away = away;
  }
}

export const NO_ACCESS = "This browser has no access any more: open the address with the token again.";

const TIMEOUT_MS = 20000;

/** Returns the path with its parameters; those that are null, undefined or "" are left out. */
export function address(path, params = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    for (const item of Array.isArray(value) ? value : [value]) {
      if (item !== null && item !== undefined && item !== "") query.append(name, item);
    }
  }
  const text = query.toString();
  return text ? `${path}?${text}` : path;
}

/** Returns the JSON of `GET /api/<path>`. Throws ApiError. */
export async function get(path, params = {}, signal = undefined) {
  const deadline = AbortSignal.timeout(TIMEOUT_MS);
  let answer;
  try {
    answer = await fetch(address(`/api/${path}`, params), { signal: signal ? AbortSignal.any([signal, deadline]) : deadline });
  } catch (error) {
    if (signal?.aborted) throw error;
    const late = error.name === "TimeoutError";
    throw new ApiError(late ? `The console took longer than ${TIMEOUT_MS / 1000} s to answer.` : "The console itself does not answer.", 0);
  }
  const body = await answer.json().catch(() => null);
  if (answer.ok && body !== null) return body;
  if (answer.status === 401) throw new ApiError(NO_ACCESS, 401);
  throw new ApiError(words(body?.detail) ?? `The console answered ${answer.status}.`, answer.status, body?.away ?? []);
}

/** Returns what an error's body says, in words: a text, or FastAPI's list of fields. */
function words(detail) {
  if (typeof detail === "string") return detail;
  if (!Array.isArray(detail)) return null;
  return detail.map((item) => `${(item.loc ?? []).slice(1).join(".")}: ${item.msg}`).join("; ");
}
