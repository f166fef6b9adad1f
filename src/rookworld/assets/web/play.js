/* The table: a board, whose turn it is, what is thought of the position, the moves so far. */

import { ask, once, Refusal } from "./api.js";
import { arrows, destinations, makeBoard, place, scores } from "./board.js";
import { Game, moveNumber, start } from "./game.js";
import { h } from "./report.js";
import { list } from "./thoughts.js";

const by = (id) => document.getElementById(id);
const SIDES = [["white", "White"], ["black", "Black"], ["both", "Both"]];
const PIECES = { q: "queen", r: "rook", b: "bishop", n: "knight" };

export class Table {
  constructor(about, changed) {
    Object.assign(this, { about, changed, game: new Game(), side: "white", shown: { model: true, engine: true }, turn: 0, answeredIn: 0 });
    this.board = makeBoard(by("board"), { movable: { free: false, color: undefined, events: { after: (from, to) => this.dropped(from, to) } } });
    this.listen();
  }

  listen() {
    const click = (id, act) => by(id).addEventListener("click", act);
    click("first", () => this.look(0));
    click("back", () => this.look(this.game.at - 1));
    click("forward", () => this.look(this.game.at + 1));
    click("last", () => this.look(this.game.positions.length - 1));
    click("flip", () => { this.board.toggleOrientation(); this.drawPlayers(); });
    click("undo", () => this.takeBack());
    click("new", () => this.begin());
    click("copy", () => navigator.clipboard.writeText(this.game.here.fen).then(() => this.say("The FEN is copied.")));
    by("type").addEventListener("submit", (event) => { event.preventDefault(); this.typed(); });
    by("read").addEventListener("submit", (event) => { event.preventDefault(); this.read(by("source").value); });
    by("file").addEventListener("change", async (event) => { const [file] = event.target.files; if (file) this.read(await file.text()); event.target.value = ""; });
    document.addEventListener("keydown", (event) => {
      if (event.target.closest("input, textarea, select") || event.altKey || event.ctrlKey || event.metaKey) return;
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step) { event.preventDefault(); this.look(this.game.at + step); }
    });
    this.drawChips();
  }

  say(text, bad = false) { by("said").textContent = text; by("said").classList.toggle("bad", bad); }

  /* What the server refuses is told; anything else is a mistake of ours and stays one. */
  async attempt(work) {
    try { return await work(); } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      this.say(error.message, true);
      this.draw();
      return null;
    }
  }

  /* Who answers: the last checkpoint, by name, as a run that trains will have another one soon. */
  get checkpoint() { const last = this.about.checkpoints[this.about.checkpoints.length - 1]; return last ? last.name : ""; }

  get modelMoves() { return this.side !== "both" && this.game.here.turn !== this.side && !this.game.here.over && this.checkpoint !== ""; }

  async begin() {
    await this.read(start, "Game");
    this.say("");
    await this.answer();
  }

  async read(text, title = null) {
    this.turn += 1;
    const found = await this.attempt(() => ask("read", { text }));
    if (!found) return;
    this.game.load({ ...found, title: title || found.title });
    // a game that is loaded is looked at: nobody plays on in it unasked
    if (!title) this.side = "both";
    this.drawChips();
    this.say(title ? "" : `${found.title}: ${found.positions.length - 1} moves`);
    this.game.go(title ? 0 : found.positions.length - 1);
    this.draw();
  }

  look(at) { this.turn += 1; this.game.go(at); this.say(""); this.draw(); }

  takeBack() {
    this.turn += 1;
    this.game.takeBack(this.side === "both" || this.game.here.turn !== this.side ? 1 : 2);
    this.say("");
    this.draw();
  }

  async typed() {
    const text = by("text").value.trim();
    if (!text) return;
    if (await this.play(text)) by("text").value = "";
  }

  dropped(from, to) {
    const moves = Object.keys(this.game.here.moves).filter((uci) => uci.startsWith(from + to));
    if (moves.length > 1) this.promote(moves); else this.play(from + to);
  }

  promote(moves) {
    const host = by("promotion"), colour = this.game.here.turn;
    const close = () => { host.hidden = true; };
    host.replaceChildren(...Object.entries(PIECES).map(([letter, name]) => h("button.cg-wrap", { type: "button", "aria-label": name, onclick: () => { close(); this.play(moves.find((uci) => uci.endsWith(letter))); } }, h(`piece.${colour}.${name}`))));
    host.hidden = false;
    host.firstChild.focus();
  }

  /* A move of the one who sits here, then the model's answer. */
  async play(text) {
    const turn = ++this.turn, begun = performance.now();
    const next = await this.attempt(() => ask("move", { fen: this.game.here.fen, move: text }));
    if (!next || turn !== this.turn) return false;
    this.game.add(next);
    this.say("");
    this.draw(true);
    await this.answer(begun);
    return true;
  }

  async answer(begun = performance.now()) {
    if (!this.modelMoves) { this.think(); return; }
    const turn = this.turn, fen = this.game.here.fen;
    const next = await this.attempt(async () => {
      const said = await once("think", { fen, checkpoint: this.checkpoint });
      if (said.note) this.say(`The model's own move: ${said.note}.`);
      return said.after;
    });
    if (!next || turn !== this.turn) return;
    this.game.add(next);
    this.answeredIn = Math.round(performance.now() - begun);
    document.documentElement.dataset.answeredIn = this.answeredIn;
    this.draw();
  }

  /* --- drawing --- */

  draw(waiting = false) {
    const here = this.game.here, mine = this.side === "both" ? here.turn : this.side;
    by("promotion").hidden = true;
    if (waiting) this.board.setAutoShapes([]);
    place(this.board, here, { movable: { color: here.over ? undefined : mine, dests: mine === here.turn ? destinations(here.moves) : new Map() } });
    this.drawMoves();
    this.drawPlayers();
    for (const [id, off] of [["first", !this.game.at], ["back", !this.game.at], ["undo", !this.game.at], ["forward", this.game.atEnd], ["last", this.game.atEnd]]) by(id).disabled = off;
    if (!waiting) this.think();
    this.changed(this, waiting);
  }

  async think() {
    const { fen, over } = this.game.here, here = () => fen === this.game.here.fen;
    const found = { said: null, compared: null };
    const show = () => { if (here()) this.drawThoughts(found); };
    show();
    if (over) return;
    await Promise.all([
      this.checkpoint && this.attempt(async () => { found.said = await once("think", { fen, checkpoint: this.checkpoint }); show(); }),
      this.about.engine && this.attempt(async () => { found.compared = await once("compare", { fen }); show(); }),
    ]);
  }

  drawThoughts({ said, compared }) {
    const here = this.game.here;
    if (here.over) by("thoughts").replaceChildren(h("p.note", {}, `The game is over: ${here.over}, ${here.result}.`));
    else list(by("thoughts"), said, compared, { empty: this.checkpoint ? "…" : "no checkpoint yet", name: this.about.name, engine: this.about.engine && this.about.engine.name, play: (move) => this.play(move) });
    const shapes = [
      ...(compared && this.shown.engine ? arrows(compared.candidates, compared.candidates[0] && compared.candidates[0].move, "engine", 1) : []),
      ...(said && this.shown.model ? arrows(said.candidates, said.move, "model") : []),
    ];
    this.board.setAutoShapes([...shapes, ...scores(shapes)]);
  }

  drawPlayers() {
    const bottom = this.board.state.orientation, top = bottom === "white" ? "black" : "white";
    for (const [id, colour] of [["player-top", top], ["player-bottom", bottom]]) {
      const node = by(id), turn = this.game.here.turn === colour && !this.game.here.over;
      const model = this.side !== "both" && colour !== this.side;
      node.className = `player ${colour}${turn ? " turn" : ""}`;
      const clock = model && this.answeredIn ? `answered in ${this.answeredIn} ms` : turn ? "to move" : "";
      node.replaceChildren(h("span", {}, model ? this.about.name : this.side === "both" ? (colour === "white" ? "White" : "Black") : "You"), h("span.clock", {}, clock));
    }
  }

  drawMoves() {
    const host = by("moves"), game = this.game;
    by("title").textContent = game.title;
    host.dataset.empty = "No move yet. Drag a piece, tap two squares, or type a move.";
    const cells = game.positions.slice(1).map((one, nth) => {
      const number = nth === 0 || one.turn === "black" ? h("span.number", {}, moveNumber(one)) : null;
      return h("li", {}, number, h("button", { type: "button", "aria-current": nth + 1 === game.at, onclick: () => this.look(nth + 1) }, one.san));
    });
    const end = game.positions[game.positions.length - 1];
    host.replaceChildren(...cells, ...(end.over ? [h("li.over", {}, `${end.result} · ${end.over}`)] : []));
    const now = host.querySelector("[aria-current=true]");
    if (now) host.scrollTop = now.offsetTop - host.offsetTop - host.clientHeight / 2;
  }

  drawChips() {
    const chip = (text, on, act) => h("button.chip", { type: "button", "aria-pressed": on, onclick: act }, text);
    by("sides").replaceChildren(...SIDES.map(([side, text]) => chip(side === "both" ? "Both" : `I am ${text}`, this.side === side, () => this.sit(side))));
    const arrowsOf = [["model", "Its arrows"], ...(this.about.engine ? [["engine", "Stockfish's"]] : [])];
    by("shown").replaceChildren(...arrowsOf.map(([key, text]) => chip(text, this.shown[key], () => { this.shown[key] = !this.shown[key]; this.drawChips(); this.think(); })));
  }

  sit(side) {
    this.side = side;
    this.turn += 1;
    if (side !== "both") this.board.set({ orientation: side });
    this.drawChips();
    this.draw(this.modelMoves);
    this.answer();
  }
}
