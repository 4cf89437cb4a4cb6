"use strict";
// Code blocks: language, copy button, and colours by highlight.js, which are added in idle time.

const MOST_COLOURED = 16000;  // characters of a block; the rest stays plain
const MOST_GROWING = 4000;    // the same for a block that still grows
const STILL = 400;            // ms without a change, after which a block no longer grows

hljs.registerAliases(["cuda", "cu"], { languageName: "cpp" });

/** A code block. `element` is focusable, so that keys can scroll it. */
class CodeBlock {
  constructor(language, text) {
    this.label = make("span");
    this.code = make("code");
    const button = iconButton("copy", "Copy code", () => copy(this.text, button));
    const head = make("div", { class: "code-head" }, this.label, button);
    this.element = make("div", { class: "code" }, head, make("pre", { tabindex: 0 }, this.code));
    this.element.block = this;
    this.text = "";
    this.next = 0;  // time of the next colouring
    this.show(language, text);
  }

  /** Shows `text`. If it extends the former text, the elements before it stay. */
  show(language, text) {
    if (language !== this.language) this.label.textContent = language || "text";
    else if (text === this.text) return;
    const added = text.startsWith(this.text) ? text.slice(this.text.length) : null;
    if (added === null) this.code.replaceChildren(text);
    else if (this.code.lastChild?.nodeType === Node.TEXT_NODE) this.code.lastChild.appendData(added);
    else if (added) this.code.append(added);
    Object.assign(this, { language, text, changed: performance.now() });
    colouring.add(this);
  }

  /** Adds colours now. Returns false if it is too early. */
  colour(now) {
    const { text, language } = this;
    if (!this.element.isConnected || !hljs.getLanguage(language)) return true;
    if (now < this.next || (text.length > MOST_GROWING && now < this.changed + STILL)) return false;
    const end = text.length > MOST_COLOURED ? text.lastIndexOf("\n", MOST_COLOURED) + 1 : text.length;
    const found = hljs.highlight(text.slice(0, end), { language, ignoreIllegals: true });
    const fresh = make("code", {}, ...found._emitter.root.children.map(colouredNode), text.slice(end));
    fresh.normalize();
    sync(this.code, fresh);
    const after = performance.now();
    this.next = after + 20 * (after - now);
    return true;
  }
}

/** Converts a node of highlight.js's tree: a text, or {scope, children}. */
function colouredNode(node) {
  if (typeof node === "string") return document.createTextNode(node);
  const element = make("span", node.scope ? { class: `hl-${node.scope.split(/[.:]/)[0]}` } : {});
  element.append(...node.children.map(colouredNode));
  return element;
}

/** The blocks that wait for colours. */
const colouring = {
  waiting: new Set(),
  asked: false,

  add(block) {
    this.waiting.add(block);
    this.ask(0);
  },

  ask(delay) {
    if (this.asked) return;
    this.asked = true;
    const idle = window.requestIdleCallback ?? ((act) => setTimeout(act, 20));
    setTimeout(() => idle(() => this.work()), delay);
  },

  /** Colours blocks for a few milliseconds. */
  work() {
    this.asked = false;
    const begin = performance.now();
    let early = 0;
    for (const block of this.waiting) {
      const now = performance.now();
      if (now - begin > 8) break;
      if (block.colour(now)) this.waiting.delete(block);
      else early++;
    }
    if (this.waiting.size) this.ask(early === this.waiting.size ? 100 : 0);
  },
};
