// The steps of a run: all that there are, then each new one as it comes. And what they say, in words.
import { useEffect, useState } from "../vendor/preact-hooks.js";
import { events, get } from "./api.js";
import { number, percent } from "./format.js";

const AGAIN = 2000;

// {points, state, error, live}. The stream ends every few minutes, and is asked for again from where it was.
export function useSteps(runId) {
  const [found, setFound] = useState({ points: null, state: null, error: null, live: false });
  useEffect(() => {
    const cancel = new AbortController();
    const steps = new Map();
    const show = (more) => {
      if (cancel.signal.aborted) return;
      const points = [...steps.values()].sort((one, other) => one.step - other.step);
      setFound((before) => ({ ...before, points, ...more }));
    };
    const follow = async () => {
      const path = `training_runs/${runId}`;
      while (!cancel.signal.aborted) {
        let over = false;
        try {
          const { points } = await get(`${path}/metrics`, {}, cancel.signal);
          steps.clear();
          for (const point of points) steps.set(point.step, point);
          show({ error: null, live: true });
          const after = Math.max(0, (points.at(-1)?.step ?? 0) - 8);
          for await (const { name, data } of events("GET", `${path}/events`, { params: { after }, signal: cancel.signal })) {
            const told = JSON.parse(data);
            if (name === "points") {
              for (const point of told.points) steps.set(point.step, point);
              show({});
            } else if (name === "state") {
              over = ["closed", "lost", "failed"].includes(told.state);
              show({ state: told.state, live: !over });
            }
          }
        } catch (error) {
          if (error.name === "AbortError" || cancel.signal.aborted) return;
          show({ error, live: false });
          if (error.status === 404 || error.status === 401) return;
        }
        if (over) return;
        await new Promise((resume) => setTimeout(resume, AGAIN));
      }
    };
    follow();
    return () => cancel.abort();
  }, [runId]);
  return found;
}

export const MEASURES = {
  loss: { name: "Loss per token", of: (point) => point.loss_per_token ?? null, better: "down" },
  norm: { name: "Gradient norm", of: (point) => point.grad_norm ?? null },
  rate: { name: "Learning rate", of: (point) => point.learning_rate ?? null },
  speed: { name: "Tokens per second", of: null },
  gap: { name: "Sampler–trainer logprob gap", of: (point) => point.logprob_gap ?? null, better: "down" },
};

// Of each step: tokens by the time since the step before, the client's own pauses included.
export function speeds(points) {
  return points.map((point, place) => {
    if (!place || !point.tokens) return null;
    const passed = (new Date(point.time) - new Date(points[place - 1].time)) / 1000;
    return passed > 0 ? point.tokens / passed : null;
  });
}

export function column(points, measure) {
  return measure === "speed" ? speeds(points) : points.map(MEASURES[measure].of);
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

// Did it get better? The first tenth against the last tenth: single steps say little.
export function verdict(losses) {
  const known = losses.filter((value) => value !== null && value !== undefined);
  if (known.length < 4) return null;
  const tenth = Math.max(1, Math.round(known.length / 10));
  const first = mean(known.slice(0, tenth));
  const last = mean(known.slice(-tenth));
  const lowest = Math.min(...known);
  const scale = Math.max(Math.abs(first), Math.abs(last));
  const way = last < first - 0.02 * scale ? "better" : last > first + 0.02 * scale ? "worse" : "same";
  // A share of a number that is near 0, or changes its sign, says nothing: losses of reinforcement learning do that.
  const change = first > 0 && last > 0 && last < 10 * first ? Math.abs(last - first) / first : null;
  return { first, last, change, lowest, way };
}

// What is left of a loss that fell is more than nothing, so it never fell by "100 %".
export function part({ change, way }) {
  if (way !== "better" || change <= 0.99) return percent(change);
  return change > 0.999 ? "more than 99.9 %" : percent(change, 1);
}

export function verdictText(found) {
  if (!found) return "Too few steps to say whether it gets better.";
  const { first, last, change, way } = found;
  const numbers = `${number(first)} at the beginning, ${number(last)} now`;
  if (way === "same") return `The loss per token is where it was: ${numbers}.`;
  const word = way === "better" ? "fell" : "rose";
  return `The loss per token ${word}${change === null ? "" : ` by ${part(found)}`}: ${numbers}.`;
}
