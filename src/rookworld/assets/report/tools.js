/* The report's data, its state, and small tools: elements, numbers, colours. See report_data.py for
   the shape of the data. Text from runs is only ever set as text; SVG strings come from gallery.py. */

const SVG = "http://www.w3.org/2000/svg";
const KIND_COLOURS = { warning: "--s4", skip: "--s7", rate_halved: "--s3", restore: "--s1", stop: "--bad" };
const ui = { window: 20, raw: true, metric: {}, hidden: {}, step: "ends", task: "", run: 0, filmRun: 0, filmStep: null, filmTask: "", answer: {}, zoom: null };
let data = JSON.parse(document.getElementById("data").textContent);
let charts = [];

function h(tag, attributes, ...children) {
  const [name, ...classes] = tag.split(".");
  const node = document.createElement(name || "div");
  if (classes.length) node.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [k, v] of Object.entries(value)) node.style.setProperty(k, v);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value);
  }
  node.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return node;
}

function s(tag, attributes, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (place) => `--s${place % 8}`;
const minus = (text) => text.replace("-", "−");

function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 10000) return minus(Math.round(value).toLocaleString("en"));
  if (size < 0.001) return Number(value.toPrecision(2)).toExponential().replaceAll("-", "−");
  return minus(String(Number(value.toPrecision(digits))));
}

const isShare = (name) => !data.metrics[name] || data.metrics[name].percent;
function estimate(name, value) {
  if (value === null || value === undefined) return "–";
  return minus(isShare(name) ? `${(100 * value).toFixed(1)} %` : value.toFixed(3));
}
function difference(name, value) {
  const shown = isShare(name) ? `${(100 * value).toFixed(1)}` : value.toFixed(3);
  return minus((value >= 0 ? "+" : "") + shown);
}
const label = (name) => data.metrics[name] ? data.metrics[name].label : name;

function averaged(values, window) {
  let sum = 0, count = 0;
  return values.map((value, place) => {
    if (value !== null) { sum += value; count += 1; }
    const left = values[place - window];
    if (place >= window && left !== null) { sum -= left; count -= 1; }
    return value === null || !count ? null : sum / count;
  });
}

function duration(hours) {
  const minutes = hours * 60;
  if (minutes < 1) return `${Math.round(minutes * 60)} s`;
  return minutes < 90 ? `${Math.round(minutes)} min` : `${hours.toFixed(1)} h`;
}

function section(id, title, text, ...children) {
  return h("section", { id }, h("div.head", {}, h("h2", {}, title), text && h("p", {}, text)), ...children);
}
