// Elements and words. Text from outside becomes text nodes and nothing else.

const $ = id => document.getElementById(id);

/** An element with attributes and children; strings become text. */
function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children.map(child => child ?? ""));
  return element;
}

function draw(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** Puts a table in the place of what was there, without moving what is scrolled. */
function table(place, caption, heads, rows) {
  const head = make("tr", {}, ...heads.map(text => make("th", { scope: "col" }, text)));
  const body = rows.map(([first, ...rest]) =>
    make("tr", {}, make("th", { scope: "row", title: first }, first), ...rest.map(text => make("td", {}, text))));
  place.replaceChildren(make("table", {}, make("caption", {}, caption), make("thead", {}, head), make("tbody", {}, ...body)));
}

/** A square of a colour and a word. */
function legend(place, entries) {
  place.replaceChildren(...entries.map(([colour, text]) => {
    const square = make("span");
    square.style.background = colour;
    return make("li", { title: text }, square, text);
  }));
}

const colour = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
/** Names in the order in which they came: each of the first has a colour of its own, wherever it is shown. */
const coloured = [];
const COLOURS = 7;

function tenantColour(name) {
  if (!coloured.includes(name) && coloured.length < COLOURS) coloured.push(name);
  const at = coloured.indexOf(name);
  return colour("t" + (at < 0 ? COLOURS : at));
}

const none = "–";
const number = (value, digits = 0) => value == null ? none
  : value.toLocaleString("en", { maximumFractionDigits: digits });
const percent = value => value == null ? none : number(100 * value, value < 0.1 ? 1 : 0) + " %";
/** In whatever currency: three digits that count, of a small price, too. */
const money = value => value == null || value >= 100 ? number(value, 2)
  : value.toLocaleString("en", { maximumSignificantDigits: 3 });

function scaled(value, step, units) {
  if (value == null) return none;
  let at = 0;
  while (value >= step && at < units.length - 1) { value /= step; at += 1; }
  return number(value, value < 10 && at > 0 ? 1 : 0) + " " + units[at];
}
const bytes = value => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
const rate = (value, unit) => scaled(value, 1000, ["", "k", "M", "G", "T", "P"]) + unit;

function seconds(value) {
  if (value == null) return none;
  if (value < 0.001) return number(value * 1e6, 0) + " µs";
  return value < 1 ? number(value * 1e3, value < 0.01 ? 2 : 0) + " ms" : number(value, value < 10 ? 2 : 0) + " s";
}

/** A canvas as sharp as the screen; its width in CSS pixels. */
function prepare(canvas, height) {
  const scale = window.devicePixelRatio || 1;
  const width = Math.max(canvas.clientWidth, 50);
  canvas.style.height = height + "px";
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  return [context, width];
}
