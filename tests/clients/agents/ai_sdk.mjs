// Vercel's AI SDK does the agents' task: node ai_sdk.mjs http://127.0.0.1:PORT (packages: ai, @ai-sdk/openai-compatible, zod).
import { writeFileSync, readFileSync, mkdtempSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const folder = mkdtempSync(join(tmpdir(), "folio-ai-sdk-"));
const provider = createOpenAICompatible({ name: "folio", baseURL: process.argv[2] + "/v1", apiKey: "none" });
const write_file = tool({
  description: "Writes a text to a file.",
  inputSchema: z.object({ path: z.string(), text: z.string() }),
  execute: async ({ path, text }) => {
    writeFileSync(join(folder, path), text);
    return "written";
  },
});
const result = streamText({
  model: provider("folio"),
  prompt: "Make a file made.txt with the word folio",
  tools: { write_file },
  stopWhen: stepCountIs(5),
});
const said = await result.text;
const wrote = readFileSync(join(folder, "made.txt"), "utf8").trim();
console.log(said.includes("Done: it is there.") && wrote === "folio" ? "did it" : `said ${said}, wrote ${wrote}`);
