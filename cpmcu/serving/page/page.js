"use strict";
// The whole page: connection, open conversation, actions, keyboard.

const model = { name: "", context: 0, chats: true, thinks: false };
let current = null;   // the open conversation
let views = [];       // views of its turns
let draftTimer = 0;
const SETTLING = 1000;    // ms after a conversation is opened
let opened = -SETTLING;   // time of that
let connecting = false;
let saidOfServer = "";

// ---- the server

/** Waits until the server answers, then reads its model's properties. */
async function connect() {
  if (connecting) return;
  connecting = true;
  $("hint").textContent = "Connecting…";
  for (let state; (state = await notReady());) {
    $("hint").textContent = state;
    if ($("empty").hidden) tellOfServer(state);
    await new Promise((wake) => setTimeout(wake, 1000));
  }
  connecting = false;
  try {
    Object.assign(model, await describeModel());
  } catch (error) {
    if (error.status === 401) return askForKey();
    return tellOfServer(error.message);
  }
  const free = [document.body, $("key")].includes(document.activeElement);  // no other field has the focus
  $("key-form").hidden = true;
  if ($("notice").textContent === saidOfServer) tell("");
  $("model").textContent = document.title = model.name;
  $("thinking-field").hidden = !model.thinks;
  if (!model.chats && !current.turns.length) current.mode = "complete";
  showChat();
  if (free) toPrompt();
}

/** Shows a sentence until the server answers. */
function tellOfServer(text) {
  saidOfServer = text;
  tell(text);
}

function askForKey() {
  $("hint").textContent = "This server needs an API key.";
  $("key-form").hidden = false;
  if (apiKey.get()) tellOfServer("The server does not know this API key.");
  $("key").focus();
}

// ---- the open conversation

function openChat(conversation) {
  keepDraft();
  current = conversation;
  if (!model.chats && !current.turns.length) current.mode = "complete";
  session.set("cpmcu.current", current.id);
  for (const view of views.splice(0)) view.element.remove();
  tell("");
  $("prompt").value = current.draft;
  showChat();
  showList();
  toEnd();
  opened = performance.now();
  $("to-end").hidden = true;
}

/** Shows the turns of the current conversation, reusing existing views. */
function showChat() {
  const turns = current.path().filter((turn) => current.mode === "chat" || turn.role === "assistant");
  const same = turns.findIndex((turn, i) => views[i]?.turn !== turn);
  const kept = same < 0 ? turns.length : same;
  for (const view of views.splice(kept)) view.element.remove();
  for (const turn of turns.slice(kept)) {
    views.push(new TurnView(current, turn));
    $("turns").append(views.at(-1).element);
  }
  for (const view of views) view.update();
  const chat = current.mode === "chat";
  $("empty").hidden = turns.length > 0;
  $("modes").hidden = !model.chats || !model.name;
  for (const button of $("modes").children) button.setAttribute("aria-pressed", String(button.value === current.mode));
  if (model.name && !connecting) {
    $("hint").textContent = chat ? "Write a message." : "Write the beginning of a text; the model goes on.";
  }
  const noChat = chat && !model.chats;
  $("prompt").placeholder = noChat ? "This model completes texts only" : chat ? "Message" : "Text to complete";
  $("prompt").classList.toggle("mono", !chat);
  $("prompt-label").textContent = chat ? "Your message" : "Text to complete";
  $("prompt").enterKeyHint = chat && !touch.matches ? "send" : "enter";
  $("keys-hint").textContent = chat
    ? "Enter sends, Shift+Enter starts a new line" : "Ctrl+Enter or ⌘+Enter sends, Enter starts a new line";
  $("attach").hidden = !chat;
  $("open-export").disabled = turns.length === 0;
  showFiles();
  showContext();
  showRunning();
}

function showRunning() {
  const busy = running.has(current.id);
  const focused = [$("send"), $("stop")].includes(document.activeElement);
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  if (focused && busy) $("stop").focus();
  else if (focused) toPrompt();
  fit($("prompt"));
}

/** Focuses the message field, unless an on-screen keyboard would then cover the page. */
function toPrompt() { if (!touch.matches) $("prompt").focus(); }

/** True if the end of the conversation is visible. The page then scrolls with new text. */
function atEnd() {
  const log = $("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 60;
}

function toEnd() { $("log").scrollTop = $("log").scrollHeight; }

// ---- answers

/** Generates an answer. Returns the Refusal if the server refused. */
async function answer(conversation, turn) {
  tell("");
  $("live").replaceChildren();
  spoken = turn;
  const show = perFrame(() => {
    const view = views.find((each) => each.turn === turn);
    const follows = atEnd();
    view?.update();
    if (view) showContext();
    if (follows) toEnd();
    else $("to-end").hidden = false;
  });
  const answering = new Answering(conversation, turn, show);
  const ended = answering.run();
  if (conversation === current) {
    showChat();
    toEnd();
  }
  showList();
  say("The model is answering.");
  await ended;
  finish(conversation, turn, answering.refusal);
  return answering.refusal;
}

function finish(conversation, turn, refusal) {
  if (chats.all.has(conversation.id)) chats.save(conversation);  // skipped if it was deleted meanwhile
  if (conversation === current) {
    const follows = atEnd();
    showChat();
    if (follows) toEnd();
    if (!refusal) views.find((each) => each.turn === turn)?.end();
  }
  if (spoken === turn) spoken = null;
  showList();
  if (!refusal) return say(endOf(turn));
  say("");  // screen readers read the notice
  tell(refusal.message);
  if (refusal.status === 401) askForKey();
  if (refusal.status === 0) {
    tellOfServer(refusal.message);
    connect();
  }
}

/** Sends a text. If the server refuses it, the conversation is unchanged. */
async function askWith(conversation, parent, text) {
  const asked = conversation.add(parent, { role: "user", text });
  const turn = conversation.add(asked, { role: "assistant" });
  const refusal = await answer(conversation, turn);
  if (!refusal) return true;
  conversation.remove(turn);
  conversation.remove(asked);
  return false;
}

async function send() {
  const conversation = current;
  const text = $("prompt").value;
  const { files } = conversation;
  if (running.has(conversation.id) || !(text.trim() || files.length)) return;
  $("prompt").value = conversation.draft = "";
  conversation.files = [];
  const parent = conversation.turn(conversation.leaf);
  if (await askWith(conversation, parent, messageWith(text, files))) return;
  keepDraft();
  conversation.files = [...files, ...conversation.files];
  conversation.draft = conversation.draft ? `${text}\n\n${conversation.draft}` : text;
  undo(conversation);
}

/** Sends an edited message as a new branch. */
async function resend(turn, text) {
  const conversation = current;
  const former = conversation.leaf;
  if (await askWith(conversation, conversation.turn(turn.parent), text)) return;
  conversation.leaf = former;
  keepDraft();
  undo(conversation);
  if (conversation === current) views.find((view) => view.turn === turn || view.given === turn)?.edit(text);
}

async function regenerate(turn) {
  const conversation = current;
  const other = conversation.add(conversation.turn(turn.parent), { role: "assistant" });
  if (!await answer(conversation, other)) return;
  conversation.remove(other);
  conversation.show(turn);
  keepDraft();
  undo(conversation);
}

/** Continues an answer that ended early. */
function goOn(turn) { answer(current, turn); }

/** Adds an edited answer as a new branch. */
function replace(turn, text) {
  current.add(current.turn(turn.parent), { role: "assistant", text, end: "edited", model: turn.model });
  chats.save(current);
  showChat();
}

/** Shows and stores a conversation after a refused request. */
function undo(conversation) {
  chats.save(conversation);
  showList();
  if (conversation !== current) return;
  $("prompt").value = current.draft;
  showChat();
}

function showBranch(turn) {
  current.show(turn);
  chats.save(current);
  showChat();
  showList();  // the title may be another one
}

// ---- controls

function startNew() {
  if (!current.isEmpty) openChat(new Conversation({ mode: current.mode }));
  if (narrow.matches && !$("side").inert) showSide(false);
  toPrompt();
}

/** Stores the text of the message field. */
function keepDraft() {
  clearTimeout(draftTimer);
  draftTimer = 0;
  if (!current || current.draft === $("prompt").value) return;
  current.draft = $("prompt").value;
  if (chats.save(current)) showList();
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("stop").addEventListener("click", () => running.get(current.id)?.stop());
$("prompt").addEventListener("input", () => {
  fit($("prompt"));
  draftTimer ||= setTimeout(keepDraft, SAVE_EVERY);
});
$("prompt").addEventListener("keydown", (event) => {
  if (sendsNow(event, current.mode)) {
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && !$("prompt").value && !running.has(current.id)) {
    event.preventDefault();
    views.findLast(({ turn }) => current.mode === "complete" || turn.role === "user")?.edit();
  }
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  apiKey.set($("key").value.trim());
  connect();
});
for (const button of document.querySelectorAll(".new")) button.addEventListener("click", startNew);
for (const button of $("modes").children) {
  button.addEventListener("click", () => {
    current.mode = button.value;
    chats.save(current);
    showChat();
    toPrompt();
  });
}
// If a keyboard or a longer message reduces the room of the conversation, its end stays visible.
let staysAtEnd = true;
$("log").addEventListener("scroll", () => { staysAtEnd = $("to-end").hidden = atEnd(); });
new ResizeObserver(() => { if (staysAtEnd) toEnd(); }).observe($("log"));
// Turns get their heights when they come in sight. An opened conversation stays at its end meanwhile.
new ResizeObserver(() => { if (performance.now() < opened + SETTLING) toEnd(); }).observe($("turns"));
for (const kind of ["wheel", "pointerdown", "keydown"]) {
  addEventListener(kind, () => { opened = -SETTLING; }, { capture: true, passive: true });
}
$("to-end").addEventListener("click", toEnd);

document.addEventListener("keydown", (event) => {
  if (event.isComposing || document.querySelector("dialog[open]")) return;
  const writing = event.target.closest("input, textarea, select");
  if (event.key === "Escape") running.get(current.id)?.stop();
  if (event.key.toLowerCase() === "o" && event.shiftKey && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    startNew();
  }
  if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey) && !event.shiftKey && !event.altKey) {
    event.preventDefault();
    toSearch();
  }
  if (writing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") {
    event.preventDefault();
    $("prompt").focus();
  }
  if (event.key === "?") $("keys").showModal();
});

// Changes by other tabs. A conversation with an answer in progress merges their turns.
addEventListener("storage", ({ key, newValue }) => {
  if (!key?.startsWith(CHAT)) return;
  const before = chats.all.get(key.slice(CHAT.length));
  const found = chats.take(key, newValue);
  if (found && running.has(found.id)) {
    const mine = running.get(found.id).conversation;
    for (const turn of found.turns) if (!mine.turn(turn.id)) mine.turns.push(turn);
    chats.all.set(mine.id, mine);
  } else if (found && found.id === current.id) {
    Object.assign(found, { draft: current.draft, files: current.files });
    current = found;
    showChat();
  } else if (!found && before === current && !running.has(current.id)) {
    openChat(new Conversation({ mode: current.mode }));
  }
  showList();
});

// If the page is closed or hidden, the text so far is stored.
function keepAll() {
  keepDraft();
  for (const each of running.values()) each.save();
}
document.addEventListener("visibilitychange", keepAll);
addEventListener("pagehide", () => {
  leaving = true;
  keepAll();
});
addEventListener("pageshow", () => { leaving = false; });

// If the keyboard covers the page, only the visual viewport has the remaining height.
visualViewport?.addEventListener("resize", () => {
  const covered = visualViewport.scale === 1 && innerHeight - visualViewport.height > 100;
  document.body.style.height = covered ? `${visualViewport.height}px` : "";
  if (covered) scrollTo(0, 0);
});

chats.load();
openChat(chats.all.get(session.get("cpmcu.current")) ?? new Conversation());
connect();
