// The report of /v1/why: percentiles, roofline, queue, tiers, cost, advice.

function tiles(timeline, why, hello) {
  const active = timeline.of("active_blocks"), cached = timeline.of("cached_blocks");
  const told = [
    ["Running", number(timeline.of("running"))],
    ["Waiting", number(timeline.of("queued"))],
    ["Output tokens/s", number(timeline.rate("output_tokens"), 1)],
    ["Prompt tokens/s", number(timeline.rate("prompt_tokens"), 1)],
    ["Blocks in use", hello.blocks ? percent((active ?? 0) / hello.blocks) : none],
    ["Blocks cached", hello.blocks ? percent((cached ?? 0) / hello.blocks) : none],
    ["Prompt tokens from cache", percent(why?.cache.hit_share)],
    ["First token in time", percent(why?.served.in_time_share)],
    ["Time to first token, p50", seconds(why?.latency.time_to_first_token_s.p50)],
    ["Time per output token, p50", seconds(why?.latency.time_per_output_token_s.p50)],
  ];
  $("tiles").replaceChildren(...told.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}

const LATENCIES = [
  ["time_to_first_token_s", "Time to first token (TTFT)"],
  ["time_per_output_token_s", "Time per output token (TPOT)"],
  ["queue_s", "In the queue"],
  ["total_s", "In the engine"],
];

function latency(told) {
  const rows = LATENCIES.map(([name, words]) => {
    const of = told[name];
    return [words, seconds(of.p50), seconds(of.p90), seconds(of.p99), number(of.count)];
  });
  table($("latency"), "Within a tenth of each", ["Time", "p50", "p90", "p99", "count"], rows);
}

function queue({ running, waiting, new_requests, reasons }) {
  const rows = Object.entries(reasons).map(([name, of]) => [name, number(of.now), number(of.mean, 2), number(of.began)]);
  const caption = `${number(running)} running, ${number(waiting)} waiting, ${number(new_requests)} not scheduled yet`;
  table($("queue"), caption, ["Waiting for", "now", "mean", "began"], rows);
}

function tiers(cache) {
  const rows = Object.entries(cache.tiers).map(([name, of]) =>
    [name, bytes(of.bytes), number(of.blocks), number(of.blocks_loaded), number(of.blocks_evicted), percent(of.hit_share)]);
  // What a tier brought was found in the cache then.
  const brought = Object.values(cache.tiers).reduce((sum, of) => sum + (of.hit_share ?? 0), 0);
  const own = cache.hit_share == null ? null : Math.max(cache.hit_share - brought, 0);
  const device = [["device", bytes(cache.bytes.active + cache.bytes.cached), none, none, number(cache.evicted_blocks), percent(own)]];
  const caption = rows.length ? "Blocks loaded and evicted since the start; of the device, and hits, in the last minute" : "There is no tier but the device";
  table($("tiers"), caption, ["Place", "bytes", "blocks", "loaded", "evicted", "hits"], device.concat(rows));
}

function cost(told) {
  const price = told.price_per_hour != null;
  const of = (name, part) => {
    const shown = [name, percent(part.share), seconds(part.seconds), number(part.computed_tokens), number(part.cached_tokens), number(part.output_tokens)];
    return price ? shown.concat(money(part.price), money(part.per_million_computed), money(part.per_million_output)) : shown;
  };
  const rows = Object.entries(told.tenants).slice(0, 50).map(([name, part]) => of(name, part));
  rows.push(of("all", told));
  const heads = ["Tenant", "share", "steps", "computed", "cached", "output"];
  const caption = price ? `At ${number(told.price_per_hour, 4)} an hour` : "Times; with --price-per-hour prices, too";
  table($("cost"), caption, price ? heads.concat("price", "per 1M computed", "per 1M output") : heads, rows);
}

/** What a change gains, in the unit of each figure. */
const GAINS = {
  prompt_tokens_share: value => percent(value) + " of the prompt tokens computed now",
  prompt_tokens: value => number(value) + " prompt tokens",
  recomputed_tokens: value => number(value) + " tokens that are computed again",
  step_s: value => seconds(value) + " of steps",
  step_share: value => percent(value) + " of their time",
};

function gain(told) {
  const figures = Object.entries(told ?? {}).filter(([, value]) => typeof value === "number");
  return figures.map(([name, value]) => Object.hasOwn(GAINS, name) ? GAINS[name](value) : name.replaceAll("_", " ") + " " + number(value, 2));
}

function advice(told, cache) {
  const evicted = cache.evicted_blocks ? `${number(cache.evicted_blocks)} blocks were evicted` : "nothing was evicted";
  const nothing = [make("li", {}, `None: in the last minute ${evicted}, and no change was found that would gain 5 %.`)];
  const items = told.map(piece => {
    const gained = gain(piece.gain);
    const sentences = [piece.because ?? ""];
    if (gained.length) sentences.push("Gain: " + gained.join(", "));
    if (piece.costs) sentences.push("Costs: " + piece.costs.text);
    return make("li", {}, make("strong", {}, piece.do), " ", sentences.join(". ") + ".");
  });
  $("advice").replaceChildren(...(items.length ? items : nothing));
}

const WIDTH = 480, HEIGHT = 260, LEFT = 72, BOTTOM = 34;

/** Both axes logarithmic: operations for each byte read, and operations a second. */
function roofline(limits) {
  const place = $("roofline");
  if (!limits.known) {
    place.replaceChildren();
    place.setAttribute("viewBox", "0 0 1 0.01");
    $("roofline-text").textContent = "Not known: " + limits.why;
    return;
  }
  place.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  const read = limits.machine.read_bytes_per_s, peak = limits.machine.weight_op_per_s;
  const points = ["prefill", "decode", "mixed"].filter(kind => limits[kind]).map(kind => {
    const { bandwidth, arithmetic } = limits[kind];
    return { kind, x: arithmetic * peak / Math.max(bandwidth * read, 1), y: arithmetic * peak, near: limits[kind] };
  }).filter(point => point.x > 0 && point.y > 0);
  const ridge = peak / read;
  const low = Math.log10(Math.min(ridge / 100, ...points.map(point => point.x)) / 2);
  const high = Math.log10(Math.max(ridge * 30, ...points.map(point => point.x)) * 2);
  const bottom = Math.log10(Math.min(peak / 1000, ...points.map(point => point.y)) / 2), top = Math.log10(peak * 2);
  const x = value => LEFT + (WIDTH - LEFT - 10) * (Math.log10(value) - low) / (high - low);
  const y = value => 8 + (HEIGHT - BOTTOM - 8) * (top - Math.log10(value)) / (top - bottom);
  const shapes = [];
  for (let power = Math.ceil(low); power <= high; power += 1) {
    const at = x(10 ** power);
    shapes.push(draw("line", { class: "axis", x1: at, x2: at, y1: 8, y2: HEIGHT - BOTTOM }));
    shapes.push(draw("text", { x: at, y: HEIGHT - BOTTOM + 14, "text-anchor": "middle" }, number(10 ** power, 3)));
  }
  for (let power = Math.ceil(bottom); power <= top; power += 1) {
    const at = y(10 ** power);
    shapes.push(draw("line", { class: "axis", x1: LEFT, x2: WIDTH - 10, y1: at, y2: at }));
    shapes.push(draw("text", { x: LEFT - 4, y: at + 4, "text-anchor": "end" }, rate(10 ** power, "op/s")));
  }
  const start = Math.max(10 ** low, 10 ** bottom / read);
  shapes.push(draw("path", { class: "roof", d: `M${x(start)} ${y(start * read)} L${x(ridge)} ${y(peak)} L${x(10 ** high)} ${y(peak)}` }));
  for (const { kind, x: intensity, y: reached } of points) {
    const dot = draw("circle", { cx: x(intensity), cy: y(reached), r: 6 });
    dot.style.fill = colour(kind);
    const right = x(intensity) > WIDTH - 90;
    shapes.push(dot, draw("text", { x: x(intensity) + (right ? -10 : 10), y: y(reached) + 4, "text-anchor": right ? "end" : "start" }, kind));
  }
  shapes.push(draw("text", { x: WIDTH / 2, y: HEIGHT - 4, "text-anchor": "middle" }, "operations for each byte read"));
  place.replaceChildren(...shapes);
  const words = points.map(({ kind, near }) => `${kind}: ${percent(near.bandwidth)} of the bandwidth, ${percent(near.arithmetic)} of the arithmetic`);
  $("roofline-text").textContent = `Measured limits: ${rate(read, "B/s")} and ${rate(peak, "op/s")}. ` + (words.join("; ") || "No step in the last minute") + ".";
}
