// Charts over uPlot: axes with units, marks, zoom, the values under the cursor, a click on a point; all of it by keyboard, too.

import uPlot from "./vendor/uPlot/uPlot.esm.js";
import { el, fill, shown } from "./dom.js";

const HEIGHT = 200;
const COLOURS = 6;
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];
const STYLES = ["solid", "dashed", "dotted", "mixed"];
const WHOLE = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power)); // steps and versions have no halves
const MOST_KEYS = 12;
const NEAR = 5; // pixels from a mark within which its text is shown
const MARKS = { push: "tick", "push failed": "cross" }; // any other kind is a line

/** Returns the colours of the theme that holds now. Series differ by dash, too. */
function palette(element) {
  const style = getComputedStyle(element);
  const colour = (name) => style.getPropertyValue(name).trim();
  return {
    text: colour("--quiet"),
    grid: colour("--line"),
    mark: colour("--warn"),
    push: colour("--strong-line"),
    series: Array.from({ length: COLOURS }, (_, index) => colour(`--series-${index + 1}`)),
  };
}

/**
 * Makes a chart in `parent`, and returns {update(data), destroy()}.
 *
 * title: its heading. unit: of the values, "" where there is none. xLabel: such as "step". log: a logarithmic axis. note: what it is of.
 * onPick(x, index): called with the x of a point that was clicked, or chosen by keyboard, and its place in data.x.
 * onZoom(first, last): called with the part of x that was drawn out, or (null, null) for the whole; without it the chart zooms by itself.
 * announce(text): tells what the keys have moved to.
 * data: {x: [numbers, ascending], range: [first, last] of the axis or null, marks: [{x, kind, text}],
 *        series: [{name, values, quiet: drawn thin and pale, colour and dash: which ones, unusual: [{x, value}]}]}
 * A value is a number, null (a gap), or undefined (this series has no point there).
 */
export function chart(parent, options) {
  const { title, unit = "", xLabel = "step", log = false, onPick = null, onZoom = null, announce = () => {}, height = HEIGHT, note = "" } = options;
  const heading = el("figcaption", {}, el("span", { class: "chart-title" }, title), unit ? el("span", { class: "quiet" }, ` ${unit}`) : null);
  const latest = el("p", { class: "chart-latest number" });
  const stage = el("div", { class: "chart-stage", tabindex: "0", role: "group", "aria-roledescription": "chart" });
  const legend = el("p", { class: "chart-legend number" });
  const count = el("summary");
  const many = el("details", { class: "chart-many", hidden: true }, count);
  const whole = el("button", { type: "button", class: "plain", hidden: true, onclick: showWhole }, "Show all");
  const odd = el("p", { class: "chart-legend warn", hidden: true });
  const head = el("div", { class: "chart-head" }, heading, whole, latest);
  const figure = el("figure", { class: "chart", title: note || null }, head, stage, legend, many, odd);
  parent.append(figure);
  let plot = null;
  let data = { x: [], series: [], marks: [], range: null };
  let shape = "";
  let cursor = -1;

  const named = () => data.series.filter((item) => !item.quiet);
  const colourOf = (item) => (item.colour ?? data.series.indexOf(item)) % COLOURS;
  const dashOf = (item) => (item.dash ?? Math.max(0, named().indexOf(item))) % DASHES.length;

  function plotOptions() {
    const colours = palette(figure);
    const axis = { stroke: colours.text, grid: { stroke: colours.grid, width: 1 }, ticks: { stroke: colours.grid, size: 4 }, font: "11px system-ui" };
    return {
      width: Math.max(160, stage.clientWidth),
      height,
      legend: { show: false },
      cursor: { y: false, drag: { x: true, y: false, setScale: !onZoom }, points: { size: 7 }, bind: onPick || onZoom ? { dblclick: () => null } : {} },
      scales: { x: { time: false, range: wide }, y: { distr: log ? 3 : 1, range: log ? undefined : padded } },
      axes: [
        { ...axis, ...(xLabel === "hours" ? {} : { incrs: WHOLE }), label: xLabel, labelSize: 16, labelFont: "11px system-ui", size: 28, values: (_, ticks) => ticks.map((tick) => shown(tick)) },
        { ...axis, size: 54, values: (_plot, ticks, _axis, _space, step) => ticks.map((tick) => tickText(tick, step)) },
      ],
      series: [
        {},
        ...data.series.map((item) => ({
          label: item.name,
          stroke: colours.series[colourOf(item)],
          width: item.quiet ? 1 : 1.75,
          alpha: item.quiet ? 0.3 : 1,
          dash: item.quiet ? [] : DASHES[dashOf(item)],
          points: { show: data.x.length < 60 && !item.quiet, size: 5 },
        })),
      ],
      hooks: { draw: [(drawn) => drawMarks(drawn, data, palette(figure))], setCursor: [showAt], setSelect: [zoomTo], setScale: [onScale], ready: [listen] },
    };
  }

  function wide(_plot, min, max) {
    const [first, last] = data.range ?? [min, max];
    if (first === null || last === null) return [0, 1];
    return first === last ? [first - 0.5, last + 0.5] : [first, last];
  }

  function showAt(drawn) {
    const index = drawn.cursor.idx;
    const over = index !== null && index !== undefined && drawn.cursor.left >= 0;
    const mark = over ? nearest(drawn) : null;
    showValues(over ? index : null, mark);
  }

  function nearest(drawn) {
    const far = (mark) => Math.abs(drawn.valToPos(mark.x, "x") - drawn.cursor.left);
    const near = data.marks.filter((mark) => far(mark) < NEAR);
    return near.sort((one, other) => far(one) - far(other))[0] ?? null;
  }

  /** Shows the values at a place of data.x, or the newest ones (null). */
  function showValues(index, mark = null) {
    const items = named();
    const values = items.map((item) => (index === null ? newest(item) : valueAt(item, index)));
    const place = index === null ? "" : ` at ${xLabel} ${shown(data.x[index])}`;
    latest.textContent = mark ? mark.text : items.length === 1 ? `${shown(values[0])}${place}` : place.trim();
    showLegend(items, values);
    return items.length > MOST_KEYS ? `${items.length} curves` : items.map((item, at) => `${item.name} ${shown(values[at])}`).join(", ");
  }

  /** Names the curves with their values; where there are very many, on demand. */
  function showLegend(items, values) {
    const key = (item) => `key key-${colourOf(item) + 1} key-${STYLES[dashOf(item)]}`;
    fill(legend, items.map((item, at) => el("span", { class: key(item) }, el("bdi", {}, item.name), " ", el("b", {}, shown(values[at], 3)))));
    legend.hidden = items.length < 2;
    many.hidden = items.length <= MOST_KEYS;
    count.textContent = `${items.length} curves`;
    if (many.hidden === many.contains(legend)) many.hidden ? many.before(legend) : many.append(legend);
  }

  /** Returns a series' value there, or the one before where it has no point of its own there. */
  function valueAt(item, index) {
    for (let at = index; at >= 0; at--) {
      if (item.values[at] !== undefined) return item.values[at] ?? unusualAt(item, data.x[at]);
    }
    return null;
  }

  function unusualAt(item, x) {
    return (item.unusual ?? []).find((one) => one.x === x)?.value ?? null;
  }

  function newest(item) {
    return item.values.length ? valueAt(item, item.values.length - 1) : null;
  }

  function zoomTo(drawn) {
    if (!onZoom || drawn.select.width < 4) return;
    const first = drawn.posToVal(drawn.select.left, "x");
    const last = drawn.posToVal(drawn.select.left + drawn.select.width, "x");
    drawn.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    onZoom(first, last);
  }

  function listen(drawn) {
    if (!onPick) return;
    let down = null;
    drawn.over.style.cursor = "pointer";
    drawn.over.addEventListener("mousedown", (event) => (down = [event.clientX, event.clientY]));
    drawn.over.addEventListener("click", (event) => {
      const moved = down ? Math.hypot(event.clientX - down[0], event.clientY - down[1]) : 0;
      down = null;
      if (moved < 4 && drawn.cursor.idx !== null) pick(drawn.cursor.idx);
    });
  }

  function onScale(_plot, scale) {
    if (scale === "x") whole.hidden = !(onZoom ? data.range : zoomed());
  }

  /** Returns the part of the x axis that somebody has zoomed to; null where all of it is shown, or the page zooms. */
  function zoomed() {
    if (onZoom || !plot || !plot.data[0].length) return null;
    const { min, max } = plot.scales.x;
    return min > plot.data[0][0] || max < plot.data[0].at(-1) ? { min, max } : null;
  }

  function showWhole() {
    if (document.activeElement === whole) stage.focus(); // the button goes
    if (onZoom) onZoom(null, null);
    else plot?.setScale("x", { min: data.x[0], max: data.x.at(-1) });
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
      announce(`${title} at ${xLabel} ${shown(data.x[cursor])}: ${showValues(cursor)}`);
      event.preventDefault();
    } else if (event.key === "Enter" && cursor >= 0) {
      pick(cursor);
    } else if (event.key === "Escape" && plot) {
      showWhole();
    }
  }

  function drawn() {
    return [data.x, ...data.series.map((item) => item.values.map(drawable))];
  }

  /** Puts new data into the plot; what was zoomed to stays. */
  function renew() {
    const zoom = zoomed();
    plot.batch(() => {
      plot.setData(drawn(), !zoom);
      if (zoom) plot.setScale("x", zoom);
    });
  }

  function draw() {
    const zoom = zoomed();
    plot?.destroy();
    plot = null;
    if (data.x.length) {
      fill(stage);
      plot = new uPlot(plotOptions(), drawn(), stage);
      if (zoom) plot.setScale("x", zoom);
    } else {
      fill(stage, el("p", { class: "empty" }, data.range ? "No values in this part." : "No values yet."));
    }
  }

  const resized = new ResizeObserver(() => plot?.setSize({ width: Math.max(160, stage.clientWidth), height }));
  resized.observe(stage);
  stage.addEventListener("keydown", onKey);
  document.addEventListener("themechange", draw);

  return {
    update(next) {
      data = { marks: [], range: null, ...next };
      cursor = Math.min(cursor, data.x.length - 1);
      const now = JSON.stringify([data.series.map((item) => [item.name, item.quiet, item.colour, item.dash]), data.x.length > 0, data.x.length < 60, data.range]);
      if (plot && now === shape) renew();
      else draw();
      shape = now;
      whole.hidden = !(onZoom ? data.range : zoomed());
      const lost = named().reduce((sum, item) => sum + lostValues(item), 0);
      odd.hidden = !lost;
      odd.textContent = `▲ ${shown(lost)} ${lost === 1 ? "value is" : "values are"} NaN or infinite`;
      const words = [`${title} by ${xLabel}, newest: ${showValues(null) || "none"}.`, lost ? `${odd.textContent.slice(2)}.` : "", onPick ? "Arrow keys move, Enter opens the batch." : ""];
      stage.setAttribute("aria-label", words.filter(Boolean).join(" "));
    },
    destroy() {
      resized.disconnect();
      document.removeEventListener("themechange", draw);
      plot?.destroy();
      figure.remove();
    },
  };
}

/**
 * Puts curves that have x of their own over one x: returns {x, series} for `chart`.
 * curves: [{x, values, …}]; what else they hold goes into their series.
 */
export function aligned(curves) {
  const places = new Map([...new Set(curves.flatMap((curve) => curve.x))].sort((one, other) => one - other).map((x, index) => [x, index]));
  const series = curves.map(({ x, values, ...rest }) => {
    const spread = new Array(places.size).fill(undefined);
    x.forEach((place, index) => (spread[places.get(place)] = values[index]));
    return { ...rest, values: spread };
  });
  return { x: [...places.keys()], series };
}

/** Returns how many values of a series no curve can show. */
function lostValues({ values, unusual, unusualTotal }) {
  return unusualTotal ?? unusual?.length ?? values.filter((value) => value !== null && value !== undefined && drawable(value) === null).length;
}

function drawable(value) {
  return value === undefined ? undefined : typeof value === "number" && Number.isFinite(value) ? value : null;
}

/** Returns the text of a tick, with as many digits as tell it from the next one, `step` away. */
function tickText(tick, step) {
  if (tick === null) return "";
  const size = Math.abs(tick);
  if (size >= 1e6 || (size > 0 && step < 1e-4)) return tick.toExponential(Math.min(6, Math.max(0, Math.ceil(Math.log10(size / step)))));
  return tick.toLocaleString("en", { maximumFractionDigits: Math.max(0, 1 - Math.floor(Math.log10(step))) }); // 0.25 has a digit more
}

/** Returns the range of an axis with a little room, none below 0 where nothing is; a curve that is flat lies in the middle. */
function padded(_plot, min, max) {
  if (min === null || max === null || (min === 0 && max === 0)) return [0, 1];
  const room = (max - min) * 0.08 || Math.abs(max) * 0.1;
  return [min >= 0 && min < room * 4 ? 0 : min - room, max + room];
}

/** Draws the marks: lines with a head for what happened to services, ticks at the bottom for pushes, crosses for what is no number. */
function drawMarks(plot, { marks, series }, colours) {
  const { ctx, bbox } = plot;
  const unit = devicePixelRatio;
  const bottom = bbox.top + bbox.height;
  const inside = (x) => x >= bbox.left - 1 && x <= bbox.left + bbox.width + 1;
  ctx.save();
  ctx.setLineDash([]);
  ctx.lineWidth = unit;
  for (const mark of marks) {
    const x = Math.round(plot.valToPos(mark.x, "x", true));
    if (!inside(x)) continue;
    const kind = MARKS[mark.kind] ?? "line";
    ctx.strokeStyle = ctx.fillStyle = kind === "tick" ? colours.push : colours.mark;
    ctx.beginPath();
    if (kind === "tick") {
      ctx.moveTo(x, bottom);
      ctx.lineTo(x, bottom - 5 * unit);
    } else if (kind === "cross") {
      cross(ctx, x, bottom - 5 * unit, 3 * unit);
    } else {
      ctx.moveTo(x - 4 * unit, bbox.top);
      ctx.lineTo(x + 4 * unit, bbox.top);
      ctx.lineTo(x, bbox.top + 6 * unit);
      ctx.fill();
      ctx.setLineDash([3 * unit, 3 * unit]);
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bottom);
    }
    ctx.stroke();
    ctx.setLineDash([]);
  }
  ctx.strokeStyle = colours.mark;
  ctx.lineWidth = 1.5 * unit;
  for (const one of series.flatMap((item) => item.unusual ?? [])) {
    const x = plot.valToPos(one.x, "x", true);
    if (!inside(x)) continue;
    ctx.beginPath();
    cross(ctx, x, bbox.top + 6 * unit, 4 * unit);
    ctx.stroke();
  }
  ctx.restore();
}

function cross(ctx, x, y, size) {
  ctx.moveTo(x - size, y - size);
  ctx.lineTo(x + size, y + size);
  ctx.moveTo(x - size, y + size);
  ctx.lineTo(x + size, y - size);
}
