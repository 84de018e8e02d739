// Makes elements. Text is always put in as text, never as markup: it may be what a model or a stranger wrote.

/** Returns an element: `el("td", {class: "number", title: "…"}, "12")`. A property that is a function is a listener; null leaves it out. */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.replace(/^on/, ""), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Replaces what an element holds. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Returns a number as people read it: at most `digits` significant ones, "–" for none, "NaN" and "∞" as such. */
export function shown(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value; // NaN and infinities travel as text
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

/** Returns a paragraph for where there is nothing to show yet: what will appear here, and when. */
export function empty(text) {
  return el("p", { class: "empty" }, text);
}
