/* What a run did and said: guard events, sampled positions, settings. */

function eventsOf() {
  const rows = data.runs.flatMap((run, place) => run.events.map((event) => ({ run, place, event }))).sort((a, b) => a.event.step - b.event.step);
  if (!rows.length) return null;
  const many = data.runs.length > 1;
  return section("events", "Guard", "What the guard saw and did, step by step.", h("div.card.scroll", {}, h("table", {},
    h("thead", {}, h("tr", {}, h("th.number", {}, "Step"), many ? h("th", {}, "Run") : null, h("th", {}, "Did"), h("th", {}, "Why"))),
    h("tbody", {}, rows.slice(0, 200).map(({ run, place, event }) => h("tr", {},
      h("td.number", {}, event.step),
      many ? h("td", {}, h("span.swatch", { style: { "--swatch": `var(${colour(place)})` } }), run.name) : null,
      h("td", {}, h(`span.kind.${event.kind.replace(/\W/g, "")}`, {}, event.kind.replace("_", " "))),
      h("td", {}, event.message || event.cause)))))));
}

/* --- positions --- */

function positionsOf() {
  const runs = data.runs.map((run, place) => ({ run, place })).filter(({ run }) => run.gallery.length);
  if (!runs.length) return null;
  if (!runs.some(({ place }) => place === ui.run)) ui.run = runs[0].place;
  const host = h("div");
  const draw = () => host.replaceChildren(...galleryOf(data.runs[ui.run], runs, draw));
  draw();
  return section("positions", "Positions", "What the model answered while it trained, beside the truth. Evaluations are in pawns, as the side to move sees them. Bars: the parts of this answer's reward; the thin mark is the average of that step.", host);
}

function galleryOf(run, runs, draw) {
  const steps = [...new Set(run.gallery.map((card) => card.step))];
  const chip = (text, on, act) => h("button.chip", { "aria-pressed": on, onclick: () => { act(); draw(); } }, text);
  const tasks = new Map(run.gallery.map((card) => [card.task, card.title]));
  const bars = [
    runs.length > 1 ? h("div.chips", {}, runs.map(({ run: one, place }) => chip(one.name, place === ui.run, () => { ui.run = place; }))) : null,
    h("div.chips", {}, steps.length > 1 ? chip("First and last", ui.step === "ends", () => { ui.step = "ends"; }) : null,
      steps.map((step) => chip(`Step ${step}`, ui.step === step, () => { ui.step = step; })),
      tasks.size > 1 ? [h("span", { style: { width: "10px" } }), ...tasks].map((one) => Array.isArray(one) ? chip(one[1], ui.task === one[0], () => { ui.task = ui.task === one[0] ? "" : one[0]; }) : one) : null),
  ].filter(Boolean);
  const wanted = ui.step === "ends" || !steps.includes(ui.step) ? [steps[0], steps[steps.length - 1]] : [ui.step];
  const cards = run.gallery.filter((card) => wanted.includes(card.step) && (!ui.task || card.task === ui.task));
  return [heatOf(run), h("div", { style: { display: "grid", gap: "8px", margin: "0 0 16px" } }, bars), h("div.cards", {}, cards.map((card) => positionCard(run, card)))].filter(Boolean);
}

function heatOf(run) {
  const tables = Object.entries(run.parts).filter(([, one]) => one.steps.length > 1).map(([task, one]) => {
    const keep = spread(one.steps.length, 7);
    return h("div", {}, h("h3", { style: { "margin-bottom": "6px" } }, `${one.title} (${task}), sampled answers`), h("table", {},
      h("thead", {}, h("tr", {}, h("th", {}, "step"), keep.map((place) => h("th", {}, one.steps[place])))),
      h("tbody", {}, Object.entries(one.parts).map(([part, values]) => h("tr", {}, h("td", {}, part), keep.map((place) => h("td", {}, values[place] === null ? "" : h("span", { style: { "--v": Math.max(0, Math.min(1, values[place])) } }, values[place].toFixed(2)))))))));
  });
  return tables.length ? h("div.card.heat", {}, tables) : null;
}

function spread(count, most) {
  if (count <= most) return [...Array(count).keys()];
  return [...Array(most).keys()].map((place) => Math.round((place * (count - 1)) / (most - 1)));
}

function positionCard(run, card) {
  const key = `${run.name} ${card.step} ${card.fen} ${card.task}`;
  const card_ = h("article.card.position");
  const draw = () => {
    const chosen = ui.answer[key] ?? Math.floor((card.answers.length - 1) / 2);
    const answer = card.answers[chosen];
    card_.replaceChildren(
      h("div.title", {}, h("h3", {}, card.caption), h("span.faint", {}, `${card.title.toLowerCase()} · step ${card.step}`)),
      h("div.boards", {}, boardFigure(card, answer, "Model", "#2f6bd8"), boardFigure(card, card.truth, card.truth_title, "#2b9a5b")),
      h("div.answers", {}, h("span", {}, `${card.answers.length} answers, by reward`), card.answers.map((one, place) => h("button.answer", { "aria-pressed": place === chosen, onclick: () => { ui.answer[key] = place; draw(); } }, one.reward === null ? "–" : minus(one.reward.toFixed(2))))),
      answer ? verdictOf(run, card, answer) : "");
  };
  draw();
  return card_;
}

function boardFigure(card, shown, title, dot, note) {
  const board = h("div.board");
  if (shown && shown.board !== null && shown.board !== undefined) {
    board.innerHTML = card.boards[shown.board];
    if (shown.arrows) board.firstChild.insertAdjacentHTML("beforeend", shown.arrows);
  } else board.append(h("div.none", {}, "no board can be read from this answer"));
  const lines = shown ? shown.lines : [];
  return h("figure", {}, h("figcaption", { style: { "--dot": dot } }, title), board,
    lines.length ? h("ul.lines", {}, lines.map((line) => h("li", {}, h(`span${line.chosen ? ".chosen" : ""}${line.legal ? "" : ".illegal"}${line.known ? ".known" : ""}`, {}, line.move), " ", h("span.score", {}, line.score)))) : null,
    note && !lines.length ? h("p.note", {}, note) : null);
}

function verdictOf(run, card, answer) {
  const place = run.x.findIndex((step) => step >= card.step);
  const mean = (part) => { const series = run.series[`reward/${card.task}/${part}`]; return series && place >= 0 ? series[place] : null; };
  const wide = (value) => `${100 * Math.max(0, Math.min(1, value || 0))}%`;
  return h("div", {},
    h("div.parts", {}, Object.entries(answer.parts).map(([part, value]) => h("div.part", {}, h("div.row", {}, h("span", {}, part), h("span", {}, number(value, 2))), h("div.bar", {}, h("i", { style: { width: wide(value) } }), mean(part) !== null ? h("b", { style: { left: wide(mean(part)) }, title: `average of the step: ${number(mean(part), 3)}` }) : null)))),
    h("p.reason", {}, answer.reason), h("p.text", {}, answer.text.trim()));
}

/* --- settings --- */

function valueText(value) {
  if (value === null || value === undefined) return "–";
  if (Array.isArray(value)) return value.map(valueText).join(" × ");
  return typeof value === "number" && value && Math.abs(value) < 0.001 ? value.toExponential() : String(value);
}

function settingsOf() {
  const parts = [];
  if (data.runs.length > 1 && data.diff.length) parts.push(h("div.card.scroll", {}, h("table", {},
    h("thead", {}, h("tr", {}, h("th", {}, "Setting"), data.runs.map((run, place) => h("th", {}, h("span.swatch", { style: { "--swatch": `var(${colour(place)})` } }), run.name)))),
    h("tbody", {}, data.diff.map((row) => h("tr", {}, h("td.mono", {}, row.key), row.values.map((value) => h("td.mono", {}, valueText(value)))))))));
  for (const run of data.runs) parts.push(settingsCard(run));
  const text = data.runs.length > 1 ? "Where the runs differ, then each run's own." : "What was changed from the defaults, and where the run came from.";
  return parts.length ? section("settings", "Settings", text, parts) : null;
}

function settingsCard(run) {
  const row = (cells) => h("tr", {}, cells.map((text, place) => h(place === 2 ? "td.mono.faint" : "td.mono", { style: { "overflow-wrap": "anywhere" } }, text)));
  const table = (heads, rows) => h("table", {}, heads ? h("thead", {}, h("tr", {}, heads.map((text) => h("th", {}, text)))) : null, h("tbody", {}, rows));
  const many = data.runs.length > 1;
  return h("div.card.scroll", { style: { "margin-top": many ? "16px" : "0" } },
    many ? h("h3", { style: { padding: "14px 14px 0" } }, run.name) : null,
    !many && run.changed.length ? table(["Setting", "Here", "Default"], run.changed.map((one) => row([one.key, valueText(one.value), valueText(one.default)]))) : null,
    Object.keys(run.config).length ? h("details", {}, h("summary", {}, "All settings"), table(null, Object.entries(run.config).map(([k, v]) => row([k, valueText(v)])))) : null,
    Object.keys(run.origin).length ? h("details", {}, h("summary", {}, "Origin"), table(null, Object.entries(run.origin).map(([k, v]) => row([k, Array.isArray(v) ? v.join(" ") : valueText(v)])))) : null);
}
