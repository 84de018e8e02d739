// One sample: its turns, and its tokens coloured by version, log-prob, engine–trainer difference or advantage.

import { el, empty, fill, shown } from "../dom.js";
import { flags, signed } from "./samples_group.js";
import { mountTokens } from "./samples_tokens.js";
import { asked, commands, facts, latest, partsList, prompt, textBlock, visible } from "./samples_parts.js";

export function mountSample(root, context) {
  const load = latest();
  let tokens = null;
  let known = "";

  function refresh() {
    const [group, index] = context.rest;
    const address = `samples/groups/${encodeURIComponent(group)}/${encodeURIComponent(index)}`;
    load(() => context.get(address), (answer) => show(answer, address), (error) => {
      if (!known) fill(root, up(group), empty(error.message));
    });
  }

  function show(answer, address) {
    const now = JSON.stringify(answer);
    if (now === known) return; // nothing has changed: what is selected stays
    known = now;
    tokens?.unmount();
    tokens = null;
    const stage = el("div");
    fill(root, up(answer.group), head(answer), pictures(answer, address), body(answer, stage), el("h2", {}, "Again"), commands(answer.commands, context.announce));
    if (answer.tokens) {
      const more = (first) => context.get(address, { first });
      tokens = mountTokens(stage, answer, { more, announce: context.announce, colour: context.params.get("colour") });
    }
  }

  function navigate(next) {
    const same = next.rest.join("/") === context.rest.join("/");
    context = next;
    if (same) {
      tokens?.colour(next.params.get("colour"));
      return;
    }
    known = "";
    refresh();
  }

  fill(root, up(context.rest[0]), el("p", { class: "quiet" }, "Loading …"));
  refresh();
  return { refresh, navigate, unmount: () => tokens?.unmount() };
}

function up(group) {
  return el("p", {}, el("a", { href: `#/samples/${encodeURIComponent(group)}` }, `← ${visible(group)}`));
}

function head(answer) {
  const { group, line, samples } = answer;
  const beside = (index, text) => el("a", { href: `#/samples/${encodeURIComponent(group)}/${index}` }, text);
  const steps = el(
    "p",
    { class: "steps" },
    line.index > 0 ? beside(line.index - 1, `← sample ${line.index - 1}`) : null,
    line.index + 1 < samples ? beside(line.index + 1, `sample ${line.index + 1} →`) : null,
  );
  const forks = answer.forks.map((fork) => el("li", {}, beside(fork.index, `sample ${fork.index}`), fork.shared === null ? "" : `, the same up to token ${shown(fork.shared)} of prompt and response`));
  const segments = answer.segments.map(([start, end, version]) => `${start}–${end - 1} by version ${version}`).join(", ");
  return [
    el("h2", {}, `Sample ${line.index} of ${group}`, line.role ? el("span", { class: "quiet" }, ` ${visible(line.role)}`) : null),
    steps,
    facts([
      ["reward", shown(line.reward)],
      ["by part", partsList(line.parts)],
      ["advantage", line.advantage === null ? null : signed(line.advantage)],
      ["end", line.finish === "length" ? "cut off at its length" : line.finish],
      ["prompt", answer.prompt_tokens === null ? null : `${shown(answer.prompt_tokens)} tokens`],
      ["response", line.tokens === null ? null : `${shown(line.tokens)} tokens`],
      ["made by", segments ? `tokens ${segments}` : null],
      ["masked", answer.mask_below ? `tokens older than version ${answer.mask_below}` : null],
      ["step", answer.step === null ? null : el("a", { href: `#/samples?step=${answer.step}` }, shown(answer.step))],
    ]),
    flags(line),
    forks.length ? el("div", {}, el("h3", {}, `Other samples of rollout ${line.rollout}`), el("ul", {}, forks)) : null,
  ];
}

function pictures(answer, address) {
  if (!answer.pictures.length) return null;
  const source = (name) => `/api/${address}/pictures/${name}`;
  const one = answer.sounds
    ? (name) => el("audio", { src: source(name), controls: "" })
    : (name, at) => el("img", { src: source(name), alt: `Picture ${at + 1} of ${answer.pictures.length}`, loading: "lazy" });
  return [el("h2", {}, answer.sounds ? "Sounds" : "Pictures"), el("div", { class: "pictures" }, answer.pictures.map(one))];
}

function body(answer, stage) {
  const notes = Object.values(answer.unknown).length
    ? el("ul", { class: "quiet notes" }, Object.entries(answer.unknown).map(([name, why]) => el("li", {}, `${NAMES[name] ?? name}: ${visible(why)}`)))
    : null;
  return [
    el("h2", {}, "Prompt"),
    prompt(answer.prompt),
    answer.prompt_read ? el("details", {}, el("summary", {}, "As the model read it"), textBlock(answer.prompt_read)) : null,
    asked(answer),
    el("h2", {}, "Response"),
    answer.turns.length > 1 ? turns(answer.turns) : textBlock(answer.response),
    el("h2", {}, "Tokens"),
    answer.tokens ? stage : el("p", {}, visible(answer.no_tokens)),
    notes,
  ];
}

const NAMES = { text: "Text of tokens", difference: "Engine–trainer difference", advantages: "Advantage of tokens", log_probs: "Log-probs", pictures: "Pictures" };

function turns(found) {
  return found.map((turn) =>
    el(
      "div",
      { class: `turn ${turn.kind}` },
      el("p", { class: "turn-head" }, turn.kind === "sampled" ? "model" : "not trained here: tools, users, or an earlier sample's", ` · tokens ${turn.start}–${turn.end - 1}${turn.reward === null ? "" : ` · reward ${shown(turn.reward)}`}`),
      turn.text === null ? el("p", { class: "quiet" }, "its text needs the run's tokenizer") : textBlock(turn.text),
    ),
  );
}
