// Charts over uPlot: axes with units, marks, zoom by drag or keyboard, a click on a point.

import uPlot from "./vendor/uPlot/uPlot.esm.js";
import { el, fill, shown } from "./dom.js";

const HEIGHT = 200;
const DASHES = [[], [6, 4], [2, 3], [10, 4, 2, 4]];

/** Returns the colours of the theme that holds now. Series differ by dash, too. */
function palette(element) {
  const style = getComputedStyle(element);
  const colour = (name) => style.getPropertyValue(name).trim();
  return {
    text: colour("--quiet"),
    grid: colour("--line"),
    mark: colour("--warn"),
    series: [1, 2, 3, 4, 5, 6].map((index) => colour(`--series-${index}`)),
  };
}

/**
 * Makes a chart in `parent`, and returns {update(data), destroy()}.
 *
 * title: its heading. unit: of the values, "" where there is none. xLabel: such as "step". log: a logarithmic axis.
 * onPick(x, index): called with the x of a point that was clicked, or chosen by keyboard; index is that of its series.
 * data: {x: [numbers, ascending], series: [{name, values: [number or null], quiet: drawn thin and pale}], marks: [{x, label, kind}]}
 */
export function chart(parent, { title, unit = "", xLabel = "step", log = false, onPick = null, height = HEIGHT, note = "" }) {
  const heading = el("figcaption", {}, el("span", { class: "chart-title" }, title), unit ? el("span", { class: "quiet" }, ` ${unit}`) : null);
  const latest = el("p", { class: "chart-latest number" });
  const stage = el("div", { class: "chart-stage", tabindex: "0", role: "img" });
  const legend = el("p", { class: "chart-legend" });
  const whole = el("button", { type: "button", class: "plain", hidden: true, onclick: showWhole }, "Show all");
  const head = el("div", { class: "chart-head" }, heading, whole, latest);
  const figure = el("figure", { class: "chart", title: note || null }, head, stage, legend);
  parent.append(figure);
  let plot = null;
  let data = { x: [], series: [], marks: [] };
  let shape = "";
  let cursor = -1;

  function options() {
    const colours = palette(figure);
    const axis = { stroke: colours.text, grid: { stroke: colours.grid, width: 1 }, ticks: { stroke: colours.grid, size: 4 }, font: "11px system-ui" };
    return {
      width: Math.max(160, stage.clientWidth),
      height,
      legend: { show: false },
      cursor: { y: false, focus: { prox: 24 }, drag: { x: true, y: false }, points: { size: 7 } },
      scales: { x: { time: false, range: aroundOne }, y: { distr: log ? 3 : 1, range: log ? undefined : padded } },
      axes: [
        { ...axis, label: xLabel, labelSize: 16, labelFont: "11px system-ui", size: 28, values: (_, ticks) => ticks.map((tick) => shown(tick)) },
        { ...axis, size: 54, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : shown(tick, 3))) },
      ],
      series: [
        {},
        ...data.series.map((item, index) => ({
          label: item.name,
          stroke: colours.series[(item.colour ?? index) % colours.series.length],
          width: item.quiet ? 1 : 1.75,
          alpha: item.quiet ? 0.35 : 1,
          dash: DASHES[Math.floor((item.colour ?? index) / 6) % DASHES.length],
          points: { show: data.x.length < 60 && !item.quiet, size: 5 },
        })),
      ],
      hooks: { draw: [(drawn) => drawMarks(drawn, data.marks ?? [], colours)], setCursor: [showAt], setScale: [onScale], ready: [listen] },
    };
  }

  function onScale(_drawn, scale) {
    if (scale === "x") whole.hidden = !zoomed();
  }

  function showWhole() {
    if (document.activeElement === whole) stage.focus(); // the button goes
    plot?.setScale("x", { min: data.x[0], max: data.x.at(-1) });
  }

  function showAt(drawn) {
    const index = drawn.cursor.idx;
    showValues(index ?? data.x.length - 1, index !== null && index !== undefined);
  }

  function showValues(index, hovered) {
    if (index < 0 || !data.series.length) {
      latest.textContent = "";
      return;
    }
    const first = data.series.find((item) => !item.quiet) ?? data.series[0];
    latest.textContent = `${shown(first.values[index])}${hovered ? ` at ${xLabel} ${shown(data.x[index])}` : ""}`;
    if (hovered && data.series.length > 1) {
      latest.textContent = data.series.filter((item) => !item.quiet).map((item) => shown(item.values[index], 3)).join(" · ") + ` at ${shown(data.x[index])}`;
    }
  }

  function listen(drawn) {
    if (!onPick) return;
    let down = null;
    drawn.over.style.cursor = "pointer";
    drawn.over.addEventListener("mousedown", (event) => (down = [event.clientX, event.clientY]));
    drawn.over.addEventListener("mouseup", (event) => {
      const moved = down && Math.hypot(event.clientX - down[0], event.clientY - down[1]);
      down = null;
      if (moved !== null && moved < 4 && drawn.cursor.idx !== null) pick(drawn.cursor.idx);
    });
  }

  function pick(index) {
    if (onPick && index >= 0 && index < data.x.length) onPick(data.x[index], index);
  }

  function onKey(event) {
    const last = data.x.length - 1;
    const moves = { ArrowLeft: Math.max(0, (cursor < 0 ? last + 1 : cursor) - 1), ArrowRight: Math.min(last, cursor + 1), Home: 0, End: last };
    if (event.key in moves && plot && last >= 0) {
      cursor = moves[event.key];
      plot.setCursor({ left: plot.valToPos(data.x[cursor], "x"), top: 0 });
      event.preventDefault();
    } else if (event.key === "Enter" && cursor >= 0) {
      pick(cursor);
    } else if (event.key === "Escape" && plot) {
      showWhole();
    }
  }

  /** Returns the part of the x axis that somebody has zoomed to; null where all of it is shown. */
  function zoomed() {
    if (!plot || !plot.data[0].length) return null;
    const { min, max } = plot.scales.x;
    const [first, last] = [plot.data[0][0], plot.data[0].at(-1)];
    return min > first || max < last ? { min, max } : null;
  }

  function draw() {
    const zoom = zoomed();
    plot?.destroy();
    plot = null;
    if (!data.x.length) {
      fill(stage, el("p", { class: "empty" }, "No values yet."));
      return;
    }
    fill(stage);
    plot = new uPlot(options(), [data.x, ...data.series.map((item) => item.values.map(drawable))], stage);
    if (zoom) plot.setScale("x", zoom);
  }

  /** Names the curves where there are several, and says how many values no curve can show. */
  function showLegend() {
    const named = data.series.filter((item) => !item.quiet);
    const keys = named.map((item) => el("span", { class: `key key-${((item.colour ?? data.series.indexOf(item)) % 6) + 1}` }, item.name));
    const lost = named.flatMap((item) => item.values).filter((value) => value !== null && value !== undefined && drawable(value) === null).length;
    const words = lost ? el("span", { class: "warn" }, `▲ ${shown(lost)} ${lost === 1 ? "value is" : "values are"} NaN or infinite`) : null;
    fill(legend, named.length > 1 ? keys : null, words);
  }

  /** Puts new data into the plot; what was zoomed to stays. */
  function renew() {
    const zoom = zoomed();
    plot.batch(() => {
      plot.setData([data.x, ...data.series.map((item) => item.values.map(drawable))], !zoom);
      if (zoom) plot.setScale("x", zoom);
    });
  }

  const resized = new ResizeObserver(() => plot?.setSize({ width: Math.max(160, stage.clientWidth), height }));
  resized.observe(stage);
  stage.addEventListener("keydown", onKey);
  document.addEventListener("themechange", draw);

  return {
    update(next) {
      data = { marks: [], ...next };
      const now = JSON.stringify([data.series.map((item) => [item.name, item.quiet, item.colour]), data.x.length > 0, data.x.length < 60]);
      const last = data.x.length - 1;
      const values = data.series.filter((item) => !item.quiet).map((item) => `${item.name} ${last < 0 ? "none" : shown(item.values[last])}`);
      stage.setAttribute("aria-label", `${title} by ${xLabel}, ${data.x.length} points; newest: ${values.join(", ") || "none"}.${onPick ? " Arrow keys move, Enter opens the batch." : ""}`);
      if (plot && now === shape) renew();
      else draw();
      shape = now;
      showLegend();
      if (plot) showAt(plot);
      else showValues(last, false);
    },
    destroy() {
      resized.disconnect();
      document.removeEventListener("themechange", draw);
      plot?.destroy();
      figure.remove();
    },
  };
}

function drawable(value) {
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}

/** Returns the range of an axis with a little room; a curve that is flat lies in the middle. */
function padded(_plot, min, max) {
  if (min === null || max === null) return [0, 1];
  const room = (max - min) * 0.08 || Math.abs(max) * 0.1 || 1;
  return [min - room, max + room];
}

/** Returns the range of the x axis; a single point lies in the middle. */
function aroundOne({ data: [x] }, min, max) {
  return x.length === 1 ? [x[0] - 1, x[0] + 1] : [min, max];
}

/** Draws each mark as a dashed line with its label's first letter on top. */
function drawMarks(plot, marks, colours) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = colours.mark;
  ctx.font = `${Math.round(10 * devicePixelRatio)}px system-ui`;
  for (const mark of marks) {
    const x = Math.round(plot.valToPos(mark.x, "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.fillText(mark.label, x + 3 * devicePixelRatio, bbox.top + 10 * devicePixelRatio);
  }
  ctx.restore();
}
