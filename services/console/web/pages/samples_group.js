// A group: its prompt, its samples side by side, and what became of it.

import { clock, el, empty, fill, shown } from "../dom.js";
import { left } from "./samples_list.js";
import { asked, commands, facts, latest, partsList, prompt, range, rewardWithParts, seconds, status, textBlock, visible } from "./samples_parts.js";

const SOURCES = { store: "read from the store", kept: "read from the run's kept responses" };

export function mountGroup(root, context) {
  const load = latest();

  function refresh() {
    const [group] = context.rest;
    const show = (answer) => showGroup(root, answer, context);
    load(() => context.get(`samples/groups/${encodeURIComponent(group)}`), show, (error) => {
      if (!root.querySelector("[data-group]")) fill(root, back(), empty(error.message));
    });
  }

  function navigate(next) {
    context = next;
    fill(root);
    refresh();
  }

  fill(root, back(), el("p", { class: "quiet" }, "Loading …"));
  refresh();
  return { refresh, navigate, unmount() {} };
}

/** Returns the way back to the list as it was left. */
export function back() {
  return el("p", {}, el("a", { href: left.hash, "data-focus": "back" }, "← Groups"));
}

function showGroup(root, answer, context) {
  const focused = document.activeElement?.closest?.("[data-focus]")?.dataset.focus;
  const open = root.querySelector("details.prompt")?.open ?? true;
  const { row } = answer;
  const step = row.step === null ? null : el("a", { href: `#/samples?step=${row.step}` }, shown(row.step));
  fill(
    root,
    back(),
    el("h2", { "data-group": row.group }, row.group, " ", status(row, row.reason ? row.status : row.where)),
    row.reason ? textBlock(row.reason) : null,
    facts([
      ["reward", shown(row.reward)],
      ["by part, mean of the samples that have it", partsList(row.parts)],
      ["attempt", shown(row.attempt)],
      ["step", step],
      ["weights", row.version === null ? null : `version ${row.version}`],
      ["its tokens' versions", range(row.oldest, row.newest)],
      ["tokens", shown(row.tokens)],
      ["cut off", row.samples ? `${row.truncated} of ${row.samples}` : null],
      ["replica", visible(row.replica) || null],
      ["generated in", row.seconds === null ? null : seconds(row.seconds)],
      ["data set", row.dataset === null ? null : visible(row.dataset)],
    ]),
    answer.prompt.length
      ? el("details", { class: "prompt", open }, el("summary", {}, "Prompt"), prompt(answer.prompt), asked(answer))
      : null,
    el("h2", {}, "Samples", answer.source === "none" ? null : el("span", { class: "quiet small" }, ` ${SOURCES[answer.source]}`)),
    answer.absent ? el("p", { class: "quiet" }, `Their text is not there: ${answer.absent}.`) : null,
    answer.samples.length ? samplesTable(answer) : answer.absent ? null : empty("It has no samples yet; they appear when an attempt has come back with rewards."),
    answer.advantage_unknown && answer.samples.length ? el("p", { class: "quiet" }, `Advantages: ${answer.advantage_unknown}.`) : null,
    el("h2", {}, "What became of it"),
    answer.provenance.length ? provenance(answer.provenance) : empty("The ledger that tells it is not there; only kept responses are."),
    el("h2", {}, "Again"),
    commands(answer.commands, context.announce),
  );
  if (focused) root.querySelector(`[data-focus="${CSS.escape(focused)}"]`)?.focus();
}

function samplesTable(answer) {
  const rollouts = new Set(answer.samples.map((line) => line.rollout));
  const forked = rollouts.size < answer.samples.length;
  const lines = forked ? [...answer.samples].sort((a, b) => a.rollout - b.rollout || a.index - b.index) : answer.samples;
  const head = ["Sample", forked ? "Rollout" : null, "Reward", "Advantage", "Tokens", "End", "Versions", "Turns", "Response"].filter(Boolean);
  const numbers = new Set(["Reward", "Advantage", "Tokens", "Versions", "Turns", "Rollout"]);
  return el(
    "div",
    { class: "scroll" },
    el(
      "table",
      {},
      el("caption", { class: "unseen" }, "Samples of the group"),
      el("thead", {}, el("tr", {}, head.map((name) => el("th", { scope: "col", class: numbers.has(name) ? "number" : null }, name)))),
      el("tbody", {}, lines.map((line) => sampleRow(answer, line, forked))),
    ),
  );
}

function sampleRow(answer, line, forked) {
  const address = `#/samples/${encodeURIComponent(answer.row.group)}/${line.index}`;
  const there = answer.source !== "none";
  const name = `${line.index}${line.role ? ` ${visible(line.role)}` : ""}`;
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, there ? el("a", { href: address, "data-focus": address }, name) : name),
    forked ? el("td", { class: "number" }, shown(line.rollout)) : null,
    el("td", { class: "number" }, rewardWithParts(line.reward, line.parts)),
    el("td", { class: `number ${line.advantage > 0 ? "good" : line.advantage < 0 ? "bad" : ""}` }, signed(line.advantage)),
    el("td", { class: "number" }, shown(line.tokens)),
    el("td", { class: "nowrap" }, line.finish === "length" ? el("span", { class: "warn" }, "cut off") : line.finish || "–", flags(line)),
    el("td", { class: "number" }, range(line.oldest, line.newest)),
    el("td", { class: "number" }, shown(line.turns)),
    el("td", { class: "preview", dir: "auto" }, line.preview ? visible(line.preview) : el("span", { class: "quiet" }, there ? "(empty)" : "–")),
  );
}

/** Returns a number with its sign. */
export function signed(value) {
  if (value === null || value === undefined) return "–";
  return value > 0 ? `+${shown(value)}` : shown(value).replace("-", "−");
}

/** Returns why a sample, or tokens of it, left the loss. */
export function flags(line) {
  const words = [line.removed ? "removed by a filter" : null, line.stale ? "too old to train" : null, line.unread ? `not read: ${visible(line.unread)}` : null];
  return words.filter(Boolean).map((text) => el("div", { class: "warn reason" }, text));
}

function provenance(steps) {
  return el(
    "ol",
    { class: "provenance" },
    steps.map((step) => el("li", {}, el("span", { class: "quiet number" }, `${clock(step.at)}  `), visible(step.what), el("span", { class: "quiet" }, ` · record ${step.sequence}`))),
  );
}
