/* What the model believes a move leads to, beside the rules; and a game inside that belief. */

import { ask, once, quiet, Refusal } from "./api.js";
import { makeBoard, place, viewOnly } from "./board.js";
import { moveNumber } from "./game.js";
import { h, number } from "./report.js";

const by = (id) => document.getElementById(id);
const PAUSE_MS = 420, MOST_PLIES = 300;
const HISTORY = 9;
const ENDS = { game_over: "The game inside its world is over, as the rules have it.", illegal: "It chose an illegal move, and knew it.", no_move: "It named no move that can be read." };
const NAMES = { board: "position", reward: "reward", terminated: "game over", truncated: "illegal move" };

export class World {
  constructor() {
    this.believed = makeBoard(by("believed"), viewOnly);
    this.rules = makeBoard(by("true"), viewOnly);
    this.walking = 0;
    by("walk").addEventListener("click", () => (this.running ? this.stop() : this.walk()));
  }

  /* Follow the table: the prediction for the move that led to the position on it. */
  async follow(table) {
    this.stop();
    Object.assign(this, { table, seen: table.game.here.fen });
    const { game } = table, here = game.here;
    by("trail").replaceChildren();
    by("walk").disabled = Boolean(here.over) || !table.checkpoint;
    const orientation = table.board.state.orientation;
    for (const board of [this.believed, this.rules]) place(board, here, { orientation, highlight: { custom: new Map() } });
    if (!game.at || !table.checkpoint) { by("verdict").replaceChildren(h("span.soft", {}, "After a move you see here whether the model knows what it does.")); return; }
    const before = game.positions[game.at - 1], move = here.played, history = game.history(game.at - 1);
    await quiet();
    if (this.seen !== table.game.here.fen || this.running) return;
    const found = await this.asked("predict", { fen: before.fen, move, history, checkpoint: table.checkpoint });
    if (found && this.seen === table.game.here.fen && !this.running) this.show(found, here.played, `${moveNumber(here)} ${here.san}: `);
  }

  async asked(what, fields) {
    try { return await (what === "predict" ? once : ask)(what, fields); } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      by("verdict").textContent = error.message;
      return null;
    }
  }

  show(found, move, before) {
    const lastMove = [move.slice(0, 2), move.slice(2, 4)], custom = new Map(found.squares.map((square) => [square, "wrong"]));
    if (found.said.fen) this.believed.set({ fen: found.said.fen, lastMove, check: false, highlight: { custom } });
    this.rules.set({ fen: found.rules.fen, lastMove, check: false, highlight: { custom } });
    by("verdict").dataset.exact = found.exact;
    by("verdict").replaceChildren(...verdict(found, before));
  }

  stop() {
    this.walking += 1;
    this.running = false;
    by("walk").textContent = "Play on inside its world";
  }

  async walk() {
    const mine = ++this.walking, { game, checkpoint } = this.table;
    this.running = true;
    by("walk").textContent = "Stop";
    by("trail").replaceChildren();
    let fen = game.here.fen, history = game.history(game.at);
    for (let ply = 1; ply <= MOST_PLIES; ply += 1) {
      const found = await this.asked("walk", { fen, history, checkpoint });
      if (mine !== this.walking) return;
      if (!found) break;
      if (found.move && found.said) this.step(found, ply, fen);
      if (found.end) { this.tell(found, ply); break; }
      fen = found.said.fen;
      history = [...history, found.move].slice(-HISTORY);
      await new Promise((done) => setTimeout(done, PAUSE_MS));
      if (mine !== this.walking) return;
    }
    this.stop();
  }

  step(found, ply, fen) {
    this.show(found, found.move, `Ply ${ply}, ${found.san}: `);
    const [, turn, , , , count] = fen.split(" ");
    const cell = h("li", {}, h("span.small", {}, `${turn === "w" ? `${count}. ` : ""}${found.san} `));
    by("trail").append(cell);
    by("trail").scrollTop = by("trail").scrollHeight;
  }

  tell(found, ply) {
    const departed = found.end.startsWith("wrong_");
    const text = departed ? `It departed from the rules at ply ${ply}.` : ENDS[found.end] || found.end;
    by("verdict").append(h("div", {}, h("b", { "data-end": found.end }, text)));
  }
}

function verdict(found, before) {
  if (found.fault) return [h("span", {}, before, h("b.bad", {}, "its answer cannot be read"), `: ${found.fault}`)];
  if (found.exact) return [h("span", {}, before, h("b.good", {}, "exactly right"), ". Position, reward and flags are those of the rules.")];
  const where = found.squares.length ? ` on ${found.squares.slice(0, 8).join(", ")}${found.squares.length > 8 ? ` and ${found.squares.length - 8} more` : ""}` : "";
  const rows = found.wrong.filter((name) => name !== "board" || behind(found.said) !== behind(found.rules)).map((name) => h("tr", {}, h("td", {}, NAMES[name]), h("td", {}, value(found.said, name)), h("td.soft", {}, value(found.rules, name))));
  return [h("span", {}, before, h("b.bad", {}, "it departs"), `${where}.`), rows.length ? h("table", {}, h("thead", {}, h("tr", {}, ["", "model", "rules"].map((text) => h("th", {}, text)))), h("tbody", {}, rows)) : ""];
}

/* What a FEN says behind its board: whose turn, castling, en passant, counters. */
const behind = (one) => one.fen.split(" ").slice(1).join(" ");

function value(one, name) {
  if (name === "board") return h("span.mono", {}, behind(one));
  return typeof one[name] === "boolean" ? (one[name] ? "yes" : "no") : number(one[name]);
}
