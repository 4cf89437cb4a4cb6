"use strict";
// The list of conversations at the side.

const narrow = matchMedia("(max-width: 52rem)");

/** Rebuilds the list: the conversations found by the search, else all that have begun or were left as a
 * draft. `renaming`: the conversation whose title is being edited. */
function showList(renaming = null) {
  const focused = $("list").contains(document.activeElement);
  if (focused && !renaming && document.activeElement.matches("input")) return;
  const begun = chats.sorted().filter((chat) => chat.turns.length || chat.id !== current.id);
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = words.length ? begun.filter((chat) => hasWords(chat, words)) : begun;
  $("list").replaceChildren(...found.map((chat) => listItem(chat, chat === renaming, words)));
  $("search").hidden = !begun.length && !words.length;
  $("no-chats").hidden = begun.length > 0;
  $("none-found").hidden = !begun.length || found.length > 0;
  if (focused) ($("list").querySelector("[aria-current]") ?? $("new")).focus();
}

const textsOf = (chat) => [chat.name, ...chat.turns.map(({ text }) => text)];

/** True if each word occurs in a conversation. */
function hasWords(chat, words) {
  const texts = textsOf(chat).map((text) => text.toLowerCase());
  return words.every((word) => texts.some((text) => text.includes(word)));
}

/** Returns the text around the first word that the title does not have, or "". */
function excerpt(chat, words) {
  const word = words.find((each) => !chat.name.toLowerCase().includes(each));
  const text = word && textsOf(chat).find((each) => each.toLowerCase().includes(word));
  if (!text) return "";
  const at = Math.max(0, text.toLowerCase().indexOf(word) - 20);
  return (at ? "…" : "") + text.slice(at, at + 80).replace(/\s+/g, " ");
}

function listItem(chat, renaming, words) {
  const item = make("li", chat === current ? { class: "current" } : {});
  if (renaming) {
    item.append(titleField(chat));
    return item;
  }
  const name = make("button", { type: "button", class: "chat", title: chat.name }, chat.name);
  if (chat === current) name.setAttribute("aria-current", "true");
  if (running.has(chat.id)) name.append(make("span", { class: "dot", role: "img", "aria-label": "is being answered" }));
  const found = excerpt(chat, words);
  if (found) name.append(make("span", { class: "excerpt" }, found));
  name.addEventListener("click", () => {
    openChat(chat);
    if (narrow.matches) showSide(false);
  });
  const rename = iconButton("pencil", `Rename ${chat.name}`, () => {
    showList(chat);
    const field = $("list").querySelector("input");
    field.focus();
    field.select();
  });
  item.append(name, rename, iconButton("bin", `Delete ${chat.name}`, () => deleteChat(chat)));
  return item;
}

function titleField(chat) {
  const field = make("input", { "aria-label": "Title", maxlength: 200 });
  field.value = chat.name;
  let ended = false;
  const end = (keep) => {
    if (ended) return;
    ended = true;
    if (keep && field.value.trim() !== chat.name) {
      chat.title = field.value.trim();
      chats.save(chat);
    }
    field.blur();
    showList();
  };
  field.addEventListener("blur", () => end(true));
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.isComposing) end(true);
    if (event.key === "Escape") { event.stopPropagation(); end(false); }
    if (ended) $("list").querySelector("[aria-current]")?.focus();
  });
  return field;
}

/** Deletes a conversation and shows a button that restores it. */
function deleteChat(chat) {
  running.get(chat.id)?.stop();
  keepDraft();
  chats.remove(chat);
  const shown = chat === current;
  if (shown) openChat(new Conversation({ mode: current.mode }));
  showList();
  const undo = make("button", { type: "button" }, "Undo");
  undo.addEventListener("click", () => {
    tell("");
    chats.save(chat);
    if (shown && current.isEmpty) openChat(chat);
    showList();
  });
  tell(`“${chat.name}” was deleted.`, undo);
  if (narrow.matches) showSide(false);  // the list would cover the notice
}

/** Opens or closes the side. On a narrow page it covers the rest, which is then inert. */
function showSide(open) {
  document.body.classList.toggle("no-side", !open);
  $("side").inert = !open;
  $("page").inert = open && narrow.matches;
  $("show-side").setAttribute("aria-expanded", String(open));
  if (!narrow.matches) local.set("cpmcu.side", open ? null : "closed");
  else if (open) $("new").focus();
  else $("show-side").focus();
}

/** Focuses the search field, in the opened list. */
function toSearch() {
  if (document.body.classList.contains("no-side")) showSide(true);
  ($("search").hidden ? $("new") : $("search")).focus();
  $("search").select();
}

$("search").addEventListener("input", perFrame(() => showList()));
$("search").addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !$("search").value) return;
  event.stopPropagation();
  $("search").value = "";
  showList();
});
$("show-side").addEventListener("click", () => showSide(document.body.classList.contains("no-side")));
for (const id of ["hide-side", "shade"]) $(id).addEventListener("click", () => showSide(false));
$("side").addEventListener("keydown", (event) => { if (event.key === "Escape" && narrow.matches) showSide(false); });
const resetSide = () => {
  const open = !narrow.matches && local.get("cpmcu.side") !== "closed";
  document.body.classList.toggle("no-side", !open);
  $("side").inert = !open;
  $("page").inert = false;
  $("show-side").setAttribute("aria-expanded", String(open));
};
narrow.addEventListener("change", resetSide);
resetSide();
