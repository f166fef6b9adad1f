/* One position, asked of every checkpoint of a run: a film of an opinion. */

import { once, quiet, Refusal } from "./api.js";
import { arrows, makeBoard, place, viewOnly } from "./board.js";
import { h } from "./report.js";
import { list, share } from "./thoughts.js";

const by = (id) => document.getElementById(id);
const FRAME_MS = 550, MOST_MOVES = 8;

export class Film {
  constructor(about) {
    Object.assign(this, { checkpoints: about.checkpoints, frames: [], at: about.checkpoints.length - 1, asked: 0, seen: false });
    this.board = makeBoard(by("film-board"), viewOnly);
    by("frame").addEventListener("input", () => { this.stop(); this.look(Number(by("frame").value)); });
    by("roll").addEventListener("click", () => (this.rolling ? this.stop() : this.roll()));
    new IntersectionObserver(([entry]) => { if (entry.isIntersecting && !this.seen) { this.seen = true; this.load(); } }).observe(by("film"));
  }

  follow(table) {
    this.table = table;
    this.stop();
    this.load();
  }

  /* Somebody waits for an answer: the film can wait. */
  pause() { this.asked += 1; }

  /* A run that trains has more and more of them. */
  setCheckpoints(found) {
    const same = JSON.stringify(found) === JSON.stringify(this.checkpoints);
    const atEnd = this.at >= this.checkpoints.length - 1;
    this.checkpoints = found;
    if (atEnd) this.at = found.length - 1;
    if (!same) this.load();
  }

  /* Every checkpoint in turn; the first and last first, as they say most. */
  async load() {
    if (!this.seen || !this.table || !this.checkpoints.length) { this.draw(); return; }
    const mine = ++this.asked, { fen, over } = this.table.game.here;
    this.frames = this.checkpoints.map(() => null);
    this.draw();
    if (over) return;
    await quiet();
    if (mine !== this.asked) return;
    const order = [...new Set([this.at, 0, this.checkpoints.length - 1, ...this.checkpoints.keys()])];
    for (const nth of order) {
      const found = await this.frame(fen, nth);
      if (mine !== this.asked) return;
      this.frames[nth] = found;
      this.draw();
    }
  }

  async frame(fen, nth) {
    try { return await once("think", { fen, checkpoint: this.checkpoints[nth].name }); } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      return { candidates: [], move: "", san: "", note: error.message };
    }
  }

  look(at) { this.at = at; this.draw(); }

  stop() { this.rolling = false; clearTimeout(this.timer); by("roll").textContent = "▶ Play"; }

  roll() {
    this.rolling = true;
    by("roll").textContent = "❚❚ Pause";
    if (this.at >= this.checkpoints.length - 1) this.at = 0;
    const step = () => {
      this.draw();
      if (!this.rolling) return;
      if (this.at >= this.checkpoints.length - 1) { this.stop(); return; }
      this.timer = setTimeout(() => { if (this.frames[this.at + 1]) this.at += 1; step(); }, FRAME_MS);
    };
    step();
  }

  draw() {
    if (!this.table) return;
    const { here } = this.table.game, now = this.frames[this.at] || null, one = this.checkpoints[this.at];
    const slider = by("frame");
    slider.max = Math.max(0, this.checkpoints.length - 1);
    slider.value = this.at;
    by("frame-name").textContent = one ? nameOf(one) : "none yet";
    place(this.board, here, { orientation: this.table.board.state.orientation });
    this.board.setAutoShapes(now ? arrows(now.candidates, now.move, "model") : []);
    if (here.over) by("film-thoughts").replaceChildren(h("p.note", {}, "The game is over: nothing to ask."));
    else list(by("film-thoughts"), now, null, { name: one ? nameOf(one) : "" });
    by("strip").replaceChildren(this.strip());
  }

  /* A row a move, a column a checkpoint: the darker, the higher in the list; framed what is played. */
  strip() {
    const weight = new Map(), san = new Map(), legal = new Map();
    for (const frame of this.frames) for (const [rank, one] of ranked(frame).entries()) {
      weight.set(one.move, (weight.get(one.move) || 0) + 5 - rank);
      san.set(one.move, one.san);
      legal.set(one.move, one.legal);
    }
    const moves = [...weight.keys()].sort((a, b) => weight.get(b) - weight.get(a)).slice(0, MOST_MOVES);
    const cell = (nth, node) => { node.addEventListener("click", () => { this.stop(); this.look(nth); }); return h(nth === this.at ? "td.now" : "td", {}, node); };
    const rows = moves.map((move) => h("tr", {}, h("th", {}, san.get(move)), this.frames.map((frame, nth) => cell(nth, square(frame, move, legal.get(move))))));
    const legality = h("tr.legality", {}, h("th", {}, "legal"), this.frames.map((frame, nth) => cell(nth, h(frame ? (frame.candidates.length && frame.candidates.every((one) => one.legal) ? "i.clean" : "i.dirty") : "i", { title: frame ? `${frame.candidates.filter((one) => one.legal).length} of ${frame.candidates.length} legal` : "" }))));
    const values = h("tr.values", {}, h("th", {}, "value"), this.frames.map((frame, nth) => cell(nth, value(frame))));
    const table = h("table", { style: { "--cell": `${Math.max(8, Math.min(30, Math.floor((by("strip").clientWidth - 64) / Math.max(1, this.frames.length)) - 2))}px` } }, h("tbody", {}, rows, moves.length ? [legality, values] : null));
    return table;
  }
}

/* How good the side to move believes its move to be, as a bar. */
function value(frame) {
  const played = frame && frame.candidates.find((one) => one.move === frame.move);
  return played ? h("i", { title: `${played.san} ${played.score}`, style: { "--v": `${share(played.cp)}%` } }) : h("i");
}

const nameOf = (one) => (one.step === null ? one.name : `Step ${one.step}`);

function ranked(frame) {
  return frame ? [...frame.candidates].sort((a, b) => (b.move === frame.move) - (a.move === frame.move) || b.cp - a.cp) : [];
}

function square(frame, move, legal) {
  const rank = ranked(frame).findIndex((one) => one.move === move);
  if (rank < 0) return h("i");
  const best = frame.move === move ? ".best" : "";
  const one = ranked(frame)[rank];
  return h(`i${legal ? ".listed" : ".illegal"}${best}`, { title: `${one.san} ${one.score}`, style: { "--v": `${90 - 17 * rank}%` } });
}
