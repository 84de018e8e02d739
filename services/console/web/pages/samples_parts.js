// What the views of the Samples page share: text of runs made visible, facts, prompts, commands.

import { el, shown, span } from "../dom.js";

// controls but tab and newline, marks that turn the direction of writing or are not seen: as in shared/runtime/safe_text.py
const UNSAFE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u206f\u2028\u2029\ufeff\ufff9-\ufffb]/g;

/** Returns text in which characters that are not seen, or that turn the direction of writing, are spelled out. */
export function visible(text) {
  return text.replace(UNSAFE, (character) => `\\u${character.codePointAt(0).toString(16).padStart(4, "0")}`);
}

const LONG_TEXT = 1000; // characters or, per line, so many of them, from which on a block may scroll: then the keyboard has to reach it
const LINE = 50;

/** Returns a block of a run's text, in its own direction of writing. */
export function textBlock(text) {
  const long = text.length + LINE * (text.match(/\n/g)?.length ?? 0) > LONG_TEXT;
  const reached = long ? { tabindex: "0", role: "region", "aria-label": "Text, scrolls" } : {};
  return el("pre", { class: "run-text", dir: "auto", ...reached }, text === "" ? el("span", { class: "quiet" }, "(empty)") : visible(text));
}

/** Returns a list of named facts; those whose value is null are left out. */
export function facts(entries) {
  const there = entries.filter(([, value]) => value !== null && value !== undefined);
  return el("dl", { class: "facts" }, there.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

/** Returns a prompt's messages under their roles. */
export function prompt(messages) {
  return messages.map((message) =>
    el(
      "div",
      { class: "turn given" },
      message.role ? el("p", { class: "turn-head" }, visible(message.role)) : null,
      message.text || !message.calls ? textBlock(message.text) : null,
      message.calls ? el("div", {}, el("p", { class: "turn-head" }, "tool calls"), textBlock(message.calls)) : null,
    ),
  );
}

/** Returns label and metadata, where there are any. */
export function asked(answer) {
  const entries = Object.entries(answer.metadata).map(([name, value]) => [visible(name), code(value)]);
  return facts([["label", answer.label === null ? null : code(answer.label)], ...entries]);
}

function code(text) {
  return el("code", { dir: "auto", class: "run-line" }, visible(text));
}

/** Returns commands with what they do and a button that copies each. */
export function commands(entries, announce) {
  return el("div", { class: "commands" }, entries.map((entry) => (entry.command ? command(entry, announce) : el("p", { class: "quiet" }, entry.what))));
}

function command({ command, what }, announce) {
  const copy = el("button", { type: "button", "aria-label": `Copy the command that ${what}` }, "Copy");
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(command);
      announce("Copied");
      copy.textContent = "Copied";
      setTimeout(() => (copy.textContent = "Copy"), 2000);
    } catch {
      announce("This browser does not let a page copy; select the text instead.");
    }
  });
  return el("div", { class: "command" }, el("code", {}, command), copy, el("p", { class: "quiet" }, what));
}

/** Returns the lowest and highest of two figures as text. */
export function range(low, high) {
  if (low === null || high === null) return "–";
  return low === high ? shown(low) : `${shown(low)}–${shown(high)}`;
}

/** Returns how long something took, short ones with a digit behind the point. */
export function seconds(value) {
  if (value === null) return "–";
  return value < 60 ? `${value.toFixed(1)} s` : span(value);
}

export const STATUS_SIGNS = {
  outstanding: "○", requeued: "↻", ready: "◐", batched: "◕", trained: "●", dropped: "▽", dead: "✕", evaluated: "●", failed: "✕",
};

/** Returns a group's status with its sign. */
export function status(row, words = row.status) {
  const tone = { dead: "bad", failed: "bad", dropped: "warn", requeued: "warn", ready: "good" }[row.status] ?? "";
  return el("span", { class: `status ${tone}` }, el("span", { "aria-hidden": "true" }, `${STATUS_SIGNS[row.status] ?? "·"} `), visible(words));
}

/** Returns named rewards as one line; each name is read in its own direction of writing. Null where there are none. */
export function parts(values) {
  const named = Object.entries(values).map(([name, value], index) => el("span", {}, index ? ", " : "", el("bdi", {}, visible(name)), ` ${shown(value)}`));
  return named.length ? named : null;
}

/** Returns named rewards one below another, in columns where there is room; null where there are none. */
export function partsList(values) {
  const named = Object.entries(values).map(([name, value]) => el("li", {}, el("bdi", {}, visible(name)), " ", el("span", { class: "number" }, shown(value))));
  return named.length ? el("ul", { class: named.length > 5 ? "parts-list many" : "parts-list" }, named) : null;
}

/** Returns a reward with its named parts below: as many of them as a line of a table takes, all of them when pointed at. */
export function rewardWithParts(reward, values) {
  const named = parts(values);
  const all = named?.map((part) => part.textContent).join("");
  return [shown(reward), named ? el("div", { class: "quiet parts", title: all }, named) : null];
}

/** Returns whether the answer is for what is still shown, and shows a failure where it is one: `load(() => get(…), show, fail)`. */
export function latest() {
  let turn = 0;
  return async (ask, show, fail) => {
    const own = ++turn;
    try {
      const answer = await ask();
      if (own === turn) show(answer);
    } catch (error) {
      if (own === turn && error.name !== "AbortError") fail(error);
    }
  };
}
