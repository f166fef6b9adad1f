/* Questions to the server; the JSON interface is in docs/web.md. */

export class Refusal extends Error {}

export function ask(what, fields) {
  return asked(what, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(fields) });
}

export function state() {
  return asked("state", {});
}

async function asked(what, request) {
  const answer = await fetch(`api/${what}`, request).catch(() => { throw new Refusal("The server does not answer: has it ended?"); });
  const content = await answer.json();
  if (content.refused || !answer.ok) throw new Refusal(content.refused || content.error);
  return content;
}

/* What nobody waits for is asked when the table has been quiet for a while: moves are answered first. */
export const QUIET_MS = 450;
export const quiet = () => new Promise((done) => setTimeout(done, QUIET_MS));

/* An answer depends on its question alone: each is asked once. */
const kept = new Map();
export function once(what, fields) {
  const key = JSON.stringify([what, fields]);
  if (!kept.has(key)) {
    if (kept.size > 5000) kept.clear();
    kept.set(key, ask(what, fields).catch((error) => { kept.delete(key); throw error; }));
  }
  return kept.get(key);
}
