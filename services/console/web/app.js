// The frame: pages by the address's hash, the feed, the banner that says what is away.

import { NO_ACCESS, get as ask } from "./api.js";
import { clock, el, fill, shown } from "./dom.js";
import { follow } from "./live.js";

const PAGES = { run: "Run", flow: "Flow", weights: "Weights", samples: "Samples", health: "Health", clients: "Clients" };
const THEMES = ["system", "light", "dark"];
const AGAIN_MS = 1000;

const main = document.getElementById("main");
const banner = document.getElementById("banner");
const announcer = document.getElementById("announcer");

let overview = null;
let first = null; // the first time that it is asked for
let current = null; // {name, view, rest}: the page that is shown
let mounting = 0;
let connected = true;
const failed = new Map(); // path → what went wrong when it was last asked

/** Returns {page, rest, params} of a hash such as #/samples/g00000012?sort=age. */
function route(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const [page, ...rest] = path.split("/").map(decoded);
  return { page: page in PAGES ? page : "run", rest: rest.filter(Boolean), params: new URLSearchParams(query) };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

async function get(path, params = {}, signal = undefined) {
  try {
    const answer = await ask(path, params, signal);
    if (failed.delete(path)) showBanner();
    return answer;
  } catch (error) {
    if (!signal?.aborted && (error.status === 0 || error.status === 401 || error.status >= 500)) {
      failed.set(path, error.message);
      showBanner();
    }
    throw error;
  }
}

function announce(text) {
  announcer.textContent = text;
}

function context(here) {
  return { get, announce, go: (hash) => (location.hash = hash), runs: overview?.runs ?? [], overview: known, rest: here.rest, params: here.params };
}

/** Shows the page that the hash names; the page that is there is told where only its parameters have changed. */
async function show() {
  const here = route(location.hash);
  const key = here.page;
  if (current?.key === key && current.view.navigate) {
    current.view.navigate(context(here));
    return;
  }
  const turn = ++mounting;
  current?.view.unmount();
  current = null;
  failed.clear();
  showBanner();
  for (const link of document.querySelectorAll("#pages a")) {
    if (link.dataset.page === here.page) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  showTitle(here.page);
  const module = await loaded(here.page, () => turn === mounting);
  if (module === null) return;
  const root = el("div", { class: `page page-${here.page}` });
  fill(main, root);
  current = { key, page: here.page, view: module.mount(root, context(here)) };
}

/** Returns a page's code, asked for until it comes; null once the page is no longer `wanted()`. */
async function loaded(page, wanted) {
  const path = `./pages/${page}.js`;
  for (;;) {
    try {
      const module = await import(path);
      if (failed.delete(path)) showBanner();
      return wanted() ? module : null;
    } catch (error) {
      if (!wanted()) return null;
      failed.set(path, `The page could not be loaded and is asked for again: ${error.message}`);
      showBanner();
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  }
}

function showTitle(page) {
  document.title = `${PAGES[page]} · ${overview?.run ?? "Myxo"}`;
}

/** Returns what stands above all pages, once it has been asked for; null where there was no answer. */
async function known() {
  await first;
  return overview;
}

async function refreshOverview() {
  try {
    overview = await get("overview");
  } catch {
    return;
  }
  document.getElementById("title").textContent = overview.run;
  document.querySelector("#pages a[data-page=clients]").hidden = !overview.serves;
  document.getElementById("progress").textContent = progress(overview);
  showTitle(route(location.hash).page);
  showBanner();
}

function progress({ phase, steps, of, live, at_rest: atRest }) {
  const done = steps === null ? "" : of === null ? `step ${shown(steps)}` : `${shown(steps)} of ${shown(of)} steps`;
  const state = live ? (atRest && phase === "running" ? "stopped" : (phase ?? "connecting")) : "from its directory";
  return [state, done].filter(Boolean).join(" · ");
}

/** Says what is away, and what could not be asked; hidden where all is well. */
function showBanner() {
  const lines = [];
  const texts = new Set(failed.values());
  if (texts.delete(NO_ACCESS)) lines.push([NO_ACCESS]);
  else if (!connected) lines.push(["The console itself does not answer; what is shown is from before. It is asked again."]);
  if (overview?.phase === "failed") lines.push([`The run has failed: ${overview.failure}`]);
  const { waiting } = overview ?? {};
  if (waiting?.trouble) lines.push([`Waiting for ${waiting.awaited}${since(waiting)}${waiting.next_action ? `; ${waiting.next_action}` : ""}`]);
  for (const part of overview?.away ?? []) lines.push([el("strong", {}, part.name), `: ${part.why} (since ${clock(part.since)})`]);
  if (connected) for (const text of texts) lines.push([text]);
  const words = lines.map((line) => line.map((part) => part.textContent ?? part).join("")).join("\n");
  if (words !== banner.dataset.words) {
    banner.dataset.words = words;
    fill(banner, lines.map((line) => el("p", {}, ...line)));
  }
  banner.hidden = lines.length === 0;
}

/** Returns since when something is awaited, where that is known. */
function since({ since: begun }) {
  return begun ? ` (since ${clock(begun)})` : "";
}

function onChange(pages) {
  if (pages.includes("overview")) refreshOverview();
  if (current && pages.includes(current.page)) current.view.refresh();
}

function onState(state) {
  if (!state) refreshOverview(); // which learns why: a console that was started anew has another token
  if (state === connected) return;
  connected = state;
  showBanner();
  if (state) onChange(["overview", current?.page]);
}

// --- theme

function theme(value) {
  if (value === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = value;
  const button = document.getElementById("theme");
  const name = { system: "Auto", light: "Light", dark: "Dark" }[value];
  button.textContent = name;
  button.setAttribute("aria-label", `${name} colours. Press to change.`);
  document.dispatchEvent(new Event("themechange"));
}

function stored() {
  try {
    const value = localStorage.getItem("theme");
    return THEMES.includes(value) ? value : "system";
  } catch {
    return "system"; // storage is turned off
  }
}

document.getElementById("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(stored()) + 1) % THEMES.length];
  try {
    localStorage.setItem("theme", next);
  } catch {
    // it holds for this page then
  }
  theme(next);
});

// --- start

theme(stored());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new Event("themechange")));
fill(
  document.getElementById("pages"),
  Object.entries(PAGES).map(([page, name]) => el("a", { href: `#/${page}`, "data-page": page, hidden: page === "clients" }, name)),
);
addEventListener("hashchange", show);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
first = refreshOverview();
show();
follow(onChange, onState);
