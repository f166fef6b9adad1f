/* Boards: chessground with our colours, and candidates as arrows on them. */

import { Chessground } from "./chessground.min.js";

const STRENGTH = [1, 0.62, 0.46, 0.36, 0.28];
const WIDTH = [13, 10, 9, 8, 7];
const TINTS = { model: "#2f6bd8", engine: "#2b9a5b", bad: "#d64550" };

const brushes = Object.fromEntries(Object.entries(TINTS).flatMap(([name, color]) => STRENGTH.map((opacity, rank) => [`${name}${rank}`, { key: `${name}${rank}`, color, opacity, lineWidth: WIDTH[rank] }])));

export function makeBoard(node, options = {}) {
  return Chessground(node, {
    animation: { enabled: !matchMedia("(prefers-reduced-motion: reduce)").matches, duration: 180 },
    drawable: { enabled: false, visible: true, brushes },
    coordinates: true,
    ...options,
  });
}

export const viewOnly = { viewOnly: true, coordinates: false };
const ends = (uci) => [uci.slice(0, 2), uci.slice(2, 4)];

/* Squares -> squares, as chessground wants the legal moves. */
export function destinations(moves) {
  const found = new Map();
  for (const uci of Object.keys(moves)) {
    const [from, to] = ends(uci);
    found.set(from, [...(found.get(from) || []), to]);
  }
  return found;
}

export function place(board, position, more = {}) {
  board.set({
    fen: position.fen,
    turnColor: position.turn,
    check: position.check ? position.turn : false,
    lastMove: position.played ? ends(position.played) : undefined,
    ...more,
  });
}

/* The chosen move first; arrows of one move and another tint lie over each other, the stronger below. */
export function arrows(candidates, chosen, tint, most = 5) {
  const ranked = [...candidates].sort((a, b) => (b.move === chosen) - (a.move === chosen) || b.cp - a.cp).slice(0, most);
  return ranked.map((one, rank) => {
    const [orig, dest] = ends(one.move);
    return { orig, dest, brush: `${one.legal ? tint : "bad"}${rank}`, tint: one.legal ? tint : "bad", text: one.score };
  }).filter((one) => /^[a-h][1-8]$/.test(one.orig) && /^[a-h][1-8]$/.test(one.dest)).reverse();
}

/* Evaluations at the heads of arrows; where several end, one above the other. */
export function scores(shapes) {
  const there = new Map();
  return [...shapes].reverse().map(({ dest, tint, text }) => {
    const level = there.get(dest) || 0;
    there.set(dest, level + 1);
    return { orig: dest, customSvg: { center: "orig", html: pill(text, TINTS[tint], 76 - 25 * level) } };
  });
}

const pill = (text, fill, y) => `<rect x="18" y="${y}" width="64" height="23" rx="11.5" fill="${fill}" opacity="0.93"/><text x="50" y="${y + 17}" font-size="17" font-weight="600" font-family="system-ui, sans-serif" text-anchor="middle" fill="#fff">${text.replace(/[^-+−#.0-9]/g, "")}</text>`;
