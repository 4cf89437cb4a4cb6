"use strict";
// Data stored in this browser. Local storage has conversations and settings. The tab's session
// storage has the API key and the id of the open conversation.

const CHAT = "cpmcu.chat.";

/** A storage that may be full or disabled. */
class Kept {
  constructor(name) { this.name = name; }

  get(key) { try { return window[this.name].getItem(key); } catch { return null; } }

  /** Sets a value; null removes it. Returns true if it succeeded. */
  set(key, value) {
    try {
      if (value === null) window[this.name].removeItem(key);
      else window[this.name].setItem(key, value);
      return true;
    } catch { return false; }
  }

  keys() { try { return Object.keys(window[this.name]); } catch { return []; } }
}

const local = new Kept("localStorage");
const session = new Kept("sessionStorage");

/** Returns a new id of a conversation or a turn. crypto.randomUUID needs HTTPS or localhost. */
function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (b) => b.toString(16).padStart(2, "0")).join("");
}

const isText = (value) => typeof value === "string";

/** A tree of turns, of which the path to one leaf is shown. Editing and regenerating add branches.
 *
 * A turn: {id, parent, role, text}; an answer also has thought, end, problem, model and numbers.
 * files: those attached to the draft, {name, text}. settings: its own ones, null for the common ones. */
class Conversation {
  constructor({
    id = newId(), mode = "chat", title = "", updated = Date.now(), turns = [], leaf = null, draft = "", files = [],
    settings = null,
  } = {}) {
    Object.assign(this, { id, mode, title, updated, turns, leaf, draft, files, settings });
  }

  /** Parses a stored conversation; null if the text is not one. */
  static read(text) {
    let data = null;
    try { data = JSON.parse(text); } catch { /* not ours */ }
    const before = new Set([null]);  // a turn follows its parent
    const isTurn = (turn) => {
      if (!isText(turn?.id) || !isText(turn.text) || !before.has(turn.parent)) return false;
      return before.add(turn.id);
    };
    const whole = [data?.id, data?.title, data?.draft].every(isText)
      && Array.isArray(data.turns) && data.turns.every(isTurn);
    if (!whole) return null;
    const files = Array.isArray(data.files) ? data.files.filter((file) => isText(file?.name) && isText(file.text)) : [];
    const own = data.settings && typeof data.settings === "object" ? Object.entries(data.settings) : null;
    const settings = own && Object.fromEntries(own.filter(([, value]) => isText(value)));
    return new Conversation({ ...data, files, settings });
  }

  get isEmpty() { return !this.turns.length && !this.draft && !this.files.length && !this.settings; }

  /** The title given by the user, else the beginning of the branch that is shown. */
  get name() {
    const begin = (this.path()[0]?.text || this.draft || this.files[0]?.name || "").trim().split("\n", 1)[0];
    return this.title || begin.slice(0, 80) || "New conversation";
  }

  turn(id) { return this.turns.find((turn) => turn.id === id); }

  /** Returns the turns from the first one to the leaf, or to the given turn. */
  path(end = this.turn(this.leaf)) {
    const turns = new Map(this.turns.map((turn) => [turn.id, turn]));
    const found = [];
    for (let turn = end; turn; turn = turns.get(turn.parent)) found.push(turn);
    return found.reverse();
  }

  /** Returns the siblings of a turn, including the turn. */
  siblings(turn) { return this.turns.filter((each) => each.parent === turn.parent); }

  /** Returns the alternatives of a turn. For a text, beginning and continuation are one alternative. */
  versions(turn) {
    if (this.mode === "chat" || turn.role === "user") return this.siblings(turn);
    const begins = this.siblings(this.turn(turn.parent)).map(({ id }) => id);
    return this.turns.filter((each) => begins.includes(each.parent));
  }

  /** Adds a turn after `parent` and shows it. */
  add(parent, fields) {
    const turn = { id: newId(), parent: parent?.id ?? null, text: "", ...fields };
    this.turns.push(turn);
    this.leaf = turn.id;
    this.updated = Date.now();
    return turn;
  }

  /** Removes a turn without children and shows its last sibling or its parent. */
  remove(turn) {
    this.turns = this.turns.filter((each) => each !== turn);
    const other = this.siblings(turn).at(-1);
    if (other) this.show(other);
    else this.leaf = turn.parent;
  }

  /** Shows the branch of a turn, up to its newest leaf. */
  show(turn) {
    for (let next = turn; next; next = this.turns.findLast((each) => each.parent === this.leaf)) this.leaf = next.id;
  }
}

/** The stored conversations, including changes by other tabs. */
const chats = {
  all: new Map(),

  load() {
    for (const key of local.keys().filter((each) => each.startsWith(CHAT))) {
      const found = Conversation.read(local.get(key));
      if (found) this.all.set(found.id, found);
    }
  },

  sorted() { return [...this.all.values()].sort((a, b) => b.updated - a.updated); },

  /** Stores a conversation, or removes an empty one. */
  save(conversation) {
    const { id, isEmpty } = conversation;
    const isNew = !this.all.has(id);
    if (isEmpty) this.all.delete(id);
    else this.all.set(id, conversation);
    const done = local.set(CHAT + id, isEmpty ? null : JSON.stringify(conversation));
    if (!done && !isEmpty) {
      tell("The browser's storage is full, or closed to this page: what is new here is lost when the page is closed.");
    }
    return isNew !== isEmpty;
  },

  remove(conversation) {
    this.all.delete(conversation.id);
    local.set(CHAT + conversation.id, null);
  },

  /** Applies another tab's change. Returns the conversation; null if it was deleted. */
  take(key, text) {
    const found = text === null ? null : Conversation.read(text);
    if (found) this.all.set(found.id, found);
    else this.all.delete(key.slice(CHAT.length));
    return found;
  },
};
