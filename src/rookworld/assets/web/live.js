/* A run while it trains: the report's curves, fed by server-sent events, and sampled answers. */

import { chartsNow, curvesOf, forgetCharts, h, minus, refreshCharts, show } from "./report.js";

const by = (id) => document.getElementById(id);
const shapeOf = (one) => JSON.stringify([one.panels, one.runs.map((run) => [run.x.length > 0, Object.keys(run.series), Object.keys(run.evals.curves), run.evals.steps.length > 1])]);

export function follow(changed, open) {
  let shape = "";
  const source = new EventSource("api/live");
  source.onmessage = (event) => {
    const data = JSON.parse(event.data), [run] = data.runs;
    show(data);
    by("progress").replaceChildren(h(`span.state.${run.state}`, {}, run.state === "unfinished" ? "training" : run.state), ` ${run.steps}${run.planned ? ` of ${run.planned}` : ""} steps`);
    document.getElementById("page").classList.toggle("live", run.state === "unfinished");
    document.documentElement.dataset.steps = run.steps;
    if (shapeOf(data) === shape) refreshCharts(); else { shape = shapeOf(data); draw(); }
    by("samples").replaceChildren(...samples(data.samples, open));
    changed(data);
  };
}

function draw() {
  forgetCharts();
  const curves = curvesOf();
  by("curves").replaceChildren(curves || h("p.soft", {}, "No step has been logged yet."));
  chartsNow().forEach((chart) => chart.rebuild());
}

function samples(found, open) {
  if (!found.length) return [];
  const row = (one) => h("button.sample", { type: "button", title: "put the position on the board", onclick: () => open(one.fen) },
    h("span.faint", {}, `step ${one.step}`), h("span", {}, `${one.task}:${one.move ? ` ${one.move}` : ""}`), h("code", {}, one.text), h("span", { title: one.reason }, `${minus(one.reward.toFixed(2))}, best of ${one.of}`));
  return [h("div.card", {}, h("h3", {}, "Sampled answers"), found.map(row))];
}
