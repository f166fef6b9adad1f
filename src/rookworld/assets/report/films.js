/* The same held-out rows at every evaluation: what the model said before training, and step by step since. */

function filmsOf() {
  const runs = data.runs.map((run, place) => ({ run, place })).filter(({ run }) => run.films.length);
  if (!runs.length) return null;
  if (!runs.some(({ place }) => place === ui.filmRun)) ui.filmRun = runs[0].place;
  const host = h("div");
  const draw = () => host.replaceChildren(...filmOf(data.runs[ui.filmRun], runs, draw));
  draw();
  return section("films", "Same positions", "Fixed held-out rows, answered at every evaluation: on the left before training, on the right at the chosen step. Red: what the rules do not allow. ✓: a move that the engine lists too. Evaluations are in pawns, as the side to move sees them.", host);
}

function filmOf(run, runs, draw) {
  const steps = [...new Set(run.films.flatMap((card) => card.answers.map((one) => one.step)))].sort((a, b) => a - b);
  const last = steps.indexOf(ui.filmStep) >= 0 ? steps.indexOf(ui.filmStep) : steps.length - 1;
  const chip = (text, on, act) => h("button.chip", { "aria-pressed": on, onclick: () => { act(); draw(); } }, text);
  const tasks = new Map(run.films.map((card) => [card.task, card.title]));
  if (!tasks.has(ui.filmTask)) ui.filmTask = run.films[0].task;
  const slide = (event) => { ui.filmStep = steps[Number(event.target.value)]; draw(); host.querySelector("input").focus(); };
  const host = h("div.tools", { style: { margin: "0 0 16px" } },
    runs.length > 1 ? h("div.chips", {}, runs.map(({ run: one, place }) => chip(one.name, place === ui.filmRun, () => { ui.filmRun = place; }))) : null,
    tasks.size > 1 ? h("div.chips", {}, [...tasks].map(([task, title]) => chip(title, ui.filmTask === task, () => { ui.filmTask = task; }))) : null,
    steps.length > 2 ? h("label", {}, "step ", h("input", { type: "range", min: 1, max: steps.length - 1, value: last, oninput: slide }), ` ${steps[last]}`) : null);
  const cards = run.films.filter((card) => card.task === ui.filmTask);
  return [host, h("div.cards", {}, cards.map((card) => filmCard(card, steps[0], steps[last])))];
}

function filmCard(card, first, step) {
  const said = (wanted) => card.answers.find((one) => one.step === wanted);
  const [before, after] = [said(first), said(step)];
  const earned = (one) => one && one.reward !== null ? minus(one.reward.toFixed(2)) : "–";
  const truth = card.truth.lines.map((line) => [h("span", {}, line.move), " ", h("span.score", {}, line.score)]);
  return h("article.card.position", {},
    h("div.title", {}, h("h3", {}, card.caption), h("span.faint", {}, `reward ${earned(before)} → ${earned(after)}`)),
    h("div.boards", {}, boardFigure(card, before, first === 0 ? "Before training" : `Step ${first}`, "var(--faint)", before && before.reason), step === first ? null : boardFigure(card, after, `After step ${step}`, "#2f6bd8", after && after.reason)),
    truth.length ? h("div.truth", {}, h("span.faint", {}, card.truth_title), h("ul.lines", {}, truth.map((line) => h("li", {}, line)))) : null);
}
