// The page Weights: who serves which version, how each version got there, in how many seconds, and what failed by name.

import { chart } from "../charts.js";
import { clock, el, empty, fill, renew, shown } from "../dom.js";
import { refreshing } from "../refreshing.js";

const PAGE = 50;
const STEPS = ["transfer", "joining", "pausing", "check", "activation", "longest pause", "stall of the trainer"];

export function mount(root, context) {
  const ended = new AbortController();
  const refresh = refreshing(load, ended.signal); // the banner says what is away, and the page keeps what it has
  const now = el("section", { "aria-label": "Who serves what" });
  const pace = el("section", { "aria-label": "Seconds of the pushes" });
  const versions = el("section", { "aria-label": "Versions" });
  const events = el("section", { "aria-label": "Failures" });
  const charts = {};
  let limit = PAGE;
  fill(root, now, pace, versions, events);
  refresh();

  async function load() {
    const ask = (path, params) => context.get(`weights/${path}`, params, ended.signal);
    const answers = await Promise.all([ask("now"), ask("versions", { limit }), ask("pace"), ask("events", { limit: 50 })]);
    if (ended.signal.aborted) return;
    showNow(answers[0]);
    showVersions(answers[1], answers[0]);
    showPace(answers[2]);
    showEvents(answers[3]);
  }

  function showNow({ live, trained, replicas }) {
    const behind = trained > live && live >= 0 ? `, version ${shown(trained)} is on its way` : "";
    const words = live < 0 ? "No replica serves weights yet: the first version goes out when trainer and engines are up." : replicas.length ? `Version ${shown(live)} is live${behind}.` : `Version ${shown(live)} was served last.`;
    const rows = replicas.map((replica) =>
      el(
        "tr",
        { "data-key": replica.replica },
        el("th", { scope: "row" }, replica.replica),
        el("td", { class: "number" }, replica.version < 0 ? "–" : shown(replica.version)),
        el("td", {}, replica.state === "ready" ? el("span", { class: "good" }, "● ready") : el("span", { class: "warn" }, `▲ ${replica.state}`)),
        el("td", {}, replica.behind && replica.version >= 0 ? `${shown(replica.behind)} behind` : "", replica.detail ? ` ${replica.detail}` : ""),
      ),
    );
    renew(
      now,
      el("h2", {}, "Who serves what"),
      el("p", {}, words),
      replicas.length ? table("Live replicas", ["Replica", ["Version"], "State", ""], rows, "narrow") : live < 0 ? null : el("p", { class: "quiet" }, "No replica is alive."),
    );
  }

  function showPace({ versions: x, series }) {
    if (!charts.seconds) {
      fill(pace, el("h2", {}, "Seconds and speed"));
      const grid = el("div", { class: "charts wide" });
      pace.append(grid);
      const look = { xLabel: "version", announce: context.announce };
      charts.seconds = chart(grid, { ...look, title: "Parts of a push", unit: "s", note: "what a push took, by the version that it brought" });
      charts.speed = chart(grid, { ...look, title: "Speed of the transfer", unit: "GB/s", note: "bytes that were sent by the seconds of the transfer" });
    }
    pace.hidden = !x.length;
    if (!x.length) return;
    const curves = (names) => series.filter((item) => names.includes(item.name)).map(({ name, values }, index) => ({ name, values, colour: index, dash: index }));
    charts.seconds.update({ x, series: curves(STEPS) });
    charts.speed.update({ x, series: curves(["speed"]) });
  }

  function showVersions({ versions: rows, total, next }, { live }) {
    if (!rows.length) return renew(versions, el("h2", {}, "Versions"), empty("Each version of the weights appears here once the trainer has pushed it, or replicas have read it from disk."));
    const seconds = (value) => el("td", { class: "number" }, value === null ? "–" : shown(value < 5e-4 ? 0 : value, 3));
    const body = rows.map((row) =>
      el(
        "tr",
        { "data-key": row.version },
        el("th", { scope: "row", class: "number" }, shown(row.version), row.version === live ? el("span", { class: "good" }, " live") : null),
        el("td", { class: "number" }, shown(row.step)),
        el("td", { class: "nowrap" }, clock(row.at)),
        el("td", {}, holders(row)),
        seconds(row.seconds),
        seconds(row.joining),
        seconds(row.pausing),
        seconds(row.transfer),
        seconds(row.check),
        seconds(row.activation),
        seconds(row.paused),
        seconds(row.stall),
        el("td", { class: "number nowrap" }, row.bytes === null ? "–" : bytes(row.bytes)),
        el("td", { class: "number" }, shown(row.gb_per_s, 3)),
        el("td", {}, row.attempts > 1 ? `${row.attempts} tries` : "", row.failure ? el("span", { class: row.served ? "warn" : "bad" }, `${row.attempts > 1 ? ", " : ""}▲ ${row.failure}`) : null),
      ),
    );
    const head = ["Version", ["Step"], "Since", "Replicas", ["Push, s"], ["Joining"], ["Pausing"], ["Transfer"], ["Check"], ["Activation"], ["Pause"], ["Stall"], ["Sent"], ["GB/s"], "Trouble"];
    return renew(
      versions,
      el("h2", {}, `Versions (${shown(total)})`),
      el("p", { class: "quiet" }, "● serves it now, ○ was given it, ▲ failed. Pausing: until engines were paused, beside the transfer. Pause: the longest time in which a replica generated nothing. Stall: what the trainer waited."),
      table("Versions, the newest first", head, body),
      next === null ? null : el("button", { type: "button", onclick: () => ((limit = Math.min(500, limit * 2)), refresh()) }, limit < 500 ? "Show older versions" : "Older versions are in the API"),
    );
  }

  function holders({ replicas }) {
    const found = replicas.map((part) => {
      const sign = part.now ? "●" : part.failure ? "▲" : "○";
      const parts = ["paused", "pausing", "loading", "activating"].map((name) => (part[name] === null ? "" : `${name} ${shown(part[name], 3)} s`));
      const words = [...parts, part.failure].filter(Boolean).join(", ");
      return el("li", { class: part.failure && !part.now ? "warn" : null, title: words || null }, `${sign} ${part.replica}`, part.failure ? el("span", {}, `: ${part.failure}`) : null);
    });
    if (found.length <= 4) return el("ul", { class: "plain-list" }, found);
    const has = replicas.filter((part) => part.now).length;
    return el("details", {}, el("summary", {}, `${has} of ${found.length} now`), el("ul", { class: "plain-list" }, found));
  }

  function showEvents({ events: found, left_out: leftOut, recorded }) {
    const none = recorded
      ? "No push has failed. Replicas that fail a step, or catch up from others, are named here."
      : "Which replicas failed is told by the run's events alone, and these are not among its files here.";
    if (!found.length) return renew(events, el("h2", {}, "Failures"), el("p", { class: "quiet" }, none));
    const rows = found.map((event) =>
      el(
        "tr",
        { "data-key": `${event.at} ${event.who} ${event.what}` },
        el("td", { class: "nowrap" }, clock(event.at)),
        el("td", {}, event.who),
        el("td", {}, el("span", { class: event.bad ? "bad" : "good" }, event.bad ? "▲ " : "● "), event.what),
        el("td", {}, event.text),
      ),
    );
    return renew(
      events,
      el("h2", {}, "Failures and catch-ups"),
      table("Failures and catch-ups, the newest first", ["When", "Replica", "What", "Why"], rows, "narrow"),
      leftOut ? el("p", { class: "quiet" }, `${shown(leftOut)} older ones are not shown.`) : null,
    );
  }

  return {
    refresh,
    unmount() {
      ended.abort();
      for (const view of Object.values(charts)) view.destroy();
    },
  };
}

/** Returns a table that scrolls sideways where it is too wide. A heading in brackets is of numbers. */
function table(name, headings, rows, width = "") {
  const cells = headings.map((heading) => (Array.isArray(heading) ? el("th", { scope: "col", class: "number" }, heading[0]) : heading ? el("th", { scope: "col" }, heading) : el("td")));
  return el("div", { class: `scroll ${width}`, tabindex: "0", role: "region", "aria-label": name }, el("table", {}, el("thead", {}, el("tr", {}, cells)), el("tbody", {}, rows)));
}

function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = count ? Math.min(units.length - 1, Math.floor(Math.log10(count) / 3)) : 0;
  return `${shown(count / 1000 ** power, 3)} ${units[power]}`;
}
