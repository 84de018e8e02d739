// What may be wrong with the run: alarms with what they mean and what to do, services, groups that died, what services told.

import { clock, el, empty, fill, renew, shown } from "../dom.js";
import { withoutLedger } from "../ledger_gone.js";

export function mount(root, context) {
  let asked = 0;
  let raised = null;

  async function refresh() {
    const turn = ++asked;
    const gone = await withoutLedger(context, "Alarms, restarts and the ends of groups");
    if (gone) {
      fill(root, gone);
      return;
    }
    let health;
    try {
      health = await context.get("health");
    } catch {
      if (!root.childElementCount) fill(root, empty("The run's health appears here once its ledger has been read."));
      return;
    }
    if (turn !== asked) return;
    const titles = health.alarms.map((alarm) => alarm.title).join(". ");
    const kinds = health.alarms.map((alarm) => alarm.kind).join();
    if (raised !== null && kinds !== raised) context.announce(titles || "No alarm stands any more.");
    raised = kinds;
    renew(root, alarms(health), services(health), dead(health), events(health));
  }

  refresh();
  return {
    refresh,
    unmount() {
      asked = -1;
    },
  };
}

function alarms({ alarms: raised, disk, memory }) {
  const rooms = [["Disk of the run's directory", disk], ["Memory of the console's machine, with swap", memory]]
    .filter(([, room]) => room)
    .map(([name, room]) => `${name}: ${size(room.free)} of ${size(room.total)} free`);
  const items = raised.map((alarm) =>
    el("li", { class: "alarm", "data-key": `${alarm.kind} ${alarm.title}` },
      el("h3", {}, alarm.title),
      el("p", {}, alarm.meaning),
      el("p", {}, el("strong", {}, "What to do: "), alarm.remedy),
      alarm.shown_by ? el("p", {}, el("strong", {}, "See it: "), el("code", {}, alarm.shown_by)) : null));
  return el("section", { "aria-labelledby": "health-alarms" },
    el("h2", { id: "health-alarms" }, raised.length ? `Alarms: ${raised.length}` : "Alarms"),
    raised.length ? el("ul", { class: "alarms" }, items) : el("p", { class: "good" }, "✓ None. Looked at: services, log-probs, entropy, rewards, groups without a signal, truncation, pushes, drops" + (rooms.length ? ", disk, memory." : ".")),
    rooms.length ? el("p", { class: "quiet" }, rooms.join(" · ")) : null);
}

function size(bytes) {
  return `${shown(bytes / 2 ** 30, 3)} GiB`;
}

function services({ services: all }) {
  const rows = all.map((service) =>
    el("tr", { "data-key": service.instance },
      el("th", { scope: "row" }, service.instance),
      el("td", {}, service.service),
      el("td", { class: service.state ? null : "bad" }, service.state || "not there"),
      el("td", { class: "number" }, service.version >= 0 ? shown(service.version) : "–"),
      el("td", { class: service.restarts ? "number warn" : "number" }, shown(service.restarts)),
      el("td", { class: "words" }, [service.held_back, service.error || service.detail].filter(Boolean).join(" · "))));
  return section("health-services", "Services", rows.length
    ? table(["Service", "Kind", "State", "Version", "Restarts", "Newest error, or reason of its state"], rows, [3, 4])
    : empty("No service is in the run now. Those that join it appear here."));
}

function dead({ dead: count, reasons }) {
  const rows = reasons.map((item) =>
    el("tr", {},
      el("td", { class: "number" }, shown(item.count)),
      el("td", {}, item.fault || "–"),
      el("td", { class: "words" }, item.reason),
      el("td", {}, el("a", { href: `#/samples/${encodeURIComponent(item.newest)}` }, item.newest)),
      el("td", { class: "when" }, clock(item.at))));
  return section("health-dead", `Dead groups${count ? `: ${shown(count)}` : ""}`, rows.length
    ? table(["Groups", "Fault", "Reason", "Newest", "At"], rows, [0])
    : el("p", { class: "quiet" }, count !== 0 ? "None among the newest records of the ledger." : "None: every group that was admitted could be generated and scored."));
}

function events({ events: told }) {
  const rows = told.map((event) =>
    el("tr", { "data-key": `${event.at} ${event.instance} ${event.what}` }, el("td", { class: "when" }, clock(event.at)), el("th", { scope: "row" }, event.instance), el("td", {}, event.what), el("td", { class: "words" }, event.detail)));
  return section("health-events", "What services told", rows.length
    ? table(["At", "Service", "What", "Detail"], rows)
    : empty("Joins, failures, restarts and other events appear here as they happen, the newest first."));
}

function section(id, title, ...content) {
  return el("section", { "aria-labelledby": id }, el("h2", { id }, title), ...content);
}

function table(head, rows, numbers = []) {
  return el("div", { class: "scroll", tabindex: "0" },
    el("table", {}, el("thead", {}, el("tr", {}, head.map((name, index) => el("th", { scope: "col", class: numbers.includes(index) ? "number" : null }, name)))), el("tbody", {}, rows)));
}
