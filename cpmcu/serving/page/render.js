"use strict";
// From markdown-it's tokens to elements. The model's text becomes text nodes only, never HTML.

/** Returns the nodes of tokens. Elements nested too deeply are left out, but not their text. */
function nodesOf(tokens) {
  const root = document.createDocumentFragment();
  const stack = [root];
  tokens.forEach((token, i) => {
    const top = stack.at(-1);
    if (token.nesting < 0) {
      stack.pop();
    } else if (token.nesting === 0) {
      top.append(...leavesOf(token));
    } else if (token.hidden || stack.length > 2 * DEEPEST) {
      stack.push(top);
    } else {
      const element = openElement(token, tokens, i);
      top.append(token.type === "table_open" ? make("div", { class: "scroll", tabindex: 0 }, element) : element);
      stack.push(element);
    }
  });
  return [...root.childNodes];
}

function openElement(token, tokens, i) {
  const { tag, type } = token;
  if (type === "heading_open") {
    // Headings start at h2: the page's own heading is h1.
    return make(`h${Math.min(6, Number(tag[1]) + 1)}`, { class: `level-${tag[1]}` });
  }
  if (type === "link_open") return linkTo(token.attrGet("href"));
  if (type === "ordered_list_open") return make("ol", token.attrGet("start") ? { start: token.attrGet("start") } : {});
  if (type === "th_open" || type === "td_open") {
    return make(tag, { class: (token.attrGet("style") ?? "text-align:left").slice("text-align:".length) });
  }
  if (type === "list_item_open") return listItemElement(tokens[i + 2]);
  return make(tag);
}

function linkTo(address, ...nodes) {
  const attributes = { href: webAddress(address), target: "_blank", rel: "noopener noreferrer nofollow" };
  return make("a", attributes, ...nodes);
}

/** A list item. `inline`: the token of its first text, which may begin with the box of a task. */
function listItemElement(inline) {
  const text = inline?.type === "inline" ? inline.children[0] : null;
  const task = text?.type === "text" ? /^\[([ xX])\]\s+/.exec(text.content) : null;
  if (!task) return make("li");
  text.content = text.content.slice(task[0].length);
  const done = task[1] !== " ";
  const box = make("span", { role: "img", "aria-label": done ? "done" : "to do" }, done ? "☑ " : "☐ ");
  return make("li", { class: "task" }, box);
}

/** Returns the nodes of a token without inner tokens. */
function leavesOf(token) {
  const { type, content } = token;
  switch (type) {
    case "inline": return nodesOf(token.children);
    case "softbreak": case "hardbreak": return [make("br")];
    case "hr": return [make("hr")];
    case "code_inline": return [make("code", {}, content)];
    case "fence": case "code_block": {
      const language = (token.info ?? "").trim().split(/\s/)[0];
      return [new CodeBlock(language, content.replace(/\n$/, "")).element];
    }
    case "image": return [linkTo(token.attrGet("src"), content || token.attrGet("src"))];
    case "formula": return [formulaOf(token)];
    default: return [content];
  }
}

/** Changes `old` to equal `fresh`, with as few changes as possible: selections and places stay. */
function sync(old, fresh) {
  if (old.isEqualNode(fresh)) return;
  if (old.block && fresh.block) {
    old.block.show(fresh.block.language, fresh.block.text);
  } else if (old.nodeType === Node.TEXT_NODE && fresh.nodeType === Node.TEXT_NODE) {
    if (fresh.data.startsWith(old.data)) old.appendData(fresh.data.slice(old.data.length));
    else old.data = fresh.data;
  } else if (old.nodeName !== fresh.nodeName || old.className !== fresh.className || old.dataset.source || old.block) {
    old.replaceWith(fresh);
  } else {
    for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
    for (const { name, value } of fresh.attributes) old.setAttribute(name, value);
    const [before, after] = [[...old.childNodes], [...fresh.childNodes]];
    for (const node of before.slice(after.length)) node.remove();
    after.forEach((node, i) => { if (i < before.length) sync(before[i], node); else old.append(node); });
  }
}

/** Returns the text of a node for screen readers: formulas as TeX, code without its buttons. */
function textOf(node) {
  if (node.nodeType === Node.TEXT_NODE) return node.data;
  if (node.block) return node.block.text;
  return node.dataset.source ?? [...node.childNodes].map(textOf).join("");
}
