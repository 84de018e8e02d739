// The pipeline as it is now: who waits for whom, where groups are, what each service did, staleness, tokens by length.

import { el, empty, fill, renew, shown, span } from "../dom.js";
import { withoutLedger } from "../ledger_gone.js";
import { activityKey, bar, percent, timelines } from "../timelines.js";

const WINDOWS = [[300, "5 min"], [900, "15 min"], [3600, "1 h"]];
const STAGES = {
  tasks: "Tasks, waiting for a replica",
  generating: "Generating, on replicas",
  scoring: "Scoring, waiting or in hand",
  ready: "Ready, waiting for a batch",
  training: "Training, in a batch",
};

export function mount(root, context) {
  let window_s = Number(context.params.get("window")) || 900;
  let asked = 0;
  const choice = el("select", { id: "flow-window", onchange: () => context.go(`#/flow?window=${choice.value}`) },
    WINDOWS.map(([seconds, name]) => el("option", { value: seconds, selected: seconds === window_s }, name)));
  const body = el("div");
  fill(root, el("div", { class: "controls" }, el("label", { for: "flow-window" }, "Looking back", choice)), body);

  async function refresh() {
    const turn = ++asked;
    const gone = await withoutLedger(context, "Groups on their way, what services did and who waits for whom");
    if (gone) {
      fill(body, gone);
      return;
    }
    let flow;
    try {
      flow = await context.get("flow", { window: window_s });
    } catch {
      if (!body.childElementCount) fill(body, empty("The pipeline appears here once the run's ledger has been read."));
      return;
    }
    if (turn === asked) show(flow);
  }

  function show(flow) {
    renew(body, verdict(flow), pipeline(flow), services(flow), ages(flow), lengths(flow));
  }

  refresh();
  return {
    refresh,
    navigate(next) {
      context = next;
      window_s = Number(next.params.get("window")) || 900;
      choice.value = String(window_s);
      refresh();
    },
    unmount() {
      asked = -1;
    },
  };
}

function verdict({ bottleneck, waits, parts: ofStep, live, waiting_for: waiting, stalled }) {
  const advice = bottleneck.advice.map((item) =>
    el("li", { "data-key": item.text }, item.withheld ? [el("span", { class: "quiet" }, `Withheld — ${item.withheld}. `), el("s", { class: "quiet" }, item.text)] : sentence(item.text)));
  const parts = Object.entries(waits);
  const steps = Object.entries(ofStep);
  return el("section", { "aria-labelledby": "flow-verdict" },
    el("h2", { id: "flow-verdict" }, "Who waits for whom"),
    el("p", { class: "verdict" }, bottleneck.sentence),
    waiting && !bottleneck.sentence.includes(waiting) ? el("p", { id: "flow-waiting", class: stalled ? "warn" : "quiet" }, `Now waiting for ${waiting}.`) : null,
    live ? null : el("p", { class: "quiet" }, bottleneck.waiting === "the run" ? "What follows is how the run was at its last record." : "No service is there now: this is how the run was at its last record."),
    parts.length ? [bar(parts, "The trainer's time"), activityKey(parts)] : null,
    steps.length ? [el("h3", {}, "A step's parts"), bar(steps, "A step's parts"), activityKey(steps)] : null,
    advice.length ? [el("h3", {}, "What would help"), el("ul", { class: "advice" }, advice)] : null);
}

function sentence(text) {
  return `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;
}

function pipeline({ stages }) {
  const cells = stages.map((stage) =>
    el("li", { class: "stage", "data-key": stage.name },
      el("span", { class: "stage-name" }, STAGES[stage.name] ?? stage.name),
      el("span", { class: "stage-depth number" }, shown(stage.groups)),
      el("span", { class: "quiet number" }, detail(stage))));
  return el("section", { "aria-labelledby": "flow-stages" }, el("h2", { id: "flow-stages" }, "Groups on their way"), el("ol", { class: "stages" }, cells));
}

function detail({ held, per_minute, oldest_s }) {
  return [
    held !== null ? `${shown(held)} in hand` : null,
    `${shown(per_minute, 3)} a minute`,
    oldest_s !== null ? `oldest ${span(oldest_s)}` : null,
  ].filter(Boolean).join(" · ");
}

function services(flow) {
  return el("section", { "aria-labelledby": "flow-services" },
    el("h2", { id: "flow-services" }, "What services did"),
    flow.services.length ? timelines(flow) : empty("Each service's time appears here once it is seen at work."));
}

function ages({ ages: { bound, policy, tokens, steps } }) {
  const all = Object.values(tokens).reduce((sum, count) => sum + count, 0);
  const newest = steps.at(-1);
  const rows = Object.entries(tokens).map(([age, count]) =>
    el("tr", { "data-key": age },
      el("th", { scope: "row" }, `${age} ${Number(age) === 1 ? "version" : "versions"}${Number(age) === bound ? ", the bound" : ""}`),
      el("td", { class: "number" }, shown(count)),
      el("td", { class: "number" }, percent(count / all)),
      el("td", { class: "wide" }, bar([["training", count / all]], `${age} versions old`))));
  return el("section", { "aria-labelledby": "flow-ages" },
    el("h2", { id: "flow-ages" }, "Staleness of trained tokens"),
    el("p", { class: "quiet" }, `At most ${bound} ${bound === 1 ? "version" : "versions"}; what is older is handled by the policy “${policy}”.`
      + (newest ? ` Step ${newest.step}: ${shown(newest.mean, 3)} in the mean, ${newest.largest} at most.` : "")),
    all ? table(["Age", "Tokens", "Share", ""], rows) : empty("Ages appear with the first step that is trained within this time."));
}

function lengths({ lengths: classes, dropped }) {
  const rows = classes.map((item) => {
    const whole = Math.max(1, item.trained + item.masked + item.dropped);
    const parts = [["training", item.trained / whole], ["masked", item.masked / whole], ["dropped", item.dropped / whole]];
    return el("tr", {},
      el("th", { scope: "row", class: "number" }, item.shortest === item.longest ? shown(item.shortest) : `${shown(item.shortest)} – ${shown(item.longest)}`),
      ...[item.samples, item.trained, item.masked, item.dropped].map((value) => el("td", { class: "number" }, shown(value))),
      el("td", { class: "wide" }, bar(parts.filter(([, share]) => share > 0), `${item.shortest} to ${item.longest} tokens`)));
  });
  const reasons = Object.entries(dropped).map(([reason, count]) => `${shown(count)} ${reason}`);
  return el("section", { "aria-labelledby": "flow-lengths" },
    el("h2", { id: "flow-lengths" }, "What became of tokens, by length of the response"),
    el("p", { class: "quiet" }, ["Of the ledger's newest records, whatever the window.", ...(reasons.length ? [`Groups dropped: ${reasons.join(" · ")}.`] : [])].join(" ")),
    rows.length
      ? [activityKey([["training"], ["masked"], ["dropped"]], { training: "trained" }), table(["Length", "Responses", "Trained", "Masked", "Dropped", ""], rows)]
      : empty("Responses appear here once their groups are trained or dropped."));
}

function table(head, rows) {
  return el("div", { class: "scroll", tabindex: "0" },
    el("table", {}, el("thead", {}, el("tr", {}, head.map((name, index) => el("th", { scope: "col", class: index ? "number" : null }, name)))), el("tbody", {}, rows)));
}
