"use strict";
// Markdown that grows: complete blocks stay, only the last block is rendered again.

class Markdown {
  /** Shows text in `root`; `settled` gets the text of each block that is complete. */
  constructor(root, settled = () => {}) {
    this.root = root;
    this.settled = settled;
    this.text = "";
    this.done = 0;    // characters whose blocks are complete
    this.open = [];   // blocks behind them: {source, kind, node, code}
  }

  /** Shows `text`, which is quickest if it only got longer. */
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

  /** The element of a block: the one that is there, if it can be kept. */
  node(block, source, old) {
    if (old?.source === source) return old.node;
    if (block.kind === "code" && old?.kind === "code" && block.code.startsWith(old.code)) {
      const label = old.node.querySelector(".code-head span");
      label.textContent = block.language || "text";
      // Selection and scroll position stay where they are.
      old.node.querySelector("code").append(block.code.slice(old.code.length));
      return old.node;
    }
    const node = block.make();
    if (old) old.node.replaceWith(node);
    else this.root.append(node);
    return node;
  }

  /** Lets complete blocks go. Where the last one begins may depend on the last line (a table's second
   * line makes a table), which may not be complete. */
  settle(lines, blocks) {
    const last = blocks.at(-1);
    const kept = last && last.from >= lines.length - 2 ? 2 : 1;
    const count = Math.max(0, blocks.length - kept);
    if (!count) return;
    const next = blocks[count].from;
    this.done += lines.slice(0, next).reduce((sum, line) => sum + line.length + 1, 0);
    for (const block of this.open.splice(0, count)) this.settled(textOf(block));
  }

  /** Gives `settled` what is left: no more text comes. */
  end() {
    for (const block of this.open) this.settled(textOf(block));
  }
}

function textOf({ kind, node }) { return (kind === "code" ? node.querySelector("code") : node).textContent; }
