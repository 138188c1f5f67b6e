// What a survey found: of each head and score a mean over texts and its spread; read and checked.

import { count, finite, isObject, need, scoreWords, text, type ScoreWords } from "./manifest";

export interface Head {
  layer: string; // its number, or the name of its place where layers have the same numbers
  head: number;
  mean: (number | null)[]; // by score; null: no text had it
  std: (number | null)[]; // null: fewer than two had it
  texts: number[]; // how many had it
}
export interface HeadTable {
  model: string;
  texts: number;
  empty: number;
  truncated: number;
  scores: string[];
  words: Record<string, ScoreWords>;
  heads: Head[];
}

export function isTable(value: unknown): boolean {
  return isObject(value) && value.kind === "heads";
}

export function readTable(value: unknown): HeadTable {
  need(isObject(value) && value.format === 1, "this page reads format 1");
  need(Array.isArray(value.scores) && Array.isArray(value.heads) && value.heads.length > 0, "a table should have scores and heads");
  const scores = value.scores.map((name) => text(name, "a score"));
  const many = (what: unknown) => count(what, "a number of texts", 0, Number.MAX_SAFE_INTEGER);
  const row = (all: unknown): unknown[] => {
    need(Array.isArray(all) && all.length === scores.length, "a head should have a number for each score");
    return all;
  };
  const heads = value.heads.map((one): Head => {
    need(isObject(one), "a head should be an object");
    return { layer: text(one.layer, "a layer"), head: count(one.head, "a head's number", 0, 1e6), mean: row(one.mean).map(finite), std: row(one.std).map(finite), texts: row(one.texts).map(many) };
  });
  return { model: text(value.model, "model"), texts: many(value.texts), empty: many(value.empty), truncated: many(value.truncated), scores, words: scoreWords(value.words), heads };
}
