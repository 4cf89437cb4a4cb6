"use strict";
// Formulas: KaTeX reads TeX, the browser shows MathML. Markdown's rules for $, $$, \( and \[.

const MATHML = "http://www.w3.org/1998/Math/MathML";
const LONGEST_FORMULA = 5000;
const formulas = new Map();  // source of a formula -> its element, which is copied

/** Returns the element of a formula. `source`: with its marks. What KaTeX cannot read stays text. */
function formulaElement(source, tex, display) {
  if (!formulas.has(source)) {
    if (formulas.size > 500) formulas.clear();
    formulas.set(source, readFormula(source, tex, display));
  }
  return formulas.get(source).cloneNode(true);
}

function readFormula(source, tex, display) {
  const frame = { class: display ? "math display" : "math", "data-source": source };
  if (tex.length <= LONGEST_FORMULA) {
    try {
      const options = { output: "mathml", displayMode: display, strict: "ignore", maxExpand: 200, maxSize: 20 };
      const tree = katex.__renderToDomTree(tex, options);
      if (display) frame.tabindex = 0;
      return make("span", frame, ...tree.children.map(mathElement));
    } catch (error) {
      if (!(error instanceof katex.ParseError || error instanceof RangeError)) throw error;
    }
  }
  return make("span", { ...frame, class: "math source" }, source);
}

/** Converts a node of KaTeX's tree. The page's policy allows no style attributes, but properties. */
function mathElement(node) {
  if (!node.children) return node.toNode();
  if (node.type === "semantics") return mathElement(node.children[0]);
  const element = document.createElementNS(MATHML, node.type);
  for (const [name, value] of Object.entries(node.attributes)) {
    if (name === "style") element.style.cssText = value;
    else if (name !== "xmlns") element.setAttribute(name, value);
  }
  element.append(...node.children.map(mathElement));
  return element;
}

const CLOSING = { "$": "$", "$$": "$$", "\\(": "\\)", "\\[": "\\]" };

/** Returns the mark that opens a formula at a position, or null. */
function openingMark(text, at) {
  const two = text.slice(at, at + 2);
  if (two in CLOSING) return two;
  const alone = text[at] === "$" && /\S/.test(text[at + 1] ?? " ") && !/[\w$]/.test(text[at - 1] ?? " ");
  return alone ? "$" : null;
}

/** Returns the position of the mark that closes a formula, -1 if there is none, null if the next mark
 * cannot close it: "$5 and $6" has no formula. */
function closingMark(text, mark, from) {
  const end = CLOSING[mark];
  let at = text.indexOf(end, from);
  while (mark === "$" && text[at - 1] === "\\") at = text.indexOf(end, at + 1);
  const cannot = mark === "$" && at >= 0 && (/\s/.test(text[at - 1]) || /[\w$]/.test(text[at + 1] ?? " "));
  return cannot ? null : at;
}

/** Rule for a formula in a paragraph. */
function inlineFormula(state, silent) {
  const mark = openingMark(state.src, state.pos);
  state.unclosed ??= new Set();
  if (!mark || state.unclosed.has(mark)) return false;
  const from = state.pos + mark.length;
  const end = closingMark(state.src, mark, from);
  if (end === -1) state.unclosed.add(mark);
  if (end === null || end < 0 || !state.src.slice(from, end).trim()) return false;
  if (!silent) {
    const token = state.push("formula", "", 0);
    token.content = state.src.slice(from, end);
    token.markup = mark;
  }
  state.pos = end + mark.length;
  return true;
}

/** Rule for a formula that has its own lines. It ends before a blank line, or is no formula. */
function blockFormula(state, start, end, silent) {
  const lineOf = (line) => state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]).trimEnd();
  const mark = lineOf(start).slice(0, 2);
  if (!["$$", "\\["].includes(mark) || state.sCount[start] - state.blkIndent >= 4) return false;
  let next = start;
  let closing = -1;
  for (; next < end; next++) {
    if (next > start && (state.isEmpty(next) || state.sCount[next] < state.blkIndent)) return false;
    closing = lineOf(next).indexOf(CLOSING[mark], next === start ? 2 : 0);
    if (closing >= 0) break;
  }
  if (closing >= 0 && closing + 2 !== lineOf(next).length) return false;  // text follows
  if (silent) return true;
  const source = state.getLines(start, Math.min(next + 1, end), state.blkIndent, false).trim();
  const token = state.push("formula", "", 0);
  token.block = true;
  token.map = [start, Math.min(next + 1, end)];
  token.hidden = closing < 0;  // the formula has not ended yet
  token.content = closing < 0 ? source : source.slice(2, -2);
  token.markup = mark;
  state.line = Math.min(next + 1, end);
  return true;
}

/** Returns the element of a rule's token. */
function formulaOf(token) {
  const { content, markup } = token;
  if (token.hidden) return make("span", { class: "math source" }, content);
  return formulaElement(markup + content + CLOSING[markup], content, markup === "$$" || markup === "\\[");
}
