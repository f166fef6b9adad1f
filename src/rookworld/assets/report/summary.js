/* The head of the page, its notices, tiles or comparison, and the table of before and after. */

function topOf() {
  const rounds = !data.sweep && data.evolutions.length > 0;
  const one = data.runs.length === 1 && !data.sweep && !rounds ? data.runs[0] : null;
  const title = data.sweep ? data.sweep.name : (rounds ? data.evolutions : data.runs).map((r) => r.name).join(" · ");
  const facts = one
    ? [h(`span.state.${one.state}`, {}, one.state), h("span", {}, progress(one)), one.hours > 0 && h("span", {}, duration(one.hours)), one.config.model && h("span", {}, `model ${one.config.model}`)]
    : [h("span", {}, data.sweep ? `${data.sweep.planned} trials, curves of the best ${data.runs.length}` : rounds ? data.evolutions.map(roundsProgress).join("; ") : `${data.runs.length} runs`)];
  return h("header", {},
    h("div", {},
      h("p.kicker", {}, data.sweep ? "RookWorld sweep" : rounds ? "RookWorld evolution" : data.runs.length > 1 ? "RookWorld comparison" : "RookWorld training run"),
      h("h1", {}, title || "No run"),
      h("div.subtitle", {}, facts)),
    h("button.button", { onclick: toggleTheme, "aria-label": "light or dark" }, "Light / dark"));
}

const progress = (run) => run.planned ? `${run.steps} of ${run.planned} steps` : `${run.steps} steps`;

function noticesOf() {
  const lines = data.notes.map((text) => h("p.notice", {}, text));
  for (const run of data.runs) {
    const name = data.runs.length > 1 ? [h("b", {}, run.name), " "] : [];
    lines.push(...run.warnings.map((text) => h("p.notice.warning", {}, name.map((n) => n.cloneNode ? n.cloneNode(true) : n), text)));
    lines.push(...run.notes.map((text) => h("p.notice", {}, name.map((n) => n.cloneNode ? n.cloneNode(true) : n), text)));
  }
  return h("div", { id: "notices", style: { "padding-top": lines.length ? "12px" : "0" } }, lines);
}

function summaryOf() {
  if (data.runs.length !== 1) return h("div", { id: "summary" }, data.runs.length ? comparison() : null);
  const run = data.runs[0];
  const wanted = [run.headline, "P/best", "P/legal", "A/exact", "mate1/accuracy"];
  const rows = wanted.map((name) => run.held_out.find((row) => row.name === name)).filter(Boolean).slice(0, 4);
  return h("div", { id: "summary" },
    run.start ? h("p.verdict.faint", {}, run.start) : null,
    run.verdict ? h("p.verdict", {}, verdictText(run.verdict)) : null,
    run.match ? h("p.verdict", {}, run.match) : null,
    rows.length ? h("div.tiles", {}, rows.map(tile)) : null,
    Object.keys(run.facts).length ? h("dl.facts", {}, Object.entries(run.facts).map(([k, v]) => h("div", {}, h("dt", {}, k), h("dd", {}, v)))) : null);
}

const TONES = { Better: "good", Worse: "bad", "Not measurably changed": "faint" };

function verdictText(text) {
  return text.split(/(Better|Worse|Not measurably changed)(?=: )/).map((part) => TONES[part] ? h(`b.${TONES[part]}`, {}, part) : part);
}

function tile(row) {
  const last = row.after || row.before;
  const from = row.after
    ? ["from ", estimate(row.name, row.before.value), " ", changeOf(row)]
    : [`n = ${row.before.n}`];
  return h("div.card.tile", {},
    h("div.label", {}, label(row.name)),
    h("div.value", {}, estimate(row.name, last.value)),
    h("div.from", {}, from));
}

function changeOf(row) {
  const change = row.change.difference;
  const better = data.metrics[row.name].lower ? change < 0 : change > 0;
  const tone = !row.change.clear ? "quiet" : better ? "good" : "bad";
  return h(`span.change.${tone}`, {}, difference(row.name, change));
}

function changeBounds(row) {
  if (!row.change || row.change.low === undefined) return null;
  return h("span.interval", {}, `${difference(row.name, row.change.low)} … ${difference(row.name, row.change.high)}`);
}

function comparison() {
  const body = data.runs.map((run, place) => {
    const row = run.held_out.find((one) => one.name === run.headline);
    return h("tr", {},
      h("td", {}, h("span.swatch", { style: { "--swatch": `var(${colour(place)})` } }), run.name),
      h("td", {}, h(`span.state.${run.state}`, {}, run.state)),
      h("td.number", {}, progress(run)),
      h("td.number", {}, row ? estimate(row.name, row.before.value) : "–"),
      h("td.number", {}, row && row.after ? estimate(row.name, row.after.value) : "–"),
      h("td.number", {}, row && row.after ? changeOf(row) : ""),
      h("td.number", {}, run.events.length),
      h("td.number", {}, duration(run.hours)));
  });
  const heads = ["Run", "State", "Steps", "Held-out before", "after", "change", "Guard", "Time"];
  return h("div.card.scroll", { style: { "margin-top": "26px" } }, h("table", {},
    h("thead", {}, h("tr", {}, heads.map((text, place) => h(place > 1 ? "th.number" : "th", {}, text)))),
    h("tbody", {}, body)));
}

/* --- before and after --- */

function heldOutOf() {
  const names = [...new Set(data.runs.flatMap((run) => run.held_out.map((row) => row.name)))];
  if (!names.length) return null;
  const main = names.filter((name) => !/by_kind|_opening|_middlegame|_endgame/.test(name));
  const rest = names.filter((name) => !main.includes(name));
  const paired = data.runs.every((run) => run.paired || run.held_out.every((row) => !row.after));
  const text = paired
    ? "The same held-out rows before and after, with 95 % intervals. The difference is taken row by row; in colour where its interval leaves 0 out."
    : "The same held-out rows before and after, with 95 % intervals. Differences were not kept row by row; in colour where the two intervals do not meet.";
  return section("held-out", "Before and after", text,
    h("div.card.scroll", {}, heldOutTable(main),
      rest.length ? h("details", {}, h("summary", {}, `${rest.length} more: by kind of move and phase of the game`), heldOutTable(rest)) : null));
}

function heldOutTable(names) {
  return h("table.held-out", {},
    h("thead", {}, h("tr", {}, ["Metric", "Before", "After", "Change", "", "n"].map((text, place) => h([1, 2, 3, 5].includes(place) ? "th.number" : "th", {}, text)))),
    h("tbody", {}, names.map(heldOutRow)));
}

function heldOutRow(name) {
  const found = data.runs.map((run, place) => ({ place, row: run.held_out.find((one) => one.name === name) })).filter((one) => one.row);
  const many = data.runs.length > 1;
  const swatch = (place) => many ? h("span.swatch", { style: { "--swatch": `var(${colour(place)})` } }) : null;
  const cell = (key) => found.map(({ place, row }) => h("div", {}, key === "after" ? swatch(place) : null, estimate(name, row[key] && row[key].value), row[key] ? h("span.interval", {}, bounds(name, row[key])) : null));
  return h("tr", {},
    h("td.metric", {}, h("div", {}, label(name)), h("div.metric-name", {}, name)),
    h("td.number.before", {}, cell("before")),
    h("td.number.after", {}, cell("after")),
    h("td.number.delta", {}, found.map(({ row }) => h("div", {}, row.after ? [changeOf(row), changeBounds(row)] : ""))),
    h("td.plot", {}, forest(found)),
    h("td.number.n.faint", {}, found[0].row.before.n));
}

const bounds = (name, one) => {
  const shown = (v) => minus(isShare(name) ? (100 * v).toFixed(1) : v.toFixed(3));
  return `${shown(one.low)} – ${shown(one.high)}`;
};

function forest(found) {
  const all = found.flatMap(({ row }) => [row.before, row.after].filter(Boolean));
  let low = Math.min(...all.map((one) => one.low)), high = Math.max(...all.map((one) => one.high));
  if (high - low < 1e-9) { low -= 0.5; high += 0.5; }
  const x = (value) => `${3 + (94 * (value - low)) / (high - low)}%`;
  const height = found.length * 22 + 2;
  const marks = found.flatMap(({ place, row }, line) => [
    ...whisker(row.before, x, line * 22 + 7, "var(--faint)", false),
    ...(row.after ? whisker(row.after, x, line * 22 + 16, data.runs.length > 1 ? `var(${colour(place)})` : "var(--accent)", true) : []),
  ]);
  return s("svg", { class: "forest", height, "aria-hidden": "true" }, ...marks);
}

function whisker(one, x, y, stroke, filled) {
  return [
    s("line", { x1: x(one.low), x2: x(one.high), y1: y, y2: y, stroke, "stroke-width": 1.5, "stroke-linecap": "round" }),
    s("circle", { cx: x(one.value), cy: y, r: 3.4, fill: filled ? stroke : "var(--card)", stroke, "stroke-width": 1.5 }),
  ];
}
