/* A sweep: parallel coordinates, what mattered, causes, the best trials, survival by value. */

function sweepOf() {
  const sweep = data.sweep;
  if (!sweep) return null;
  const counts = Object.entries(sweep.states).map(([state, count]) => `${count} ${state}`).join(", ");
  const survival = sweep.survival === null ? "" : ` ${(100 * sweep.survival).toFixed(1)} % of the ended trials survived.`;
  return section("sweep", "Sweep", `${sweep.planned} trials planned: ${counts}.${survival}`,
    parallelOf(sweep),
    h("div.pair", {}, importanceOf(sweep), causesOf(sweep)),
    bestOf(sweep),
    h("div.card.scroll", { style: { "margin-top": "16px" } }, levelsOf(sweep)));
}

function importanceOf(sweep) {
  const known = sweep.factors.filter((factor) => factor.importance !== null);
  if (!known.length) return null;
  return h("div.card.importance", {}, h("h3", {}, "What mattered"), h("p.faint", {}, `Share of the variance of ${sweep.metric} that a setting explains alone`),
    known.map((factor) => h("div", {}, h("div.row", {}, h("span.mono", {}, factor.name), h("span", {}, `${(100 * factor.importance).toFixed(1)} %`)), h("div.bar", {}, h("i", { style: { width: `${100 * factor.importance}%` } })))));
}

function causesOf(sweep) {
  const rows = Object.entries(sweep.causes);
  return rows.length ? h("div.card", {}, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "Why trials failed"), h("th.number", {}, "Trials"))), h("tbody", {}, rows.map(([cause, count]) => h("tr", {}, h("td", {}, cause.replace(/_/g, " ")), h("td.number", {}, count)))))) : null;
}

function bestOf(sweep) {
  if (!sweep.best.length) return null;
  const names = Object.keys(sweep.best[0].params);
  const heads = [h("th.number", {}, "Best trials"), h("th.number", {}, sweep.metric), names.map((name) => h("th", {}, name.replaceAll(",", " × ")))];
  const row = (trial) => h("tr", {}, h("td.number", {}, trial.number), h("td.number", {}, number(trial.value)), names.map((name) => h("td.mono", {}, valueText(trial.params[name]))));
  return h("div.card.scroll", { style: { "margin-top": "16px" } }, h("table", {}, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, sweep.best.slice(0, 5).map(row))));
}

function levelsOf(sweep) {
  return h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "Setting"), h("th", {}, "Value"), h("th.number", {}, "Trials"), h("th.number", {}, "Survived"), h("th.number", {}, `Mean ${sweep.metric}`))),
    h("tbody", {}, sweep.factors.flatMap((factor) => factor.levels.map((level, place) => h("tr", {}, h("td.mono", {}, place ? "" : factor.name), h("td.mono", {}, level.label), h("td.number", {}, level.trials), h("td.number", {}, `${(100 * level.survived / level.trials).toFixed(1)} %`), h("td.number", {}, level.mean === null ? "–" : number(level.mean)))))));
}

function axisOf(name, values, log) {
  const numbers = values.every((value) => typeof value === "number");
  const distinct = [...new Set(values.map(valueText))];
  if (numbers && distinct.length > 8) {
    const map = log ? Math.log10 : (v) => v;
    const low = Math.min(...values.map(map)), high = Math.max(...values.map(map));
    const at = (value) => (map(value) - low) / (high - low || 1);
    return { name, at, ticks: [0, 0.5, 1].map((t) => { const v = low + t * (high - low); return [t, number(log ? 10 ** v : v, 3)]; }), jitter: 0 };
  }
  const order = numbers ? [...distinct].sort((a, b) => Number(a) - Number(b)) : distinct;
  const at = (value) => (order.indexOf(valueText(value)) + 0.5) / order.length;
  return { name, at, ticks: order.map((text, place) => [(place + 0.5) / order.length, text]), jitter: 0.5 / order.length };
}

function parallelOf(sweep) {
  const ended = sweep.trials.filter((trial) => trial.state !== "running");
  const names = [...new Set(ended.flatMap((trial) => Object.keys(trial.params)))];
  if (!ended.length || !names.length) return h("p.notice", {}, "no trial has ended yet");
  const axes = names.map((name) => axisOf(name, ended.map((trial) => trial.params[name]), (sweep.space[name] || {}).log));
  const scored = ended.filter((trial) => trial.value !== null);
  const low = Math.min(...scored.map((t) => t.value)), high = Math.max(...scored.map((t) => t.value));
  const goal = { name: sweep.metric, jitter: 0, at: (value) => value === null ? 0 : 0.08 + 0.92 * (value - low) / (high - low || 1), ticks: scored.length ? [[0.08, number(low, 3)], [1, number(high, 3)], [0, ""]] : [] };
  axes.push({ ...goal, ticks: ended.length > scored.length ? [...goal.ticks.slice(0, 2), [0, "failed"]] : goal.ticks.slice(0, 2) });
  return drawParallel(ended, axes, low, high);
}

function curve(points) {
  let path = `M${points[0][0].toFixed(1)},${points[0][1].toFixed(1)}`;
  for (let place = 1; place < points.length; place += 1) {
    const [[a, b], [c, d]] = [points[place - 1], points[place]], middle = (a + c) / 2;
    path += `C${middle.toFixed(1)},${b.toFixed(1)} ${middle.toFixed(1)},${d.toFixed(1)} ${c.toFixed(1)},${d.toFixed(1)}`;
  }
  return path;
}

function drawParallel(ended, axes, low, high) {
  const trials = [...ended].sort((a, b) => (a.value ?? -Infinity) - (b.value ?? -Infinity)); // the best on top
  const faint = Math.min(0.8, Math.max(0.08, 5 / Math.sqrt(trials.length) / 2));
  const wide = Math.max(700, axes.length * 130), tall = 350, top = 44, foot = tall - 16;
  const x = (place) => 60 + (place * (wide - 130)) / (axes.length - 1);
  const y = (share) => foot - share * (foot - top);
  const brushes = {};
  const hint = h("div.hint", {}, "Drag along an axis to keep the trials that pass there; click it to let go.");
  const shareOf = (trial, place) => {
    const axis = axes[place], last = place === axes.length - 1;
    const value = last ? trial.value : trial.params[axis.name];
    const noise = ((trial.number * 0.618034) % 1) - 0.5;
    return axis.at(value) + axis.jitter * noise;
  };
  const paths = trials.map((trial) => {
    const points = axes.map((_, place) => [x(place), y(shareOf(trial, place))]);
    const share = trial.value === null ? null : (trial.value - low) / (high - low || 1);
    const path = s("path", { d: curve(points) });
    path.style.stroke = share === null ? "var(--bad)" : `color-mix(in oklab, var(--accent) ${Math.round(100 * share)}%, var(--s4))`;
    path.style.strokeOpacity = share === null ? 0.9 : faint + (1 - faint) * share ** 6;
    path.addEventListener("pointerenter", () => { path.classList.add("on"); hint.textContent = `Trial ${trial.number}: ${Object.entries(trial.params).map(([k, v]) => `${k} ${valueText(v)}`).join(", ")} → ${trial.value === null ? (trial.cause || trial.state) : number(trial.value)}`; });
    path.addEventListener("pointerleave", () => path.classList.remove("on"));
    return path;
  });
  const filter = () => trials.forEach((trial, nth) => paths[nth].classList.toggle("off", Object.entries(brushes).some(([place, [a, b]]) => { const v = shareOf(trial, Number(place)); return v < a || v > b; })));
  const svg = s("svg", { viewBox: `0 0 ${wide} ${tall}` }, ...paths, ...axes.flatMap((axis, place) => [
    s("line", { x1: x(place), x2: x(place), y1: top, y2: foot }),
    ...axis.name.split(",").map((part, nth) => Object.assign(s("text", { x: x(place), y: 14 + 14 * nth, "text-anchor": "middle" }), { textContent: part })),
    ...axis.ticks.map(([share, text]) => Object.assign(s("text", { class: "tick", x: x(place) + 7, y: y(share) + 4 }), { textContent: text })),
    ...brushFor(place),
  ]));
  function brushFor(place) {
    const shown = s("rect", { class: "brush", x: x(place) - 9, width: 18, y: 0, height: 0 });
    const hit = s("rect", { class: "axis", x: x(place) - 12, width: 24, y: top - 6, height: foot - top + 12 });
    const share = (event) => { const box = svg.getBoundingClientRect(); return (foot - ((event.clientY - box.top) * tall) / box.height) / (foot - top); };
    let start = null;
    hit.addEventListener("pointerdown", (event) => { start = share(event); hit.setPointerCapture(event.pointerId); });
    hit.addEventListener("pointermove", (event) => {
      if (start === null) return;
      const [a, b] = [start, share(event)].sort((m, n) => m - n);
      brushes[place] = [a, b];
      shown.setAttribute("y", y(b)); shown.setAttribute("height", Math.max(0, y(a) - y(b))); filter();
    });
    hit.addEventListener("pointerup", (event) => {
      if (start !== null && Math.abs(share(event) - start) < 0.015) { delete brushes[place]; shown.setAttribute("height", 0); filter(); }
      start = null;
    });
    return [shown, hit];
  }
  return h("div.card.parallel", {}, h("div.scroll", {}, h("div", { style: { "min-width": `${Math.min(wide, 640)}px` } }, svg)), hint);
}
