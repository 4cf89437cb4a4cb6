"use strict";
// Saves the open conversation as a file: the branch that is shown as Markdown, or everything as JSON.

/** Returns the branch of a conversation as Markdown. */
function markdownOf(conversation) {
  const path = conversation.path();
  if (conversation.mode === "complete") return `${path.map(({ text }) => text).join("")}\n`;
  const { system } = settings.of(conversation);
  const parts = [`# ${conversation.name}`];
  if (system.trim()) parts.push("## System", system.trim());
  for (const turn of path) {
    parts.push(turn.role === "user" ? "## You" : `## ${turn.model || "The model"}`);
    if (turn.thought?.trim()) parts.push(turn.thought.trim().replace(/^/gm, "> "));
    parts.push(turn.text.trim());
  }
  return `${parts.join("\n\n")}\n`;
}

/** Returns a conversation as JSON: the messages of the branch as in a request, and all turns. */
function jsonOf(conversation) {
  const { mode, leaf, turns, name: title } = conversation;
  const values = Object.entries(settings.of(conversation)).filter(([name, value]) => name !== "theme" && value !== "");
  const { system, thinking, ...numbers } = Object.fromEntries(values);
  const messages = conversation.path().map(({ role, text, thought }) => (
    { role, content: text, ...(thought ? { reasoning_content: thought } : {}) }));
  if (system) messages.unshift({ role: "system", content: system });
  const chosen = { ...sampling({ ...conversation, settings: numbers }), ...(thinking ? { thinking } : {}) };
  return `${JSON.stringify({ title, model: model.name, mode, settings: chosen, messages, turns, leaf }, null, 2)}\n`;
}

/** Lets the browser save a text as a file. */
function saveFile(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

function exportAs(ending, type, text) {
  const name = current.name.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60);
  saveFile(`${name || "conversation"}.${ending}`, type, text);
  $("export").close();
}

$("open-export").addEventListener("click", () => $("export").showModal());
$("export-markdown").addEventListener("click", () => exportAs("md", "text/markdown", markdownOf(current)));
$("export-json").addEventListener("click", () => exportAs("json", "application/json", jsonOf(current)));
$("close-export").addEventListener("click", () => $("export").close());
