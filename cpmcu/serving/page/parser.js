"use strict";
// The Markdown parser: markdown-it with formulas, and with rules for what models write.

const DEEPEST = 40;  // nesting of blocks
const LINE_BREAK = /<br\s*\/?>/iy;
const PUNCTUATION = /[\p{P}\p{S}]/u;
// Scripts without spaces: a letter next to a mark counts as a space.
const SPACELESS = /[\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}\p{sc=Hangul}]/u;

/** Returns the address if a link may have it (http, https and mailto only), else null. */
function webAddress(text) {
  let url;
  try { url = new URL(text); } catch { return null; }
  return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
}

const parser = markdownit({ html: false, linkify: true, breaks: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
parser.disable(["reference", "html_block", "html_inline"]);  // a reference would change earlier blocks
parser.validateLink = (address) => webAddress(address) !== null;
parser.normalizeLinkText = (text) => text;
parser.inline.State.prototype.scanDelims = scanMarks;
parser.inline.ruler.at("newline", newline);
parser.inline.ruler.before("escape", "formula", inlineFormula);
parser.inline.ruler.before("autolink", "line_break", lineBreak);
const starters = { alt: ["paragraph", "blockquote", "list"] };
parser.block.ruler.before("table", "deep", deepText);
parser.block.ruler.before("fence", "formula", blockFormula, starters);

/** Returns what a run of *, _ or ~ can do. Replaces markdown-it's function, which knows no SPACELESS. */
function scanMarks(start, splitsWords) {
  const { src, posMax } = this;
  let end = start;
  while (end < posMax && src[end] === src[start]) end++;
  const before = start ? [...src.slice(Math.max(0, start - 2), start)].pop() : " ";
  const after = end < posMax ? String.fromCodePoint(src.codePointAt(end)) : " ";
  const [left, right] = [before, after].map((c) => ({
    space: /\s/.test(c), sign: PUNCTUATION.test(c), free: SPACELESS.test(c),
  }));
  const opens = !right.space && (!right.sign || left.space || left.sign || left.free);
  const closes = !left.space && (!left.sign || right.space || right.sign || right.free);
  return {
    can_open: opens && (splitsWords || !closes || left.sign),
    can_close: closes && (splitsWords || !opens || right.sign),
    length: end - start,
  };
}

/** Rule for the end of a line. The next line keeps its indentation. */
function newline(state, silent) {
  if (state.src[state.pos] !== "\n") return false;
  if (!silent) {
    state.pending = state.pending.trimEnd();
    state.push("softbreak", "br", 0);
  }
  state.pos++;
  return true;
}

/** Rule for <br>, the only HTML that is not shown as text. */
function lineBreak(state, silent) {
  LINE_BREAK.lastIndex = state.pos;
  if (!LINE_BREAK.test(state.src)) return false;
  if (!silent) state.push("hardbreak", "br", 0);
  state.pos = LINE_BREAK.lastIndex;
  return true;
}

/** Rule for lists and quotes that are nested too deeply: their lines are one paragraph. */
function deepText(state, start, end, silent) {
  if (silent || state.level < DEEPEST) return false;
  let next = start + 1;
  while (next < end && state.sCount[next] >= state.blkIndent) next++;
  state.line = next;
  state.push("paragraph_open", "p", 1).map = [start, next];
  const token = state.push("inline", "", 0);
  token.content = state.getLines(start, next, state.blkIndent, false).trim();
  token.children = [];
  state.push("paragraph_close", "p", -1);
  return true;
}
