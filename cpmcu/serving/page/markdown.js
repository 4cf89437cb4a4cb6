"use strict";
// Growing Markdown: complete blocks stay, only the last block is rendered again.

class Markdown {
  /** Renders into `root`. `settled` is called with the text of each complete block. */
  constructor(root, settled = () => {}) {
    this.root = root;
    this.settled = settled;
    this.text = "";
    this.done = 0;    // characters of complete blocks
    this.open = [];   // blocks after them: {source, kind, node, code}
  }

  /** Shows `text`. Fast if `text` extends the previous text. */
  show(text) {
    if (!text.startsWith(this.text)) {
      this.root.replaceChildren();
      this.done = 0;
      this.open = [];
    }
    this.text = text;
    const lines = text.slice(this.done).split("\n");
    const blocks = blocksOf(lines);
    const before = this.open;
    this.open = blocks.map((block, i) => {
      const source = lines.slice(block.from, block.to).join("\n");
      return { source, kind: block.kind, code: block.code, node: this.node(block, source, before[i]) };
    });
    for (const { node } of before.slice(blocks.length)) node.remove();
    this.settle(lines, blocks);
  }

  /** Returns the element of a block, reusing the existing one if possible. */
  node(block, source, old) {
    if (old?.source === source) return old.node;
    if (block.kind === "code" && old?.kind === "code" && block.code.startsWith(old.code)) {
      const label = old.node.querySelector(".code-head span");
      label.textContent = block.language || "text";
      // Preserves the selection and the scroll position.
      old.node.querySelector("code").append(block.code.slice(old.code.length));
      return old.node;
    }
    const node = block.make();
    if (old) old.node.replaceWith(node);
    else this.root.append(node);
    return node;
  }

  /** Removes complete blocks from `open`. The last line may be incomplete, and the start of the last
   * block may depend on it (the second line of a table makes it a table). */
  settle(lines, blocks) {
    const last = blocks.at(-1);
    const kept = last && last.from >= lines.length - 2 ? 2 : 1;
    const count = Math.max(0, blocks.length - kept);
    if (!count) return;
    const next = blocks[count].from;
    this.done += lines.slice(0, next).reduce((sum, line) => sum + line.length + 1, 0);
    for (const block of this.open.splice(0, count)) this.settled(textOf(block));
  }

  /** Ends the text: calls `settled` with the rest. */
  end() {
    for (const block of this.open) this.settled(textOf(block));
  }
}

function textOf({ kind, node }) { return (kind === "code" ? node.querySelector("code") : node).textContent; }
