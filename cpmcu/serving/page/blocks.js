"use strict";
// Parses Markdown to blocks: {kind, from, to, make, ...} of lines from..to-1; `make` returns the element.
// Not supported: HTML, indented code, and link reference definitions.

const FENCE = /^([ \t]*)(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?=[ \t]|$)/;
const UNDERLINE = /^ {0,3}(=+|-+)[ \t]*$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const MARKER = /^([ \t]*)([-+*]|\d{1,9}[.)])(?:([ \t]+)(.*))?$/;
const COLUMNS = /^[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const DEEPEST = 10;  // nesting depth of lists and quotes

const isBlank = (line) => !line.trim();

/** Returns the blocks of lines. */
function blocksOf(lines, depth = 0) {
  const found = [];
  for (let at = 0; at < lines.length;) {
    if (isBlank(lines[at])) { at++; continue; }
    const block = readCode(lines, at) ?? readHeading(lines, at) ?? readRule(lines, at)
      ?? (depth < DEEPEST ? readQuote(lines, at, depth) ?? readList(lines, at, depth) : null)
      ?? readTable(lines, at) ?? readParagraph(lines, at);
    found.push({ from: at, ...block });
    at = block.to;
  }
  return found;
}

/** True if a line ends the paragraph before it. */
function interrupts(line) {
  if (FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)) return true;
  const marker = MARKER.exec(line);
  return Boolean(marker?.[4]) && (!/\d/.test(marker[2]) || parseInt(marker[2]) === 1);
}

/** Returns the width in columns of a line's leading white space. */
function indentOf(line) {
  let columns = 0;
  for (const sign of line) {
    if (sign === " ") columns++;
    else if (sign === "\t") columns += 4 - (columns % 4);
    else break;
  }
  return columns;
}

/** Removes up to a number of columns of a line's leading white space. */
function dedent(line, columns) {
  const indent = indentOf(line);
  return " ".repeat(Math.max(0, indent - columns)) + line.replace(/^[ \t]+/, "");
}

function readCode(lines, from) {
  const opened = FENCE.exec(lines[from]);
  if (!opened) return null;
  const [, indent, fence, info] = opened;
  const end = new RegExp(`^[ \\t]*${fence[0]}{${fence.length},}[ \\t]*$`);
  let to = from + 1;
  while (to < lines.length && !end.test(lines[to])) to++;
  const columns = indentOf(indent);
  const code = lines.slice(from + 1, to).map((line) => (columns ? dedent(line, columns) : line)).join("\n");
  const language = info.trim().split(/\s/)[0];
  const make = () => codeElement(language, code);
  return { kind: "code", to: Math.min(to + 1, lines.length), code, language, make };
}

function readHeading(lines, from) {
  const found = HEADING.exec(lines[from]);
  if (!found) return null;
  let text = lines[from].slice(found[0].length).trim();
  let end = text.length;
  while (text[end - 1] === "#") end--;  // "# Heading #"
  if (end === 0 || " \t".includes(text[end - 1])) text = text.slice(0, end);
  return { kind: "heading", to: from + 1, make: () => headingElement(found[1].length, text) };
}

/** Headings start at h2: the page's own heading is h1. */
function headingElement(level, text) {
  const element = make(`h${Math.min(6, level + 1)}`, { class: `level-${level}` });
  element.append(...inlineNodes(text.trim()));
  return element;
}

function readRule(lines, from) {
  return RULE.test(lines[from]) ? { kind: "rule", to: from + 1, make: () => make("hr") } : null;
}

function readQuote(lines, from, depth) {
  let to = from;
  while (to < lines.length && QUOTE.test(lines[to])) to++;
  if (to === from) return null;
  const inside = lines.slice(from, to).map((line) => line.replace(QUOTE, ""));
  return { kind: "quote", to, make: () => make("blockquote", {}, ...elementsOf(inside, depth + 1)) };
}

function elementsOf(lines, depth) { return blocksOf(lines, depth).map((block) => block.make()); }

function readList(lines, from, depth) {
  const first = MARKER.exec(lines[from]);
  if (!first) return null;
  const kind = first[2].slice(-1);  // another marker begins another list
  const items = [];
  let loose = false;
  let at = from;
  let to = from;
  while (at < lines.length) {
    const marker = MARKER.exec(lines[at]);
    if (!marker || marker[2].slice(-1) !== kind || RULE.test(lines[at])) break;
    if (items.length && indentOf(marker[1]) >= indentOf(first[1]) + 2) break;
    if (at > to) loose = true;  // there were blank lines
    const item = readItem(lines, at, marker);
    items.push(item.lines);
    loose ||= item.loose;
    to = at = item.to;
    while (at < lines.length && isBlank(lines[at])) at++;
  }
  return { kind: "list", to, make: () => listElement(first[2], items, loose, depth) };
}

/** Returns the lines of one list item. Two columns of indentation suffice: models often use fewer than CommonMark. */
function readItem(lines, from, [, indent, sign, gap = " ", rest = ""]) {
  const base = indentOf(indent);
  const offset = base + sign.length + (rest && gap.length <= 4 ? gap.length : 1);
  const inside = [rest];
  let loose = false;
  let to = from + 1;
  while (to < lines.length) {
    let next = to;
    while (next < lines.length && isBlank(lines[next])) next++;
    if (next === lines.length) break;
    const columns = indentOf(lines[next]);
    if (columns < base + 2) {
      // A paragraph may continue without indentation.
      if (next > to || MARKER.test(lines[next]) || interrupts(lines[next])) break;
      if (isBlank(inside.at(-1))) break;
    }
    loose ||= next > to && !MARKER.test(lines[next]);
    for (; to < next; to++) inside.push("");
    inside.push(dedent(lines[to], Math.min(columns, offset)));
    to++;
  }
  return { lines: inside, to, loose };
}

function listElement(sign, items, loose, depth) {
  const ordered = /\d/.test(sign);
  const start = parseInt(sign);
  const list = make(ordered ? "ol" : "ul", ordered && start !== 1 ? { start } : {});
  for (const lines of items) {
    const task = /^\[([ xX])\][ \t]+/.exec(lines[0]);
    const item = make("li", task ? { class: "task" } : {});
    if (task) {
      const done = task[1] !== " ";
      item.append(make("span", { role: "img", "aria-label": done ? "done" : "to do" }, done ? "☑ " : "☐ "));
    }
    const [begin, ...rest] = lines;
    for (const block of blocksOf([begin.slice(task?.[0].length ?? 0), ...rest], depth + 1)) {
      const element = block.make();
      if (block.kind === "paragraph" && !loose) item.append(...element.childNodes);
      else item.append(element);
    }
    list.append(item);
  }
  return list;
}

function isTable(lines, at) {
  const [header, columns] = [lines[at], lines[at + 1]];
  if (!header.includes("|") || !columns?.includes("|") || !COLUMNS.test(columns)) return false;
  return cellsOf(header).length === cellsOf(columns).length;
}

function cellsOf(line) {
  const inside = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inside.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function readTable(lines, from) {
  if (!isTable(lines, from)) return null;
  let to = from + 2;
  while (to < lines.length && lines[to].includes("|") && !interrupts(lines[to])) to++;
  const rows = [lines[from], ...lines.slice(from + 2, to)].map(cellsOf);
  return { kind: "table", to, make: () => tableElement(cellsOf(lines[from + 1]), rows) };
}

function tableElement(columns, [header, ...rows]) {
  const sides = columns.map((c) => (c.endsWith(":") ? (c.startsWith(":") ? "center" : "right") : "left"));
  const row = (kind, cells) => make("tr", {}, ...sides.map((side, i) => {
    const cell = make(kind, { class: side });
    cell.append(...inlineNodes(cells[i] ?? ""));
    return cell;
  }));
  const table = make("table", {}, make("thead", {}, row("th", header)));
  table.append(make("tbody", {}, ...rows.map((cells) => row("td", cells))));
  return make("div", { class: "scroll", tabindex: 0 }, table);
}

function readParagraph(lines, from) {
  let to = from + 1;
  for (; to < lines.length && !isBlank(lines[to]); to++) {
    const underline = UNDERLINE.exec(lines[to]);
    if (underline) {
      const text = lines.slice(from, to).join("\n");
      const level = underline[1][0] === "=" ? 1 : 2;
      return { kind: "heading", to: to + 1, make: () => headingElement(level, text) };
    }
    if (interrupts(lines[to]) || isTable(lines, to)) break;
  }
  const text = lines.slice(from, to).join("\n").trimEnd();
  return { kind: "paragraph", to, make: () => make("p", {}, ...inlineNodes(text)) };
}

/** Code with its language and a copy button. It is focusable, so that keys can scroll it. */
function codeElement(language, text) {
  const code = make("code", {}, text);
  const button = make("button", { type: "button", class: "icon", "aria-label": "Copy code", title: "Copy code" });
  button.append(icon("copy"));
  button.addEventListener("click", () => copy(code.textContent, button));
  const head = make("div", { class: "code-head" }, make("span", {}, language || "text"), button);
  return make("div", { class: "code" }, head, make("pre", { tabindex: 0 }, code));
}
