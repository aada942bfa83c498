// Numbers, sizes and times for people. Everything takes null for "not known".
const NONE = "–";

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  if (!Number.isFinite(value)) return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(Math.max(0, digits - 2)).replace("e+", "e").replaceAll("-", "−");
  const places = Math.max(0, Math.min(8, digits - 1 - Math.floor(Math.log10(size))));
  return value.toFixed(places).replace("-", "−");
}

// As short as it can be said: for axes, step sizes and other numbers that people chose.
export function plain(value, digits = 3) {
  if (value === null || value === undefined) return NONE;
  const text = String(Number(value.toPrecision(digits)));
  return text.replace("e+", "e").replace("-", "−").replace("e-", "e−");
}

export function count(value) {
  return value === null || value === undefined ? NONE : Math.round(value).toLocaleString("en-US");
}

export function things(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

export function short(value) {
  if (value === null || value === undefined) return NONE;
  for (const [size, unit] of [[1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (value >= size) return `${(value / size).toFixed(value >= 10 * size ? 1 : 2)} ${unit}`;
  }
  return value >= 100 || Number.isInteger(value) ? String(Math.round(value)) : value.toFixed(1);
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit && value < 10 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 0.0995) return `${Math.round(value * 1000)} ms`;
  if (value < 9.95) return `${value.toFixed(1)} s`;
  if (value < 90) return `${Math.round(value)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  if (value < 129600) return `${(value / 3600).toFixed(1)} h`;
  return `${Math.round(value / 86400)} days`;
}

// What is left by an estimate. One that is used up says no more than that.
export function left(value) {
  return value < 0.5 ? "any moment" : `about ${seconds(value)}`;
}

export function age(value) {
  const since = (Date.now() - new Date(value).getTime()) / 1000;
  if (since < -1) return `in ${seconds(-since)}`;
  return since < 2 ? "just now" : `${seconds(since)} ago`;
}

export function time(value) {
  return new Date(value).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });
}

// The time of day where the day is known, as the server's clock has it.
export function timeOfDay(value) {
  return `${new Date(value).toISOString().slice(11, 19)} UTC`;
}

export function percent(value, digits = 0) {
  return value === null || value === undefined ? NONE : `${(100 * value).toFixed(digits).replace("-", "−")} %`;
}

// "3f9c…:train:0": enough of an id to tell it from others; the whole one is in its title.
export function shortId(id) {
  const [session, ...rest] = id.split(":");
  return session.length > 10 ? [`${session.slice(0, 8)}…`, ...rest].join(":") : id;
}

// A model as lists show it: a checkpoint by its name and run, a base model as it is.
export function modelName(model) {
  if (!model?.startsWith("tinker://")) return model;
  const [run, , name] = model.slice("tinker://".length).split("/");
  return `${name} · ${shortId(run)}`;
}

const KINDS = {
  create_model: "create the model", forward: "score", forward_backward: "forward and backward",
  optim_step: "optimizer step", zero_grad: "clear the gradient", save_weights: "save a checkpoint",
  save_weights_for_sampler: "save for sampling", save_weights_external: "export", load_weights: "load a checkpoint",
  sample: "sample", unload_model: "unload the model",
};

export function kindName(kind) {
  return KINDS[kind] ?? kind.replaceAll("_", " ");
}

// Rows as CSV. A text that a spreadsheet would take for a formula gets an apostrophe in front.
export function csv(rows) {
  const cell = (value) => {
    if (value === null || value === undefined) return "";
    if (typeof value === "number") return String(value);
    const safe = /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
    return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  return rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}

export function download(name, text, type) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
