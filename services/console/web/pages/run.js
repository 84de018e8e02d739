// The page Run: every metric of training by step or by time, other runs over it, what happened beside; a click opens the batch.

import { aligned, chart } from "../charts.js";
import { clock, el, empty, fill, shown } from "../dom.js";
import { refreshing } from "../refreshing.js";

const WINDOWS = [1, 5, 10, 20, 50, 100, 500];
const AXES = { step: "step", hours: "hours since the run began" };
const MOST_RUNS = 7;
const MOST_TAGS = 128;

export function mount(root, context) {
  let state = read(context.params);
  let answers = { panels: null, marks: { marks: [], left_out: 0 } };
  const ended = new AbortController();
  const refresh = refreshing(load, ended.signal, (error) => {
    if (error.status === 404 || error.status === 422) fill(notes, el("p", { class: "bad" }, error.message)); // the banner has the others
  });
  const charts = new Map(); // key of a panel → {view, look}
  const controls = el("form", { class: "controls", "aria-label": "What the charts show" });
  const notes = el("div");
  const grid = el("div", { class: "charts" });
  const events = el("section", { "aria-label": "What happened to services" });
  const more = el("details", { class: "more" });
  controls.addEventListener("submit", (event) => event.preventDefault());
  fill(root, el("h2", { class: "unseen" }, "Training"), controls, notes, grid, events, more);
  showControls();
  refresh();

  /** Opens the page with other parameters, so that every view is a link. */
  function go(changes) {
    context.go(hash({ ...state, ...changes }));
  }

  async function load(again) {
    const wanted = state;
    const ask = (path, params) => context.get(path, params, ended.signal);
    const part = { axis: wanted.axis, first: wanted.first, last: wanted.last };
    const [panels, marks] = await Promise.all([ask("run/panels", { run: wanted.run }), ask("run/marks", part)]);
    const drawn = [...panels.panels, ...wanted.more.map(ownPanel)];
    const tags = [...new Set(drawn.flatMap((panel) => panel.series.map(tagOf)))].slice(0, MOST_TAGS);
    const curves = async (chosen, more) => (chosen.length ? (await ask("run/curves", { ...more, tag: chosen, run: wanted.run, points: points() })).curves : []);
    const apart = (tag) => wanted.axis === "step" && ofWarmStart(tag);
    const sparse = (tag) => tag.startsWith("eval/"); // each is a mean over a whole set already
    const window = wanted.window;
    const found = await Promise.all([
      curves(tags.filter((tag) => !apart(tag) && !sparse(tag)), { ...part, window }),
      curves(tags.filter(apart), { window }),
      curves(tags.filter(sparse), part),
    ]);
    if (wanted !== state) {
      again();
      return;
    }
    answers = { panels, marks, drawn: new Set(found.flat().map((curve) => curve.run)) };
    showNotes();
    showCharts(drawn, found.flat());
    showEvents();
    showMore();
  }

  function points() {
    return Math.max(200, Math.min(1200, Math.round(innerWidth * 0.6)));
  }

  // --- controls

  function showControls() {
    const axis = el("select", { name: "axis", onchange: (event) => go({ axis: event.target.value, first: null, last: null }) }, options(AXES, state.axis));
    const smooth = el(
      "select",
      { name: "window", onchange: (event) => go({ window: Number(event.target.value) }) },
      options(Object.fromEntries(WINDOWS.map((window) => [window, window === 1 ? "none" : `mean of ${window} steps`])), String(state.window)),
    );
    const bound = (name) =>
      el("input", {
        type: "number",
        name,
        step: "any",
        class: "short",
        value: state[name] ?? "",
        onchange: (event) => go({ [name]: event.target.value === "" ? null : Number(event.target.value) }),
      });
    refilled(
      controls,
      el("label", {}, "Axis ", axis),
      el("label", {}, "Smoothing ", smooth),
      el("label", {}, "From ", bound("first")),
      el("label", {}, "to ", bound("last")),
      el("button", { type: "button", name: "whole", disabled: state.first === null && state.last === null, onclick: () => go({ first: null, last: null }) }, "Whole run"),
      el("label", {}, el("input", { type: "checkbox", name: "marks", checked: state.marks, onchange: (event) => go({ marks: event.target.checked }) }), "Marks"),
      overlay(),
    );
  }

  /** Returns the choice of other runs to draw over this one. */
  function overlay() {
    const names = [...new Set([...context.runs, ...state.run])].sort();
    if (!names.length) return null;
    const choose = (name, chosen) => go({ run: chosen ? [...state.run, name].slice(-MOST_RUNS) : state.run.filter((other) => other !== name) });
    return el(
      "details",
      { class: "choice", open: overlayOpen },
      el("summary", { onclick: () => (overlayOpen = !overlayOpen) }, state.run.length ? `Over it: ${state.run.join(", ")}` : "Draw other runs over it"),
      el("div", { class: "choices" }, names.map((name) => el("label", {}, el("input", { type: "checkbox", name: `run ${name}`, checked: state.run.includes(name), onchange: (event) => choose(name, event.target.checked) }), name))),
    );
  }

  function showNotes() {
    const { left_out: leftOut, unreadable } = answers.panels;
    const lines = Object.entries(unreadable).map(([directory, why]) => `${directory} ${why}.`);
    if (leftOut) lines.push(`${shown(leftOut)} more metrics have names of their own and are not kept.`);
    for (const panel of answers.panels.panels) if (panel.left_out) lines.push(`${panel.title}: ${shown(panel.left_out)} more than the chart draws are among “All other metrics”.`);
    const bare = state.run.filter((run) => !answers.drawn.has(run));
    if (bare.length) lines.push(`No metric of these charts is known of ${bare.join(", ")}.`);
    if (answers.marks.left_out) lines.push(`${shown(answers.marks.left_out)} older marks are not drawn; zoom in to see them.`);
    fill(notes, lines.map((line) => el("p", { class: "quiet" }, line)));
  }

  // --- charts

  function showCharts(panels, curves) {
    const waiting = grid.querySelector(".empty");
    waiting?.remove();
    if (!panels.length) grid.append(empty("Curves appear here with the first training step; before it, the warm start's loss where there is one."));
    for (const [key, { view }] of charts) {
      if (!panels.some((panel) => keyOf(panel) === key)) {
        view.destroy();
        charts.delete(key);
      }
    }
    for (const panel of panels) {
      const key = keyOf(panel);
      if (!charts.has(key)) charts.set(key, { view: chart(grid, look(panel)), steps: [] });
      const own = charts.get(key);
      own.found = joined(panel, curves);
      const apart = hasOwnSteps(panel);
      own.view.update({ ...own.found, range: apart ? null : range(), marks: state.marks && !apart ? answers.marks.marks.map(marked) : [] });
    }
  }

  function look(panel) {
    const pick = (x) => {
      const step = stepAt(charts.get(keyOf(panel)).found.own, x);
      if (step === null) context.announce("This run has no batch there.");
      else context.go(`#/samples?step=${step}`);
    };
    return {
      title: panel.title,
      unit: panel.unit,
      note: panel.about,
      xLabel: xLabel(panel),
      onPick: panel.by_batch ? pick : null,
      onZoom: hasOwnSteps(panel) ? null : (first, last) => go({ first: rounded(first, Math.floor), last: rounded(last, Math.ceil) }),
      announce: context.announce,
    };
  }

  /** Returns whether a chart's x is that of the warm start's steps, which are before those of training. */
  function hasOwnSteps(panel) {
    return state.axis === "step" && ofWarmStart(panel.series[0].tag);
  }

  function xLabel(panel) {
    if (state.axis !== "step") return "hours";
    return hasOwnSteps(panel) ? "step of the warm start" : panel.series[0].tag.startsWith("perf/update_weights") ? "version" : "step";
  }

  function rounded(value, how) {
    return value === null ? null : state.axis === "step" ? Math.max(0, how(value)) : Math.max(0, Number(value.toPrecision(6)));
  }

  function range() {
    if (state.first === null && state.last === null) return null;
    const { steps, hours } = answers.panels;
    const [begin, end] = state.axis === "step" ? (steps ?? [0, 1]) : [0, hours ?? 1];
    const found = [state.first ?? begin, state.last ?? Math.max(end, state.first ?? 0)];
    return found[0] > found[1] ? [found[1], found[0]] : found;
  }

  /** Returns the data of a panel's chart: colours tell runs apart where there are several, else series; dashes always series. */
  function joined(panel, curves) {
    const runs = [answers.panels.run, ...state.run];
    const several = state.run.length > 0;
    const parts = [];
    let own = null;
    panel.series.forEach((series, index) => {
      for (const curve of curves.filter((item) => item.tag === tagOf(series))) {
        const run = runs.indexOf(curve.run);
        if (run === 0) own ??= curve;
        const name = several ? (panel.series.length > 1 ? `${curve.run}: ${series.label}` : curve.run) : series.label;
        const seen = { name, colour: several ? run : index, dash: several && panel.series.length === 1 ? run : index, unusual: curve.unusual, unusualTotal: curve.unusual_total };
        if (curve.smoothed.length) {
          parts.push({ ...seen, x: curve.x, values: curve.values, quiet: true, unusual: [], unusualTotal: 0 });
          parts.push({ ...seen, x: curve.x, values: curve.smoothed });
        } else parts.push({ ...seen, x: curve.x, values: curve.values });
      }
    });
    return { ...aligned(parts), own };
  }

  // --- beside the charts

  function showEvents() {
    const happened = answers.marks.marks.filter((mark) => !mark.kind.startsWith("push")).reverse();
    const pushes = answers.marks.marks.length - happened.length;
    if (!answers.marks.marks.length) return fill(events);
    const legend = el(
      "p",
      { class: "quiet marks" },
      happened.length ? "▼ with a dashed line: a service failed, was restarted or took over, or values of the training changed. " : "",
      pushes ? "╷ at the bottom: weights were pushed; × there: a replica did not take them. " : "",
      "Drag over a chart to zoom; click on a point to see its batch.",
    );
    const rows = happened.slice(0, 50).map((mark) =>
      el("tr", {}, el("td", {}, clock(mark.at)), el("td", { class: "number" }, shown(Math.round(mark.x * (state.axis === "step" ? 10 : 1000)) / (state.axis === "step" ? 10 : 1000))), el("td", {}, mark.instance), el("td", {}, mark.kind.replace("_", " ")), el("td", {}, mark.text)),
    );
    const table = el(
      "table",
      {},
      el("thead", {}, el("tr", {}, ["When", AXES[state.axis] === "step" ? "Step" : "Hours", "Service", "What", "Why"].map((name) => el("th", { scope: "col", class: name === "Step" || name === "Hours" ? "number" : null }, name)))),
      el("tbody", {}, rows),
    );
    return fill(
      events,
      legend,
      happened.length ? el("h2", {}, `Failures, restarts and changes (${shown(happened.length)})`) : null,
      happened.length ? el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Failures, restarts and changes" }, table) : null,
    );
  }

  function showMore() {
    const tags = [...new Set([...answers.panels.further, ...state.more])].sort();
    if (!tags.length) return fill(more);
    const shownTags = more.dataset.tags === String([tags, state.more]);
    if (shownTags) return more;
    more.dataset.tags = String([tags, state.more]);
    const choose = (tag, chosen) => go({ more: chosen ? [...state.more, tag] : state.more.filter((other) => other !== tag) });
    const list = el("div", { class: "choices columns" }, tags.map((tag) => el("label", { "data-tag": tag }, el("input", { type: "checkbox", name: `tag ${tag}`, checked: state.more.includes(tag), onchange: (event) => choose(tag, event.target.checked) }), el("span", {}, tag))));
    const filter = el("input", { type: "search", value: more.dataset.filter ?? "", oninput: (event) => narrow(event.target.value) });
    function narrow(text) {
      more.dataset.filter = text;
      for (const label of list.children) label.hidden = !label.dataset.tag.toLowerCase().includes(text.toLowerCase());
    }
    narrow(filter.value);
    return refilled(more, el("summary", {}, `All other metrics (${tags.length})`), el("p", { class: "controls" }, el("label", {}, "Filter ", filter)), list);
  }

  return {
    refresh,
    navigate(next) {
      const before = state;
      context = { ...context, ...next };
      state = read(next.params);
      if (before.axis !== state.axis) {
        for (const { view } of charts.values()) view.destroy();
        charts.clear();
      }
      showControls();
      refresh();
    },
    unmount() {
      ended.abort();
      for (const { view } of charts.values()) view.destroy();
    },
  };
}

/** Replaces what an element holds; the control that had the focus has it again, by its name. */
function refilled(element, ...children) {
  const name = element.contains(document.activeElement) ? document.activeElement.getAttribute("name") : null;
  fill(element, ...children);
  if (name) [...element.querySelectorAll("[name]")].find((control) => control.getAttribute("name") === name)?.focus();
  return element;
}

let overlayOpen = false; // stays as it was left while the controls are made anew

function tagOf(series) {
  return (series.negative ? "-" : "") + series.tag;
}

function ofWarmStart(tag) {
  return tag.startsWith("sft/");
}

function keyOf(panel) {
  return panel.panel;
}

function ownPanel(tag) {
  const batch = !tag.startsWith("eval/") && !tag.startsWith("sft/") && !tag.startsWith("perf/update_weights");
  return { panel: `tag ${tag}`, title: tag, unit: "", about: "", by_batch: batch, series: [{ tag, negative: false, label: tag }] };
}

function marked(mark) {
  return { x: mark.x, kind: mark.kind, text: `${mark.instance} ${mark.kind.replace("_", " ")}: ${mark.text}` };
}

/** Returns the step of this run's point that is nearest to x; null where it has none. */
function stepAt(curve, x) {
  if (!curve || !curve.x.length) return null;
  const nearest = curve.x.reduce((best, place, index) => (Math.abs(place - x) < Math.abs(curve.x[best] - x) ? index : best), 0);
  return curve.steps[nearest];
}

function options(names, chosen) {
  return Object.entries(names).map(([value, text]) => el("option", { value, selected: value === chosen }, text));
}

function read(params) {
  const number = (name) => (params.get(name) === null || params.get(name) === "" || !Number.isFinite(Number(params.get(name))) ? null : Number(params.get(name)));
  const window = number("window");
  return {
    axis: params.get("axis") in AXES ? params.get("axis") : "step",
    window: WINDOWS.includes(window) ? window : 1,
    first: number("first"),
    last: number("last"),
    run: params.getAll("run").slice(0, MOST_RUNS),
    more: params.getAll("more"),
    marks: params.get("marks") !== "off",
  };
}

function hash({ axis, window, first, last, run, more, marks }) {
  const params = new URLSearchParams();
  if (axis !== "step") params.set("axis", axis);
  if (window !== 1) params.set("window", window);
  if (first !== null) params.set("first", first);
  if (last !== null) params.set("last", last);
  for (const name of run) params.append("run", name);
  for (const tag of more) params.append("more", tag);
  if (!marks) params.set("marks", "off");
  const text = params.toString();
  return `#/run${text ? `?${text}` : ""}`;
}
