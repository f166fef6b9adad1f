/* Puts the page together: what it is about, its parts, light and dark. */

import { state } from "./api.js";
import { Film } from "./film.js";
import { follow } from "./live.js";
import { Table } from "./play.js";
import { chartsNow, h } from "./report.js";
import { World } from "./world.js";

const by = (id) => document.getElementById(id);

function setTheme(dark) {
  document.documentElement.classList.toggle("dark", dark);
  chartsNow().forEach((chart) => chart.u && chart.u.redraw(false, true));
}

const dark = matchMedia("(prefers-color-scheme: dark)");
setTheme(dark.matches);
dark.addEventListener("change", (event) => setTheme(event.matches));
by("theme").addEventListener("click", () => setTheme(!document.documentElement.classList.contains("dark")));

const about = await state();
document.title = `${about.name} · RookWorld`;
by("name").textContent = about.name;
const size = about.parameters ? `${(about.parameters / 1e6).toFixed(1)} million parameters` : "no checkpoint yet";
by("about").append(h("span", {}, size), h("span", {}, about.engine ? `beside ${about.engine.name}, ${about.engine.nodes.toLocaleString("en")} nodes` : "no Stockfish here"), ...(about.run ? [h("span", {}, `${about.checkpoints.length} checkpoints`)] : []));
by("footer").textContent = `RookWorld ${about.version}. Board by chessground, pieces by Colin M. L. Burnett, curves by uPlot. Evaluations are in pawns, as the side to move sees them.`;

const parts = [["play", "Play"], ["world", "Its world"], ...(about.run ? [["film", "Checkpoints"], ["training", "Training"]] : [])];
by("nav").append(...parts.map(([id, text]) => h("a", { href: `#${id}` }, text)));
for (const id of ["film", "training"]) by(id).hidden = !about.run;

const world = new World();
const film = about.run ? new Film(about) : null;
const table = new Table(about, (one, waiting) => {
  if (film && waiting) film.pause();
  if (waiting) return;
  world.follow(one);
  if (film) film.follow(one);
});
await table.begin();
if (about.run) follow((data) => {
  const first = !table.checkpoint && data.checkpoints.length > 0;
  about.checkpoints = data.checkpoints;
  if (first) table.draw();
  film.setCheckpoints(data.checkpoints);
}, (fen) => { table.read(fen); by("play").scrollIntoView(); });
document.documentElement.dataset.ready = "yes";
