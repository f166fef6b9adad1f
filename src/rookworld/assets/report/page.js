/* Puts the page together, follows a live run, and switches light and dark. */

function toggleTheme() { setTheme(!document.documentElement.classList.contains("dark")); }

function setTheme(dark) {
  document.documentElement.classList.toggle("dark", dark);
  charts.forEach((chart) => chart.u && chart.u.redraw(false, true));
}

const SECTIONS = [["top", topOf], ["nav", null], ["notices", noticesOf], ["sweep", sweepOf], ["rounds", roundsOf], ["summary", summaryOf], ["held-out", heldOutOf], ["films", filmsOf], ["curves", curvesOf], ["events", eventsOf], ["positions", positionsOf], ["settings", settingsOf]];

function render() {
  charts = [];
  const made = SECTIONS.map(([name, build]) => [name, build && build()]);
  const links = [["sweep", "Sweep"], ["rounds", "Rounds"], ["held-out", "Before and after"], ["films", "Same positions"], ["curves", "Curves"], ["events", "Guard"], ["positions", "Positions"], ["settings", "Settings"]];
  const there = new Set(made.filter(([, node]) => node).map(([name]) => name));
  const nav = h("nav", {}, links.filter(([id]) => there.has(id)).map(([id, text]) => h("a", { href: `#${id}` }, text)));
  const page = document.getElementById("page");
  page.classList.toggle("live", data.live);
  page.replaceChildren(...made.map(([name, node]) => name === "nav" ? nav : node).filter(Boolean), h("footer", {}, `RookWorld ${data.version}. Curves by uPlot, boards by python-chess.`));
  charts.forEach((chart) => chart.rebuild());
}

function shapeOf(one) {
  return JSON.stringify([one.panels, one.evolutions.map((each) => each.rounds.length > 0), one.runs.map((run) => [run.name, run.x.length > 0, Object.keys(run.series), Object.keys(run.evals.curves), run.evals.steps.length > 1])]);
}

function swap(fresh) {
  const same = shapeOf(fresh) === shapeOf(data);
  data = fresh;
  if (!same) return render();
  refreshCharts();
  const replace = (selector, build) => { const old = document.querySelector(selector), node = build(); if (old && node) old.replaceWith(node); };
  replace("header", topOf);
  document.getElementById("notices").replaceWith(noticesOf());
  document.getElementById("summary").replaceWith(summaryOf());
  const open = document.querySelector("#held-out details[open]");
  replace("#held-out", heldOutOf); replace("#films", filmsOf); replace("#sweep", sweepOf); replace("#rounds", roundsOf); replace("#positions", positionsOf);
  if (open) document.querySelector("#held-out details").open = true;
  const events = document.querySelector("#events"), node = eventsOf();
  if (events && node) events.replaceWith(node); else if (node) document.querySelector("#curves").after(node);
  return undefined;
}

let tag = "";
async function poll() {
  try {
    const answer = await fetch("data", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
    if (answer.status === 200) { tag = answer.headers.get("ETag") || ""; swap(await answer.json()); }
  } catch (error) {
    if (!(error instanceof TypeError)) throw error; // the server is away; ask again later
  }
  setTimeout(poll, 2500);
}

const dark = window.matchMedia("(prefers-color-scheme: dark)");
setTheme(dark.matches);
dark.addEventListener("change", (event) => setTheme(event.matches));
render();
// the sections did not exist when the browser looked for the one in the address
const wanted = window.location.hash && document.getElementById(window.location.hash.slice(1));
if (wanted) wanted.scrollIntoView({ behavior: "instant" });
let resizing = null;
window.addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(() => charts.forEach((chart) => chart.u && chart.u.setSize({ width: Math.max(200, chart.plot.clientWidth), height: 200 })), 80);
});
if (data.live) setTimeout(poll, 2500);
