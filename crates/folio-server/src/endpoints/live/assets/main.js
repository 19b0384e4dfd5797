// What comes is kept, and drawn once a frame.

const timeline = new Timeline(), map = new BlockMap(), chat = new Chat();
let hello = null, why = null, tree = null, wanted = new Set(), asked = false;

/** Draws these parts before the next frame. */
function redraw(...parts) {
  parts.forEach(part => wanted.add(part));
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => {
    const now = wanted;
    [asked, wanted] = [false, new Set()];
    if (!hello) return;
    if (now.has("timeline")) {
      timeline.draw();
      tiles(timeline, why, hello);
    }
    if (now.has("map")) map.draw();
    if (now.has("tree") && tree) prefixTree(tree, hello);
    if (now.has("why") && why) {
      timeline.text(why.time);
      latency(why.latency);
      roofline(why.limits);
      queue(why.queue);
      tiers(why.cache);
      cost(why.cost);
      advice(why.advice, why.cache);
      paged(why.cache.contiguous, timeline, hello);
    }
  });
}

const take = {
  hello(told) {
    hello = told;
    $("key-form").hidden = true;
    $("figures").hidden = false;
    document.title = "Folio: " + told.model;
    $("model").textContent = `${told.model}, context ${number(told.context_tokens)} tokens, version ${told.version}`;
    timeline.begin(told.moment, told.moments);
    map.begin(told);
    chat.begin(told);
    redraw("timeline");
  },
  sample(told) {
    if (told.draining) $("status").textContent = "Draining";
    if (told.moment) timeline.add(told.moment);
    if (told.map) map.see(told.map);
    redraw("timeline", "map");
  },
  why(told) {
    why = told;
    redraw("why", "timeline");
  },
  tree(told) {
    tree = told;
    redraw("tree");
  },
};

function askKey(reason) {
  $("key-why").textContent = reason;
  $("key-form").hidden = false;
  $("key").focus();
}

const live = new Live((name, data) => take[name]?.(data), text => { $("status").textContent = text; }, askKey);

$("key-form").addEventListener("submit", event => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value.trim());
  $("key").value = "";
  live.again();
});
$("pause").addEventListener("click", () => {
  const paused = !live.paused;
  $("pause").setAttribute("aria-pressed", paused);
  live.pause(paused);
});
function redrawAll() {
  legend($("timeline-legend"), KINDS.map(kind => [colour(kind), kind]));
  map.legend();
  redraw("timeline", "map", "tree", "why");
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
addEventListener("resize", redrawAll);
redrawAll();
live.update();
