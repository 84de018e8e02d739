// Timelines of services and bars of shares: each activity has a colour, a pattern and a name, so that colour is never the only sign.

import { el, shown, span } from "./dom.js";

const NS = "http://www.w3.org/2000/svg";
const BUSY = ["training", "generating", "scoring", "gradient"];
const PARTS = { preparing: "reading", "log-probs": "masked", "optimizer step": "dropped" };
const STOPPED = ["saving", "pushing weights", "paused for a push", "updating"];
const WAITING = ["waiting", "waiting for rollout", "waiting for reward", "waiting for its batch", "taking its batch", "ready", "standby"];
const LOST = ["masked", "dropped"];

/** Returns the class of an activity's colour and pattern. */
export function kind(activity) {
  if (BUSY.includes(activity)) return "busy";
  if (STOPPED.includes(activity)) return "stopped";
  if (WAITING.includes(activity)) return activity === "waiting for reward" ? "waiting-reward" : activity === "taking its batch" ? "reading" : "waiting";
  if (LOST.includes(activity)) return activity;
  if (PARTS[activity]) return PARTS[activity];
  return "other";
}

export function percent(share) {
  return `${shown(100 * share, share < 0.1 ? 2 : 3)} %`;
}

function svg(tag, properties = {}, ...children) {
  const element = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(properties)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

function strip(parts, label, className) {
  const title = svg("title");
  title.textContent = label;
  const picture = svg("svg", { class: className, viewBox: "0 0 1000 10", preserveAspectRatio: "none", role: "img", "aria-label": label }, title);
  for (const [activity, from, to, words] of parts) {
    const block = svg("rect", { class: `act act-${kind(activity)}`, x: from * 1000, y: 0, width: Math.max(0.5, (to - from) * 1000), height: 10 });
    const tip = svg("title");
    tip.textContent = words;
    block.append(tip);
    picture.append(block);
  }
  return picture;
}

/** Returns a bar of [activity, share] parts that lie one after another. */
export function bar(parts, what) {
  let at = 0;
  const placed = parts.map(([activity, share]) => [activity, at, (at += share), `${activity}: ${percent(share)}`]);
  return strip(placed, `${what}: ${parts.map(([activity, share]) => `${activity} ${percent(share)}`).join(", ")}`, "strip");
}

/** Returns the key of activities: [[activity, share?], …]; `names` has other words for some. */
export function activityKey(parts, names = {}) {
  return el("ul", { class: "activity-key" }, parts.map(([activity, share]) =>
    el("li", { "data-key": activity }, swatch(activity), ` ${names[activity] ?? activity}`, share === undefined ? null : el("span", { class: "number quiet" }, ` ${percent(share)}`))));
}

function swatch(activity) {
  const picture = svg("svg", { class: "swatch", viewBox: "0 0 12 12", "aria-hidden": "true" });
  picture.append(svg("rect", { class: `act act-${kind(activity)}`, x: 0, y: 0, width: 12, height: 12 }));
  return picture;
}

/** Returns the timelines of the services of a flow, one below another, with the time's axis. */
export function timelines({ services, begin, end, live }) {
  const length = Math.max(1e-9, end - begin);
  const rows = services.map((service) => {
    const shares = Object.entries(service.shares).sort((one, other) => other[1] - one[1]);
    const words = shares.map(([activity, share]) => `${activity} ${percent(share)}`).join(", ") || "nothing was seen of it";
    const parts = service.spans.map(([activity, from, to]) =>
      [activity, (from - begin) / length, (to - begin) / length, `${activity}, ${span(to - from)}, ${span(end - to)} before ${live ? "now" : "the end"}`]);
    return el("tr", { "data-key": service.instance },
      el("th", { scope: "row" }, service.instance),
      el("td", { class: "doing" }, service.doing),
      el("td", { class: "number" }, service.busy === null ? "–" : percent(service.busy)),
      el("td", { class: "wide" }, strip(parts, `${service.instance}: ${words}`, "strip lane"), el("span", { class: "unseen" }, words)));
  });
  const names = [...new Set(services.flatMap((service) => Object.keys(service.shares)))];
  return [
    activityKey(names.map((name) => [name])),
    el("div", { class: "scroll", tabindex: "0" },
      el("table", { class: "timelines" },
        el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Service"), el("th", { scope: "col" }, "Now"), el("th", { scope: "col", class: "number" }, "Busy"),
          el("th", { scope: "col" }, el("span", { class: "axis" }, el("span", {}, `${span(length)} ago`), el("span", {}, live ? "now" : "the end"))))),
        el("tbody", {}, rows))),
  ];
}
