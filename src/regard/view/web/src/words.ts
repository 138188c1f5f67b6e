// Tokens as labels: cut, and with everything invisible made visible.
//
// A token is a stranger's text. Line breaks, control characters and the marks that turn the
// direction of writing are shown as signs, so that a label is one line, changes nothing around it
// and hides nothing. Joiners stay: emoji and Indic scripts need them.

const SIGNS: Record<string, string> = { "\n": "⏎", "\r": "␍", "\t": "⇥" };
// How byte-level vocabularies write white space.
const BYTES: Record<string, string> = { "\u0120": "␣", "\u010a": "⏎", "\u0109": "⇥" };
// Controls; embeddings, overrides and isolates; line and paragraph separators; byte order mark.
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069\u2028\u2029\ufeff]/gu;
export const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/u;
const LONE = /\p{Surrogate}/gu;
const segmenter =
  typeof Intl !== "undefined" && "Segmenter" in Intl
    ? new Intl.Segmenter(undefined, { granularity: "grapheme" })
    : null;

function sign(character: string): string {
  const known = SIGNS[character];
  if (known) return known;
  const code = character.codePointAt(0) ?? 0;
  if (code < 0x20) return String.fromCodePoint(0x2400 + code);
  return `⟨${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
}

export function visible(text: string): string {
  return text.slice(0, 400).replace(HIDDEN, sign).replace(LONE, "\ufffd");
}

/** The first graphemes of a label, so that no emoji is cut in two. */
export function shorten(text: string, length: number): string {
  const seen = visible(text);
  const parts = segmenter ? [...segmenter.segment(seen)].map((part) => part.segment) : [...seen];
  return parts.length <= length ? seen : parts.slice(0, length - 1).join("") + "…";
}

/** A label that can be read: a token of nothing but space is shown as a sign. */
export function label(text: string, length = 24): string {
  if (text === "") return "∅";
  if (/^[\u0120\u010a\u0109]+$/u.test(text)) return text.replace(/./gu, (sign) => BYTES[sign] ?? sign);
  const bare = text.replace(/^[ \u00a0\u2581\u0120]+(?=\S)/u, "");
  if (/^[ \u00a0\u3000]+$/u.test(bare)) return "␣";
  return shorten(bare, length);
}

/** Whether a token stands for no text, as [CLS] and <s> do. */
export function isSpecial(token: string): boolean {
  return /^(\[.+\]|<.+>)$/u.test(token.trim());
}

/** Which way a text runs: as its first letter does. */
export function direction(parts: Iterable<string>): "ltr" | "rtl" {
  for (const part of parts) {
    const letter = /\p{L}/u.exec(part);
    if (letter) return RIGHT_TO_LEFT.test(letter[0]) ? "rtl" : "ltr";
  }
  return "ltr";
}

/** Whether most of what is written is Chinese, Japanese or Korean. */
export function isCjk(parts: string[]): boolean {
  const letters = parts.join("").match(/\p{L}/gu) ?? [];
  const own = letters.filter((letter) => /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Hangul}ー]/u.test(letter));
  return own.length * 2 > letters.length;
}

/** A label between quotes for a sentence; isolated, so that Hebrew in it turns nothing around it. */
export function quoted(text: string, length = 24): string {
  return `“\u2068${label(text, length)}\u2069”`;
}

/** How the text begins, without tokens that stand for none of it. */
export function opening({ pieces, tokens }: { pieces: [string, string][] | null; tokens: string[] }): string {
  if (pieces) return pieces.slice(0, 200).map(([before, own]) => before + own).join("").replace(/\s+/g, " ").trim();
  const read = tokens.slice(0, 60);
  const said = read.filter((token) => !isSpecial(token));
  return (said.length ? said : read).join(" ");
}
