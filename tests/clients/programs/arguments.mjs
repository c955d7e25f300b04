// The arguments of a program, as in arguments.py, and what imports a package of the folder that it runs in.
import assert from "node:assert";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const from = createRequire(`${process.cwd()}/`);
export const load = (name) => import(pathToFileURL(from.resolve(name)));

export const [server, chatModel, embedderServer, embedder, file] = process.argv.slice(2);
export const { texts, embeddings } = JSON.parse(readFileSync(file, "utf8"));

// Throws AssertionError unless the rows are the expected embeddings.
export function assertEmbeddings(rows) {
  assert.equal(rows.length, embeddings.length);
  rows.forEach((row, i) => {
    assert.equal(row.length, embeddings[i].length);
    row.forEach((value, j) => assert.ok(Math.abs(value - embeddings[i][j]) < 1e-4));
  });
}
