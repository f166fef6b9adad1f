/* Lists of candidates, the model's beside Stockfish's. */

import { h, minus } from "./report.js";

/* Where an evaluation lies between a lost game and a won one, by the curve that Lichess uses. */
export const share = (cp) => 100 / (1 + Math.exp(-0.00368208 * Math.max(-2000, Math.min(2000, cp))));

export function list(host, said, compared, { name = "Model", empty = "…", engine = null, play = null } = {}) {
  const known = new Set((compared ? compared.candidates : []).map((one) => one.move));
  const mine = said ? said.candidates.map((one) => row(one, "model", { chosen: one.move === said.move, known: known.has(one.move), play })) : [];
  const theirs = compared ? compared.candidates.map((one, place) => row(one, "engine", { chosen: place === 0, play })) : [];
  host.replaceChildren(
    h("div.model", {}, h("h4", {}, name), mine.length ? mine : h("p.small.faint", {}, said ? "lists no move that can be read" : empty)),
    engine ? h("div.engine", {}, h("h4", {}, engine), theirs) : "",
    said && said.note ? h("p.note", {}, `${said.note}. Played: ${said.san}`) : "");
  host.classList.toggle("stale", !said);
}

function row(one, tint, { chosen, known, play }) {
  const kind = `button.candidate${chosen ? ".chosen" : ""}${one.legal ? "" : ".illegal"}${known ? ".known" : ""}`;
  const act = play && one.legal ? { onclick: () => play(one.move) } : { disabled: true };
  return h(kind, { type: "button", title: one.legal ? one.move : `${one.move} is not legal`, style: { "--share": `${share(one.cp)}%` }, ...act },
    h("span.move", {}, one.san), h("span.score", {}, minus(one.score)));
}
