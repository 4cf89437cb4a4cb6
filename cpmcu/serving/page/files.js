"use strict";
// Text files attached to a message. Each becomes a fenced block after the message's text.

const MOST_BYTES = 256 * 1024;
const FILE = /(?:^|\n\n)File `([^`\n]+)`:\n(`{3,})[\w+-]*\n([\s\S]*?\n)\2(?=\n|$)/g;

const sizeOf = (bytes) => (bytes < 1024 ? `${bytes} B` : bytes < 1 << 20 ? `${Math.ceil(bytes / 1024)} KiB`
  : `${(bytes / (1 << 20)).toFixed(1)} MiB`);

/** Reads a file to {name, text}. Throws an Error with a sentence if it cannot be attached. */
async function readFile(file) {
  if (file.size > MOST_BYTES) {
    throw new Error(`“${file.name}” has ${sizeOf(file.size)}, but at most ${sizeOf(MOST_BYTES)} can be attached. `
      + "Attach the part that matters.");
  }
  let text = "\0";
  try { text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer()); } catch { /* no text */ }
  if (text.includes("\0")) throw new Error(`“${file.name}” is not a text in UTF-8. Only text files can be attached.`);
  if (!text.trim()) throw new Error(`“${file.name}” is empty. Attach a file that has text.`);
  return { name: file.name.replaceAll(/[`\n]/g, "'"), text: text.replace(/\r\n?/g, "\n") };
}

/** Attaches files to the draft of the open conversation. */
async function attach(files) {
  const conversation = current;
  tell("");
  for (const file of files) {
    try {
      conversation.files.push(await readFile(file));
    } catch (error) {
      tell(error.message);
    }
  }
  chats.save(conversation);
  showFiles();
  showList();
  toPrompt();
}

/** Shows the files attached to the draft. */
function showFiles() {
  $("files").hidden = !current.files.length;
  $("files").replaceChildren(...current.files.map((file) => {
    const remove = iconButton("cross", `Remove ${file.name}`, () => {
      current.files = current.files.filter((each) => each !== file);
      chats.save(current);
      showFiles();
      toPrompt();
    });
    return make("li", {}, make("span", { class: "name" }, file.name), ` ${sizeOf(new Blob([file.text]).size)}`, remove);
  }));
}

/** Returns a message's text, followed by its files. */
function messageWith(text, files) {
  return [text.trim() ? text : null, ...files.map(fenced)].filter((part) => part !== null).join("\n\n");
}

function fenced({ name, text }) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  const language = /\.([\w+-]{1,12})$/.exec(name)?.[1] ?? "";
  return `File \`${name}\`:\n${fence}${language}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}

/** Returns the nodes of a message: its text, and its files folded. */
function messageNodes(text) {
  const nodes = [];
  let at = 0;
  for (const found of text.matchAll(FILE)) {
    const [whole, name, , body] = found;
    if (found.index > at) nodes.push(text.slice(at, found.index));
    const summary = make("summary", {}, `${name} · ${sizeOf(new Blob([body]).size)}`);
    nodes.push(make("details", { class: "file" }, summary, make("pre", { class: "mono", tabindex: 0 }, body)));
    at = found.index + whole.length;
  }
  return at < text.length || !nodes.length ? [...nodes, text.slice(at)] : nodes;
}

$("attach").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => {
  await attach([...$("file").files]);
  $("file").value = "";
});
const carriesFiles = (event) => current.mode === "chat" && event.dataTransfer?.types.includes("Files");
// Copied cells and formatted text come with a picture of themselves: the text is pasted then.
$("prompt").addEventListener("paste", (event) => {
  const { files, types } = event.clipboardData;
  if (current.mode !== "chat" || !files.length || types.includes("text/plain")) return;
  event.preventDefault();
  attach([...files]);
});
$("page").addEventListener("dragover", (event) => { if (carriesFiles(event)) event.preventDefault(); });
$("page").addEventListener("drop", (event) => {
  if (!carriesFiles(event)) return;
  event.preventDefault();
  attach([...event.dataTransfer.files]);
});
