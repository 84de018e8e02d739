// A response token by token. Colour is never the only sign: levels have lines under or over the token, versions their number.

import { el, fill, shown } from "../dom.js";
import { signed } from "./samples_group.js";
import { visible } from "./samples_parts.js";

const LOG_PROBS = [-0.1, -0.7, -2.3, -4.6];
const SIGNED = { difference: [0.01, 0.05, 0.2, 1], advantages: [0.01, 0.5, 1, 2] };

const COLOURS = {
  version: { name: "weight version", legend: "Each version has a colour; its number stands where it begins." },
  log_probs: { name: "log-prob of the engine", legend: levels(["likely", "≤ −0.1", "≤ −0.7", "≤ −2.3", "≤ −4.6: surprising"], "down") },
  difference: { name: "trainer − engine", legend: [...levels(["+ 0.01", "+ 0.05", "+ 0.2", "+ 1"], "up", 1), ...levels(["− 0.01", "− 0.05", "− 0.2", "− 1"], "down", 1)] },
  advantages: { name: "advantage", legend: [...levels(["> 0", "≥ 0.5", "≥ 1", "≥ 2"], "up", 1), ...levels(["< 0", "≤ −0.5", "≤ −1", "≤ −2"], "down", 1)] },
  none: { name: "nothing", legend: "" },
};

function levels(names, side, first = 0) {
  return names.map((name, index) => [name, index + first ? `${side}-${index + first}` : ""]);
}

/** Returns the class of a token under one of `COLOURS`. */
function classOf(tokens, index, colour) {
  if (colour === "version") return `version-${tokens.versions[index] % 6}`;
  const value = tokens[colour]?.[index] ?? null;
  if (value === null) return "";
  if (colour === "log_probs") {
    const level = LOG_PROBS.filter((bound) => value <= bound).length;
    return level ? `down-${level}` : "";
  }
  const level = SIGNED[colour].filter((bound) => Math.abs(value) >= bound).length;
  return level ? `${value > 0 ? "up" : "down"}-${level}` : "";
}

/** Shows the tokens of `answer` in `stage`. more: asks for those from a position on. Returns {colour(name), unmount()}. */
export function mountTokens(stage, answer, { more, announce, colour: wanted }) {
  const all = { ...answer.tokens, ids: [], trained: [], versions: [], log_probs: [], trainer_log_probs: [], difference: [], advantages: [] };
  all.text = answer.tokens.text ? [] : null;
  let colour = wanted in COLOURS ? wanted : "version";
  let selected = -1;
  const select = el("select", { onchange: () => paint(select.value) }, Object.entries(COLOURS).map(([value, { name }]) => el("option", { value }, name)));
  const legend = el("p", { class: "token-legend" });
  const detail = el("p", { class: "token-detail number", role: "status" }, "Choose a token: by pointer, or with the arrow keys in the text.");
  const text = el("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "Tokens of the response", "aria-describedby": "token-help" });
  const help = el("p", { class: "quiet small", id: "token-help" }, "Arrow keys move from token to token. Tokens in italics are not in the loss.");
  const on = el("button", { type: "button", onclick: further }, "Show more tokens");
  fill(stage, el("div", { class: "controls" }, el("label", {}, "Colour by", select)), legend, detail, text, on, help);
  select.value = colour;

  function add(tokens) {
    const begin = all.ids.length;
    for (const name of ["ids", "trained", "versions", "log_probs", "trainer_log_probs", "difference", "advantages"]) all[name].push(...tokens[name]);
    if (all.text) all.text.push(...(tokens.text ?? []));
    const found = document.createDocumentFragment();
    for (let index = begin; index < all.ids.length; index++) found.append(...token(index));
    text.append(found);
    on.hidden = all.ids.length >= answer.tokens.total;
    on.textContent = `Show more tokens (${shown(all.ids.length)} of ${shown(answer.tokens.total)})`;
  }

  function token(index) {
    const words = all.text ? visible(all.text[index]) : String(all.ids[index]);
    const element = el("span", { class: look(index), "data-index": index }, words.replace(/\n/g, "⏎") || "∅");
    const begins = index === 0 || all.versions[index] !== all.versions[index - 1];
    const mark = begins ? el("sub", { class: "version-mark" }, `v${all.versions[index]}`) : null;
    return [mark, element, words.includes("\n") ? el("br") : all.text ? null : document.createTextNode(" ")].filter(Boolean);
  }

  function look(index) {
    const own = all.trained[index] ? "token" : "token untrained";
    return `${own} ${classOf(all, index, colour)}${index === selected ? " selected" : ""}`;
  }

  function paint(name) {
    colour = name in COLOURS ? name : "version";
    select.value = colour;
    for (const element of text.querySelectorAll(".token")) element.className = look(Number(element.dataset.index));
    const { legend: words } = COLOURS[colour];
    const known = colour === "none" || colour === "version" || all[colour].some((value) => value !== null);
    fill(legend, known ? (Array.isArray(words) ? words.map(([label, kind]) => el("span", { class: `token ${kind}` }, label)) : words) : "Not known for this sample; why stands below.");
  }

  function choose(index) {
    if (index < 0 || index >= all.ids.length) return;
    const of = (at) => text.querySelector(`[data-index="${at}"]`);
    of(selected)?.classList.remove("selected");
    selected = index;
    of(index).classList.add("selected");
    const rect = of(index).getBoundingClientRect();
    if (rect.top < 0 || rect.bottom > window.innerHeight) of(index).scrollIntoView({ block: "center" });
    detail.textContent = describe(index);
  }

  function describe(index) {
    const words = all.text ? ` “${visible(all.text[index]).replace(/\n/g, "⏎")}”` : "";
    return [
      `token ${index}:${words} id ${all.ids[index]}`,
      `version ${all.versions[index]}`,
      `log-prob ${shown(all.log_probs[index])}`,
      all.trainer_log_probs[index] === null ? null : `trainer ${shown(all.trainer_log_probs[index])}`,
      all.difference[index] === null ? null : `difference ${signed(all.difference[index])}`,
      all.advantages[index] === null ? null : `advantage ${signed(all.advantages[index])}`,
      all.trained[index] ? "trained" : "not in the loss",
    ]
      .filter(Boolean)
      .join(" · ");
  }

  async function further() {
    on.disabled = true;
    try {
      add((await more(all.ids.length)).tokens);
      announce(`${shown(all.ids.length)} of ${shown(answer.tokens.total)} tokens`);
    } catch (error) {
      announce(error.message);
    }
    on.disabled = false;
  }

  function onKey(event) {
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };
    const to = event.key === "Home" ? 0 : event.key === "End" ? all.ids.length - 1 : selected + (moves[event.key] ?? NaN);
    if (Number.isNaN(to) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    choose(Math.min(Math.max(to, 0), all.ids.length - 1));
  }

  text.addEventListener("keydown", onKey);
  text.addEventListener("click", (event) => {
    const found = event.target.closest(".token");
    if (found) choose(Number(found.dataset.index));
  });
  text.addEventListener("pointerover", (event) => {
    const found = event.target.closest(".token");
    if (found) detail.textContent = describe(Number(found.dataset.index));
  });
  text.addEventListener("pointerleave", () => {
    if (selected >= 0) detail.textContent = describe(selected);
  });
  add(answer.tokens);
  paint(colour);
  return { colour: (name) => name && paint(name), unmount: () => text.removeEventListener("keydown", onKey) };
}
