"use strict";
// Growing Markdown: complete blocks stay, only the last two blocks are read again.

class Markdown {
  /** Renders into `root`. `settled` is called with the text of each complete block. */
  constructor(root, settled = () => {}) {
    this.root = root;
    this.settled = settled;
    this.text = "";
    this.done = 0;   // characters of complete blocks
    this.open = [];  // blocks after them: {source, node}
  }

  /** Shows `text`. Fast if `text` extends the previous text. */
  show(text) {
    text = text.replace(/\r\n?/g, "\n");
    if (text === this.text) return;
    if (!text.startsWith(this.text)) {
      this.root.replaceChildren();
      this.done = 0;
      this.open = [];
    }
    this.text = text;
    const rest = text.slice(this.done);
    const blocks = blocksOf(rest);
    const before = this.open;
    this.open = blocks.map(({ source, tokens }, i) => ({ source, node: this.node(source, tokens, before[i]) }));
    for (const { node } of before.slice(blocks.length)) node.remove();
    this.settle(blocks);
  }

  /** Returns the element of a block. The existing one is changed if possible. */
  node(source, tokens, old) {
    if (old?.source === source) return old.node;
    const [node] = nodesOf(tokens);
    if (!old) this.root.append(node);
    else sync(old.node, node);
    return node.parentNode === this.root ? node : old.node;
  }

  /** Removes complete blocks from `open`. The last line may be incomplete, and then belong to the block
   * before the last one. */
  settle(blocks) {
    const count = Math.max(0, blocks.length - 2);
    if (!count) return;
    this.done += blocks[count].begin;
    for (const block of this.open.splice(0, count)) this.settled(textOf(block.node));
  }

  /** Ends the text: calls `settled` with the rest. */
  end() {
    for (const block of this.open) this.settled(textOf(block.node));
    this.settled = () => {};
  }
}

/** Returns the outermost blocks of a text: {begin, source, tokens}. */
function blocksOf(text) {
  const starts = [0];  // where lines begin
  for (let at = text.indexOf("\n"); at >= 0; at = text.indexOf("\n", at + 1)) starts.push(at + 1);
  const blocks = [];
  for (const token of parser.parse(text, {})) {
    if (token.level === 0 && token.nesting >= 0) blocks.push({ begin: starts[token.map[0]], tokens: [] });
    blocks.at(-1).tokens.push(token);
  }
  blocks.forEach((block, i) => { block.source = text.slice(block.begin, blocks[i + 1]?.begin); });
  return blocks;
}
