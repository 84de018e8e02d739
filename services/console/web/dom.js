// Makes elements. Text is always put in as text, never as markup: it may be what a model or a stranger wrote.

const listening = new WeakSet(); // elements with listeners, which know the data that they were made with

/** Returns an element: `el("td", {class: "number", title: "…"}, "12")`. A property that is a function is a listener; null leaves it out. */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  if (Object.values(properties).some((value) => typeof value === "function")) listening.add(element);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.replace(/^on/, ""), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

/** Replaces what an element holds. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

/**
 * Brings what an element holds up to date, and touches only what has changed: focus, selected text, scrolled tables and opened details stay
 * as they are while a run continues. Children are known again by their `data-key`, and those without one by their place among such.
 */
export function renew(element, ...children) {
  const fresh = children.flat(Infinity).filter((child) => child !== null && child !== undefined);
  const olds = [...element.childNodes];
  const keys = new Set(fresh.map(keyOf).filter(Boolean));
  const known = new Map(olds.filter((old) => keys.has(keyOf(old))).map((old) => [keyOf(old), old]));
  const rest = olds.filter((old) => !keyOf(old)).slice(0, fresh.filter((child) => !keyOf(child)).length);
  const kept = new Set([...known.values(), ...rest]);
  for (const old of olds) if (!kept.has(old)) old.remove(); // first: an element that is moved would lose its focus
  let next = element.firstChild;
  for (const child of fresh) {
    const old = keyOf(child) ? known.get(keyOf(child)) : rest.shift();
    known.delete(keyOf(child));
    const inPlace = old !== undefined && old === next;
    if (inPlace) next = next.nextSibling;
    const now = old ? match(old, child) : child;
    if (inPlace) continue;
    const focused = now.contains?.(document.activeElement) ? document.activeElement : null; // moving takes it away
    element.insertBefore(now, next);
    focused?.focus({ preventScroll: true });
  }
}

function keyOf(node) {
  return node?.dataset?.key ?? null;
}

/** Brings one element up to date, and returns it, or what stands in its place now. */
function match(old, fresh) {
  if (old.isEqualNode(fresh)) return old;
  if (old.nodeName !== fresh.nodeName || listening.has(old) || listening.has(fresh)) {
    const focused = old === document.activeElement;
    old.replaceWith(fresh);
    if (focused) fresh.focus();
    return fresh;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    old.data = fresh.data;
  } else {
    for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
    for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    renew(old, [...fresh.childNodes]);
  }
  return old;
}

/** Returns a number as people read it: at most `digits` significant ones, "–" for none, "NaN" and "∞" as such. */
export function shown(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return { nan: "NaN", inf: "∞", "-inf": "−∞" }[value] ?? value; // what JSON has no number for travels as text
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "−∞";
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-4 || size >= 1e9) ? value.toExponential(digits - 1) : String(Number(value.toPrecision(digits)));
}

/** Returns a time span as people write it: 45 s, 2 min 10 s, 3 h 05 min. */
export function span(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  return `${Math.floor(whole / 3600)} h ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")} min`;
}

/** Returns a time of day of the browser's zone, of seconds since the epoch, with the day where it is not today; "–" for none. */
export function clock(seconds) {
  const date = new Date(seconds * 1000);
  if (!seconds || Number.isNaN(date.getTime())) return "–";
  const time = date.toLocaleTimeString("en-GB");
  return date.toDateString() === new Date().toDateString() ? time : `${date.toLocaleDateString("sv")} ${time}`;
}

/** Returns a paragraph for where there is nothing to show yet: what will appear here, and when. */
export function empty(text) {
  return el("p", { class: "empty" }, text);
}
