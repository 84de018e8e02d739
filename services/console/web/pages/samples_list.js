// The list of groups: filters, order and page stand in the address, so that every view is a link.

import { clock, el, empty, fill, shown } from "../dom.js";
import { commands, facts, latest, range, rewardWithParts, seconds, status, visible } from "./samples_parts.js";

const LIMIT = 50;

const COLUMNS = [
  { name: "Group", sort: null },
  { name: "Status", sort: null },
  { name: "Reward", sort: "reward", number: true },
  { name: "Rewards", sort: "spread", title: "of each sample; sorted by the difference of best and worst" },
  { name: "Tokens", sort: "tokens", number: true, title: "of all responses" },
  { name: "Longest", sort: "longest", number: true, title: "tokens of the longest response" },
  { name: "Cut off", sort: "truncated", number: true, title: "responses that ended at their length" },
  { name: "Versions", sort: null, number: true, title: "weight versions of its trained tokens" },
  { name: "Attempt", sort: "attempt", number: true },
  { name: "Generated in", sort: "seconds", number: true },
  { name: "Replica", sort: null },
  { name: "Changed", sort: "changed", number: true },
];

const STATUSES = {
  training: ["outstanding", "requeued", "ready", "batched", "trained", "dropped", "dead"],
  evaluation: ["evaluated", "failed"],
};

const CHOICES = {
  teaches: ["Rewards", "any", "differ within the group", "all alike: teaches nothing"],
  truncated: ["Length", "any", "some cut off", "none cut off"],
  retried: ["Attempts", "any", "generated again", "at the first attempt"],
  forked: ["Rollouts", "any", "forked", "one sample each"],
};

const FIELDS = ["evaluation", "status", "dataset", "step", "version", "min_reward", "max_reward", "min_tokens", "max_tokens", "replica", "group", "reason",
  "teaches", "truncated", "retried", "forked", "since", "until", "sort", "descending", "offset"];

/** Where the list was left, for the way back from a group. */
export const left = { hash: "#/samples" };

export function mountList(root, context) {
  let params = context.params;
  let timer = null;
  let pending = {}; // changes of filters that are not gone to yet
  const load = latest();
  const loadFacets = latest();
  const loadBatch = latest();

  const batch = el("section", { class: "batch", "aria-label": "Batch", hidden: true });
  const form = el("form", { class: "controls", "aria-label": "Filters" });
  const note = el("p", { class: "quiet", role: "status" });
  const table = el("div", { class: "scroll" });
  const pager = el("nav", { class: "pager", "aria-label": "Pages of groups" });
  form.addEventListener("submit", (event) => event.preventDefault());
  const sessions = el("p", {}, el("a", { href: "#/samples/sessions" }, "Sessions in flight"));
  fill(root, batch, sessions, form, note, table, pager);
  const controls = filters(form, change);

  function query() {
    const given = {};
    for (const name of FIELDS) {
      const values = params.getAll(name);
      if (values.length) given[name] = name === "status" ? values : values[0];
    }
    return given;
  }

  function go(changes) {
    const next = { ...query(), ...pending, ...changes };
    clearTimeout(timer);
    pending = {};
    const kept = new URLSearchParams();
    for (const [name, value] of Object.entries(next)) for (const item of [value].flat()) if (item !== "" && item !== null) kept.append(name, item);
    const text = kept.toString();
    context.go(text ? `#/samples?${text}` : "#/samples");
  }

  function change(name, value, soon) {
    clearTimeout(timer);
    Object.assign(pending, { [name]: value, offset: null });
    if (name === "evaluation") Object.assign(pending, { status: null, dataset: null, step: null });
    timer = setTimeout(() => go({}), soon ? 0 : 350);
  }

  function sort(column) {
    const now = query();
    const same = (now.sort ?? "changed") === column;
    go({ sort: column, descending: same && now.descending !== "false" ? "false" : null, offset: null });
    context.announce(`Sorted by ${column}`);
  }

  function navigate(next) {
    context = next;
    params = next.params;
    refresh();
  }

  function refresh() {
    left.hash = location.hash.startsWith("#/samples") ? location.hash : left.hash;
    const asked = query();
    controls.show(asked);
    load(() => context.get("samples", { ...asked, limit: LIMIT }), show, (error) => (note.textContent = error.message));
    loadFacets(() => context.get("samples/facets"), controls.offer, () => {});
    batch.hidden = asked.step === undefined;
    if (!batch.hidden) loadBatch(() => context.get(`samples/batches/${asked.step}`), showBatch, (error) => fill(batch, el("p", { class: "quiet" }, error.message)));
  }

  function show(answer) {
    const { groups, total, offset, reading } = answer;
    note.textContent = words(reading);
    const focused = document.activeElement?.closest?.("[data-focus]")?.dataset.focus;
    const filtered = FIELDS.some((name) => params.has(name) && !["sort", "descending", "offset"].includes(name));
    if (total === 0) fill(table, empty(nothing(reading, filtered, params.get("evaluation") === "true")));
    else fill(table, rows(groups, query(), sort));
    fill(pager, total > 0 ? pages(total, offset, go) : null);
    if (focused) root.querySelector(`[data-focus="${CSS.escape(focused)}"]`)?.focus();
  }

  function showBatch(found) {
    fill(
      batch,
      el("h2", {}, `Batch of step ${found.step}`),
      facts([
        ["weights", `version ${found.version}`],
        ["groups", shown(found.groups) + (found.amended ? `, amended ${found.amended} times` : "")],
        ["masked", found.mask_below ? `tokens older than version ${found.mask_below}` : null],
        ["formed", clock(found.formed)],
        ["trained", found.ended ? `${clock(found.ended)}, in ${shown(found.ended - found.started, 3)} s` : "not yet"],
      ]),
      el(
        "p",
        { class: "steps" },
        found.step > 0 ? el("a", { href: "#/samples?step=" + (found.step - 1), "data-focus": "before" }, `← step ${found.step - 1}`) : null,
        el("a", { href: "#/samples?step=" + (found.step + 1), "data-focus": "after" }, `step ${found.step + 1} →`),
      ),
      commands([found.replay], context.announce),
    );
  }

  refresh();
  return { refresh, navigate, unmount: () => clearTimeout(timer) };
}

/** Returns how far the history has been read, where it is not at its end, and what could not be read. */
function words(reading) {
  const lines = [];
  if (reading.read < reading.of) lines.push(`The run's history is being read: ${shown(reading.read)} of ${shown(reading.of)} records.`);
  if (reading.from_directory) lines.push("Read from the run's directory alone: groups that it has kept.");
  if (reading.damaged) lines.push(`${shown(reading.damaged)} lines of rollouts/ are cut off or damaged, and left out.`);
  if (reading.problem) lines.push(reading.problem);
  return lines.join(" ");
}

function nothing(reading, filtered, evaluation) {
  if (reading.read < reading.of) return "Groups appear as the history is read.";
  if (filtered) return evaluation ? "No held-out prompt that has come back fits these filters." : "No group fits these filters.";
  if (reading.from_directory) return "The run's directory has kept no responses (keep_rollouts says how many are).";
  return evaluation
    ? "No held-out prompt has come back yet."
    : "No group has been admitted for training. The first ones appear when the engines serve weights; held-out prompts are chosen above.";
}

function rows(groups, asked, sort) {
  const order = asked.sort ?? "changed";
  const heads = COLUMNS.map((column) => {
    const sorted = column.sort === order;
    const down = asked.descending !== "false";
    const arrow = sorted ? (down ? " ↓" : " ↑") : "";
    const inside = column.sort
      ? el("button", { type: "button", class: "sort", title: column.title ?? null, "data-focus": `sort-${column.sort}`, onclick: () => sort(column.sort) }, column.name + arrow)
      : column.name;
    return el("th", { scope: "col", class: column.number ? "number" : null, "aria-sort": sorted ? (down ? "descending" : "ascending") : null }, inside);
  });
  return el("table", { class: "groups" }, el("caption", { class: "unseen" }, "Groups"), el("thead", {}, el("tr", {}, heads)), el("tbody", {}, groups.map(row)));
}

function row(group) {
  const address = `#/samples/${encodeURIComponent(group.group)}`;
  const step = group.step !== null ? [" ", el("a", { href: `#/samples?step=${group.step}` }, `step ${shown(group.step)}`)] : null;
  const why = group.reason ? el("div", { class: "quiet reason" }, visible(group.reason.length > 90 ? `${group.reason.slice(0, 90)} …` : group.reason)) : null;
  const forked = group.rollouts < group.samples ? el("div", { class: "quiet" }, `${group.rollouts} rollouts, ${group.samples} samples`) : null;
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, el("a", { href: address, "data-focus": group.group }, group.group)),
    el("td", {}, status(group), step, group.dataset ? ` v${group.version}` : null, why),
    el("td", { class: "number" }, rewardWithParts(group.reward, group.parts)),
    el("td", {}, rewardStrip(group.rewards, group.samples), forked),
    el("td", { class: "number" }, shown(group.tokens)),
    el("td", { class: "number" }, shown(group.longest)),
    el("td", { class: `number ${group.truncated ? "warn" : ""}` }, group.samples ? `${group.truncated}/${group.samples}` : "–"),
    el("td", { class: "number" }, range(group.oldest, group.newest)),
    el("td", { class: "number" }, shown(group.attempt)),
    el("td", { class: "number" }, seconds(group.seconds)),
    el("td", {}, visible(group.replica) || "–"),
    el("td", { class: "number" }, clock(group.at)),
  );
}

/** Returns the rewards of a group as a strip of bars, with the figures as its name. */
function rewardStrip(rewards, of) {
  if (!rewards.length) return "–";
  const top = Math.max(...rewards);
  const bottom = Math.min(...rewards);
  const strip = el("span", { class: "reward-bars", role: "img", "aria-label": `rewards ${rewards.map((reward) => shown(reward, 3)).join(", ")}` });
  strip.title = strip.getAttribute("aria-label");
  for (const reward of rewards.slice(0, 32)) {
    const level = top === bottom ? 4 : Math.round(((reward - bottom) / (top - bottom)) * 8);
    strip.append(el("i", { class: `bar-${level}` }));
  }
  if (of > 32) strip.append(el("span", { class: "quiet" }, ` +${of - 32}`));
  return strip;
}

function pages(total, offset, go) {
  const last = Math.min(offset + LIMIT, total);
  const button = (name, to, off) => el("button", { type: "button", disabled: off, "data-focus": `page-${name}`, onclick: () => go({ offset: to > 0 ? to : null }) }, name);
  const end = Math.floor((total - 1) / LIMIT) * LIMIT;
  return [
    button("First", 0, offset <= 0),
    button("Back", Math.max(0, offset - LIMIT), offset <= 0),
    el("span", { class: "number" }, `${shown(Math.min(offset + 1, total))}–${shown(last)} of ${shown(total)}`),
    button("On", offset + LIMIT, last >= total),
    button("Last", end, last >= total),
  ];
}

/** Makes the filters' controls in `form`; `change(name, value, soon)` is called for each change. */
function filters(form, change) {
  const controls = {};

  function select(name, label, options) {
    const control = el("select", { onchange: () => change(name, control.value, true) }, options.map(([value, text]) => el("option", { value }, text)));
    controls[name] = control;
    return el("label", {}, label, control);
  }

  function input(name, label, properties) {
    const control = el("input", { ...properties, oninput: () => control.validity.valid && change(name, control.value, false) });
    controls[name] = control;
    return el("label", {}, label, control);
  }

  const whole = { type: "number", min: 0, max: 2147483647, step: 1, class: "short" };
  const any = { type: "number", step: "any", class: "short" };
  const choices = Object.entries(CHOICES).map(([name, [label, all, yes, no]]) => select(name, label, [["", all], ["true", yes], ["false", no]]));
  const further = el(
    "div",
    { class: "controls" },
    choices,
    input("min_tokens", "Tokens from", whole),
    input("max_tokens", "to", whole),
    select("replica", "Replica", [["", "any"]]),
    input("reason", "Reason has", { type: "text", maxlength: 200 }),
  );
  const more = el("details", {}, el("summary", {}, "More filters"), further);
  fill(
    form,
    select("evaluation", "Show", [["", "training groups"], ["true", "held-out prompts"]]),
    select("status", "Status", [["", "any"]]),
    select("dataset", "Set", [["", "any"]]),
    input("step", "Step", whole),
    input("version", "Version", whole),
    input("min_reward", "Reward from", any),
    input("max_reward", "to", any),
    input("group", "Group", { type: "search", maxlength: 160, placeholder: "12 or g00000012", class: "medium" }),
    more,
  );
  let counts = null;
  let asked = {};

  function options(name, values) {
    const control = controls[name];
    const wanted = asked[name] === undefined ? "" : [asked[name]].flat()[0];
    const names = [...new Set([...Object.keys(values), ...(wanted ? [wanted] : [])])];
    const entries = [["", "any"], ...names.map((key) => [key, key in values ? `${visible(key)} (${shown(values[key])})` : visible(key)])];
    fill(control, entries.map(([value, text]) => el("option", { value }, text)));
    control.value = wanted;
  }

  function renew() {
    const evaluation = asked.evaluation === "true";
    const own = counts?.[evaluation ? "evaluation" : "training"] ?? { statuses: {}, datasets: {}, replicas: {} };
    const statuses = Object.fromEntries(STATUSES[evaluation ? "evaluation" : "training"].map((name) => [name, own.statuses[name] ?? 0]));
    options("status", statuses);
    options("dataset", own.datasets);
    options("replica", own.replicas);
    controls.dataset.closest("label").hidden = !evaluation;
    controls.step.closest("label").hidden = evaluation;
  }

  return {
    /** Shows what is asked for, but in the control that is being typed into. */
    show(next) {
      asked = next;
      for (const [name, control] of Object.entries(controls)) if (control !== document.activeElement && control.tagName === "INPUT") control.value = next[name] ?? "";
      for (const name of ["evaluation", ...Object.keys(CHOICES)]) controls[name].value = next[name] ?? "";
      const hidden = [...Object.keys(CHOICES), "min_tokens", "max_tokens", "replica", "reason"].some((name) => next[name] !== undefined);
      if (hidden) more.open = true;
      renew();
    },
    offer(found) {
      counts = found;
      if (!form.contains(document.activeElement) || document.activeElement.tagName !== "SELECT") renew();
    },
  };
}
