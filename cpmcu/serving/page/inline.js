"use strict";
// Markdown inside a paragraph: emphasis, code, links and line breaks, as DOM nodes.
// The model's text becomes text nodes only. HTML in it is shown as text.

const RUN = /[^\\`*_~[\]!<&\n$h]+/y;
const URL_RUN = /https?:\/\/[^\s<>"'`|\\^{}]{1,2000}/y;
const AUTOLINK = /<(https?:\/\/[^\s<>]*)>/y;
const LINE_BREAK = /<br\s*\/?>/iy;
const ENTITY = /&(amp|lt|gt|quot|apos|nbsp|#39);/y;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", "#39": "'" };
// (address "title") after the text of a link
const TARGET = /\(\s?(?:<([^<>\n]*)>|((?:[^\s()\\]|\\.|\((?:[^\s()\\]|\\.)*\))*))(?:\s(?:"[^"]*"|'[^']*'|\([^()]*\)))?\s?\)/y;
const PUNCTUATION = /[\p{P}\p{S}]/u;
// Scripts without spaces: a letter next to a mark counts as a space.
const SPACELESS = /[\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}\p{sc=Hangul}]/u;
const MOST_PIECES = 5000;  // of a paragraph; if there are more, marks stay text

/** Returns the nodes of a paragraph's text. */
function inlineNodes(text) { return new Inline(text).nodes(); }

/** Returns the address if a link may have it (http and https only), else null. */
function webAddress(text) {
  let url;
  try { url = new URL(text); } catch { return null; }
  return ["http:", "https:"].includes(url.protocol) ? url.href : null;
}

function linkTo(address, nodes) {
  const link = make("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" });
  link.append(...nodes);
  return link;
}

class Inline {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.pieces = [];     // {node}, or a run of marks: {mark, count, whole, opens, closes}
    this.plain = "";      // text read but not yet a piece
    this.brackets = [];   // pieces that are an open [ or ![
    this.missing = new Set();  // end marks that do not occur in the rest
  }

  nodes() {
    while (this.at < this.text.length) this.step();
    this.flush();
    return nodesOf(this.pieces);
  }

  step() {
    const { text, at } = this;
    const run = this.match(RUN);
    if (run) { this.plain += run[0]; return; }
    switch (text[at]) {
      case "\\": return this.escape();
      case "`": return this.code();
      case "*": case "_": case "~": return this.marks();
      case "[": return this.open("[");
      case "!": return text[at + 1] === "[" ? this.open("![") : this.take(1);
      case "]": return this.close();
      case "<": return this.angle();
      case "&": {
        const entity = this.match(ENTITY);
        if (entity) { this.plain += ENTITIES[entity[1]]; return; }
        return this.take(1);
      }
      case "$": return text[at + 1] === "$" && this.formula("$$", "$$") ? undefined : this.take(1);
      case "h": return this.address();
      default: return this.newline();
    }
  }

  /** Matches a sticky pattern here and advances past it. Returns the match or null. */
  match(pattern) {
    pattern.lastIndex = this.at;
    const found = pattern.exec(this.text);
    if (found) this.at = pattern.lastIndex;
    return found;
  }

  take(count) {
    this.plain += this.text.slice(this.at, this.at + count);
    this.at += count;
  }

  flush() {
    if (this.plain) this.pieces.push({ node: document.createTextNode(this.plain) });
    this.plain = "";
  }

  push(node) {
    this.flush();
    this.pieces.push({ node });
  }

  /** Returns the next position of `end`, or -1. A missing end mark is searched for only once. */
  search(end, from) {
    if (this.missing.has(end)) return -1;
    const found = this.text.indexOf(end, from);
    if (found < 0) this.missing.add(end);
    return found;
  }

  escape() {
    const next = this.text[this.at + 1];
    if (next === "(" && this.formula("\\(", "\\)")) return;
    if (next === "[" && this.formula("\\[", "\\]")) return;
    if (next === "\n") { this.at += 1; return this.newline(); }
    if (next && /[!-/:-@[-`{-~]/.test(next)) this.at += 1;
    this.take(1);
  }

  /** Shows a formula as text: it is not parsed as Markdown. */
  formula(begin, end) {
    const found = this.search(end, this.at + begin.length);
    if (found < 0) return false;
    const source = this.text.slice(this.at, found + end.length);
    this.push(make("span", { class: "math" }, source));
    this.at = found + end.length;
    return true;
  }

  code() {
    const fence = /`+/y;
    const [ticks] = this.match(fence);
    let end = this.at;
    for (;;) {
      end = this.search(ticks, end);
      if (end < 0) { this.plain += ticks; return; }
      fence.lastIndex = end;
      const length = fence.exec(this.text)[0].length;
      if (length === ticks.length) break;
      end += length;
    }
    let code = this.text.slice(this.at, end).replaceAll("\n", " ");
    if (code.startsWith(" ") && code.endsWith(" ") && code.trim()) code = code.slice(1, -1);
    this.push(make("code", {}, code));
    this.at = end + ticks.length;
  }

  angle() {
    if (this.match(LINE_BREAK)) return this.push(make("br"));
    const link = this.match(AUTOLINK);
    const address = link && webAddress(link[1]);
    if (address) return this.push(linkTo(address, [link[1]]));
    if (link) this.plain += link[0];
    else this.take(1);
  }

  address() {
    const inWord = this.at > 0 && /[\p{L}\p{N}]/u.test(this.text[this.at - 1]);
    const found = inWord || this.brackets.length ? null : this.match(URL_RUN);
    if (!found) return this.take(1);
    let shown = found[0].replace(/[.,;:!?*_~]+$/, "");
    while (shown.endsWith(")") && shown.split(")").length > shown.split("(").length) shown = shown.slice(0, -1);
    this.at -= found[0].length - shown.length;
    const address = webAddress(shown);
    if (address) this.push(linkTo(address, [shown]));
    else this.plain += shown;
  }

  newline() {
    this.plain = this.plain.trimEnd();
    this.push(make("br"));
    this.plain += this.match(/\n([ \t]*)/y)[1]; // keeps the indentation of unfenced code
  }

  marks() {
    const mark = this.text[this.at];
    const before = this.at ? [...this.text.slice(Math.max(0, this.at - 2), this.at)].pop() : " ";
    const count = this.match(/\*+|_+|~+/y)[0].length;
    const after = this.at < this.text.length ? String.fromCodePoint(this.text.codePointAt(this.at)) : " ";
    if (mark === "~" && count !== 2) { this.plain += mark.repeat(count); return; }
    const [left, right] = [before, after].map((c) => ({
      space: /\s/.test(c), sign: PUNCTUATION.test(c), free: SPACELESS.test(c),
    }));
    const opening = !right.space && (!right.sign || left.space || left.sign || left.free);
    const closing = !left.space && (!left.sign || right.space || right.sign || right.free);
    const within = mark === "_";  // within a word: snake_case
    this.flush();
    this.pieces.push({
      mark, count, whole: count,
      opens: opening && (!within || !closing || left.sign),
      closes: closing && (!within || !opening || right.sign),
    });
  }

  open(bracket) {
    this.flush();
    const piece = { node: document.createTextNode(bracket) };
    this.pieces.push(piece);
    this.brackets.push(piece);
    this.at += bracket.length;
  }

  close() {
    const opened = this.brackets.pop();
    this.at += 1;
    const target = opened && this.match(TARGET);
    const address = target && webAddress((target[1] ?? target[2]).replace(/\\(?=[!-/:-@[-`{-~])/g, ""));
    if (!address) {
      this.plain += "]" + (target ? target[0] : "");
      return;
    }
    this.flush();
    const begin = this.pieces.lastIndexOf(opened);
    const inside = nodesOf(this.pieces.splice(begin).slice(1));
    this.pieces.push({ node: linkTo(address, inside.length ? inside : [address]) });
    this.brackets.length = 0;  // no link within a link
  }
}

/** Converts runs of marks to emphasis by CommonMark's rules. Returns the nodes. */
function nodesOf(pieces) {
  const none = {};  // kind of mark -> no opener before this piece
  for (let c = 0; c < pieces.length && pieces.length < MOST_PIECES; c++) {
    const closer = pieces[c];
    while (closer.closes && closer.count) {
      const kind = `${closer.mark}${closer.opens}${closer.whole % 3}`;
      let o = c - 1;
      while (o >= (none[kind] ?? 0) && !pairs(pieces[o], closer)) o--;
      if (o < (none[kind] ?? 0)) { none[kind] = c; break; }
      const opener = pieces[o];
      const count = Math.min(2, opener.count, closer.count);
      const element = make(count === 1 ? "em" : closer.mark === "~" ? "del" : "strong");
      element.append(...pieces.splice(o + 1, c - o - 1, { node: element }).map(nodeOf));
      opener.count -= count;
      closer.count -= count;
      c = o + 2;
      for (const each in none) none[each] = Math.min(none[each], o + 1);
    }
  }
  return pieces.map(nodeOf);
}

function pairs(opener, closer) {
  if (opener.mark !== closer.mark || !opener.opens || !opener.count) return false;
  const either = opener.closes || closer.opens;
  return !either || (opener.whole + closer.whole) % 3 !== 0 || opener.whole % 3 === 0;
}

function nodeOf(piece) {
  return piece.node ?? document.createTextNode(piece.mark.repeat(piece.count));
}
