// The pool as a map, the prefix tree by sizes, and paged against contiguous.

const ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
const AGES = ["less than 1/64", "1/64", "1/32", "1/16", "1/8", "1/4", "1/2", "all and more"];

class BlockMap {
  constructor() {
    Object.assign(this, { cells: [], tenants: [], hello: null, cursor: 0, columns: 1, size: 8 });
    const canvas = $("map");
    canvas.addEventListener("keydown", event => this.key(event));
    canvas.addEventListener("focus", () => { this.draw(); this.tell(); });
    canvas.addEventListener("blur", () => this.draw());
    canvas.addEventListener("pointermove", event => this.point(event));
    canvas.addEventListener("pointerdown", event => this.point(event));
  }

  begin(hello) {
    this.hello = hello;
    this.cells = [];
    const each = hello.blocks_per_cell > 1 ? `a cell is the first of ${number(hello.blocks_per_cell)} blocks` : "a cell is a block";
    $("map-about").textContent =
      `${number(hello.blocks)} blocks of ${number(hello.block_tokens)} tokens (${bytes(hello.bytes_per_block)}); ${each}. The paler a cached block, the more blocks were freed since it was.`;
  }

  see({ from, cells, tenants }) {
    for (let at = 0; at < cells.length; at += 2) this.cells[from + at / 2] = cells.slice(at, at + 2);
    if (tenants) {
      this.tenants = tenants;
      this.legend();
    }
  }

  legend() {
    const shown = this.tenants.slice(0, COLOURS).map(name => [tenantColour(name), name]);
    if (this.tenants.length > COLOURS) shown.push([colour("t" + COLOURS), `${this.tenants.length - COLOURS} more`]);
    legend($("map-legend"), [[colour("free"), "free"], ...shown]);
  }

  draw() {
    const canvas = $("map"), count = this.cells.length, width = Math.max(canvas.clientWidth, 50);
    if (!count) return;
    this.size = Math.min(18, Math.max(5, Math.floor(Math.sqrt(width * 190 / count))));
    this.columns = Math.max(1, Math.floor(width / this.size));
    const [context] = prepare(canvas, Math.ceil(count / this.columns) * this.size);
    const free = colour("free"), colours = this.tenants.map(tenantColour), side = this.size - 1;
    this.cells.forEach((cell, at) => {
      const [x, y] = this.place(at), state = cell[0];
      context.globalAlpha = 1;
      context.fillStyle = free;
      context.fillRect(x, y, side, side);
      if (state === ".") return;
      context.fillStyle = colours[ALPHABET.indexOf(cell[1])];
      const age = state >= "0" && state <= "7" ? Number(state) : 2;
      context.globalAlpha = state === "a" || state === "w" ? 1 : 0.62 - 0.065 * age;
      context.fillRect(x, y, side, side);
      if (state === "w" || state === "a") {
        context.globalAlpha = 1;
        context.strokeStyle = colour("text");
        const inset = state === "w" ? side / 2 : 0.5;
        context.strokeRect(x + 0.5, y + 0.5, side - inset, side - inset);
      }
    });
    context.globalAlpha = 1;
    if (document.activeElement === canvas && this.cursor < count) {
      const [x, y] = this.place(this.cursor);
      context.strokeStyle = colour("link");
      context.lineWidth = 3;
      context.strokeRect(x - 1, y - 1, this.size + 1, this.size + 1);
    }
  }

  place(at) {
    return [(at % this.columns) * this.size, Math.floor(at / this.columns) * this.size];
  }

  key(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns };
    const ends = { Home: 0, End: this.cells.length - 1 };
    const to = event.key in steps ? this.cursor + steps[event.key] : ends[event.key];
    if (to === undefined) return;
    event.preventDefault();
    if (to >= 0 && to < this.cells.length) this.cursor = to;
    this.draw();
    this.tell();
  }

  point(event) {
    const column = Math.floor(event.offsetX / this.size), row = Math.floor(event.offsetY / this.size);
    const at = row * this.columns + column;
    if (column >= this.columns || at >= this.cells.length) return;
    this.cursor = at;
    this.tell();
  }

  tell() {
    const cell = this.cells[this.cursor];
    if (!cell || !this.hello) return;
    const block = `Block ${number(this.cursor * this.hello.blocks_per_cell)}: `;
    const who = this.tenants[ALPHABET.indexOf(cell[1])] ?? none;
    const states = { ".": "free", w: "being written, for " + who, a: "in use, of " + who, c: "cached, of " + who };
    const age = AGES[Number(cell[0])];
    $("map-cell").textContent = block + (states[cell[0]] ?? `cached, of ${who}; ${age} of the pool was freed since`) + ".";
  }
}

const ROW = 24, LEVELS = 14;

function prefixTree({ blocks, blocks_max, tenants, runs }, hello) {
  const place = $("tree"), about = $("tree-about");
  place.replaceChildren();
  if (!runs) {
    about.textContent = `Not told: the pool has ${number(blocks)} blocks, and at most ${number(blocks_max)} are looked at.`;
    return;
  }
  const all = runs.map(([parent, tenant, depth, length, held]) => ({ parent, tenant, depth, length, held, children: [], level: 0, x: 0 }));
  const roots = [];
  for (const run of all) {
    (all[run.parent]?.children ?? roots).push(run);
  }
  const width = Math.max(place.clientWidth, 200);
  let lowest = 0;
  const lay = (list, level, x) => {
    for (const run of list.sort((one, other) => other.held - one.held)) {
      Object.assign(run, { level, x });
      lowest = Math.max(lowest, Math.min(level, LEVELS));
      lay(run.children, level + 1, x);
      x += run.held;
    }
  };
  lay(roots, 0, 0);
  const height = (lowest + 1) * ROW;
  place.setAttribute("viewBox", `0 0 ${width} ${height}`);
  place.style.height = height + "px";
  const tokens = count => number(count * hello.block_tokens) + " tokens";
  const words = run => `${tenants[run.tenant]}: ${tokens(run.length)} from ${number(run.depth * hello.block_tokens)} on; with what continues them ${number(run.held)} blocks`;
  for (const run of all.filter(run => run.level < LEVELS)) {
    const x = width * run.x / blocks, wide = width * run.held / blocks;
    const box = draw("rect", { x, y: run.level * ROW, width: Math.max(wide - 1, 0.5), height: ROW - 2, rx: 2 }, draw("title", {}, words(run)));
    box.style.fill = tenantColour(tenants[run.tenant]);
    box.style.fillOpacity = 0.35;
    place.append(box);
    const text = `${tenants[run.tenant]} ${tokens(run.length)}`;
    // What does not fit is cut off.
    if (wide > 40) place.append(draw("svg", { x, y: run.level * ROW, width: wide - 4, height: ROW }, draw("text", { x: 4, y: 15 }, text)));
  }
  const told = roots.reduce((sum, run) => sum + run.held, 0);
  about.textContent = blocks
    ? `${number(blocks)} blocks of content that can be found, the width of a bar those of a beginning and all that continues it; ${percent(told / blocks)} of them are in beginnings large enough to be drawn.`
    : "Nothing is cached.";
  const largest = [...all].sort((one, other) => other.held - one.held).slice(0, 20);
  table($("tree-table"), "", ["Tenant", "from token", "tokens", "blocks with what continues them", "share"],
    largest.map(run => [tenants[run.tenant], number(run.depth * hello.block_tokens), number(run.length * hello.block_tokens), number(run.held), percent(run.held / blocks)]));
}

/** Now, and when most ran in the last minutes. */
function paged(told, timeline, hello) {
  const at = timeline.names, each = Math.ceil(told.sequence_tokens / hello.block_tokens) * hello.bytes_per_block;
  const busiest = timeline.moments.reduce((most, moment) => moment[at.running] > most[at.running] ? moment : most, timeline.moments[0] ?? []);
  const running = busiest[at.running] ?? 0;
  const bars = [
    ["Paged, now", told.paged_bytes, "decode"],
    ["Contiguous, now", told.bytes, "prefill"],
    ["Paged, when most ran", (busiest[at.active_blocks] ?? 0) * hello.bytes_per_block, "decode"],
    ["Contiguous, when most ran", running * each, "prefill"],
  ];
  const most = Math.max(1, ...bars.map(([, value]) => value));
  const shown = bars.flatMap(([name, value, which]) => {
    const length = make("i");
    length.style.width = Math.max(100 * value / most, 0.5) + "%";
    length.style.background = colour(which);
    return [make("span", {}, name), length, make("span", {}, bytes(value))];
  });
  const times = bars[2][1] > 0 && running > 0 ? ` ${number(bars[3][1] / bars[2][1], 1)} times as much as paged.` : "";
  $("paged").replaceChildren(
    make("div", { class: "bars" }, ...shown),
    make("p", { class: "note" },
      `${number(told.sequences)} run now, ${number(running)} at most in the last two minutes: what they take, and would take with ` +
      `${number(told.sequence_tokens)} tokens set aside in one piece for each.${times} ` +
      `The pool of ${bytes(hello.blocks * hello.bytes_per_block)} would have room for ${number(told.sequences_max)} at once.`));
}
