// The page at / in a real browser: what it shows, who may see it, that nothing runs in it but itself, and what axe says of it.
//
// FOLIO_BIN: the folio binary. FOLIO_SCREENSHOTS: a folder for pictures of the page [default: shots, beside this file].

import assert from "node:assert/strict";
import { mkdirSync, mkdtempSync, readFileSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, afterEach, before, test } from "node:test";

import { browser } from "./browser.js";
import { serve } from "../node/server.js";

const AXE = readFileSync(join(import.meta.dirname, "node_modules/axe-core/axe.min.js"), "utf8");
const SHOTS = process.env.FOLIO_SCREENSHOTS ?? join(import.meta.dirname, "shots");
const MARKUP = "<img src=x onerror=alert(1)><script>alert(2)</script>";
const MODEL = "folio-demo";
const DESK = { width: 1280, height: 900 }, PHONE = { width: 390, height: 844 };

let server, chromium;
const contexts = [];

before(async () => {
  mkdirSync(SHOTS, { recursive: true });
  const folder = mkdtempSync(join(tmpdir(), "folio-page-"));
  const [config, profile] = ["folio.toml", "machine.json"].map((name) => join(folder, name));
  const tenant = (name, key) => `[[tenants]]\nname = ${JSON.stringify(name)}\nkeys = [${JSON.stringify(key)}]\n`;
  writeFileSync(config, tenant("acme", "k-acme") + tenant("search", "k-search") + tenant("support", "k-support"), { mode: 0o600 });
  // What a machine could be: nothing is measured here.
  const limits = (threads) => ({ threads, read_bytes_per_s: 3e10, f32_flop_per_s: 2e11, int8_op_per_s: 4e11 });
  writeFileSync(profile, JSON.stringify({ by_threads: Array.from({ length: 64 }, (_, at) => limits(at + 1)) }));
  server = await serve("--config", config, "--machine-profile", profile, "--kv-cache-memory", "8MiB", "--admin-listen", "127.0.0.1:0", "--admin-key", "op", "--price-per-hour", "2.5");
  chromium = await browser();
  console.log(`Chromium ${chromium.version()}`);
});

after(async () => {
  await chromium?.close();
  assert.equal(await server?.stop(), 0);
});

afterEach(() => Promise.all(contexts.splice(0).map((context) => context.close())));

const ask = (key, content, more = { max_tokens: 24 }) =>
  fetch(server.url + "/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", authorization: `Bearer ${key}` },
    body: JSON.stringify({ model: MODEL, messages: [{ role: "user", content }], ...more }),
  }).then((response) => response.json());

/** A page that notes whatever goes wrong in it, and what it asks for. */
async function open(url, options = {}) {
  const context = await chromium.newContext({ viewport: DESK, ...options });
  contexts.push(context);
  const page = await context.newPage();
  page.setDefaultTimeout(20000);
  page.wrong = [];
  page.hosts = new Set();
  page.on("pageerror", (error) => page.wrong.push(error.message));
  // A refusal of the figures is told there as well, and is no fault.
  page.on("console", (message) => message.type() === "error" && !/status of 40[13]/.test(message.text()) && page.wrong.push(message.text()));
  page.on("dialog", (dialog) => page.wrong.push(`dialog: ${dialog.message()}`) && dialog.dismiss());
  page.on("request", (request) => page.hosts.add(new URL(request.url()).protocol === "data:" ? "data:" : new URL(request.url()).host));
  await page.goto(url);
  return page;
}

async function login(page, key) {
  await page.getByLabel("Key with the scope").fill(key);
  await page.keyboard.press("Enter");
}

const shown = (page, id, pattern) =>
  page.waitForFunction(([id, source]) => new RegExp(source).test(document.getElementById(id).textContent), [id, pattern.source]);

/** What axe finds, of WCAG 2.2 AA and of best practice. The page's policy keeps scripts out, so it is run from outside. */
async function violations(page) {
  const session = await page.context().newCDPSession(page);
  const run = `${AXE}; axe.run({ runOnly: ["wcag2a", "wcag2aa", "wcag21aa", "wcag22aa", "best-practice"] }).then(found => JSON.stringify(
    found.violations.map(({ id, nodes }) => [id, nodes.map(node => node.html.slice(0, 160) + " " + node.failureSummary)])))`;
  const { result, exceptionDetails } = await session.send("Runtime.evaluate", { expression: run, awaitPromise: true, returnByValue: true });
  assert.equal(exceptionDetails, undefined, JSON.stringify(exceptionDetails));
  return JSON.parse(result.value);
}

async function clean(page) {
  assert.deepEqual(page.wrong, []);
  for (const host of page.hosts) assert.ok(host === "data:" || host === new URL(page.url()).host, `it asked ${host}`);
  await page.context().close();
}

const admin = () => server.admin;

test("without a key the page says what it needs and tells nothing", async () => {
  const page = await open(admin());
  await shown(page, "status", /key is needed/);
  const text = await page.locator("body").innerText();
  assert.ok(!/acme|folio-demo/.test(text), text);
  await login(page, "wrong");
  await shown(page, "key-why", /Incorrect API key/);
  assert.deepEqual(await violations(page), []);
  await clean(page);
});

test("with the key everything is shown, in both colour schemes and on a phone, and axe finds nothing", async () => {
  const tenants = [["k-acme", 6], ["k-search", 4], ["k-support", 2]];
  const question = (key, at) => `You are a helpful assistant of ${key}. ${"Tell me a long story about a dragon. ".repeat(12)} ${`Number ${at}. `.repeat(4 * at)}`;
  for (const [key, times] of tenants) {
    for (let at = 0; at < times; at += 1) {
      const answer = await ask(key, question(key, at));
      assert.ok(answer.choices, JSON.stringify(answer));
    }
  }
  for (const [name, options] of [
    ["light", { colorScheme: "light" }],
    ["dark", { colorScheme: "dark" }],
    ["phone-light", { colorScheme: "light", viewport: PHONE, hasTouch: true, isMobile: true }],
    ["phone-dark", { colorScheme: "dark", viewport: PHONE, hasTouch: true, isMobile: true }],
  ]) {
    const page = await open(admin(), options);
    await login(page, "op");
    await shown(page, "status", /Live/);
    await shown(page, "model", /folio-demo/);
    await shown(page, "cost", /acme/);
    await shown(page, "cost", /per 1M output/);
    await shown(page, "latency", /TTFT/);
    await shown(page, "tree-about", /beginnings/);
    await shown(page, "map-legend", /acme/);
    const busy = tenants.flatMap(([key, times]) => Array.from({ length: times }, (_, at) => ask(key, question(key, at), { max_tokens: 400, ignore_eos: true })));
    await page.waitForFunction(() => document.querySelectorAll("#roofline circle").length > 0);
    await page.waitForTimeout(600);
    const wide = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
    assert.ok(wide <= 0, `${name}: it is ${wide} px too wide`);
    const hidden = await page.evaluate(() => document.getElementById("cost").scrollWidth - document.getElementById("cost").clientWidth);
    assert.ok(options.isMobile || hidden <= 0, `${name}: ${hidden} px of what it costs are hidden`);
    await page.screenshot({ path: join(SHOTS, `${name}.png`), fullPage: true });
    await Promise.all(busy);
    assert.deepEqual(await violations(page), [], name);
    const coloured = await page.evaluate(() => {
      const count = (id) => {
        const { width, height } = document.getElementById(id);
        const { data } = document.getElementById(id).getContext("2d").getImageData(0, 0, width, height);
        const colours = new Set();
        for (let at = 0; at < data.length; at += 4) colours.add(data.slice(at, at + 4).join());
        return colours.size;
      };
      return [count("timeline"), count("map"), document.querySelectorAll("#tree rect").length];
    });
    assert.ok(coloured[0] > 2 && coloured[1] > 3 && coloured[2] > 2, `${name}: ${coloured}`);
    await clean(page);
  }
});

/** What the page is told, until there is one of each kind. */
async function told() {
  const response = await fetch(admin() + "/v1/why/live", { headers: { authorization: "Bearer op" } });
  let text = "";
  for await (const piece of response.body.pipeThrough(new TextDecoderStream())) {
    text += piece;
    if (["hello", "sample", "why", "tree"].every((name) => text.includes(`event: ${name}\n`)) && text.endsWith("\n\n")) break;
  }
  return text;
}

/** The same with other reports. */
const changed = (text, change) =>
  text.replaceAll(/^(event: why\ndata: )(.*)$/gm, (_, head, data) => {
    const why = JSON.parse(data);
    change(why);
    return head + JSON.stringify(why);
  });

test("names that are markup stay names wherever they are shown", async () => {
  const text = await told();
  assert.match(text, /acme/);
  const page = await open(admin());
  const body = text.replaceAll(/acme|folio-demo/g, () => JSON.stringify(MARKUP).slice(1, -1)).replaceAll('"advice":[]', `"advice":[${JSON.stringify({ do: MARKUP, because: MARKUP, gain: { [MARKUP]: 1 }, costs: { text: MARKUP } })}]`);
  await page.route("**/v1/why/live", (route) => route.fulfill({ contentType: "text/event-stream", body }));
  await login(page, "op");
  for (const id of ["model", "map-legend", "cost", "tree-table", "tree", "advice"]) await shown(page, id, /<img src=x onerror=alert\(1\)><script>/);
  assert.equal(await page.locator("header img, main img, header script, main script").count(), 0);
  await clean(page);
});

// As `/v1/why` has them (crates/folio-server/src/observability/why/advice).
const ADVICE = [
  {
    kind: "kv_memory", do: "Give the KV cache 2 times the memory: --kv-cache-memory 16MiB", because: "hits are 20 % of prompt tokens",
    evidence: { times: 2, bytes: 16777216 }, gain: { prompt_tokens_share: 0.25, prompt_tokens: 1234.4, step_s: 0.4 },
    costs: { text: "8.00 MiB more memory where the cache is", memory_bytes: 8388608 },
  },
  {
    kind: "preemption", do: "Keep what preempted requests had", because: "3 times a request lost its blocks",
    evidence: { preemptions: 3 }, gain: { recomputed_tokens: 1, step_s: 12.4 },
  },
  {
    kind: "max_num_seqs", do: "Let 16 requests run at once: --max-num-seqs 16", because: "7.9 of 8 places are taken in a step",
    evidence: { sequences: 7.9 }, gain: { step_s: 12.4, step_share: 0.15 },
  },
];

test("what advice gains is told in the unit of each figure, and without advice only what is so", async () => {
  const text = await told();
  const item = async (advice, evicted, pattern) => {
    const page = await open(admin());
    const body = changed(text, (why) => {
      why.advice = advice;
      why.cache.evicted_blocks = evicted;
    });
    await page.route("**/v1/why/live", (route) => route.fulfill({ contentType: "text/event-stream", body }));
    await login(page, "op");
    await shown(page, "advice", pattern);
    const items = await page.locator("#advice li").allInnerTexts();
    await clean(page);
    return items;
  };
  const [memory, preemption, places] = await item(ADVICE, 7, /Gain/);
  assert.ok(memory.endsWith("Gain: 25 % of the prompt tokens computed now, 1,234 prompt tokens, 400 ms of steps. Costs: 8.00 MiB more memory where the cache is."), memory);
  assert.ok(preemption.endsWith("Gain: 1 tokens that are computed again, 12 s of steps."), preemption);
  assert.ok(places.endsWith("Gain: 12 s of steps, 15 % of their time."), places);
  const [unevicted] = await item([], 0, /None/);
  assert.match(unevicted, /nothing was evicted, and no change was found/);
  const [evicted] = await item([], 1234, /None/);
  assert.match(evicted, /1,234 blocks were evicted, and no change was found/);
});

test("the keyboard reaches everything", async () => {
  const page = await open(admin());
  await login(page, "op");
  await shown(page, "map-legend", /acme/);
  await page.locator("#map").focus();
  await page.keyboard.press("End");
  const last = await page.locator("#map-cell").innerText();
  await page.keyboard.press("Home");
  const first = await page.locator("#map-cell").innerText();
  await page.keyboard.press("ArrowRight");
  const second = await page.locator("#map-cell").innerText();
  const at = (text) => Number(text.match(/^Block ([\d,]+): /)[1].replaceAll(",", ""));
  assert.ok(at(first) === 0 && at(second) > 0 && at(last) === 511, [first, second, last].join());
  const reached = new Set();
  await page.locator("body").focus();
  await page.evaluate(() => document.activeElement.blur());
  for (let at = 0; at < 40; at += 1) {
    await page.keyboard.press("Tab");
    reached.add(await page.evaluate(() => document.activeElement.id || document.activeElement.className || document.activeElement.tagName));
  }
  for (const id of ["skip", "pause", "map", "SUMMARY", "latency", "cost"]) assert.ok(reached.has(id), `${id} is not among ${[...reached]}`);
  await clean(page);
});

const figures = async () => {
  const text = await (await fetch(admin() + "/metrics", { headers: { authorization: "Bearer op" } })).text();
  return (name) => Number(text.match(new RegExp(`^${name}(?:\\{.*\\})? (\\S+)$`, "m"))[1]);
};
const processor = () => {
  const fields = readFileSync(`/proc/${server.pid}/stat`, "utf8").split(") ")[1].split(" ");
  return (Number(fields[11]) + Number(fields[12])) / 100;
};

test("while the page is paused or closed nothing is sampled, and what an open one takes is told", async () => {
  const page = await open(admin());
  await login(page, "op");
  await shown(page, "status", /Live/);
  const [began, took, all] = [(await figures())("folio:page_samples_total"), (await figures())("folio:page_processor_seconds_total"), processor()];
  await page.waitForTimeout(5000);
  const open_s = (await figures())("folio:page_processor_seconds_total") - took;
  const all_s = processor() - all;
  assert.ok((await figures())("folio:page_samples_total") > began);
  console.log(`an open page: ${(1000 * open_s / 5).toFixed(2)} ms of samples a second; all of the server took ${(1000 * all_s / 5).toFixed(1)} ms a second`);
  await page.getByRole("button", { name: "Pause" }).press("Enter");
  await shown(page, "status", /Paused/);
  const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
  const closed = async () => {
    for (let at = 0; at < 100 && (await figures())("folio:pages_open") > 0; at += 1) await pause(100);
    return (await figures())("folio:page_samples_total");
  };
  const paused = await closed();
  await pause(1500);
  assert.equal((await figures())("folio:page_samples_total"), paused);
  await page.getByRole("button", { name: "Pause" }).click();
  await shown(page, "status", /Live/);
  await clean(page);
  const left = await closed();
  await pause(1500);
  assert.equal((await figures())("folio:page_samples_total"), left);
});

test("one can talk to the model where there are no keys", async () => {
  const alone = await serve();
  try {
    const page = await open(alone.url);
    await shown(page, "chat-note", /in the figures/);
    await page.getByLabel("Message").fill("Hello, who are you?");
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => document.querySelectorAll("#chat-log span")[1]?.textContent.length > 5);
    await page.waitForFunction(() => !document.getElementById("chat-send").disabled);
    await page.getByLabel("Message").fill(`Say this: ${MARKUP}`);
    await page.getByRole("button", { name: "Send" }).click();
    await page.waitForFunction(() => document.querySelectorAll("#chat-log span")[3]?.textContent.length > 0);
    assert.match(await page.locator("#chat-log").innerText(), /<img src=x onerror=alert/);
    assert.equal(await page.locator("#chat-log img, #chat-log script").count(), 0);
    await page.getByRole("button", { name: "New conversation" }).click();
    assert.equal(await page.locator("#chat-log p").count(), 0);
    // The page's policy: nothing runs that is not in it.
    await page.evaluate(() => {
      const script = document.createElement("script");
      try {
        script.textContent = "window.ran = 1";
      } catch {}
      document.body.append(script);
    });
    assert.equal(await page.evaluate(() => window.ran), undefined);
    assert.ok(page.wrong.length > 0 && page.wrong.every((text) => /Content Security Policy|Trusted|script/i.test(text)), page.wrong.join());
    page.wrong.length = 0;
    await clean(page);
  } finally {
    assert.equal(await alone.stop(), 0);
  }
});
