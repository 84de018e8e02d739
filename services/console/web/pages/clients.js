// The page Clients: what the clients of the training endpoint have trained and sampled.

import { chart } from "../charts.js";
import { clock, el, empty, fill, renew, shown } from "../dom.js";
import { refreshing } from "../refreshing.js";

const DRAWN = 8; // clients whose losses one chart shows

export function mount(root, context) {
  const ended = new AbortController();
  const refresh = refreshing(load, ended.signal);
  const losses = el("section", { "aria-label": "Losses" });
  const list = el("section", { "aria-label": "Clients" });
  let drawn = null;
  fill(root, losses, list);
  refresh();

  async function load() {
    const rows = await context.get("clients", {}, ended.signal);
    if (ended.signal.aborted) return;
    showLosses(rows.filter((row) => row.losses.length).slice(0, DRAWN));
    renew(list, el("h2", {}, "Clients"), rows.length ? table(rows) : empty("Each model and each sampling session of a client appears here with its first command."));
  }

  function showLosses(rows) {
    losses.hidden = !rows.length;
    if (losses.hidden) return;
    drawn ??= chart(losses, { title: "Loss by token", xLabel: "pass", note: "of each client's newest passes", announce: context.announce });
    const length = Math.max(...rows.map((row) => row.losses.length));
    const series = rows.map((row, index) => ({ name: row.client, values: row.losses, colour: index, dash: index }));
    drawn.update({ x: Array.from({ length }, (_, index) => index + 1), series });
  }

  return {
    refresh,
    unmount() {
      ended.abort();
      drawn?.destroy();
    },
  };
}

function table(rows) {
  const heads = ["Steps", "Commands", "Waiting", "Failed", "Tokens", "Samples", "Loss"];
  const body = rows.map((row) => {
    const figures = [row.steps, row.commands, row.waiting, row.failed, row.tokens, row.sequences, row.losses.at(-1) === null ? "not finite" : row.losses.at(-1)];
    const cells = figures.map((value) => el("td", { class: "number" }, shown(value)));
    const newest = el("td", { class: "nowrap" }, clock(row.at));
    return el("tr", { "data-key": row.client }, el("th", { scope: "row" }, row.client), ...cells, newest, el("td", { class: "words" }, row.error));
  });
  const head = [el("th", { scope: "col" }, "Client"), ...heads.map((name) => el("th", { scope: "col", class: "number" }, name))];
  head.push(el("th", { scope: "col" }, "Newest"), el("th", { scope: "col" }, "Newest failure"));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Clients" }, el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body)));
}
