// Plots. Each has its numbers in words beside it, for whoever cannot see it.
import uPlot from "../vendor/uplot.js";
import { html, useEffect, useRef, useState } from "./ui.js";
import { number, plain, short } from "./format.js";

const HEIGHT = 230;
const sync = uPlot.sync("steps");
// Lines differ by their dashes too, and the legend says which is which.
export const DASHES = [[[], "solid"], [[7, 4], "dashed"], [[2, 3], "dotted"], [[10, 3, 2, 3], "dash-dot"], [[14, 4], "long dashes"],
  [[4, 2], "short dashes"], [[10, 3, 2, 3, 2, 3], "dash-dot-dot"], [[1, 5], "sparse dots"]];

// A canvas takes neither variables nor light-dark(): the colour that an element here would have.
function colour(name) {
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

// Changes whenever the colours do: by the button, or by the system.
export function useTheme() {
  const [theme, setTheme] = useState(0);
  useEffect(() => {
    const changed = () => setTheme((value) => value + 1);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const chosen = new MutationObserver(changed);
    dark.addEventListener("change", changed);
    chosen.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    return () => {
      dark.removeEventListener("change", changed);
      chosen.disconnect();
    };
  }, []);
  return theme;
}

function options(width, lines, { log, together }) {
  const axis = () => ({
    stroke: colour("--quiet"),
    grid: { stroke: colour("--line"), width: 1 },
    ticks: { stroke: colour("--line"), width: 1, size: 5 },
    font: "12px system-ui, sans-serif",
  });
  return {
    width,
    height: HEIGHT,
    padding: [10, 10, 0, 0],
    cursor: { sync: together ? { key: sync.key } : undefined, points: { size: 6 }, drag: { x: true, y: false } },
    legend: { live: true },
    scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
    axes: [
      { ...axis(), values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? String(tick) : "")) },
      { ...axis(), size: 62, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : tick >= 10_000 ? short(tick) : plain(tick, 6))) },
    ],
    series: [
      { label: "Step", value: (_, value) => (value === null ? "–" : String(value)) },
      ...lines.map((line, place) => ({
        label: line.name,
        stroke: colour(`--series-${(place % 8) + 1}`),
        width: line.thin ? 1 : 2,
        alpha: line.faint ? 0.35 : 1,
        dash: line.dash,
        spanGaps: true,
        points: { show: line.values.length < 40 },
        value: (_, value) => number(value),
      })),
    ],
  };
}

// `steps` is the x axis, `lines` are [{name, values, dash, faint}]. `summary` is what the plot says, in words.
export function Plot({ title, steps, lines, summary, log, together = true, bare }) {
  const place = useRef(null);
  const plot = useRef(null);
  const theme = useTheme();
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const watcher = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    watcher.observe(place.current);
    return () => watcher.disconnect();
  }, []);
  const shape = JSON.stringify([width > 0, lines.map((line) => [line.name, line.values.length < 40]), log, theme]);
  const data = [steps, ...lines.map((line) => line.values)];
  useEffect(() => {
    if (!width) return undefined;
    plot.current = new uPlot(options(width, lines, { log, together }), data, place.current);
    return () => {
      plot.current.destroy();
      plot.current = null;
    };
  }, [shape]);
  useEffect(() => {
    plot.current?.setSize({ width, height: HEIGHT });
  }, [width]);
  useEffect(() => {
    plot.current?.setData(data);
  });
  return html`<figure class="plot">
    <figcaption class=${bare ? "hidden" : ""}><h3>${title}</h3><p class="quiet">${summary}</p></figcaption>
    <div ref=${place} class="plot-area" role="img" aria-label=${`${title}. ${summary}`} data-points=${steps.length}></div>
  </figure>`;
}

// A line the size of a word.
export function Sparkline({ values, label }) {
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return html`<span class="quiet">–</span>`;
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const x = (place) => 2 + (116 * place) / Math.max(1, values.length - 1);
  const y = (value) => (high === low ? 13 : 24 - (22 * (value - low)) / (high - low));
  const points = values.map((value, place) => (value === null ? null : `${x(place).toFixed(1)},${y(value).toFixed(1)}`));
  const last = values.length - 1 - [...values].reverse().findIndex((value) => value !== null);
  return html`<svg class="spark" viewBox="0 0 120 26" role="img" aria-label=${label}>
    <polyline points=${points.filter(Boolean).join(" ")} />
    <circle cx=${x(last)} cy=${y(values[last])} r="2.5" />
  </svg>`;
}

// Exponential moving average, and what it is of.
export function smooth(values, weight = 0.85) {
  let average = null;
  return values.map((value) => {
    if (value === null) return average;
    average = average === null ? value : weight * average + (1 - weight) * value;
    return average;
  });
}
