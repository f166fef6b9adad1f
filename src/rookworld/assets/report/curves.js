/* Charts by uPlot: one a panel, zoomed together, with the guard's events and the limits drawn in. */

function curvesOf() {
  const panels = [...evalPanels(), ...data.panels.map((panel) => ({ ...panel, key: panel.title }))];
  if (!data.runs.some((run) => run.x.length || run.evals.steps.length)) return null;
  const every = Math.max(...data.runs.map((run) => run.every));
  const thinned = every > 1 ? ` Each point is the mean of ${every} steps.` : "";
  const out = h("output", {}, String(ui.window));
  const slider = h("input", { type: "range", min: 1, max: 100, value: ui.window, "aria-label": "steps averaged", oninput: (event) => { ui.window = Number(event.target.value); out.textContent = String(ui.window); refreshCharts(); } });
  const raw = h("input", { type: "checkbox", onchange: (event) => { ui.raw = event.target.checked; refreshCharts(); } });
  raw.checked = ui.raw;
  const tools = h("div.tools", {}, h("label", {}, "mean of ", slider, " ", out, " steps"), h("label", {}, raw, " single steps"), h("button.button", { onclick: resetZoom }, "Whole run"));
  const moving = panels.filter((panel) => !isFlat(panel)), flat = panels.filter(isFlat);
  const grid = h("div.charts", {}, moving.map(chartCard));
  return section("curves", "Curves", `Drag to zoom; all charts follow. Coloured lines mark what the guard did.${thinned}`, h("div", { style: { margin: "-6px 0 16px" } }, tools), grid, flat.length ? flatCharts(flat) : null);
}

/* What never changed needs no picture, but can be looked at. */
function isFlat(panel) {
  if (panel.evals) return false;
  const series = data.runs.flatMap((run) => panel.metrics.map((name) => run.series[name]).filter(Boolean));
  return series.every((values) => { const known = values.filter((v) => v !== null); return known.every((v) => v === known[0]); });
}

function flatCharts(panels) {
  const grid = h("div.charts", { style: { "margin-top": "14px" } }, panels.map(chartCard));
  const own = charts.slice(-panels.length);
  const redraw = (event) => { if (event.target.open) own.forEach((chart) => chart.rebuild()); };
  return h("details.flat", { ontoggle: redraw }, h("summary", {}, `Did not change: ${panels.map((panel) => panel.title.toLowerCase()).join(", ")}`), grid);
}

function evalPanels() {
  const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.evals.curves)))];
  if (!names.length || !data.runs.some((run) => run.evals.steps.length > 1)) return [];
  return [{ key: "held-out", title: "Held-out", metrics: names, evals: true, wide: true, help: "Measured on rows never trained on, with 95 % intervals." }];
}

function choices(panel) {
  if (panel.evals) {
    const rewards = panel.metrics.filter((name) => name.startsWith("reward/"));
    const all = panel.metrics.map((name) => ({ text: label(name), metrics: [name] }));
    return rewards.length > 1 && data.runs.length === 1 ? [{ text: "Reward", metrics: rewards }, ...all] : all;
  }
  if (data.runs.length === 1) return [{ text: "", metrics: panel.metrics }];
  return panel.metrics.map((name) => ({ text: label(name), metrics: [name] }));
}

function chartCard(panel) {
  const options = choices(panel);
  const chosen = Math.min(ui.metric[panel.key] || 0, options.length - 1);
  const at = h("span.at");
  const plot = h("div"), legend = h("div.legend");
  const pick = options.length > 1
    ? h("select", { "aria-label": `metric of ${panel.title}`, onchange: (event) => { ui.metric[panel.key] = event.target.selectedIndex; chart.rebuild(); } }, options.map((one, place) => h("option", { selected: place === chosen }, one.text)))
    : null;
  const card = h(panel.wide ? "div.card.chart.wide" : "div.card.chart", {},
    h("div.top", {}, h("h3", {}, panel.title), pick || at),
    h("p.help", {}, panel.help, pick ? [" ", at] : null), plot, legend);
  const chart = new Chart(panel, plot, legend, at);
  charts.push(chart);
  return card;
}

class Chart {
  constructor(panel, plot, legend, at) {
    Object.assign(this, { panel, plot, legend, at, u: null });
  }

  lines() {
    const options = choices(this.panel);
    const option = options[Math.min(ui.metric[this.panel.key] || 0, options.length - 1)];
    const found = [];
    data.runs.forEach((run, place) => option.metrics.forEach((metric, nth) => {
      const source = this.panel.evals ? run.evals.curves[metric] : run.series[metric];
      if (!source) return;
      const many = data.runs.length > 1;
      const part = metric.split("/")[2];
      found.push({ run, metric, name: many ? run.name : part && !this.panel.evals ? part : label(metric), tint: colour(many ? place : nth), x: this.panel.evals ? run.evals.steps : run.x, source });
    }));
    return found;
  }

  smooths() { return ui.window > 1 && this.panel.smooth !== false && !this.panel.evals; }

  table(lines) {
    const smooth = this.smooths();
    const tables = lines.map((line) => {
      const raw = this.panel.evals ? line.source.value : line.source;
      if (!smooth) return [line.x, raw];
      const soft = averaged(raw, Math.max(1, Math.round(ui.window / line.run.every)));
      return [line.x, soft, raw];
    });
    const joined = tables.length ? uPlot.join(tables) : [[]];
    return { data: joined, smooth };
  }

  rebuild() {
    if (this.u) this.u.destroy();
    const lines = this.lines();
    const { data: table, smooth } = this.table(lines);
    this.current = lines;
    this.smooth = smooth;
    const series = [{}];
    for (const line of lines) {
      const show = !(ui.hidden[this.panel.key] || {})[line.name];
      series.push({ stroke: () => css(line.tint), width: 2, show, spanGaps: true, points: { show: Boolean(this.panel.evals), size: 6, fill: () => css(line.tint) } });
      if (smooth) series.push({ stroke: () => css(line.tint) + "59", width: 1, show: show && ui.raw, spanGaps: true, points: { show: false } });
    }
    const axis = { stroke: () => css("--faint"), grid: { stroke: () => css("--grid"), width: 1 }, ticks: { show: false }, font: "11.5px system-ui, sans-serif" };
    const options = {
      width: Math.max(200, this.plot.clientWidth || 340), height: 200, series,
      legend: { show: false }, padding: [10, 12, 0, 0],
      cursor: { sync: { key: "steps", setSeries: false, scales: ["x", null] }, points: { size: 6 }, drag: { x: true, y: false, setScale: true } },
      scales: { x: { time: false, range: (u, low, high) => this.span(low, high) }, y: { distr: this.panel.log ? 3 : 1, range: this.panel.log ? undefined : (u, low, high) => this.range(low, high) } },
      axes: [{ ...axis, size: 26, space: 55, label: "step", labelSize: 18, labelGap: 0, labelFont: axis.font, values: (u, ticks) => ticks.map((t) => Number.isInteger(t) ? t.toLocaleString("en") : "") }, { ...axis, size: 52, space: 34, values: (u, ticks) => ticks.map((t) => t === null ? "" : number(t, 3)) }],
      hooks: { draw: [(u) => this.decorate(u)], setCursor: [(u) => this.follow(u)], setScale: [(u, key) => key === "x" && this.zoomed(u)] },
    };
    this.u = new uPlot(options, table, this.plot);
    if (ui.zoom) this.applyZoom();
    this.writeLegend();
  }

  refresh() {
    const lines = this.lines();
    if (!this.u || lines.length !== this.current.length || this.smooths() !== this.smooth) return this.rebuild();
    this.current = lines;
    this.u.setData(this.table(lines).data, true);
    if (ui.zoom) this.applyZoom();
    lines.forEach((line, place) => {
      const show = !(ui.hidden[this.panel.key] || {})[line.name];
      const at = this.smooth ? 1 + 2 * place : 1 + place;
      if (this.u.series[at].show !== show) this.u.setSeries(at, { show });
      if (this.smooth && this.u.series[at + 1].show !== (show && ui.raw)) this.u.setSeries(at + 1, { show: show && ui.raw });
    });
    this.writeLegend();
  }

  span(low, high) {
    if (low === null || low === undefined) return [0, 1];
    return low === high ? [low - 1, high + 1] : [low, high];
  }

  limits() {
    const run = data.runs[0];
    return this.panel.evals ? [] : (run.limits[this.panel.title] || []);
  }

  range(low, high) {
    if (low === null || low === undefined) return [0, 1];
    for (const line of this.panel.evals ? this.current : []) {
      if ((ui.hidden[this.panel.key] || {})[line.name]) continue;
      low = Math.min(low, ...line.source.low.filter((v) => v !== null));
      high = Math.max(high, ...line.source.high.filter((v) => v !== null));
    }
    for (const [, value] of this.limits()) if (value > low && value < 2 * high) high = Math.max(high, value);
    if (high - low < 1e-12) { const pad = Math.abs(high) * 0.1 || 1; return [low - pad, high + pad]; }
    const pad = 0.06 * (high - low);
    return [low >= 0 && low < 0.25 * (high - low) ? 0 : low - pad, high + pad];
  }

  zoomed(u) {
    if (!u.data[0] || !u.data[0].length) return;
    const { min, max } = u.scales.x;
    const all = u.data[0];
    const whole = min <= all[0] && max >= all[all.length - 1];
    const next = whole ? null : [min, max];
    if (JSON.stringify(next) === JSON.stringify(ui.zoom)) return;
    ui.zoom = next;
    setTimeout(() => charts.forEach((one) => one !== this && one.applyZoom()), 0);
  }

  applyZoom() {
    if (!this.u || !this.u.data[0] || !this.u.data[0].length) return;
    const all = this.u.data[0];
    const [min, max] = ui.zoom || this.span(all[0], all[all.length - 1]);
    this.u.setScale("x", { min, max });
  }

  decorate(u) {
    const { ctx, bbox } = u, ratio = window.devicePixelRatio || 1;
    ctx.save();
    ctx.beginPath(); ctx.rect(bbox.left, bbox.top - 8 * ratio, bbox.width, bbox.height + 8 * ratio); ctx.clip();
    for (const [text, value] of this.limits()) this.limitLine(u, ctx, ratio, text, value);
    if (this.panel.evals) this.whiskers(u, ctx, ratio);
    data.runs.forEach((run) => run.events.forEach((event) => {
      const x = u.valToPos(event.step, "x", true);
      ctx.strokeStyle = ctx.fillStyle = css(KIND_COLOURS[event.kind] || "--s7");
      ctx.globalAlpha = event.kind === "warning" ? 0.5 : 0.85;
      ctx.lineWidth = 1.25 * ratio; ctx.setLineDash(event.kind === "warning" ? [2 * ratio, 3 * ratio] : []);
      ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
      ctx.setLineDash([]); ctx.beginPath();
      ctx.moveTo(x - 4 * ratio, bbox.top - 6 * ratio); ctx.lineTo(x + 4 * ratio, bbox.top - 6 * ratio); ctx.lineTo(x, bbox.top); ctx.fill();
    }));
    ctx.restore();
  }

  limitLine(u, ctx, ratio, text, value) {
    const { min, max } = u.scales.y;
    if (value < min || value > max) return;
    const { bbox } = u, y = u.valToPos(value, "y", true);
    ctx.globalAlpha = 0.7; ctx.strokeStyle = ctx.fillStyle = css("--bad"); ctx.lineWidth = ratio; ctx.setLineDash([5 * ratio, 4 * ratio]);
    ctx.beginPath(); ctx.moveTo(bbox.left, y); ctx.lineTo(bbox.left + bbox.width, y); ctx.stroke(); ctx.setLineDash([]);
    ctx.font = `${10.5 * ratio}px system-ui, sans-serif`; ctx.textAlign = "right"; ctx.textBaseline = "bottom";
    ctx.fillText(text, bbox.left + bbox.width - 4 * ratio, y - 2 * ratio); ctx.globalAlpha = 1;
  }

  whiskers(u, ctx, ratio) {
    this.current.forEach((line, place) => {
      if (!u.series[place + 1].show) return;
      ctx.strokeStyle = css(line.tint); ctx.globalAlpha = 0.55; ctx.lineWidth = 1.5 * ratio;
      line.x.forEach((step, nth) => {
        if (line.source.low[nth] === null) return;
        const x = u.valToPos(step, "x", true);
        ctx.beginPath(); ctx.moveTo(x, u.valToPos(line.source.low[nth], "y", true)); ctx.lineTo(x, u.valToPos(line.source.high[nth], "y", true)); ctx.stroke();
      });
      ctx.globalAlpha = 1;
    });
  }

  follow(u) {
    const place = u.cursor.idx;
    const known = place !== null && place !== undefined;
    this.at.textContent = known ? this.told(u, place) : "";
    this.values.forEach((node, nth) => {
      const series = u.data[this.smooth ? 1 + 2 * nth : 1 + nth];
      node.textContent = known && series ? number(series[place], 3) : this.latest(u, nth);
    });
  }

  told(u, place) {
    const step = u.data[0][place], near = 6;
    for (const run of data.runs) for (const event of run.events) {
      const hit = Math.abs(u.valToPos(event.step, "x") - u.cursor.left) <= near;
      if (hit) return `${event.step}: ${event.kind.replace("_", " ")} (${event.cause.replace(/_/g, " ")})`;
    }
    return `step ${step}`;
  }

  latest(u, nth) {
    const series = u.data[this.smooth ? 1 + 2 * nth : 1 + nth] || [];
    for (let place = series.length - 1; place >= 0; place -= 1) if (series[place] !== null && series[place] !== undefined) return number(series[place], 3);
    return "";
  }

  writeLegend() {
    this.values = [];
    this.legend.replaceChildren(...this.current.map((line, nth) => {
      const value = h("span.now", {}, this.latest(this.u, nth));
      this.values.push(value);
      const hidden = ui.hidden[this.panel.key] || {};
      return h(hidden[line.name] ? "button.off" : "button", { style: { "--swatch": `var(${line.tint})` }, title: line.metric, "aria-pressed": !hidden[line.name], onclick: () => { ui.hidden[this.panel.key] = { ...hidden, [line.name]: !hidden[line.name] }; this.refresh(); } }, line.name, value);
    }));
  }
}

function refreshCharts() { charts.forEach((chart) => chart.refresh()); }
function resetZoom() { ui.zoom = null; charts.forEach((chart) => chart.applyZoom()); }
