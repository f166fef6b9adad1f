/* The rounds of an evolution: what each changed on the held-out rows, and whether it was kept. */

const times = (count, name) => `${count} ${name}${count === 1 ? "" : "s"}`;
const counted = (value) => value === null ? "–" : value.toLocaleString("en");

function roundsProgress(one) {
  const kept = one.rounds.filter((round) => round.kept).length;
  const over = one.planned ? `${one.rounds.length} of ${times(one.planned, "round")}` : times(one.rounds.length, "round");
  return `${over} played, ${kept} kept`;
}

function roundsOf() {
  if (data.sweep || !data.evolutions.length) return null;
  const text = "Both models answer the same held-out rows; the difference is taken row by row, with its 95 % interval. A round is kept only if the whole interval is above 0; else the model before it goes on.";
  return section("rounds", "Rounds", text, data.evolutions.map((one, nth) => h("div.card.scroll.rounds", { style: { "margin-top": nth ? "16px" : "0" } },
    h("div.top", {}, h("h3", {}, data.evolutions.length > 1 ? `${one.name}: ${roundsProgress(one)}` : roundsProgress(one), h("span.faint", {}, roundMetrics(one).map((name) => ` · ${label(name)}`))), roundsLegend(one)),
    one.rounds.length ? roundsTable(one) : h("p.faint", {}, "No round is over yet."))));
}

const roundMetrics = (one) => [...new Set(one.rounds.map((round) => round.metric))];

function roundsLegend(one) {
  const marks = [["kept", "kept"], ["unclear", "refused: no clear difference"], ["worse", "refused: worse"]];
  const there = new Set(one.rounds.filter((round) => round.change).map(outcomeOf));
  return h("div.marks", {}, marks.filter(([kind]) => there.has(kind)).map(([kind, text]) => h(`span.mark.${kind}`, {}, text)));
}

const outcomeOf = (round) => round.kept ? "kept" : round.change && round.change.high < 0 ? "worse" : "unclear";

function roundsTable(one) {
  const metrics = roundMetrics(one);
  const axes = Object.fromEntries(metrics.map((name) => [name, differenceAxis(one.rounds.filter((round) => round.metric === name))]));
  const heads = ["Round", "Before → after", "Difference", "95 % interval", "Outcome", "Rows made", "Games"];
  return h("table", {},
    h("thead", {}, h("tr", {}, heads.map((text, place) => h([1, 2, 6].includes(place) ? "th.number" : place === 3 ? "th.plot" : "th", {}, text)))),
    h("tbody", {}, one.rounds.map((round) => roundRow(round, axes[round.metric], metrics.length > 1))),
    metrics.length === 1 && axes[metrics[0]] ? h("tfoot", {}, h("tr", {}, h("td", { colspan: 3 }), h("td.plot", {}, roundsScale(metrics[0], axes[metrics[0]])), h("td", { colspan: 3 }))) : null);
}

function differenceAxis(rounds) {
  const found = rounds.map((round) => round.change).filter(Boolean);
  if (!found.length) return null;
  const low = Math.min(0, ...found.map((one) => one.low)), high = Math.max(0, ...found.map((one) => one.high));
  const wide = high - low || 1;
  return { low, high, x: (value) => `${4 + (92 * (value - low)) / wide}%` };
}

function roundRow(round, axis, many) {
  const outcome = outcomeOf(round), name = round.metric;
  const rows = Object.entries(round.rows).map(([kind, count]) => h("div", {}, `${counted(count)} ${kind}`));
  const before = estimate(name, round.before), after = round.after === null ? "" : ` → ${estimate(name, round.after)}`;
  return h("tr", {},
    h("td.round", {}, h("div", {}, round.number === null ? "–" : h("b", {}, round.number)), h("div.faint", {}, round.from === null ? "from the start" : `from round ${round.from}`)),
    h("td.number.values", {}, many ? h("div.faint", {}, label(name)) : null, before + after),
    h("td.number.delta", {}, round.change ? [h(`span.change.${outcome}`, {}, difference(name, round.change.difference)), h("span.interval", {}, `${difference(name, round.change.low)} … ${difference(name, round.change.high)}`)] : "–"),
    h("td.plot", {}, axis ? roundPlot(round, axis, outcome) : null),
    h("td.outcome", {}, h("div", {}, h(`b.${outcome}`, {}, round.kept ? "kept" : "refused")), h("div.faint", {}, round.why)),
    h("td.made", {}, rows.length ? rows : "no rows"),
    h("td.number.games", {}, h("div", {}, counted(round.games)), round.won === null ? null : h("div.faint", {}, `${counted(round.won)} won`)));
}

function roundPlot(round, axis, outcome) {
  const zero = s("line", { class: "zero", x1: axis.x(0), x2: axis.x(0), y1: 0, y2: "100%" });
  const marks = round.change ? whisker({ ...round.change, value: round.change.difference }, axis.x, "50%", `var(--${outcome === "kept" ? "good" : outcome === "worse" ? "bad" : "faint"})`, round.kept) : [];
  return s("svg", { class: "forest", height: 56, "aria-hidden": "true" }, zero, ...marks);
}

function roundsScale(name, axis) {
  const wide = axis.high - axis.low || 1;
  const ticks = [axis.low, 0, axis.high].filter((value) => value === 0 || Math.abs(value) > wide / 5);
  const text = (value) => Object.assign(s("text", { x: axis.x(value), y: 13, "text-anchor": value === axis.high && value > 0 ? "end" : value === axis.low && value < 0 ? "start" : "middle" }), { textContent: value === 0 ? "0" : difference(name, value) });
  return s("svg", { class: "forest", height: 18, "aria-hidden": "true" }, ...ticks.map(text));
}
