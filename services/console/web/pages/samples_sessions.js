// The sessions that agents play now, the oldest first: it asks again and again, since no event tells of a turn.

import { el, empty, fill, renew, shown } from "../dom.js";
import { refreshing } from "../refreshing.js";
import { back } from "./samples_group.js";
import { range, seconds, visible } from "./samples_parts.js";

const LIMIT = 25;
const AGAIN_MS = 3000;

const COLUMNS = [
  ["Session", "of a group's rollout"],
  ["Turns", "that have ended", true],
  ["Now", "whether a turn is being drawn"],
  ["Tokens", "drawn so far; those of a turn that is being drawn count as they are recorded", true],
  ["Context", "tokens of the newest turn, its prompt included", true],
  ["Versions", "weight versions of its tokens", true],
  ["Age", "since it was opened", true],
  ["Last request", "time since its newest turn began", true],
  ["Time left", "until its agent's time is over", true],
  ["Drawn by", "replica of its newest tokens, and the gateway that asked it"],
  ["Played by", "replica that looks after the rollout"],
];

export function mountSessions(root, context) {
  const ended = new AbortController();
  const refresh = refreshing(load, ended.signal, (error) => (note.textContent = error.message));
  const note = el("p", { class: "quiet", role: "status" });
  const body = el("div");
  fill(root, back(), el("h2", {}, "Sessions in flight"), note, body);
  const timer = setInterval(() => document.hidden || refresh(), AGAIN_MS);
  refresh();

  async function load() {
    const offset = Number(context.params.get("offset")) || 0;
    const answer = await context.get("samples/sessions", { offset, limit: LIMIT }, ended.signal);
    if (ended.signal.aborted) return;
    note.textContent = answer.sessions.length ? "What agents play now, the oldest first. A session's tokens are on its group's page once the group has come back." : "";
    renew(body, answer.sessions.length ? [table(answer), pager(answer)] : nothing(answer));
  }

  return {
    refresh,
    navigate(next) {
      context = next;
      refresh();
    },
    unmount() {
      clearInterval(timer);
      ended.abort();
    },
  };
}

function nothing({ agents, offset }) {
  if (offset) return el("p", {}, el("a", { href: "#/samples/sessions" }, "There are fewer sessions now: to the first ones"));
  const outstanding = el("p", {}, el("a", { href: "#/samples?status=outstanding" }, "Groups that are being generated or scored"));
  const words = agents
    ? "No agent plays at this moment. Sessions appear here while groups are generated."
    : "No agent plays this run's groups: replicas generate them at one go, without sessions.";
  return [empty(words), outstanding];
}

function table({ sessions, now }) {
  const heads = COLUMNS.map(([name, title, number]) => el("th", { scope: "col", title, class: number ? "number" : null }, name));
  return el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "Sessions in flight" },
    el("table", { class: "groups" }, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, sessions.map((session) => row(session, now)))),
  );
}

function row(session, now) {
  const since = (at) => (at === null ? "–" : seconds(Math.max(0, now - at)));
  const number = (text) => el("td", { class: "number" }, text);
  const group = el("a", { href: `#/samples/${encodeURIComponent(session.group)}` }, session.group);
  const again = session.attempt ? `, attempt ${session.attempt}` : "";
  const drawing = session.drawing > 1 ? `◐ draws ${session.drawing} turns` : session.drawing ? "◐ draws" : "○ waits for its agent";
  return el(
    "tr",
    { "data-key": session.session },
    el("th", { scope: "row", title: visible(session.session) }, group, ` rollout ${session.rollout}${again}`),
    number(shown(session.turns)),
    el("td", {}, drawing),
    number(shown(session.tokens)),
    number(session.context ? shown(session.context) : "–"),
    number(range(session.oldest, session.newest)),
    number(since(session.opened)),
    number(since(session.asked)),
    number(session.deadline > now ? seconds(session.deadline - now) : "over"),
    el("td", {}, [session.engine, session.gateway].filter(Boolean).map(visible).join(" · ") || "–"),
    el("td", {}, visible(session.replica) || "–"),
  );
}

function pager({ offset, limit, total, sessions }) {
  if (!offset && total <= limit) return null;
  const to = (place, words) => el("a", { href: place ? `#/samples/sessions?offset=${place}` : "#/samples/sessions" }, words);
  return el(
    "nav",
    { class: "pager", "aria-label": "Pages of sessions" },
    offset ? to(Math.max(0, offset - limit), "Back") : null,
    el("span", { class: "number" }, `${shown(offset + 1)}–${shown(offset + sessions.length)} of ${shown(total)}`),
    offset + limit < total ? to(offset + limit, "On") : null,
  );
}
