/* The line on the board: positions from a start on, and the one that is looked at. */

const START = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1";
const HISTORY = 10; // plies that a prompt shows, the move asked about included

export const start = START;

export class Game {
  constructor() { this.positions = []; this.at = 0; this.title = "Game"; }

  get here() { return this.positions[this.at]; }
  get atEnd() { return this.at === this.positions.length - 1; }

  load(found) { this.positions = found.positions; this.title = found.title; this.at = found.positions.length - 1; }

  /* A move from the position that is looked at; what came after it is given up. */
  add(position) { this.positions = [...this.positions.slice(0, this.at + 1), position]; this.at += 1; }

  go(at) { this.at = Math.max(0, Math.min(this.positions.length - 1, at)); }

  takeBack(plies) { this.go(this.at - plies); this.positions.length = this.at + 1; }

  /* Moves that led to a place, oldest first. */
  history(at, most = HISTORY - 1) { return this.positions.slice(1, at + 1).map((one) => one.played).slice(-most); }
}

/* Number of the move that led to a position: a FEN counts the moves to come. */
export function moveNumber(position) {
  const number = Number(position.fen.split(" ")[5]);
  return position.turn === "white" ? `${number - 1}…` : `${number}.`;
}
