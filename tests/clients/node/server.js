// Starts a folio server on a free port.

import { spawn } from "node:child_process";
import readline from "node:readline";

export async function serve(...args) {
  const binary = process.env.FOLIO_BIN;
  if (!binary) throw new Error("set FOLIO_BIN to the folio binary");
  const child = spawn(binary, ["serve", "--port", "0", ...args], { stdio: ["ignore", "ignore", "pipe"] });
  const log = [];
  let admin;
  const ended = new Promise((resolve) => child.on("exit", (code) => resolve(code)));
  const url = new Promise((resolve, reject) => {
    readline.createInterface({ input: child.stderr }).on("line", (line) => {
      log.push(line);
      admin = line.match(/operators +(https?:\/\/\S+)/)?.[1] ?? admin;
      const found = line.match(/listening on (http:\/\/\S+)/);
      if (found) resolve(found[1]);
    });
    ended.then(() => reject(new Error(`the server did not start:\n${log.join("\n")}`)));
  });
  return {
    url: await url,
    admin,
    pid: child.pid,
    async stop() {
      child.kill("SIGTERM");
      return ended;
    },
  };
}
