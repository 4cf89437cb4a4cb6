"use strict";
// The list of conversations at the side.

const narrow = matchMedia("(max-width: 52rem)");

/** Rebuilds the list. `renaming`: the conversation whose title is being edited. */
function showList(renaming = null) {
  const focused = $("list").contains(document.activeElement);
  if (focused && !renaming && document.activeElement.matches("input")) return;
  $("list").replaceChildren(...chats.sorted().map((chat) => listItem(chat, chat === renaming)));
  $("no-chats").hidden = chats.all.size > 0;
  if (focused) ($("list").querySelector("[aria-current]") ?? $("new")).focus();
}

function listItem(chat, renaming) {
  const item = make("li", chat === current ? { class: "current" } : {});
  if (renaming) {
    item.append(titleField(chat));
    return item;
  }
  const name = make("button", { type: "button", class: "chat", title: chat.name }, chat.name);
  if (chat === current) name.setAttribute("aria-current", "true");
  if (running.has(chat.id)) name.append(make("span", { class: "dot", role: "img", "aria-label": "is being answered" }));
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
